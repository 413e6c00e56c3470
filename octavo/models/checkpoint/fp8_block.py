"""The block dialect of DeepSeek and Qwen (transformers' FineGrainedFP8): E4M3 codes and `weight_scale_inv`, 128 x 128.

`weight_scale_inv` is a decode scale in spite of its name: weight ~= codes * weight_scale_inv. Activations are
quantized 1 x 128 at run time, so no scale of theirs is stored.
"""

import dataclasses
from collections.abc import Iterable
from typing import Any

import torch

from octavo.models.checkpoint.layout import E8M0, F32, Layout, as_patterns, require_value
from octavo.numerics import Scaling

QUANT_METHOD = "fp8"
SCALING = Scaling.block_128x128(torch.float8_e4m3fn)
BLOCK = 128
LAYOUT = Layout("fp8-block", SCALING, "dynamic", weight_scale=("weight_scale_inv",))
# scale_fmt "ue8m0": powers of two, for weights and inputs, stored in a byte or as fp32
UE8M0 = dataclasses.replace(LAYOUT, weight=dataclasses.replace(SCALING, scale_format="e8m0"), scale_dtypes=(E8M0, F32))


def parse(quantization: dict[str, Any]) -> Layout:
    """The layout that a quantization_config with weight_block_size declares.

    Raises:
        CheckpointError: naming the field that is not this dialect's.
    """
    require_value(
        quantization,
        "config.json: quantization_config",
        activation_scheme=("dynamic",),
        weight_block_size=([BLOCK, BLOCK],),
        fmt=("e4m3", None),
        scale_fmt=("float", "ue8m0", None),
        modules_to_convert=(None, []),
        expert_dtype=("fp8", None),
    )
    ignored = quantization.get("modules_to_not_convert") or quantization.get("ignored_layers")
    layout = UE8M0 if quantization.get("scale_fmt") == "ue8m0" else LAYOUT
    return dataclasses.replace(layout, ignored=as_patterns(ignored, "modules_to_not_convert"))


def make_config(skipped: Iterable[str], layout: Layout = LAYOUT) -> dict[str, Any]:
    """The quantization_config of a checkpoint in this dialect.

    Args:
        skipped: Hugging Face names of the linears that stay in high precision.
        layout: LAYOUT or UE8M0.
    """
    scale_fmt = {"scale_fmt": "ue8m0"} if layout == UE8M0 else {}
    return {
        **scale_fmt,
        "quant_method": QUANT_METHOD,
        "activation_scheme": "dynamic",
        "fmt": "e4m3",
        "weight_block_size": [BLOCK, BLOCK],
        "modules_to_not_convert": sorted(skipped),
    }


def can_quantize(shapes: Iterable[tuple[int, ...]]) -> bool:
    """Whether a linear's parts may all be written as codes: transformers leaves ragged blocks in high precision."""
    return all(rows % BLOCK == 0 and cols % BLOCK == 0 for rows, cols in shapes)
