"""Which dialect a checkpoint is written in: its config files read once, their quantization resolved or refused."""

import json
import logging
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from octavo.errors import CheckpointError
from octavo.models.checkpoint import compressed_tensors, fbgemm, fp8_block, fp8_tensor, modelopt, record
from octavo.models.checkpoint.layout import Layout

logger = logging.getLogger(__name__)
CONFIG_FILE = "config.json"
HIGH_PRECISION = Layout("bf16")
# The dialects that save_model writes; the compressed-tensors ones end with their kind.
WRITABLE: dict[str, Layout] = {
    layout.dialect: layout
    for layout in (
        HIGH_PRECISION,
        fp8_block.LAYOUT,
        fp8_tensor.STATIC,
        fp8_tensor.DYNAMIC,
        compressed_tensors.CHANNEL,
        compressed_tensors.TENSOR,
        compressed_tensors.BLOCK,
    )
}
DIALECTS = tuple(WRITABLE)


def model_of_run(path: Path) -> Path | None:
    """The model's folder of a training step, or the newest one of a run; None for anything else, a model included."""
    if _names_a_model(path / CONFIG_FILE):
        return None
    if (path / "model" / CONFIG_FILE).is_file():
        return path / "model"
    if any(path.glob("*.safetensors")):
        return None
    final, latest = path / "final", _latest_model(path)  # of a run of reinforcement that came to its end
    if not (final / CONFIG_FILE).is_file():
        return latest
    # it may have gone on since
    return latest if latest is not None and _weight_version(latest) > _weight_version(final) else final


def _latest_model(path: Path) -> Path | None:
    """The model that LATEST names, of a run or of its checkpoints."""
    for folder in (path, path / "checkpoints"):
        latest = folder / "LATEST"
        if latest.is_file():
            model = folder / latest.read_text(encoding="utf-8", errors="replace").strip() / "model"
            return model if (model / CONFIG_FILE).is_file() else None
    return None


def _weight_version(model: Path) -> int:
    known = record.read(model)
    return known.weight_version if known else 0


def newest_model(path: Path) -> Path:
    """A checkpoint's folder; of a training run's or step's the newest model in it, which the log names."""
    model = model_of_run(path)
    if model is None:
        return path
    logger.info("%s: a run; reading %s", path, model)
    return model


def _names_a_model(file: Path) -> bool:
    """Whether a config.json is a model's; a run of reinforcement keeps its own settings under that name."""
    try:
        fields = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return file.is_file()  # its reader says what is wrong
    return not isinstance(fields, dict) or "model_type" in fields or "architectures" in fields


def read_config(path: str | Path) -> dict[str, Any]:
    """config.json of a checkpoint directory.

    Raises:
        CheckpointError: there is none, or it is no JSON object.
    """
    file = Path(path) / CONFIG_FILE
    model = model_of_run(Path(path))
    if model is not None:
        raise CheckpointError(f"{path} is the folder of a training run; its newest model is in {model}")
    if (Path(path) / "adapter_config.json").is_file() and not file.is_file():
        raise CheckpointError(
            f"{path} holds PEFT's adapters alone; give the merged model (of octavo train: model/ in the run's folder)"
        )
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


def read_layout(path: str | Path, fields: dict[str, Any]) -> Layout:
    """How a checkpoint's weights are stored, by its config files.

    Args:
        path: the checkpoint directory.
        fields: its config.json.
    Returns:
        The layout; its dialect is "bf16" where nothing is quantized, whatever the dtype.
    Raises:
        CheckpointError: a quantization that octavo does not read, naming the field.
    """
    quantization = fields.get("quantization_config") or fields.get("compression_config") or {}
    if not isinstance(quantization, dict):
        raise CheckpointError(f"config.json: quantization_config must be a JSON object, got {quantization!r}")
    method = quantization.get("quant_method")
    file = modelopt.read_file(Path(path))
    if str(method).startswith(modelopt.QUANT_METHOD) or (file and not quantization):
        return modelopt.parse(quantization, file)
    if file:
        raise CheckpointError(f"config.json has quant_method {method!r}, but {modelopt.FILE} is there, ModelOpt's file")
    if not quantization:
        return HIGH_PRECISION
    if method == fp8_block.QUANT_METHOD:
        return (fp8_block if quantization.get("weight_block_size") else fp8_tensor).parse(quantization)
    if method == compressed_tensors.QUANT_METHOD:
        return compressed_tensors.parse(quantization)
    if method == fbgemm.QUANT_METHOD:
        return fbgemm.parse(quantization)
    known = (module.QUANT_METHOD for module in (fp8_block, compressed_tensors, modelopt, fbgemm))
    raise CheckpointError(
        f"config.json: quantization_config.quant_method = {method!r} is not supported; octavo reads "
        f"{', '.join(known)}, and checkpoints without quantization"
    )


def make_config(layout: Layout, skipped: Iterable[str], kv_strategy: str | None) -> dict[str, Any] | None:
    """The quantization_config of a checkpoint to write, None for the high-precision dialect.

    Args:
        layout: one of WRITABLE, or fp8_block.UE8M0.
        skipped: Hugging Face names of the linears that stay in high precision.
        kv_strategy: what the files' scales of the KV cache are of, "tensor" or "attn_head"; None where there are none.
    """
    if layout.weight is None:
        return None
    if layout.dialect == fp8_block.LAYOUT.dialect:
        return fp8_block.make_config(skipped, layout)
    if layout in (fp8_tensor.STATIC, fp8_tensor.DYNAMIC):
        return fp8_tensor.make_config(layout, skipped, kv_strategy)
    return compressed_tensors.make_config(layout, skipped, kv_strategy)
