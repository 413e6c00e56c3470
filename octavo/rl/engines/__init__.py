"""Engines that sample for the loop, behind one protocol: embedded, `octavo serve`, vLLM, SGLang."""

from octavo.rl.engines.config import EngineSection
from octavo.rl.engines.protocol import Completion, Generation, RolloutEngine, SamplingSpec
from octavo.weights.errors import (
    EngineAnswerError,
    EngineError,
    EngineTimeoutError,
    ProbeError,
    StaleVersionError,
    WeightAuditError,
)
from octavo.weights.refit import WeightSession

__all__ = [
    "Completion",
    "EngineAnswerError",
    "EngineError",
    "EngineSection",
    "EngineTimeoutError",
    "Generation",
    "ProbeError",
    "RolloutEngine",
    "SamplingSpec",
    "StaleVersionError",
    "WeightAuditError",
    "WeightSession",
]
