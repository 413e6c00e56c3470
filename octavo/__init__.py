"""octavo: train, serve and reinforcement-learn language models in FP8 under one numerics contract.

The public names load on first use, so that importing octavo imports neither torch nor triton.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from octavo import amp, nn
    from octavo.models import load_model, save_model, sequence_logprobs
    from octavo.nn import autocast, convert
    from octavo.numerics import (
        DelayedScaling,
        Format,
        Numerics,
        QuantizedTensor,
        Recipe,
        Scaling,
        get_recipe,
    )
    from octavo.ops.quantize import quantize
    from octavo.serve import LLM, SamplingParams

__version__ = "0.1.0"

__all__ = [
    "LLM",
    "DelayedScaling",
    "Format",
    "Numerics",
    "QuantizedTensor",
    "Recipe",
    "SamplingParams",
    "Scaling",
    "__version__",
    "amp",
    "autocast",
    "convert",
    "get_recipe",
    "load_model",
    "nn",
    "quantize",
    "save_model",
    "sequence_logprobs",
]

# Public name -> the module that holds it (`amp` and `nn` are modules themselves).
_HOMES = {
    "DelayedScaling": "octavo.numerics",
    "Format": "octavo.numerics",
    "Numerics": "octavo.numerics",
    "QuantizedTensor": "octavo.numerics",
    "Recipe": "octavo.numerics",
    "Scaling": "octavo.numerics",
    "get_recipe": "octavo.numerics",
    "quantize": "octavo.ops.quantize",
    "autocast": "octavo.nn",
    "convert": "octavo.nn",
    "load_model": "octavo.models",
    "save_model": "octavo.models",
    "sequence_logprobs": "octavo.models",
    "LLM": "octavo.serve",
    "SamplingParams": "octavo.serve",
}


def __getattr__(name: str) -> Any:
    if name in ("amp", "nn"):
        return import_module(f"octavo.{name}")
    if name not in _HOMES:
        raise AttributeError(f"module 'octavo' has no attribute {name!r}")
    value = getattr(import_module(_HOMES[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(globals().keys() | set(__all__))
