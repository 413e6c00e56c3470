"""load_model and save_model: both dialects there and back, and every way in which a checkpoint can be bad."""

import dataclasses
import json
import os
import warnings
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from octavo.errors import CheckpointError, RecipeError
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
from octavo.models.checkpoint.safetensors_io import SINGLE_FILE, SafetensorsReader
from octavo.nn import Linear
from octavo.numerics import QuantizedTensor
from octavo.ops.quantize import quantize

Save = Callable[..., Path]
TOKENS = [list(range(1, 90))]


def linears(model: Decoder) -> dict[str, Linear]:
    return {n: m for n, m in model.named_modules() if isinstance(m, Linear) and n != "lm_head"}


def codes_of(path: Path) -> dict[str, torch.Tensor]:
    """Every tensor of a checkpoint as bytes."""
    reader = SafetensorsReader(path)
    return {name: reader.load(name).reshape(-1).view(torch.uint8) for name in reader.entries}


def assert_same_bytes(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> None:
    assert a.keys() == b.keys()
    assert [name for name in a if not torch.equal(a[name], b[name])] == []


def logprobs(model: Decoder) -> torch.Tensor:
    with torch.no_grad():
        return sequence_logprobs(model, TOKENS)[0]


def load_quietly(path: Path, **fields: object) -> Decoder:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return load_model(path, **fields)  # type: ignore[arg-type]


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


def test_the_fp8_file_holds_the_codes_that_the_model_computes_with(config: ModelConfig, save: Save) -> None:
    path = save(config, "fp8-block", recipe="blockwise")
    reader = SafetensorsReader(path)
    loaded = load_model(path, recipe="blockwise")
    assert all(linear.weight is None for linear in linears(loaded).values())
    qkv = loaded.layers[1].self_attn.qkv_proj.quantized_weight()
    names = [f"model.layers.1.self_attn.{part}_proj.weight" for part in "qkv"]
    stored = torch.cat([reader.load(name).view(torch.uint8) for name in names])
    scales = torch.cat([reader.load(fp8_block.scale_name(name)) for name in names])
    assert torch.equal(torch.cat([q.qdata.view(torch.uint8) for q in qkv]), stored)
    assert torch.equal(torch.cat([q.scale for q in qkv]), scales)
    assert scales.shape == (3, 1) and scales.dtype == torch.float32


@pytest.mark.parametrize("which", ["config", "ragged_config"])
def test_an_fp8_checkpoint_is_the_model_that_wrote_it(
    request: pytest.FixtureRequest, tmp_path: Path, which: str
) -> None:
    model = load_model(request.getfixturevalue(which), recipe="blockwise")
    save_model(model, tmp_path / "m", "fp8-block")
    loaded = load_model(tmp_path / "m", recipe="blockwise")
    assert torch.equal(logprobs(loaded), logprobs(model))
    assert loaded.conversion_report.fp8_names == model.conversion_report.fp8_names
    save_model(loaded, tmp_path / "again", "fp8-block")
    assert_same_bytes(codes_of(tmp_path / "m"), codes_of(tmp_path / "again"))


@pytest.mark.parametrize("family", ["llama", "qwen3"])
def test_fp8_to_bf16_to_fp8_changes_no_code(tmp_path: Path, config: ModelConfig, family: str, save: Save) -> None:
    path = save(dataclasses.replace(config, family=family, qk_norm=family == "qwen3"), "fp8-block")
    save_model(load_quietly(path), tmp_path / "bf16")
    save_model(load_model(tmp_path / "bf16"), tmp_path / "fp8", "fp8-block")
    assert_same_bytes(codes_of(path), codes_of(tmp_path / "fp8"))


def test_codes_can_be_written_in_high_precision(tmp_path: Path, config: ModelConfig, save: Save) -> None:
    path = save(config, "fp8-block")
    save_model(load_model(path, recipe="blockwise"), tmp_path / "a")
    save_model(load_quietly(path), tmp_path / "b")
    assert_same_bytes(codes_of(tmp_path / "a"), codes_of(tmp_path / "b"))


def test_ragged_linears_stay_in_high_precision_and_are_listed(ragged_config: ModelConfig, save: Save) -> None:
    path = save(ragged_config, "fp8-block")
    quantization = json.loads((path / "config.json").read_text())["quantization_config"]
    assert quantization["quant_method"] == "fp8"
    layer = "model.layers.0"
    ragged = {f"{layer}.self_attn.{p}_proj" for p in "qkv"} | {f"{layer}.mlp.{p}_proj" for p in ("gate", "up", "down")}
    listed = set(quantization["modules_to_not_convert"])
    assert {name for name in listed if name.startswith(layer)} == ragged
    assert "lm_head" in listed
    reader = SafetensorsReader(path)
    for name in (f"{n}.weight" for n in ragged):
        assert reader.entries[name].dtype == torch.bfloat16
        assert fp8_block.scale_name(name) not in reader.entries
    assert reader.entries[f"{layer}.self_attn.o_proj.weight"].dtype == torch.float8_e4m3fn


def test_ragged_blocks_of_others_are_read(
    tmp_path: Path, ragged_config: ModelConfig, save: Save, edit_tensors, edit_config
) -> None:  # type: ignore[no-untyped-def]
    path = save(ragged_config)
    weights = {}

    def quantize_all(tensors: dict[str, torch.Tensor]) -> None:
        for name in [n for n in tensors if "_proj.weight" in n]:
            weights[name] = quantize(tensors[name], fp8_block.SCALING)
            tensors |= fp8_block.write(name, weights[name])

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
    with pytest.warns(UserWarning, match="training needs parameters"):
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
    model.set_numerics(model.numerics, skip=("layers.0.mlp.gate_up_proj",))
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


# Bad checkpoints


@pytest.mark.parametrize("dialect", ["bf16", "fp8-block"])
def test_nan_weights_are_refused_by_name(config: ModelConfig, save: Save, edit_tensors, dialect: str) -> None:  # type: ignore[no-untyped-def]
    path = save(config, dialect)

    def poison(tensors: dict[str, torch.Tensor]) -> None:
        tensors["model.layers.1.mlp.down_proj.weight"].view(torch.uint8)[3, 4:6] = 0x7F
        tensors["model.layers.1.mlp.down_proj.weight"].view(torch.uint8)[3, 6:8] = 0xFF

    edit_tensors(path, poison)
    with pytest.raises(CheckpointError, match=r"model\.layers\.1\.mlp\.down_proj\.weight holds"):
        load_model(path, recipe="blockwise")


def test_a_truncated_file_is_refused(config: ModelConfig, save: Save) -> None:
    path = save(config)
    file = path / SINGLE_FILE
    file.write_bytes(file.read_bytes()[:-1000])
    with pytest.raises(CheckpointError, match="truncated"):
        load_model(path)


SCALE = "model.layers.0.self_attn.o_proj.weight_scale_inv"


@pytest.mark.parametrize(
    ("change", "text"),
    [
        (lambda t: t.pop(SCALE), f"its scale {SCALE} is missing"),
        (lambda t: t.update({SCALE: t[SCALE].view(1)}), r"has shape \(1,\)"),
        (lambda t: t.update({SCALE: t[SCALE].repeat(2, 1)}), r"has shape \(2, 1\)"),
        (lambda t: t.update({SCALE: t[SCALE].bfloat16()}), "scales are float32"),
        (lambda t: t.update({SCALE: t[SCALE] * float("nan")}), f"{SCALE} holds 1 NaN"),
        (lambda t: t.update({SCALE: -t[SCALE]}), "negative"),
        (lambda t: t.update({"model.norm.weight_scale_inv": torch.ones(1)}), r"unused tensors: model\.norm"),
        (
            lambda t: t.update({SCALE.removesuffix("_scale_inv"): torch.zeros(128, 128)}),
            "only torch.float8_e4m3fn codes have a scale",
        ),
    ],
    ids=["missing", "flat", "rows", "bf16", "nan", "negative", "unused", "without-codes"],
)
def test_bad_scales_are_refused(config: ModelConfig, save: Save, edit_tensors, change, text: str) -> None:  # type: ignore[no-untyped-def]
    path = save(config, "fp8-block")
    edit_tensors(path, change)
    for recipe in ("blockwise", "bf16"):
        with pytest.raises(CheckpointError, match=text):
            load_model(path, recipe=recipe)


@pytest.mark.parametrize(
    ("fields", "text"),
    [
        ({"quant_method": "compressed-tensors"}, "compressed-tensors"),
        ({"activation_scheme": "static"}, "activation_scheme"),
        ({"weight_block_size": None}, "weight_block_size"),
        ({"weight_block_size": [64, 64]}, "weight_block_size"),
        ({"scale_fmt": "ue8m0"}, "scale_fmt"),
    ],
    ids=str,
)
def test_other_quantizations_are_refused(config: ModelConfig, save: Save, edit_config, fields: dict, text: str) -> None:  # type: ignore[no-untyped-def]
    path = save(config, "fp8-block")
    edit_config(path, quantization_config={**fp8_block.make_config([]), **fields})
    with pytest.raises(CheckpointError, match=text):
        load_model(path)


def test_codes_without_a_quantization_config_are_refused(
    config: ModelConfig, save: Save, edit_config, edit_tensors
) -> None:  # type: ignore[no-untyped-def]
    path = save(config, "fp8-block")
    edit_config(path, quantization_config=None)
    with pytest.raises(CheckpointError, match=r"unused tensors.*weight_scale_inv"):
        load_model(path)
    edit_tensors(path, lambda t: [t.pop(name) for name in list(t) if name.endswith("_scale_inv")])
    with pytest.raises(CheckpointError, match="quantization_config"):
        load_model(path)


def test_another_architecture_is_refused(config: ModelConfig, save: Save, edit_config, edit_tensors) -> None:  # type: ignore[no-untyped-def]
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


def test_leftovers_and_lacks_can_be_allowed_by_name(config: ModelConfig, save: Save, edit_tensors) -> None:  # type: ignore[no-untyped-def]
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


def test_a_tied_head_in_the_file_must_be_the_embedding(config: ModelConfig, save: Save, edit_tensors) -> None:  # type: ignore[no-untyped-def]
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


# Nothing half-written


def test_a_failed_save_leaves_what_was_there(
    tmp_path: Path, config: ModelConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = load_model(config)
    save_model(model, tmp_path / "m")
    before = codes_of(tmp_path / "m")
    with torch.no_grad():
        model.layers[0].mlp.down_proj.weight[0, 0] = float("nan")
    for target in ("m", "new"):
        with pytest.raises(CheckpointError, match=r"model\.layers\.0\.mlp\.down_proj\.weight holds 1 NaN"):
            save_model(model, tmp_path / target)
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
    assert_same_bytes(before, codes_of(tmp_path / "m"))


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


def test_fused_codes_split_where_the_parts_end(config: ModelConfig) -> None:
    linear = load_model(config, recipe="blockwise").layers[0].self_attn.qkv_proj
    codes = linear.quantized_weight()
    assert len(codes) == 1  # one operand for the GEMM, three parts in the file
    parts = [quantize(w.detach(), fp8_block.SCALING) for w in linear.weight.split(128)]
    assert torch.equal(codes[0].scale, torch.cat([p.scale for p in parts]))
    assert isinstance(codes[0], QuantizedTensor)
