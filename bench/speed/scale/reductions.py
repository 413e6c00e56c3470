"""`reductions`: what fp32 parameters and gradients, ordered sums and deterministic attention add to a step."""

import dataclasses

import torch

from bench.speed.scale.layers import TrainStep
from bench.speed.scale.models import build, seq_len, shape
from bench.speed.scale.session import Session
from octavo.parallel.fsdp import Reduction
from octavo.run.determinism import deterministic
from octavo.run.optimizer import MasterAdamW
from octavo.run.sections import OptimizerSection

NUM_LAYERS = 6


@dataclasses.dataclass(frozen=True)
class Kind:
    """One way to add gradients: of parameters in a dtype, which travel in that dtype or in fp32."""

    dtype: torch.dtype
    reduction: Reduction
    reduce_dtype: torch.dtype | None = torch.float32
    is_deterministic: bool = False

    def __str__(self) -> str:
        names = {torch.float32: "fp32", torch.bfloat16: "bf16"}
        # an ordered reduction adds in fp32 what travels as the backward gave it
        sums = "ordered" if self.reduction == "ordered" else f"{names[self.reduce_dtype or self.dtype]} sums"
        return f"{names[self.dtype]} parameters, {sums}{', deterministic attention' if self.is_deterministic else ''}"


BASE = Kind(torch.bfloat16, "sum", None)
FP32_SUMS = Kind(torch.bfloat16, "sum")
FP32 = Kind(torch.float32, "sum")
# each with the one that it is compared with, which differs in one thing; fp32 parameters have fp32 moments as well
KINDS = {
    BASE: None,
    FP32_SUMS: BASE,
    FP32: FP32_SUMS,
    Kind(torch.float32, "ordered"): FP32,
    Kind(torch.float32, "sum", is_deterministic=True): FP32,
    Kind(torch.float32, "ordered", is_deterministic=True): Kind(torch.float32, "ordered"),
}


def reductions(session: Session) -> None:
    """Each kind on its own, the first again at the end, which shows the clock's drift."""
    times: dict[Kind, float] = {}
    for kind in (*KINDS, BASE):
        session.attempt(f"reductions {kind}", lambda kind=kind: _measure(session, kind, times))  # type: ignore[misc]


def _measure(session: Session, kind: Kind, times: dict[Kind, float]) -> None:
    config, sharding = shape(session, NUM_LAYERS), {"reduction": kind.reduction, "reduce_dtype": kind.reduce_dtype}
    model, _ = build(session, config, "blockwise", dtype=kind.dtype, param_dtype=torch.bfloat16, **sharding)
    # moments of the parameters' dtype, and no masters beside the parameters
    state = "fp32" if kind.dtype == torch.float32 else "bf16"
    master = "fp32" if kind.dtype == torch.float32 else "none"
    optimizer = MasterAdamW(model, OptimizerSection(lr=1e-5, state_dtype=state, master_weights=master))
    with deterministic(kind.is_deterministic):
        steps = session.time_step(TrainStep(session, model, optimizer), warmup=2, timed=6)
    label = f"Qwen3-8B ({config.num_layers} layers), {seq_len(session)} tokens a GPU, blockwise, octavo.train.step"
    again = ", again" if kind in times else ""
    base = BASE if again else KINDS[kind]
    peer = (f"{label}: {base}", times[base]) if base in times else (None, None)
    session.add_step(f"{label}: {kind}{again}", steps, *peer)
    if peer[1] is not None:
        session.record.add_ratio(f"{label}: {kind}{again}", "step time over its baseline", steps.ms / peer[1], peer[0])
    times.setdefault(kind, steps.ms)
