"""load_model and save_model: both dialects there and back, and the numerics that a checkpoint is loaded with."""

import dataclasses
import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from octavo.errors import RecipeError
from octavo.models import (
    Decoder,
    ModelConfig,
    char_tokenizer,
    load_model,
    load_tokenizer,
    save_model,
    sequence_logprobs,
)
from octavo.models.checkpoint import fp8_block
from octavo.models.checkpoint.safetensors_io import SafetensorsReader
from octavo.ops.quantize import quantize
from tests.models.foreign import load_quietly

Save = Callable[..., Path]
Edit = Callable[..., None]
Stored = Callable[[Path], dict[str, bytes]]
TOKENS = [list(range(1, 90))]


def logprobs(model: Decoder) -> torch.Tensor:
    with torch.no_grad():
        return sequence_logprobs(model, TOKENS)[0]


# There and back


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("max_shard_bytes", [10**9, 100_000])
def test_high_precision_there_and_back(
    tmp_path: Path, ragged_config: ModelConfig, dtype: torch.dtype, max_shard_bytes: int
) -> None:
    config = dataclasses.replace(ragged_config, eos_token_ids=(3, 5), bos_token_id=1)
    model = load_model(config, dtype=dtype)
    save_model(model, tmp_path / "a", max_shard_bytes=max_shard_bytes)
    again = load_model(tmp_path / "a")
    assert again.config == config
    assert again.dtype == dtype
    for name, tensor in model.state_dict().items():
        assert torch.equal(tensor, again.state_dict()[name]), name
    save_model(again, tmp_path / "b", max_shard_bytes=max_shard_bytes)
    for file in os.listdir(tmp_path / "a"):
        if (tmp_path / "a" / file).is_file():
            assert (tmp_path / "a" / file).read_bytes() == (tmp_path / "b" / file).read_bytes()


@pytest.mark.parametrize("which", ["config", "ragged_config"])
def test_an_fp8_checkpoint_is_the_model_that_wrote_it(
    stored_bytes: Stored, request: pytest.FixtureRequest, tmp_path: Path, which: str
) -> None:
    model = load_model(request.getfixturevalue(which), recipe="blockwise")
    save_model(model, tmp_path / "m", "fp8-block")
    loaded = load_model(tmp_path / "m", recipe="blockwise")
    assert torch.equal(logprobs(loaded), logprobs(model))
    assert loaded.conversion_report.fp8_names == model.conversion_report.fp8_names
    save_model(loaded, tmp_path / "again", "fp8-block")
    assert stored_bytes(tmp_path / "m") == stored_bytes(tmp_path / "again")


def test_what_a_bf16_model_is_written_with_in_bf16_stays_so(tmp_path: Path, ragged_config: ModelConfig) -> None:
    """As config.json says, whether octavo's own record is there or not."""
    save_model(load_model(ragged_config), tmp_path / "m", "fp8-block")
    fp8 = load_model(tmp_path / "m", recipe="auto").conversion_report.fp8_names
    assert fp8 == ("layers.0.self_attn.o_proj", "layers.1.self_attn.o_proj")
    shutil.rmtree(tmp_path / "m" / "octavo")
    assert load_model(tmp_path / "m", recipe="auto").conversion_report.fp8_names == fp8


@pytest.mark.parametrize("family", ["llama", "qwen3"])
def test_fp8_to_bf16_to_fp8_changes_no_code(
    stored_bytes: Stored, tmp_path: Path, config: ModelConfig, family: str, save: Save
) -> None:
    path = save(dataclasses.replace(config, family=family, qk_norm=family == "qwen3"), "fp8-block")
    save_model(load_quietly(path), tmp_path / "bf16")
    save_model(load_model(tmp_path / "bf16"), tmp_path / "fp8", "fp8-block")
    assert stored_bytes(path) == stored_bytes(tmp_path / "fp8")


def test_codes_can_be_written_in_high_precision(
    stored_bytes: Stored, tmp_path: Path, config: ModelConfig, save: Save
) -> None:
    path = save(config, "fp8-block")
    save_model(load_model(path, recipe="blockwise"), tmp_path / "a")
    save_model(load_quietly(path), tmp_path / "b")
    assert stored_bytes(tmp_path / "a") == stored_bytes(tmp_path / "b")


def test_ragged_blocks_of_others_are_read(
    tmp_path: Path, ragged_config: ModelConfig, save: Save, edit_tensors, edit_config
) -> None:
    path = save(ragged_config)
    weights = {}

    def quantize_all(tensors: dict[str, torch.Tensor]) -> None:
        for name in [n for n in tensors if "_proj.weight" in n]:
            weights[name] = quantize(tensors[name], fp8_block.SCALING)
            tensors |= {name: weights[name].qdata, f"{name}_scale_inv": weights[name].scale}

    edit_tensors(path, quantize_all)
    edit_config(path, quantization_config=fp8_block.make_config(["lm_head"]))
    loaded = load_model(path, recipe="blockwise")
    down = loaded.layers[0].mlp.down_proj.quantized_weight()[0]
    expected = weights["model.layers.0.mlp.down_proj.weight"]
    assert torch.equal(down.qdata.view(torch.uint8), expected.qdata.view(torch.uint8))
    assert down.scale.shape == (1, 3)
    gate, up = loaded.layers[0].mlp.gate_up_proj.quantized_weight()  # blocks end with the part
    assert torch.equal(up.scale, weights["model.layers.0.mlp.up_proj.weight"].scale)
    assert gate.shape == up.shape == (344, 128)
    save_model(loaded, tmp_path / "bf16")
    reference = load_model(tmp_path / "bf16", recipe="blockwise")
    assert torch.equal(logprobs(loaded), logprobs(reference))


