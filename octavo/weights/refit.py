"""Refit: how new weights reach the sampler, whole or not at all; in this process they are the same tensors.

Engines implement WeightSession; the one in this process samples from the trainer's own tensors, so that its transport
is one quantization and one version.
"""

import copy
import dataclasses
import time
from typing import Protocol

import torch

from octavo.errors import ExactnessError
from octavo.models import Decoder
from octavo.nn.finite_weights import check_finite_weights
from octavo.nn.live_weights import renew_codes, stop_watching
from octavo.numerics import Numerics


class WeightSession(Protocol):
    """One weight update: all of it, or (where the engine can take it back) nothing.

    Attributes:
        num_bytes: of codes, scales and other tensors that reach the engine, known after stage.
    """

    num_bytes: int

    def stage(self) -> None:
        """Bring the weights to where the engine will take them from, and check them there: names, scales, checksums.

        Raises:
            WeightAuditError: they are not the trainer's.
            StaleScaleError: their KV scales are missing or of others.
            EngineError: the engine cannot be reached or refuses them.
        """

    def commit(self) -> int:
        """Make the engine sample from them, without a key or value that older ones made.

        Returns:
            The version, in the trainer's count, that the engine confirmed.
        Raises:
            EngineError: the engine failed; see `RolloutEngine.begin_update` for what it then holds.
        """

    def abort(self) -> None:
        """Drop what was staged."""


class Receiver(Protocol):
    """An engine that takes new weights; octavo.rl has some."""

    def begin_update(self, source: Decoder, version: int) -> WeightSession:
        """Start to hand over weights of a version, in the trainer's count; one update at a time."""


@dataclasses.dataclass(frozen=True)
class RefitReport:
    """What a refit did.

    Attributes:
        weight_version: that trainer, sampler and engine now agree on.
        num_quantized: linears whose codes were made.
        num_bytes: of those codes and scales, or of all that a remote engine was sent.
        seconds: all of it.
    """

    weight_version: int
    num_quantized: int
    num_bytes: int
    seconds: float


def share_weights(model: Decoder, numerics: Numerics) -> Decoder:
    """A second decoder over the very same parameters and buffers, in other numerics.

    Args:
        model: whose tensors are shared: an update of either is an update of both. Each keeps FP8 copies and a weight
            version of its own; refit brings them together.
    """
    shared = {id(tensor): tensor for tensor in (*model.parameters(), *model.buffers())}
    view = copy.deepcopy(model, shared)
    view.set_numerics(numerics)
    stop_watching(view)  # a refit tells it of new weights
    return view


@torch.no_grad()
def refit(trainer: Decoder, sampler: Decoder, engine: Receiver) -> RefitReport:
    """Hand the trainer's weights, as its optimizer committed them, to the engine.

    The sampler gets the trainer's weight version, its FP8 linears are quantized now, once, and the engine forgets
    the pages that older weights made. In exact mode trainer and sampler are one object, so the codes are also those
    that the trainer's next forward pass multiplies with. A remote engine gets codes and scales as bytes.

    Raises:
        ExactnessError: the engine samples from another model, from other tensors, or from another version.
        NonFiniteError: a weight is inf or NaN; nothing was changed or sent.
        WeightAuditError: of a remote engine; the update was aborted.
        EngineError: of a remote engine; the update was aborted.
    """
    began = time.perf_counter()
    check_finite_weights(trainer)
    session = engine.begin_update(sampler, trainer.weight_version)
    if sampler is not trainer:
        _check_shared(trainer, sampler)
        sampler.mark_weights_updated()
        sampler.weight_version = trainer.weight_version
    codes = renew_codes(sampler)
    try:
        session.stage()
        version = session.commit()
    except BaseException:
        session.abort()
        raise
    if version != trainer.weight_version:
        raise ExactnessError(
            f"refit: the engine samples from weight version {version}, the trainer is at {trainer.weight_version}: "
            "the engine did not see the new weights"
        )
    num_bytes = session.num_bytes or sum(q.num_bytes for q in codes)
    return RefitReport(version, len(codes), num_bytes, time.perf_counter() - began)


def _check_shared(trainer: Decoder, sampler: Decoder) -> None:
    theirs = dict(sampler.named_parameters())
    for name, param in trainer.named_parameters():
        if theirs.get(name) is not param:
            raise ExactnessError(
                f"refit: the sampler's {name} is not the trainer's tensor, so it would keep old weights; make the "
                "sampler by octavo.weights.refit.share_weights"
            )
