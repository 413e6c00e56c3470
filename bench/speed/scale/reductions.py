"""`reductions`: what fp32 parameters and gradients, ordered sums and deterministic attention add to a step."""

import contextlib
import dataclasses
import os
from collections.abc import Iterator
from typing import Any

import torch

from bench.speed.scale.layers import TrainStep
from bench.speed.scale.models import build, seq_len, shape
from bench.speed.scale.session import Session
from octavo.parallel.fsdp import Reduction
from octavo.run.optimizer import MasterAdamW
from octavo.run.sections import OptimizerSection

NUM_LAYERS = 6


@dataclasses.dataclass(frozen=True)
class Kind:
    """One way to add gradients."""

    dtype: torch.dtype
    reduction: Reduction
    is_deterministic: bool = False

    def __str__(self) -> str:
        dtype = "fp32" if self.dtype == torch.float32 else "bf16"
        return f"{dtype} parameters, {self.reduction}{', deterministic attention' if self.is_deterministic else ''}"


BASE = Kind(torch.bfloat16, "sum")
KINDS = (
    BASE,
    Kind(torch.float32, "sum"),
    Kind(torch.float32, "ordered"),
    Kind(torch.float32, "sum", True),
    Kind(torch.float32, "ordered", True),
)


def reductions(session: Session) -> None:
    """Each kind on its own, the first again at the end, which shows the clock's drift."""
    base: list[float] = []
    for kind in (*KINDS, BASE):
        session.attempt(f"reductions {kind}", lambda kind=kind: _measure(session, kind, base))  # type: ignore[misc]


def _measure(session: Session, kind: Kind, base: list[float]) -> None:
    config = shape(session, NUM_LAYERS)
    model, _ = build(
        session, config, "blockwise", dtype=kind.dtype, reduction=kind.reduction, param_dtype=torch.bfloat16
    )
    # moments of the parameters' dtype, and no masters beside the parameters
    state = "fp32" if kind.dtype == torch.float32 else "bf16"
    master = "fp32" if kind.dtype == torch.float32 else "none"
    optimizer = MasterAdamW(model, OptimizerSection(lr=1e-5, state_dtype=state, master_weights=master))
    with _deterministic() if kind.is_deterministic else contextlib.nullcontext():
        steps = session.time_step(TrainStep(session, model, optimizer), warmup=2, timed=5)
    label = f"Qwen3-8B ({config.num_layers} layers), {seq_len(session)} tokens a GPU, blockwise, octavo.train.step"
    again = ", again" if base and kind == BASE else ""
    peer = (f"{label}: {BASE}", base[0]) if base else (None, None)
    session.add_step(f"{label}: {kind}{again}", steps, *peer)
    base.append(steps.ms)


@contextlib.contextmanager
def _deterministic() -> Iterator[None]:
    """torch's attention adds its gradients in a fixed order."""
    deterministic: Any = torch.utils.deterministic
    fills = deterministic.fill_uninitialized_memory
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.use_deterministic_algorithms(True, warn_only=True)
    deterministic.fill_uninitialized_memory = False
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(False)
        deterministic.fill_uninitialized_memory = fills
