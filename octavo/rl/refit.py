"""Refit of an LLM or of any rollout engine; octavo.weights.refit does it."""

from octavo.models import Decoder
from octavo.rl.engines.embedded import as_engine
from octavo.rl.engines.protocol import RolloutEngine
from octavo.serve import LLM
from octavo.weights import refit as weights
from octavo.weights.refit import RefitReport, share_weights

__all__ = ["RefitReport", "refit", "share_weights"]


def refit(trainer: Decoder, sampler: Decoder, engine: LLM | RolloutEngine) -> RefitReport:
    """Hand the trainer's weights, as its optimizer committed them, to an LLM or an engine; see octavo.weights.refit."""
    return weights.refit(trainer, sampler, as_engine(engine))
