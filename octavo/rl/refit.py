"""Refit: how new weights reach the sampler: one quantization and one version in this process, a session elsewhere."""

import copy
import time

import torch

from octavo.errors import ExactnessError
from octavo.models import Decoder
from octavo.nn.finite_weights import check_finite_weights
from octavo.nn.live_weights import renew_codes
from octavo.numerics import Numerics
from octavo.rl.engines.protocol import RefitReport, RolloutEngine


def share_weights(model: Decoder, numerics: Numerics) -> Decoder:
    """A second decoder over the very same parameters and buffers, in other numerics.

    Args:
        model: whose tensors are shared: an update of either is an update of both. Each keeps FP8 copies and a weight
            version of its own; refit brings them together.
    """
    shared = {id(tensor): tensor for tensor in (*model.parameters(), *model.buffers())}
    view = copy.deepcopy(model, shared)
    view.set_numerics(numerics)
    return view


@torch.no_grad()
def refit(trainer: Decoder, sampler: Decoder, engine: RolloutEngine) -> RefitReport:
    """Hand the trainer's weights, as its optimizer committed them, to the engine.

    The sampler takes over the trainer's weight version, its FP8 linears are quantized now, once, and the engine forgets
    the pages that older weights made. In exact mode trainer and sampler are one object, so the codes are also those
    that the trainer's next forward pass multiplies with. An engine elsewhere gets codes and scales as bytes.

    Raises:
        ExactnessError: the engine samples from another model, from other tensors, or from another version.
        NonFiniteError: a weight is inf or NaN; nothing was changed or sent.
        WeightAuditError, EngineError: of an engine elsewhere; the update was aborted.
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
                "sampler by octavo.rl.refit.share_weights"
            )
