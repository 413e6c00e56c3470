"""Scales of the KV cache in a checkpoint: every dialect's names mapped onto one (k_scale, v_scale) a layer."""

import dataclasses
import re
from collections.abc import Iterable, Iterator

import torch

from octavo.errors import CheckpointError
from octavo.models.checkpoint.layout import BF16, F16, F32, Layout
from octavo.models.checkpoint.names import ParameterNames
from octavo.models.checkpoint.safetensors_io import SafetensorsReader
from octavo.models.checkpoint.scaled_weight import read_scale, scale_misfits
from octavo.models.config import ModelConfig

_LAYER = re.compile(r"(?:model\.layers|transformer\.h)\.(\d+)\.(?:self_attn|attn|mixer)\.(.+)")
# Name inside a layer's attention -> roles that it scales; `.attn` is vLLM's module for the cache.
_NAMES: tuple[tuple[re.Pattern[str], str], ...] = (
    (re.compile(r"(?:attn\.)?([kvq])_scale"), ""),
    (re.compile(r"([kvq])_proj\.output_scale"), ""),
    (re.compile(r"(?:[kvq]|qkv|qkqkv)_proj\.([kvq])_scale"), ""),
    (re.compile(r"([kvq])(?:_cache)?\.scale"), ""),
    (re.compile(r"(?:attn\.)?kv_scale"), "kv"),
)
_ZERO_POINT = "_zero_point"
_LAYOUT = Layout("KV-cache", scale_dtypes=(F32, BF16, F16))


@dataclasses.dataclass(frozen=True)
class KVScales:
    """Known decode scales of one layer's cache, on the CPU.

    Attributes:
        k_scale: [1] or [num_kv_heads] fp32; None where the files may lack it.
        v_scale: the same.
        q_scale: [1] or [num_heads] fp32 where the file has one.
    """

    k_scale: torch.Tensor | None
    v_scale: torch.Tensor | None
    q_scale: torch.Tensor | None = None


@dataclasses.dataclass(frozen=True)
class KVNames:
    """The names of a file that are KV scales.

    Attributes:
        scales: (layer, "k", "v" or "q") -> name.
        zero_points: names of zero points, which must be zero.
    """

    scales: dict[tuple[int, str], str]
    zero_points: tuple[str, ...]

    @property
    def all(self) -> set[str]:
        """Every name that is read."""
        return {*self.scales.values(), *self.zero_points}


def find_names(names: Iterable[str], num_layers: int | None = None) -> KVNames:
    """The KV scales among a file's names.

    Args:
        num_layers: of the model; None takes every layer's.
    Raises:
        CheckpointError: two spellings of one scale.
    """
    scales: dict[tuple[int, str], str] = {}
    zero_points = []
    for name in names:
        layer, roles = _meaning(name.replace(_ZERO_POINT, "_scale"))
        if not roles or (num_layers is not None and layer >= num_layers):
            continue
        if name.endswith(_ZERO_POINT):
            zero_points.append(name)
            continue
        for role in roles:
            other = scales.setdefault((layer, role), name)
            if other != name:
                raise CheckpointError(f"{other} and {name} are two scales for {role.upper()} of layer {layer}")
    return KVNames(scales, tuple(zero_points))


def attention_modules(parameters: Iterable[ParameterNames]) -> list[str]:
    """Hugging Face's name of each layer's attention."""
    projections = [p.parts[0][0] for p in parameters if p.name.endswith(".self_attn.qkv_proj.weight")]
    return [name.rsplit(".", 2)[0] for name in projections]


def missing_names(found: KVNames, layout: Layout, modules: list[str]) -> list[str]:
    """Scales that must be there and are not: all where config.json promises some, the rest where some layer has any.

    Args:
        modules: attention_modules of the model.
    """
    if not found.scales and not layout.has_kv_scales:
        return []
    lost = [(i, role) for i in range(len(modules)) for role in "kv" if (i, role) not in found.scales]
    return [_spelled_like(found, layer, role) or f"{modules[layer]}.{role}_scale" for layer, role in lost]


def read(reader: SafetensorsReader, config: ModelConfig) -> tuple[KVScales, ...]:
    """One KVScales a layer, or none at all where the files hold none.

    Raises:
        CheckpointError: a scale of another shape or dtype, not finite or not positive; a zero point that is not zero.
    """
    found = find_names(reader.entries, config.num_layers)
    for name in found.zero_points:
        if reader.load(name).float().any():
            raise CheckpointError(f"{reader.path}: {name} is not zero; octavo's KV cache has no zero points")
    if not found.scales:
        return ()
    if problem := next(misfits(reader, config), None):
        raise CheckpointError(f"{reader.path}: {problem}")
    values = {key: read_scale(reader, name, _LAYOUT).reshape(-1) for key, name in found.scales.items()}
    return tuple(
        KVScales(values.get((i, "k")), values.get((i, "v")), values.get((i, "q"))) for i in range(config.num_layers)
    )


def misfits(reader: SafetensorsReader, config: ModelConfig) -> Iterator[str]:
    """What is wrong with the shapes and dtypes of a file's KV scales; by headers alone."""
    for (_, role), name in find_names(reader.entries, config.num_layers).scales.items():
        entry, num_heads = reader.entries[name], config.num_heads if role == "q" else config.num_kv_heads
        if entry.shape not in ((), (1,), (num_heads,), (num_heads, 1, 1)):
            yield f"{name} has shape {entry.shape}; a KV-cache scale is one number or one a head ({num_heads})"
        yield from scale_misfits(entry, _LAYOUT)


def strategy(kv_scales: tuple[KVScales, ...]) -> str | None:
    """compressed-tensors' word for what a scale is of: "tensor", "attn_head" where one has its own; None for none."""
    if not kv_scales:
        return None
    found = [scale for s in kv_scales for scale in (s.k_scale, s.v_scale) if scale is not None]
    return "attn_head" if any(scale.numel() > 1 for scale in found) else "tensor"


def write(kv_scales: tuple[KVScales, ...], modules: list[str]) -> dict[str, torch.Tensor]:
    """The file's tensors, under the names of compressed-tensors: a scalar each, or [heads, 1, 1].

    Args:
        modules: attention_modules of the model.
    """
    tensors = {}
    for module, scales in zip(modules, kv_scales, strict=bool(kv_scales)):
        for role in ("k", "v", "q"):
            scale = getattr(scales, f"{role}_scale")
            if scale is not None:
                shape = (1,) if scale.numel() == 1 else (-1, 1, 1)
                tensors[f"{module}.{role}_scale"] = scale.reshape(shape)
    return tensors


def _meaning(name: str) -> tuple[int, str]:
    """(layer, the roles that a name scales); no roles for other tensors."""
    inside = _LAYER.fullmatch(name)
    if inside is not None:
        for pattern, roles in _NAMES:
            found = pattern.fullmatch(inside[2])
            if found is not None:
                return int(inside[1]), roles or found[1]
    return -1, ""


def _spelled_like(found: KVNames, layer: int, role: str) -> str | None:
    """A missing scale's name, spelled as the file spells those that it has."""
    for (_, known_role), name in found.scales.items():
        tail = _LAYER.fullmatch(name)
        if tail is not None and known_role in "kv" and "kv_scale" not in tail[2]:
            spelled = re.sub(rf"(?<![a-z]){known_role}(?=[_.])", role, tail[2])
            return name[: tail.start(1)] + str(layer) + name[tail.end(1) : tail.start(2)] + spelled
    return None
