"""DDP whose gradients travel in FP8: `ddp.register_comm_hook(FP8HookState(model), fp8_hook)`.

Matrices' gradients are averaged by two_shot.all_reduce_q_ with error feedback, all others in fp32, in the order of the
ranks. Each gradient has the bits that it would have alone.
"""

from collections.abc import Iterable
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.functional import pad

from octavo.distributed.collectives import all_gather_into
from octavo.distributed.reduced_in_fp8 import reduced_in_fp8
from octavo.distributed.transport import DTYPES, check_group
from octavo.distributed.two_shot import Transport, all_reduce_q_
from octavo.errors import CheckpointError, ConfigError, DtypeError

# Two shots on the wire against NCCL's bf16 all-reduce, two H200s over NVLink: 1.14 times its time at 8 MiB, 0.70 at 64.
MIN_BYTES = 16 << 20


class FP8HookState:
    """What fp8_hook keeps from step to step.

    The residuals of error feedback take as much memory as the gradients that travel in FP8, in their dtype. They are
    this rank's own, and of the gradients as they come: a loss scale that changes leaves those of the old one behind.

    A restart: a run that saves state_dict() on every rank, and loads it on as many ranks in the same order, goes on
    with the same bits, whatever buckets DDP makes then. On another number of ranks, or without it, residuals start
    from zero: what the last step's rounding had kept back is lost once, at most one step's rounding error.

    Args:
        model: the model that DDP wraps, or the DDP module.
        process_group: DDP's; None for that of the DDP module, or all ranks.
        ignore: modules or parameters to keep in fp32, as in reduced_in_fp8.
        min_bytes: a bucket with less of such gradients is averaged in fp32.
        error_feedback: add to each step's gradient what rounding took from the last one's.
        transport: as in two_shot.all_reduce_q.
    Raises:
        ConfigError: a name in `ignore` that means nothing, or no parameter that could travel in FP8.
        DtypeError: a trainable parameter that is neither fp32 nor bf16.
    """

    def __init__(
        self,
        model: nn.Module,
        process_group: Any = None,
        *,
        ignore: Iterable[str] = (),
        min_bytes: int = MIN_BYTES,
        error_feedback: bool = True,
        transport: Transport = None,
    ) -> None:
        if isinstance(model, nn.parallel.DistributedDataParallel):
            process_group, model = process_group or model.process_group, model.module
        self._names = reduced_in_fp8(model, ignore)
        if not self._names:
            raise ConfigError("no parameter of this model would be reduced in FP8; register no hook, or ignore less")
        for name, parameter in model.named_parameters():
            if parameter.requires_grad and parameter.dtype not in DTYPES:
                raise DtypeError(f"gradients must be float32 or bfloat16, and {name} is {parameter.dtype}; cast it")
        self.process_group, self.min_bytes, self.error_feedback = process_group, min_bytes, error_feedback
        self.transport: Transport = transport
        self._residuals: dict[str, torch.Tensor] = {}
        self._stream: torch.cuda.Stream | None = None

    def stream(self, device: torch.device) -> torch.cuda.Stream:
        """Where all reductions run, one after the other, beside the backward."""
        if self._stream is None:
            self._stream = torch.cuda.Stream(device)
        return self._stream

    def split(self, bucket: Any) -> tuple[dict[str, torch.Tensor], list[torch.Tensor]]:
        """(gradients that go in FP8, flat and by name; all others) of a bucket; none where they are too few to pay."""
        parameters, buffer = bucket.parameters(), bucket.buffer()
        named, others = {}, []
        for parameter, gradient in zip(parameters, buffer.split([p.numel() for p in parameters]), strict=True):
            if (name := self._names.get(parameter)) is not None:
                named[name] = gradient
            else:
                others.append(gradient)
        if sum(gradient.nbytes for gradient in named.values()) < self.min_bytes:
            return {}, [buffer]
        return named, others

    def residuals(self, gradients: dict[str, torch.Tensor]) -> list[torch.Tensor]:
        """Of flat gradients; zeros for one that never came before."""
        for name, gradient in gradients.items():
            if name not in self._residuals:
                self._residuals[name] = torch.zeros_like(gradient)
        return [self._residuals[name] for name in gradients]

    def state_dict(self) -> dict[str, Any]:
        """This rank's residuals by parameter, and the ranks that they belong to; tensors are not copied."""
        if self._stream is not None:
            torch.cuda.current_stream(self._stream.device).wait_stream(self._stream)
        world, rank = check_group(self.process_group)
        return {"world_size": world, "rank": rank, "residuals": dict(self._residuals)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on with residuals that state_dict gave.

        Raises:
            CheckpointError: they are of another rank, of another number of ranks, or of another model.
        """
        world, rank = check_group(self.process_group)
        if (state["world_size"], state["rank"]) != (world, rank):
            raise CheckpointError(
                f"residuals belong to their rank, and these are of rank {state['rank']} of {state['world_size']}, this "
                f"is rank {rank} of {world}; load none: the run goes on without what the last step's rounding kept back"
            )
        if unknown := state["residuals"].keys() - set(self._names.values()):
            raise CheckpointError(f"residuals of {sorted(unknown)[0]!r}, which this model does not reduce in FP8")
        parameters = {name: parameter for parameter, name in self._names.items()}
        for name, residual in state["residuals"].items():
            if residual.numel() != parameters[name].numel():
                raise CheckpointError(
                    f"the residual of {name!r} has {residual.numel()} elements and the parameter "
                    f"{parameters[name].numel()}; load the state of this model, or none"
                )
        self._residuals = {n: r.to(parameters[n].device, copy=True) for n, r in state["residuals"].items()}


@torch.no_grad()
def fp8_hook(
    state: FP8HookState,
    bucket: dist.GradBucket,  # type: ignore[name-defined]  # DDP compares the annotation; torch's stubs lack it
) -> torch.futures.Future[torch.Tensor]:
    """Average a bucket of gradients over the ranks; a communication hook of DDP.

    On a GPU it runs on a stream of its own beside the backward; over gloo it is done when it returns, since buckets
    that finish in threads would start their second shots in another order on each rank.

    Args:
        state: of this model.
        bucket: DDP's.
    Returns:
        A Future of the bucket's buffer, which holds the averages: the same bits on every rank.
    """
    buffer = bucket.buffer()
    if not buffer.is_cuda:
        done: torch.futures.Future[torch.Tensor] = torch.futures.Future()
        _average(state, bucket)
        done.set_result(buffer)
        return done
    done = torch.futures.Future(devices=[buffer.device])
    stream = state.stream(buffer.device)
    stream.wait_stream(torch.cuda.current_stream(buffer.device))
    with torch.cuda.stream(stream):
        _average(state, bucket)
        buffer.record_stream(stream)
        done.set_result(buffer)  # what waits for it waits for this stream
    return done


def _average(state: FP8HookState, bucket: Any) -> None:
    named, others = state.split(bucket)
    group = state.process_group
    if others:
        _average_in_fp32(others, group)
    if not named:
        return
    residuals = state.residuals(named) if state.error_feedback else None
    all_reduce_q_(list(named.values()), group, average=True, residuals=residuals, transport=state.transport)


def _average_in_fp32(gradients: list[torch.Tensor], group: Any) -> None:
    """In place; summed in the order of the ranks: a backend's own order depends on the bucket."""
    world, flat = dist.get_world_size(group), torch.cat(gradients).float()
    values = pad(flat, (0, -len(flat) % world)).view(world, -1)
    received = torch.empty_like(values)
    dist.all_to_all_single(received, values, group=group)
    total = received[:1].clone()
    for piece in received[1:]:
        total += piece
    total /= torch.full((), world, dtype=torch.float32, device=total.device)
    all_gather_into(received, total, group=group)
    torch._foreach_copy_(gradients, received.view(-1)[: len(flat)].split([len(part) for part in gradients]))
