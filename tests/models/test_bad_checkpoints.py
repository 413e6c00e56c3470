"""Every way in which a checkpoint can be bad, or a save can fail: a clear error, and nothing half-written."""

import dataclasses
import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from octavo.errors import CheckpointError
from octavo.models import Decoder, ModelConfig, load_model, save_model
from octavo.models.checkpoint import fp8_block
from octavo.models.checkpoint.dialects import model_of_run, read_config

Save = Callable[..., Path]
Edit = Callable[..., None]
Change = Callable[[dict[str, torch.Tensor]], object]
Stored = Callable[[Path], dict[str, bytes]]


@pytest.mark.parametrize(
    ("fields", "text"),
    [
        ({"quant_method": "compressed-tensors"}, "config_groups"),
        ({"weight_block_size": None}, "with per_tensor scales needs"),
        ({"scale_fmt": "ue8m0"}, "no power of two, as scale_fmt"),
        ({"scale_fmt": "int8"}, "scale_fmt"),
    ],
    ids=str,
)
def test_other_quantizations_are_refused(
    config: ModelConfig, save: Save, edit_config: Edit, fields: dict[str, Any], text: str
) -> None:
    path = save(config, "fp8-block")
    edit_config(path, quantization_config={**fp8_block.make_config([]), **fields})
    with pytest.raises(CheckpointError, match=text):
        load_model(path)


def test_codes_without_a_quantization_config_are_refused(
    config: ModelConfig, save: Save, edit_config, edit_tensors
) -> None:
    path = save(config, "fp8-block")
    edit_config(path, quantization_config=None)
    with pytest.raises(CheckpointError, match=r"unused tensors.*weight_scale_inv"):
        load_model(path)
    edit_tensors(path, lambda t: [t.pop(name) for name in list(t) if name.endswith("_scale_inv")])
    with pytest.raises(CheckpointError, match="quantization_config"):
        load_model(path)


def test_another_architecture_is_refused(
    config: ModelConfig, save: Save, edit_config: Edit, edit_tensors: Edit
) -> None:
    path = save(config)
    for fields, text in (
        ({"intermediate_size": 512}, r"gate_proj.weight has shape \(256, 128\), but config.json asks for \(512, 128\)"),
        ({"num_hidden_layers": 3}, r"missing tensors: model\.layers\.2.* and 7 more"),
        ({"num_hidden_layers": 1}, r"unused tensors: model\.layers\.1"),
        ({"model_type": "llama", "architectures": ["LlamaForCausalLM"]}, r"unused tensors: .*q_norm"),
        ({"model_type": "gpt_neox", "architectures": ["GPTNeoXForCausalLM"]}, "gpt_neox"),
    ):
        original = (path / "config.json").read_text()
        edit_config(path, **fields)
        with pytest.raises(CheckpointError, match=text):
            load_model(path)
        (path / "config.json").write_text(original)


def test_leftovers_and_lacks_can_be_allowed_by_name(config: ModelConfig, save: Save, edit_tensors: Edit) -> None:
    path = save(config)
    lost, extra = "model.layers.1.self_attn.k_proj.weight", "model.vision.weight"
    before = load_model(path).layers[1].self_attn.qkv_proj.weight

    def change(tensors: dict[str, torch.Tensor]) -> None:
        del tensors[lost]
        tensors[extra] = torch.zeros(2)
        tensors["model.layers.0.self_attn.rotary_emb.inv_freq"] = torch.zeros(2)  # old checkpoints have such

    edit_tensors(path, change)
    with pytest.raises(CheckpointError, match=lost):
        load_model(path, allow_unused=(extra,))
    with pytest.raises(CheckpointError, match=extra):
        load_model(path, allow_missing=(lost,))
    loaded = load_model(path, allow_unused=(extra,), allow_missing=(lost,), seed=5)
    weight = loaded.layers[1].self_attn.qkv_proj.weight
    assert torch.equal(weight[:128], before[:128]) and torch.equal(weight[256:], before[256:])
    assert torch.equal(weight[128:256], Decoder(config, seed=5).layers[1].self_attn.qkv_proj.weight[128:256])


def test_a_tied_head_in_the_file_must_be_the_embedding(config: ModelConfig, save: Save, edit_tensors: Edit) -> None:
    path = save(dataclasses.replace(config, tie_word_embeddings=True))
    edit_tensors(path, lambda t: t.update({"lm_head.weight": t["model.embed_tokens.weight"].clone()}))
    assert load_model(path).lm_head is None
    edit_tensors(path, lambda t: t.update({"lm_head.weight": 2 * t["model.embed_tokens.weight"]}))
    with pytest.raises(CheckpointError, match="tie_word_embeddings"):
        load_model(path)


@pytest.mark.parametrize("content", [None, "[]", "{not json"])
def test_bad_config_files(config: ModelConfig, save: Save, content: str | None) -> None:
    path = save(config)
    (path / "config.json").unlink()
    if content is not None:
        (path / "config.json").write_text(content)
    with pytest.raises(CheckpointError, match=r"config\.json"):
        load_model(path)


def test_a_name_on_a_hub_is_not_looked_up() -> None:
    with pytest.raises(CheckpointError, match="not looked up"):
        load_model("Qwen/Qwen3-8B")


