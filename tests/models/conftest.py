"""Small architectures, and checkpoints of them on the disk."""

import json
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from octavo.models import Decoder, ModelConfig, load_model, save_model
from octavo.models.checkpoint.safetensors_io import SafetensorsReader


@pytest.fixture
def config() -> ModelConfig:
    """A Qwen3 whose linears all divide into 128 x 128 blocks."""
    return ModelConfig("qwen3", 96, 128, 256, 2, 4, 4, 32, qk_norm=True, max_position_embeddings=128)


@pytest.fixture
def ragged_config() -> ModelConfig:
    """A Llama with biases whose k, v, gate, up and down do not divide into 128 x 128 blocks."""
    return ModelConfig("llama", 96, 128, 344, 2, 4, 2, 32, attention_bias=True, max_position_embeddings=128)


@pytest.fixture
def quiet() -> Iterator[None]:
    """Progress bars and deprecations of transformers are not ours."""
    import transformers

    transformers.utils.logging.disable_progress_bar()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


@pytest.fixture
def save(tmp_path: Path) -> Callable[..., Path]:
    """save(config, dialect, recipe) -> directory of a new model's checkpoint."""

    def run(config: ModelConfig, dialect: str = "bf16", recipe: str = "bf16", **fields: Any) -> Path:
        path = tmp_path / f"{config.family}-{dialect}-{recipe}"
        save_model(randomize(load_model(config, recipe=recipe)), path, dialect, **fields)
        return path

    return run


def randomize(model: Decoder) -> Decoder:
    """Norms away from one and biases away from zero, so that leaving one out shows."""
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for name, param in model.named_parameters():
            if name.endswith(("norm.weight", ".bias")):
                param += 0.1 * torch.randn(param.shape, generator=generator).to(param.dtype)
    return model


@pytest.fixture
def stored_bytes() -> Callable[[Path], dict[str, bytes]]:
    """stored_bytes(directory) -> every tensor of a checkpoint as bytes."""

    def run(directory: Path) -> dict[str, bytes]:
        reader = SafetensorsReader(directory)
        return {name: reader.load(name).reshape(-1).view(torch.uint8).numpy().tobytes() for name in reader.entries}

    return run


@pytest.fixture
def edit_config() -> Callable[..., None]:
    """edit_config(directory, field=value, ...) changes a checkpoint's config.json; None removes a field."""

    def run(directory: Path, **fields: Any) -> None:
        file = directory / "config.json"
        values = {**json.loads(file.read_text()), **fields}
        file.write_text(json.dumps({k: v for k, v in values.items() if v is not None}))

    return run


@pytest.fixture
def edit_tensors() -> Callable[..., None]:
    """edit_tensors(directory, change) applies change(dict of tensors) to model.safetensors."""

    def run(directory: Path, change: Callable[[dict[str, torch.Tensor]], None]) -> None:
        tensors = load_file(directory / "model.safetensors")
        change(tensors)
        save_file({k: v.contiguous() for k, v in tensors.items()}, directory / "model.safetensors")

    return run
