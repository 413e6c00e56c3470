"""The compressed-tensors dialect of llm-compressor, its three FP8 kinds: one scale a tensor, a channel or a block.

`weight_scale` and `input_scale` decode; the library stores them in the model's dtype, so mostly in bf16, and quantizes
with the rounded scale. Groups of modules with schemes of their own are refused unless they agree.
"""

import dataclasses
from collections.abc import Iterable
from typing import Any

import torch

from octavo.errors import CheckpointError
from octavo.models.checkpoint.layout import BF16, F16, F32, InputScale, Layout, as_patterns, require_value
from octavo.numerics import Scaling

QUANT_METHOD = "compressed-tensors"
_FORMATS = ("float-quantized", "naive-quantized")
_NAMES: dict[str, Any] = {"weight_scale": ("weight_scale",), "scale_dtypes": (F32, BF16, F16)}
TENSOR = Layout(
    "compressed-tensors-tensor",
    Scaling.per_tensor(torch.float8_e4m3fn),
    "static",
    input_scale=("input_scale",),
    **_NAMES,
)
CHANNEL = Layout("compressed-tensors-channel", Scaling.per_row(torch.float8_e4m3fn), "dynamic", **_NAMES)
BLOCK = Layout("compressed-tensors-block", Scaling.block_128x128(torch.float8_e4m3fn), "dynamic", **_NAMES)
_OF_STRATEGY = {"tensor": TENSOR, "channel": CHANNEL, "block": BLOCK}
# What the field calls each kind, and (weights' strategy, input's strategy, input's scale is made at run time).
_KINDS: dict[tuple[str, str | None, bool], InputScale] = {
    ("tensor", "tensor", False): "static",
    ("tensor", "tensor", True): "dynamic",
    ("tensor", "token", True): "dynamic",
    ("channel", "token", True): "dynamic",
    ("block", "group", True): "dynamic",
    ("tensor", None, False): "none",
    ("channel", None, False): "none",
    ("block", None, False): "none",
}


def parse(quantization: dict[str, Any]) -> Layout:
    """The layout that a quantization_config of compressed-tensors declares.

    Raises:
        CheckpointError: naming the field that octavo does not read.
    """
    where = "config.json: quantization_config"
    require_value(quantization, where, format=(*_FORMATS, None), quantization_status=("compressed", "frozen", None))
    for field in ("transform_config", "sparsity_config", "moe_sparsity_config"):
        value = quantization.get(field)
        if value and value != {"format": "dense"} and any(value.values() if isinstance(value, dict) else [value]):
            raise CheckpointError(f"{where}.{field} = {value!r} is not supported; octavo reads weights as they are")
    groups = quantization.get("config_groups")
    if not isinstance(groups, dict) or not groups:
        raise CheckpointError(f"{where}.config_groups = {groups!r} must name at least one group of modules")
    layouts = [_parse_group(group, f"{where}.config_groups.{name}") for name, group in groups.items()]
    if any(
        dataclasses.replace(layout, targets=()) != dataclasses.replace(layouts[0], targets=()) for layout in layouts
    ):
        raise CheckpointError(f"{where}.config_groups has groups of different schemes; octavo reads one a checkpoint")
    targets = tuple(pattern for layout in layouts for pattern in layout.targets)
    return dataclasses.replace(
        layouts[0],
        targets=() if "Linear" in targets else targets,
        ignored=as_patterns(quantization.get("ignore"), "ignore"),
        has_kv_scales=_has_kv_scales(quantization.get("kv_cache_scheme"), f"{where}.kv_cache_scheme"),
    )


def make_config(layout: Layout, skipped: Iterable[str], kv_strategy: str | None) -> dict[str, Any]:
    """The quantization_config of a checkpoint in this dialect.

    Args:
        layout: TENSOR, CHANNEL or BLOCK.
        skipped: Hugging Face names of the linears that stay in high precision.
        kv_strategy: what the files' scales of the KV cache are of, "tensor" or "attn_head"; None where there are none.
    """
    fp8 = {"num_bits": 8, "type": "float", "symmetric": True}
    static = {**fp8, "strategy": "tensor", "dynamic": False}
    strategy = next(name for name, known in _OF_STRATEGY.items() if known.dialect == layout.dialect)
    weights = {**fp8, "strategy": strategy, "dynamic": False}
    inputs = {"tensor": static, "channel": {**fp8, "strategy": "token", "dynamic": True}}.get(strategy)
    if strategy == "block":
        weights["block_structure"] = [128, 128]
        inputs = {**fp8, "strategy": "group", "group_size": 128, "dynamic": True}
    return {
        "quant_method": QUANT_METHOD,
        "format": _FORMATS[0],
        "quantization_status": "compressed",
        "config_groups": {"group_0": {"targets": ["Linear"], "weights": weights, "input_activations": inputs}},
        "ignore": sorted(skipped),
        "kv_cache_scheme": {**static, "strategy": kv_strategy} if kv_strategy else None,
    }


def _parse_group(group: Any, where: str) -> Layout:
    if not isinstance(group, dict) or not isinstance(group.get("weights"), dict):
        raise CheckpointError(f"{where}.weights must be a scheme; octavo reads FP8 weights")
    weights, inputs = group["weights"], group.get("input_activations")
    require_value(group, where, output_activations=(None,), format=(*_FORMATS, None))
    _check_fp8(weights, f"{where}.weights", dynamic=(False, None))
    strategy = weights.get("strategy")
    if strategy == "block":
        require_value(weights, f"{where}.weights", block_structure=([128, 128], "128x128"))
    if inputs:
        _check_fp8(inputs, f"{where}.input_activations", dynamic=(True, False, None))
    how = (strategy, inputs.get("strategy") if inputs else None, bool(inputs and inputs.get("dynamic")))
    if how not in list(_KINDS):  # by equality, for what a file holds may have no hash
        raise CheckpointError(
            f"{where}: weights by {strategy!r} with inputs by {how[1]!r} ({'dynamic' if how[2] else 'static'}) is not "
            "supported; octavo reads tensor with static tensor, tensor or channel with dynamic token, block with group"
        )
    if inputs and how[1] == "group":
        require_value(inputs, f"{where}.input_activations", group_size=(128,))
    layout = dataclasses.replace(
        _OF_STRATEGY[strategy], input=_KINDS[how], targets=as_patterns(group.get("targets"), where)
    )
    return layout if layout.input == "static" else dataclasses.replace(layout, input_scale=())


def _check_fp8(scheme: dict[str, Any], where: str, dynamic: tuple[bool | None, ...]) -> None:
    require_value(scheme, where, num_bits=(8,), type=("float",), symmetric=(True, None), dynamic=dynamic)


def _has_kv_scales(scheme: Any, where: str) -> bool:
    if not scheme:
        return False
    _check_fp8(scheme, where, dynamic=(True, False, None))
    return not scheme.get("dynamic")
