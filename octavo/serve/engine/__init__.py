"""The engine: scheduler and page manager decide (pure Python), model runner and sampler compute, Engine steps."""

from octavo.serve.engine.config import EngineConfig, served_tokens
from octavo.serve.engine.engine import Engine
from octavo.serve.engine.stats import EngineStats

__all__ = ["Engine", "EngineConfig", "EngineStats", "served_tokens"]
