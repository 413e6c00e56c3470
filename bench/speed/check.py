"""Correctness before speed: one layer of a variant against the plain bf16 layer, output and input gradient."""

import dataclasses

import torch
from torch import nn

from bench.speed.stack import StackShape
from bench.speed.variants import StackVariant, attention_backend, build_layers
from octavo.errors import BackendError
from octavo.nn import TransformerLayer, mark_weights_updated
from octavo.numerics.analysis import sqnr

CHECK_TOKENS = 256
# Of what the layer adds to the residual stream. bf16 variants differ by the order of sums and by roundings, the
# stream's included (40 dB on a CPU); FP8 variants by the noise of four quantized products in a row (23 dB, gradients
# in E5M2 20).
MIN_BF16_DB = 30.0
MIN_FP8_DB = 17.0
CALLS_BEFORE = 3  # delayed scaling's scales come from the steps before


def check_variant(variant: StackVariant, shape: StackShape, device: str) -> dict[str, float]:
    """Compare one layer of the variant, not compiled, with the plain bf16 layer of the same weights.

    Returns:
        SQNR in dB of "output" and "input gradient", both without the residual stream.
    Raises:
        BackendError: where one is below the bound.
    """
    small = dataclasses.replace(shape, layers=1, batch=1, seq_len=min(CHECK_TOKENS, shape.seq_len))
    reference = StackVariant("reference", "plain")
    generator = torch.Generator(device).manual_seed(7)
    sizes = (1, small.seq_len, shape.hidden_size)
    x, grad = (torch.randn(sizes, generator=generator, device=device).to(torch.bfloat16) for _ in range(2))
    wanted = _branches(build_layers(reference, small, device)[0], x, grad, device)
    found = _branches(build_layers(variant, small, device)[0], x, grad, device)
    least = MIN_BF16_DB if variant.recipe == "bf16" else MIN_FP8_DB
    ratios = {name: sqnr(wanted[name], found[name]) for name in wanted}
    for name, ratio in ratios.items():
        if not ratio >= least:
            raise BackendError(f"{variant.name}: {name} of a layer has SQNR {ratio:.1f} dB, at least {least} expected")
    return ratios


def _branches(layer: nn.Module, x: torch.Tensor, grad: torch.Tensor, device: str) -> dict[str, torch.Tensor]:
    """What the layer adds to its input and to the gradient that passes it by."""
    with attention_backend(device):
        for _ in range(CALLS_BEFORE):
            if isinstance(layer, TransformerLayer):  # as after a step; delayed scaling's first scales are 1
                mark_weights_updated(layer)
            leaf = x.clone().requires_grad_()
            out = layer(leaf)
            out.backward(grad)
    assert leaf.grad is not None, "a leaf that requires a gradient has one after backward"
    return {"output": (out - x).detach().float().cpu(), "input gradient": (leaf.grad - grad).float().cpu()}
