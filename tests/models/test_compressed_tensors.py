"""Against the compressed-tensors library, through transformers: its files give its numbers, and it reads octavo's."""

from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from octavo.models import Decoder, ModelConfig, load_model, save_model
from octavo.models.checkpoint.inspect import inspect_checkpoint
from octavo.models.checkpoint.names import parameter_names
from tests.models.foreign import FOREIGN, linear_weights, write_foreign

transformers = pytest.importorskip("transformers")
# It takes seconds to import, which the tests do and the collection of the files must not.
pytestmark = [
    pytest.mark.skipif(find_spec("compressed_tensors") is None, reason="an optional dependency"),
    pytest.mark.usefixtures("quiet"),
]

# The library's name of each kind -> the dialect, and the hand-made one that must have its very codes.
PRESETS = {
    "FP8_DYNAMIC": ("compressed-tensors-channel", "compressed-channel"),
    "FP8": ("compressed-tensors-tensor", "compressed-tensor"),
    "FP8_BLOCK": ("compressed-tensors-block", "compressed-block"),
}


def write_with_the_library(source: Path, path: Path, preset: str) -> None:
    """Quantize a bf16 checkpoint by compressed-tensors' own rules for scales and codes."""
    from compressed_tensors.compressors import ModelCompressor
    from compressed_tensors.quantization import QuantizationConfig, apply_quantization_config, preset_name_to_scheme
    from compressed_tensors.quantization.utils import calculate_qparams

    model = transformers.AutoModelForCausalLM.from_pretrained(source, dtype=torch.bfloat16)
    groups = {"group_0": preset_name_to_scheme(preset, ["Linear"])}
    apply_quantization_config(model, QuantizationConfig(config_groups=groups, ignore=["lm_head"]))
    for module in (m for m in model.modules() if hasattr(m, "weight_scale")):
        amax = _amax(module.weight.detach(), preset)
        module.weight_scale.data.copy_(calculate_qparams(-amax, amax, module.quantization_scheme.weights)[0])
        if hasattr(module, "input_scale"):
            module.input_scale.data.fill_(0.03)
    compressor = ModelCompressor.from_pretrained_model(model)
    compressor.compress_model(model)
    model.save_pretrained(path)
    compressor.update_config(path)


def _amax(weight: torch.Tensor, preset: str) -> torch.Tensor:
    if preset == "FP8":
        return weight.abs().max().reshape(1)
    if preset == "FP8_DYNAMIC":
        return weight.abs().amax(dim=1, keepdim=True)
    return weight.abs().unflatten(0, (-1, 128)).unflatten(2, (-1, 128)).amax(dim=(1, 3))


def decoded_by_transformers(path: Path) -> dict[str, torch.Tensor]:
    how = transformers.CompressedTensorsConfig(dequantize=True)
    model = transformers.AutoModelForCausalLM.from_pretrained(path, quantization_config=how, dtype=torch.bfloat16)
    state: dict[str, torch.Tensor] = model.state_dict()
    return state


def same_weights(model: Decoder, theirs: dict[str, torch.Tensor]) -> None:
    for parameter in parameter_names(model.config):
        for name, tensor in parameter.split(model.get_parameter(parameter.name).detach()).items():
            assert theirs[name].dtype == torch.bfloat16
            assert torch.equal(theirs[name], tensor), name


@pytest.mark.parametrize("preset", PRESETS)
def test_files_of_the_library(tmp_path: Path, config: ModelConfig, preset: str) -> None:
    save_model(load_model(config, seed=3), tmp_path / "bf16")
    write_with_the_library(tmp_path / "bf16", tmp_path / "theirs", preset)
    dialect, by_hand = PRESETS[preset]
    report = inspect_checkpoint(tmp_path / "theirs")
    assert (report.dialect, report.problems) == (dialect, [])
    same_weights(load_model(tmp_path / "theirs"), decoded_by_transformers(tmp_path / "theirs"))
    theirs = load_file(tmp_path / "theirs" / "model.safetensors")
    ours = load_file(write_foreign(tmp_path / "hand", config, FOREIGN[by_hand]) / "model.safetensors")
    for name in linear_weights(config) if preset != "FP8_BLOCK" else ():  # its scale by hand is of fp32, then rounded
        assert torch.equal(theirs[f"{name}_scale"], ours[f"{name}_scale"])
        assert torch.equal(theirs[name].view(torch.uint8), ours[name].view(torch.uint8)), name
    model: Any = load_model(tmp_path / "theirs", recipe="auto")
    down = model.layers[1].mlp.down_proj
    codes, name = down.quantized_weight()[0], "model.layers.1.mlp.down_proj.weight"
    assert torch.equal(codes.qdata.view(torch.uint8), theirs[name].view(torch.uint8))
    assert preset != "FP8" or torch.equal(down.input_scale, theirs[f"{name.removesuffix('weight')}input_scale"].float())


@pytest.mark.parametrize("kind", ["channel", "tensor", "block"])
def test_octavos_files_are_read_by_the_library(tmp_path: Path, config: ModelConfig, kind: str) -> None:
    model = load_model(config, seed=4)
    for linear in (m for n, m in model.named_modules() if n.endswith("_proj")):
        linear.set_input_scale(torch.tensor(0.02))
    save_model(model, tmp_path / "m", f"compressed-tensors-{kind}")  # fp32 scales, which the library keeps
    same_weights(load_model(tmp_path / "m"), decoded_by_transformers(tmp_path / "m"))


def test_scales_of_the_whole_tensor_in_transformers_spelling(tmp_path: Path, config: ModelConfig) -> None:
    path = write_foreign(tmp_path / "m", config, FOREIGN["transformers-tensor-dynamic"])
    how = transformers.FineGrainedFP8Config(dequantize=True, weight_block_size=None)
    theirs = transformers.AutoModelForCausalLM.from_pretrained(path, quantization_config=how, dtype=torch.bfloat16)
    same_weights(load_model(path), theirs.state_dict())