def test_a_failed_save_leaves_what_was_there(
    stored_bytes: Stored, tmp_path: Path, config: ModelConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = load_model(config)
    save_model(model, tmp_path / "m")
    before = stored_bytes(tmp_path / "m")
    with torch.no_grad():
        model.layers[0].mlp.down_proj.weight[0, 0] = float("nan")
    for target, dialect in (("m", "bf16"), ("new", "fp8-tensor-dynamic"), ("new", "compressed-tensors-block")):
        with pytest.raises(CheckpointError, match=r"model\.layers\.0\.mlp\.down_proj\.weight holds 1 NaN"):
            save_model(model, tmp_path / target, dialect)
    with torch.no_grad():
        model.layers[0].mlp.down_proj.weight[0, 0] = 0.0
    calls = []

    def failing(tensors: dict, file: Path, **_: object) -> None:
        calls.append(file)
        file.write_bytes(b"half")
        if len(calls) == 3:
            raise OSError("disk full")

    monkeypatch.setattr("octavo.models.checkpoint.safetensors_io.save_file", failing)
    with pytest.raises(OSError, match="disk full"):
        save_model(model, tmp_path / "m", max_shard_bytes=1000)
    assert len(calls) == 3
    assert os.listdir(tmp_path) == ["m"]
    assert stored_bytes(tmp_path / "m") == before


def test_only_our_own_checkpoints_are_replaced(tmp_path: Path, config: ModelConfig) -> None:
    save_model(load_model(config, seed=1), tmp_path / "m")
    save_model(load_model(config, seed=2), tmp_path / "m")
    assert torch.equal(load_model(tmp_path / "m").head_weight, load_model(config, seed=2).head_weight)
    (tmp_path / "m" / "octavo" / "numerics.json").unlink()
    with pytest.raises(CheckpointError, match="not replaced"):
        save_model(load_model(config), tmp_path / "m")
    with pytest.raises(CheckpointError, match="dialect must be one of bf16, fp8-block"):
        save_model(load_model(config), tmp_path / "x", "fp8")
    assert os.listdir(tmp_path) == ["m"]


def test_a_damaged_record_is_refused(config: ModelConfig, save: Save) -> None:
    path = save(config)
    record = path / "octavo" / "numerics.json"
    for text, error in (("{}", "not a record"), ('{"format": 99}', "newer octavo")):
        record.write_text(text)
        with pytest.raises(CheckpointError, match=error):
            load_model(path)


def test_a_run_s_folders_point_to_its_newest_model(tmp_path: Path) -> None:
    model = tmp_path / "run" / "checkpoints" / "step-00000002" / "model"
    model.mkdir(parents=True)
    (model / "config.json").write_text("{}")
    (model.parent.parent / "LATEST").write_text("step-00000002\n")
    for folder in (tmp_path / "run", tmp_path / "run" / "checkpoints"):
        with pytest.raises(CheckpointError, match="newest model") as caught:
            read_config(folder)
        assert str(model) in str(caught.value)
    with pytest.raises(CheckpointError, match="its newest model is in"):
        read_config(model.parent)
    final = tmp_path / "run" / "final"
    final.mkdir()
    (final / "config.json").write_text("{}")
    (tmp_path / "run" / "config.json").write_text('{"trainer": {"steps": 3}}')  # as reinforcement keeps its settings
    assert model_of_run(tmp_path / "run") == final
    for folder, version in ((final, 3), (model, 3), (model, 4)):
        (folder / "octavo").mkdir(exist_ok=True)
        fields = {"format": 1, "numerics": {"recipe": {"name": "bf16"}}, "numerics_fingerprint": ""}
        fields |= {"high_precision": [], "weight_version": version}
        (folder / "octavo" / "numerics.json").write_text(json.dumps(fields))
        newest = model if version == 4 else final  # the run has gone on since its end
        assert model_of_run(tmp_path / "run") == newest
    shutil.rmtree(final)
    (tmp_path / "run" / "config.json").unlink()
    for lost in (b"step-00000009\n", b"step-0000\xb0002\n"):  # the second is no UTF-8
        (model.parent.parent / "LATEST").write_bytes(lost)
        with pytest.raises(CheckpointError, match=r"no config\.json there"):
            read_config(tmp_path / "run")


def test_a_model_beside_others_is_itself(tmp_path: Path) -> None:
    (tmp_path / "model").mkdir()
    for folder in (tmp_path, tmp_path / "model"):
        (folder / "config.json").write_text('{"model_type": "llama"}')
    assert model_of_run(tmp_path) is None
    (tmp_path / "config.json").unlink()
    assert model_of_run(tmp_path) == tmp_path / "model"  # a training step
    (tmp_path / "model" / "config.json").rename(tmp_path / "old.json")
    (tmp_path / "checkpoints" / "step-1" / "model").mkdir(parents=True)
    (tmp_path / "checkpoints" / "step-1" / "model" / "config.json").write_text("{}")
    (tmp_path / "checkpoints" / "LATEST").write_text("step-1")
    assert model_of_run(tmp_path) == tmp_path / "checkpoints" / "step-1" / "model"
    (tmp_path / "weights.safetensors").touch()
    assert model_of_run(tmp_path) is None
