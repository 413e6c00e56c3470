"""Finds the first tensor that went bad: runs a step again under hooks that look for what is not finite."""

import contextlib
from collections.abc import Callable, Iterable, Iterator
from typing import Any, TypeVar

import torch

from octavo.distributed.mesh import ONE_PROCESS, Mesh
from octavo.distributed.shards import local
from octavo.nn import Linear
from octavo.nn.finite_weights import describe
from octavo.numerics.quantized import QuantizedTensor

B = TypeVar("B")
M = TypeVar("M", bound=torch.nn.Module)


def first_bad_tensor(
    model: M, batches: Iterable[B], loss_fn: Callable[[M, B], torch.Tensor], mesh: Mesh = ONE_PROCESS
) -> str | None:
    """The first tensor of a step that is inf or NaN, found by running it again.

    Looks at the parameters, then at every module's output and every operand of octavo's linears in the order of the
    forward pass, then at the loss, then at the gradients in the order of the backward pass.

    Args:
        model: as it was before the step (not updated).
        batches: the step's micro-batches of this rank, as many as the others have.
        mesh: of the ranks, all of which call this; the first rank that has found something is named.
    Returns:
        Its name, shape and place; None where nothing is found. The model's gradients are cleared.
    """
    found = _of_ranks(_first_bad_parameter(model), mesh)
    if found is None:
        for index, batch in enumerate(batches):
            found = _first_bad_activation(model, batch, loss_fn, mesh)
            if found is not None:
                found = f"{found} (micro-batch {index})"
                break
    model.zero_grad(set_to_none=True)
    return found


def _of_ranks(found: str | None, mesh: Mesh) -> str | None:
    """What the first rank has found that has found something."""
    everywhere = mesh.gather_objects(found)
    rank = next((rank for rank, text in enumerate(everywhere) if text is not None), None)
    return None if rank is None else f"rank {rank}: {everywhere[rank]}" if len(everywhere) > 1 else everywhere[rank]


def _first_bad_parameter(model: torch.nn.Module) -> str | None:
    for name, param in model.named_parameters():
        own = local(param)
        if not torch.isfinite(own).all():
            return f"parameter {name}, {describe(own)}"
    return None


def _first_bad_activation(model: M, batch: B, loss_fn: Callable[[M, B], torch.Tensor], mesh: Mesh) -> str | None:
    bad: list[str] = []
    with _watched(model, bad):
        loss = loss_fn(model, batch)
        if not bad and not torch.isfinite(loss):
            bad.append(f"the loss itself ({loss.item()}), from finite logits")
        found = _of_ranks(bad[0] if bad else None, mesh)
        if found is None:  # on no rank, so that all go on to the backward's collectives
            loss.backward()
            found = _of_ranks(bad[0] if bad else None, mesh)
    return found


@contextlib.contextmanager
def _watched(model: torch.nn.Module, bad: list[str]) -> Iterator[None]:
    """Note every module output, operand of a linear, and gradient of an output or a parameter that is not finite."""

    def watch_output(name: str) -> Callable[[torch.nn.Module, Any, Any], None]:
        def hook(module: torch.nn.Module, _: Any, output: Any) -> None:
            kind = type(module).__name__
            for tensor in _float_tensors(output):
                if not torch.isfinite(tensor).all():
                    bad.append(f"output of {name or 'the model'} ({kind}), {describe(tensor)}")
                if tensor.requires_grad:
                    tensor.register_hook(watch_gradient(f"gradient of the output of {name or 'the model'} ({kind})"))

        return hook

    def watch_gradient(what: str) -> Callable[[torch.Tensor], None]:
        def hook(grad: torch.Tensor) -> None:
            if not torch.isfinite(grad).all():
                bad.append(f"{what}, {describe(grad)}")

        return hook

    def watch_operands(name: str) -> Callable[[str, torch.Tensor, QuantizedTensor | None], None]:
        def observe(role: str, tensor: torch.Tensor, _: QuantizedTensor | None) -> None:
            if role in ("input", "grad_output") and not torch.isfinite(tensor).all():
                bad.append(f"{role} of {name or 'the model'}, {describe(tensor)}")

        return observe

    linears = {name: module for name, module in model.named_modules() if isinstance(module, Linear)}
    observers = {linear: linear.observer for linear in linears.values()}
    for name, linear in linears.items():  # fused modules run unfused under an observer, to the same bits
        linear.observer = watch_operands(name)
    handles = [module.register_forward_hook(watch_output(name)) for name, module in model.named_modules()]
    handles += [
        param.register_hook(watch_gradient(f"gradient of parameter {name}"))
        for name, param in model.named_parameters()
        if param.requires_grad
    ]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()
        for linear, observer in observers.items():
            linear.observer = observer


def _float_tensors(output: Any) -> Iterator[torch.Tensor]:
    if isinstance(output, torch.Tensor):
        if output.is_floating_point() and output.element_size() > 1:
            yield output
    elif isinstance(output, tuple | list):
        for item in output:
            yield from _float_tensors(item)
