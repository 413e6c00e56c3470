"""One FP8 backend a model: what other libraries' layers are called, and how one beside octavo's is refused."""

from torch import nn

from octavo.errors import ConfigError

_OTHERS = {  # how the full name of a layer's or parameter's class begins -> whose FP8 it is
    "deepspeed.linear.quantization.": "DeepSpeed's own FP8 (deepspeed.linear)",
    "transformer_engine.": "TransformerEngine",
    "torchao.": "torchao",
    "bitsandbytes.": "bitsandbytes",
    "msamp.": "MS-AMP",
}


def refuse_other_fp8(model: nn.Module) -> None:
    """Raise `conflict` for a model that has a layer, or a parameter, of another FP8 library."""
    for name, module in model.named_modules():
        kinds = [type(one) for one in (module, *module.parameters(recurse=False))]
        names = [f"{kind.__module__}.{kind.__qualname__}" for kind in kinds]
        other = next((whose for start, whose in _OTHERS.items() if any(n.startswith(start) for n in names)), None)
        if other is not None and any(parameter.dim() > 1 for parameter in module.parameters(recurse=False)):
            raise conflict(f"{other} ({name}, a {type(module).__name__})")


def conflict(other: str) -> ConfigError:
    """The error that names octavo and another FP8 backend."""
    return ConfigError(
        f"a model has one FP8 backend, got octavo's (octavo.convert) and {other}; leave one of the two out"
    )
