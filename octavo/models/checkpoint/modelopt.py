"""The dialect of NVIDIA's ModelOpt: `hf_quant_config.json` beside config.json's quantization_config, or one of them.

`weight_scale` and `input_scale` decode. Three algorithms: FP8 (scalars, static input), FP8_PER_CHANNEL_PER_TOKEN, and
FP8_PB_WO (128 x 128 blocks, weights only). KV scales are k_proj.k_scale and v_proj.v_scale.
"""

import dataclasses
import json
from pathlib import Path
from typing import Any

import torch

from octavo.errors import CheckpointError
from octavo.models.checkpoint.layout import BF16, F16, F32, Layout, as_patterns, require_value
from octavo.numerics import Scaling

QUANT_METHOD, FILE = "modelopt", "hf_quant_config.json"
_NAMES: dict[str, Any] = {"weight_scale": ("weight_scale",), "scale_dtypes": (F32, BF16, F16)}
TENSOR = Layout(
    "modelopt-tensor", Scaling.per_tensor(torch.float8_e4m3fn), "static", input_scale=("input_scale",), **_NAMES
)
CHANNEL = Layout("modelopt-channel", Scaling.per_row(torch.float8_e4m3fn), "dynamic", **_NAMES)
BLOCK = Layout("modelopt-block", Scaling.block_128x128(torch.float8_e4m3fn), "none", **_NAMES)
_OF_ALGORITHM = {"FP8": TENSOR, "FP8_PER_CHANNEL_PER_TOKEN": CHANNEL, "FP8_PB_WO": BLOCK}


def read_file(path: Path) -> dict[str, Any] | None:
    """The quantization of a checkpoint's hf_quant_config.json, None where there is no such file.

    Raises:
        CheckpointError: a file that is not ModelOpt's.
    """
    file = path / FILE
    if not file.is_file():
        return None
    try:
        fields = json.loads(file.read_text(encoding="utf-8"))["quantization"]
    except (ValueError, KeyError, TypeError) as error:
        raise CheckpointError(f"{file}: not a quantization of ModelOpt ({error!r})") from None
    if not isinstance(fields, dict):
        raise CheckpointError(f"{file}: quantization must be a JSON object, got {fields!r}")
    return fields


def parse(quantization: dict[str, Any], file: dict[str, Any] | None) -> Layout:
    """The layout that ModelOpt's files declare.

    Args:
        quantization: config.json's quantization_config, empty where it has none.
        file: read_file's result.
    Raises:
        CheckpointError: an algorithm that octavo does not read, or two files that disagree.
    """
    inner = quantization.get("quantization")  # some versions put the file's fields into config.json as they are
    found = [fields for fields in (inner if isinstance(inner, dict) else quantization, file) if fields]
    algorithms = [str(fields.get("quant_algo")).upper() for fields in found]  # some write them in lower case
    if any(name not in _OF_ALGORITHM for name in algorithms):
        raise CheckpointError(
            f"quant_algo = {next(a for a in algorithms if a not in _OF_ALGORITHM)!r} of config.json or {FILE} is not "
            f"supported; octavo reads {', '.join(_OF_ALGORITHM)}"
        )
    if len(set(algorithms)) > 1:
        raise CheckpointError(f"config.json has quant_algo {algorithms[0]!r}, {FILE} has {algorithms[1]!r}")
    ignored: dict[str, None] = {}
    for fields in found:
        for field in ("ignore", "exclude_modules"):
            ignored |= dict.fromkeys(as_patterns(fields.get(field), field))
    return dataclasses.replace(
        _OF_ALGORITHM[algorithms[0]],
        ignored=tuple(ignored),
        has_kv_scales=any(_has_kv_scales(fields) for fields in found),
    )


def _has_kv_scales(fields: dict[str, Any]) -> bool:
    require_value(fields, "quantization", kv_cache_quant_algo=("FP8", "fp8", None, "", "none"))
    scheme = fields.get("kv_cache_scheme")
    if scheme:
        require_value(scheme, "quantization_config.kv_cache_scheme", num_bits=(8,), type=("float",))
    return fields.get("kv_cache_quant_algo") in ("FP8", "fp8") or bool(scheme and not scheme.get("dynamic"))
