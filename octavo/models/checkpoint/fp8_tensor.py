"""The per-tensor dialect of AutoFP8 and vLLM, and transformers' spelling of it: one scale a weight, quant_method "fp8".

`weight_scale` (transformers: `weight_scale_inv`) decodes the weight, `input_scale` (`activation_scale`) the input of
the static kind; both are scalars. The dynamic kind stores no input scale.
"""

import dataclasses
from collections.abc import Iterable
from typing import Any

import torch

from octavo.models.checkpoint.layout import BF16, F16, F32, Layout, as_patterns, require_value
from octavo.numerics import Scaling

SCALING = Scaling.per_tensor(torch.float8_e4m3fn)
DYNAMIC = Layout(
    "fp8-tensor-dynamic",
    SCALING,
    "dynamic",
    weight_scale=("weight_scale", "weight_scale_inv"),
    scale_dtypes=(F32, BF16, F16),
)
STATIC = dataclasses.replace(
    DYNAMIC, dialect="fp8-tensor-static", input="static", input_scale=("input_scale", "activation_scale")
)


def parse(quantization: dict[str, Any]) -> Layout:
    """The layout that a quantization_config without weight_block_size declares.

    Raises:
        CheckpointError: naming the field that is not this dialect's.
    """
    require_value(
        quantization,
        "config.json: quantization_config",
        activation_scheme=("dynamic", "static"),
        fmt=("e4m3", None),
        scale_fmt=("float", None),
        store_dtype=(None,),
        modules_to_convert=(None, []),
        expert_dtype=("fp8", None),
        kv_cache_scheme=("static", None),
    )
    layout = STATIC if quantization["activation_scheme"] == "static" else DYNAMIC
    ignored = quantization.get("ignored_layers") or quantization.get("modules_to_not_convert")
    return dataclasses.replace(
        layout,
        ignored=as_patterns(ignored, "ignored_layers"),
        has_kv_scales=quantization.get("kv_cache_scheme") == "static",
    )


def make_config(layout: Layout, skipped: Iterable[str], kv_strategy: str | None) -> dict[str, Any]:
    """The quantization_config of a checkpoint in this dialect.

    Args:
        layout: DYNAMIC or STATIC.
        skipped: Hugging Face names of the linears that stay in high precision.
        kv_strategy: of the files' scales of the KV cache, None where there are none.
    """
    return {
        **({"kv_cache_scheme": "static"} if kv_strategy else {}),
        "quant_method": "fp8",
        "activation_scheme": "static" if layout.input == "static" else "dynamic",
        "ignored_layers": sorted(skipped),
    }
