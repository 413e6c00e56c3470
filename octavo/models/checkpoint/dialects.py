"""Which dialect a checkpoint is written in: config.json read once, its quantization_config resolved or refused."""

import json
from pathlib import Path
from typing import Any

from octavo.errors import CheckpointError
from octavo.models.checkpoint import fp8_block

CONFIG_FILE = "config.json"
DIALECTS = ("bf16", "fp8-block")


def read_config(path: str | Path) -> dict[str, Any]:
    """config.json of a checkpoint directory.

    Raises:
        CheckpointError: there is none, or it is no JSON object.
    """
    file = Path(path) / CONFIG_FILE
    if (Path(path) / "model" / CONFIG_FILE).is_file():
        raise CheckpointError(f"{path} is a training step; its model is in {Path(path) / 'model'}")
    if not file.is_file():
        raise CheckpointError(
            f"{path}: no {CONFIG_FILE} there; give a local checkpoint directory (names on a hub are not looked up: "
            "download the files first)"
        )
    try:
        fields = json.loads(file.read_text(encoding="utf-8"))
    except ValueError as error:
        raise CheckpointError(f"{file}: not valid JSON: {error}") from None
    if not isinstance(fields, dict):
        raise CheckpointError(f"{file}: must be a JSON object, got {type(fields).__name__}")
    return fields


def detect_dialect(fields: dict[str, Any]) -> str:
    """The dialect that a config.json declares.

    Returns:
        "bf16" (nothing quantized, whatever the dtype) or "fp8-block".
    Raises:
        CheckpointError: a quantization that octavo does not read yet.
    """
    quantization = fields.get("quantization_config")
    if not quantization:
        return "bf16"
    method = quantization.get("quant_method")
    if method != fp8_block.QUANT_METHOD:
        raise CheckpointError(
            f"config.json: quantization_config.quant_method = {method!r} is not supported; octavo reads "
            f"{fp8_block.QUANT_METHOD!r} with 128 x 128 blocks, and checkpoints without quantization"
        )
    fp8_block.check_config(quantization)
    return "fp8-block"