# Numerics of a loaded checkpoint


def test_decoding_for_another_recipe_or_for_training_is_said(config: ModelConfig, save: Save) -> None:
    path = save(config, "fp8-block")
    with pytest.warns(UserWarning, match=r"8 FP8 weights .* decoded to torch.bfloat16: recipe 'rowwise'"):
        rowwise = load_model(path, recipe="rowwise")
    with pytest.warns(UserWarning, match="gradients need parameters"):
        trainable = load_model(path, recipe="blockwise", trainable=True)
    codes = load_model(path, recipe="blockwise")
    assert rowwise.conversion_report.fp8_flop_share == 1.0
    assert all(param.requires_grad for param in trainable.parameters())
    assert not any(param.requires_grad for param in codes.parameters())
    assert torch.equal(logprobs(trainable), logprobs(codes))  # decoded weights give the same codes again


def test_a_model_of_codes_refuses_what_it_cannot_do(config: ModelConfig, save: Save) -> None:
    model = load_model(save(config, "fp8-block"), recipe="blockwise")
    before = model.numerics
    for recipe in ("bf16", "rowwise"):
        with pytest.raises(RecipeError, match=r"layers\.0|codes"):
            model.set_numerics(dataclasses.replace(before, recipe=load_model(config, recipe=recipe).numerics.recipe))
    assert model.numerics is before
    with pytest.raises(RuntimeError, match="does not require grad"):
        sequence_logprobs(model, TOKENS)[0].sum().backward()


def test_linears_kept_in_high_precision_stay_so(tmp_path: Path, config: ModelConfig) -> None:
    model = load_model(config, recipe="blockwise")
    model.set_numerics(model.numerics, ignore=("layers.0.mlp.gate_up_proj",))
    for dialect in ("bf16", "fp8-block"):
        save_model(model, tmp_path / dialect, dialect)
        loaded = load_model(tmp_path / dialect, recipe="blockwise")
        assert loaded.conversion_report.fp8_names == model.conversion_report.fp8_names
        assert torch.equal(logprobs(loaded), logprobs(model))
    quantization = json.loads((tmp_path / "fp8-block" / "config.json").read_text())["quantization_config"]
    kept = ["lm_head", "model.layers.0.mlp.gate_proj", "model.layers.0.mlp.up_proj"]
    assert quantization["modules_to_not_convert"] == kept


def test_the_skip_list_of_others_is_honoured(config: ModelConfig, save: Save) -> None:
    path = save(config, "fp8-block", recipe="blockwise")
    (path / "octavo" / "numerics.json").unlink()
    assert load_model(path, recipe="blockwise").conversion_report.fp8_flop_share == 1.0
    ragged = save(dataclasses.replace(config, intermediate_size=344), "fp8-block")
    (ragged / "octavo" / "numerics.json").unlink()
    high = {row.name for row in load_model(ragged, recipe="blockwise").conversion_report.rows if row.recipe is None}
    assert high == {"lm_head"} | {f"layers.{i}.mlp.{p}_proj" for i in (0, 1) for p in ("gate_up", "down")}


def test_delayed_scaling_takes_its_state_along(tmp_path: Path, config: ModelConfig) -> None:
    model = load_model(config, recipe="delayed")
    for _ in range(3):
        sequence_logprobs(model, TOKENS)[0].sum().backward()
        model.mark_weights_updated()  # codes are made with the scales of their version
    save_model(model, tmp_path / "m")
    loaded = load_model(tmp_path / "m", recipe="delayed")
    assert torch.equal(logprobs(loaded), logprobs(model))
    assert not set(SafetensorsReader(tmp_path / "m").entries) & {"layers.0.mlp.down_proj.fp8_quant_scale"}


def test_the_weight_version_and_the_tokenizer_come_along(tmp_path: Path, config: ModelConfig) -> None:
    model = load_model(config)
    model.mark_weights_updated()
    save_model(model, tmp_path / "m", tokenizer=char_tokenizer("abc"))
    assert load_model(tmp_path / "m").weight_version == 1
    assert load_tokenizer(tmp_path / "m").encode("cab") == [3, 1, 2]


def test_a_runs_folder_is_its_newest_model(
    tmp_path: Path, config: ModelConfig, caplog: pytest.LogCaptureFixture
) -> None:
    model, newest = load_model(config), tmp_path / "checkpoints" / "step-00000002"
    save_model(model, newest / "model", tokenizer=char_tokenizer("abc"))
    (tmp_path / "checkpoints" / "LATEST").write_text("step-00000002\n")
    assert load_tokenizer(tmp_path).encode("cab") == [3, 1, 2]
    caplog.clear()
    with caplog.at_level("INFO", logger="octavo.models"):
        assert torch.equal(logprobs(load_model(tmp_path)), logprobs(model))
    assert caplog.messages == [f"{tmp_path}: a run; reading {newest / 'model'}"]
