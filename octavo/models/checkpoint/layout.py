"""Layout: what a dialect's config says of its files, as data that one reader and one writer follow."""

import dataclasses
import fnmatch
import re
from collections.abc import Iterable
from typing import Literal

import torch

from octavo.errors import CheckpointError
from octavo.numerics import Recipe, Scaling, get_recipe

# How the input of a linear is quantized: by a scale in the file, by scales made at run time, or not at all.
InputScale = Literal["static", "dynamic", "none"]
BF16, F16, F32, E8M0 = torch.bfloat16, torch.float16, torch.float32, torch.float8_e8m0fnu


@dataclasses.dataclass(frozen=True)
class Layout:
    """How a checkpoint's quantized linears are stored.

    Attributes:
        dialect: its name.
        weight: scaling of the codes; None where nothing is quantized.
        input: where the scale of a linear's input comes from.
        weight_scale: last parts of the weight scale's names; the first is the one that is written.
        input_scale: the same of the input's scale.
        scale_dtypes: that a scale may have; the first is the one that is written.
        ignored: patterns of modules that stay in high precision, see matches.
        targets: patterns of modules that are quantized; none for all.
        has_kv_scales: the config promises scales of the KV cache.
        remarks: what octavo does otherwise than the dialect's author may expect; said when the checkpoint is loaded.
    """

    dialect: str
    weight: Scaling | None = None
    input: InputScale = "none"
    weight_scale: tuple[str, ...] = ()
    input_scale: tuple[str, ...] = ()
    scale_dtypes: tuple[torch.dtype, ...] = (F32,)
    ignored: tuple[str, ...] = ()
    targets: tuple[str, ...] = ()
    has_kv_scales: bool = False
    remarks: tuple[str, ...] = ()

    @property
    def recipe(self) -> Recipe:
        """The recipe that computes what the checkpoint declares.

        A dynamic scale beside one weight scale a tensor is made per token, as other engines make it on Hopper: a scale
        over all tokens would let one request change another's output. Weights alone in FP8 are decoded.
        """
        if self.weight is None or self.input == "none":
            return get_recipe("bf16")
        if self.input == "static":
            return get_recipe("tensorwise", static_input=True)
        name = "blockwise" if self.weight.kind == "block_128x128" else "rowwise"
        return get_recipe(name, scale_format=self.weight.scale_format)

    def is_ignored(self, module: str) -> bool:
        """Whether the config keeps a module out of FP8."""
        is_target = not self.targets or any(matches(pattern, module) for pattern in self.targets)
        return not is_target or any(matches(pattern, module) for pattern in self.ignored)


def matches(pattern: str, module: str) -> bool:
    """Whether a pattern of a config names a module.

    Args:
        pattern: "re:" and a regular expression from the name's start; a name with wildcards; or a full name, the name
            of a module above, or the last parts of a name.
        module: Hugging Face's full name.
    Raises:
        CheckpointError: a regular expression that is none.
    """
    if pattern.startswith("re:"):
        try:
            return re.match(pattern[3:], module) is not None
        except re.error as error:
            raise CheckpointError(f"config.json: {pattern!r} is no regular expression: {error}") from None
    if any(char in pattern for char in "*?["):
        return fnmatch.fnmatchcase(module, pattern)
    return module == pattern or module.startswith(f"{pattern}.") or module.endswith(f".{pattern}")


def as_patterns(value: object, field: str) -> tuple[str, ...]:
    """A config's list of modules; null is an empty one.

    Raises:
        CheckpointError: it is no list of names.
    """
    names = value or []
    if not isinstance(names, list | tuple) or not all(isinstance(name, str) for name in names):
        raise CheckpointError(f"config.json: {field} must be a list of module names, got {value!r}")
    return tuple(names)


def require_value(fields: dict[str, object], where: str, **allowed: Iterable[object]) -> None:
    """Refuse fields whose value would make the codes mean something else.

    Args:
        allowed: field -> the values it may have, None among them where it may be absent.
    Raises:
        CheckpointError: naming field and value; fields are none.
    """
    if not isinstance(fields, dict):
        raise CheckpointError(f"{where} must be an object, got {fields!r}")
    for name, values in allowed.items():
        known = list(values)
        if fields.get(name) not in known:
            shown = " or ".join(repr(value) for value in known if value is not None) or "null"
            raise CheckpointError(f"{where}.{name} = {fields.get(name)!r} is not supported; octavo reads {shown}")
