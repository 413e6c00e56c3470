"""Every way in which an FP8 checkpoint of any dialect can be bad: a CheckpointError that names the tensor or field."""

import dataclasses
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from octavo.errors import CheckpointError
from octavo.models import ModelConfig, load_model, save_model
from octavo.models.checkpoint import kv_scales
from octavo.models.checkpoint.inspect import inspect_checkpoint
from octavo.models.checkpoint.layout import Layout
from octavo.models.checkpoint.names import ParameterNames
from tests.models.foreign import (
    FOREIGN,
    GROUP,
    STATIC,
    STATIC_FP8,
    TOKEN,
    compressed,
    modelopt,
    modelopt_config,
    write_foreign,
)

Edit = Callable[..., None]
Change = Callable[[dict[str, torch.Tensor], str], object]
MODULE = "model.layers.1.mlp.down_proj"
WEIGHT = f"{MODULE}.weight"
STATIC_DIALECTS = [name for name, how in FOREIGN.items() if how.input_scale]


@pytest.fixture
def one_layer() -> ModelConfig:
    """Two small layers: files that are made by the dozen."""
    return ModelConfig("llama", 8, 128, 128, 2, 2, 2, 64, max_position_embeddings=16)


def scale_of(name: str) -> str:
    return f"{MODULE}.{FOREIGN[name].scale}"


CHANGES: dict[str, tuple[Change, str]] = {
    "missing": (lambda t, s: t.pop(s), "{weight} holds FP8 codes, but its scale {module}.* is missing"),
    "shape": (lambda t, s: t.update({s: torch.ones(3, 5, dtype=t[s].dtype)}), r"{scale} has shape \(3, 5\)"),
    "dtype": (lambda t, s: t.update({s: t[s].double()}), "{scale} is torch.float64"),
    "nan": (lambda t, s: t.update({s: torch.full_like(t[s].float(), float("nan"))}), "{scale} holds .* NaN"),
    "zero": (lambda t, s: t.update({s: torch.zeros_like(t[s].float())}), "{scale} holds .* zero or negative"),
    "negative": (lambda t, s: t.update({s: -t[s].float()}), "{scale} holds .* zero or negative"),
    "without-codes": (
        lambda t, s: t.update({WEIGHT: torch.zeros(128, 128)}),
        "{scale} comes with {weight}, which is torch.float32|unused tensors: {module}.[a-z]+_scale",
    ),
    "orphan": (lambda t, s: t.update({"model.norm.weight_scale": torch.ones(1)}), r"unused.*model\.norm\.weight_scale"),
    "stray": (lambda t, s: t.update({f"{MODULE}.output_scale": torch.ones(1)}), "unused.*down_proj.output_scale"),
    "codes-nan": (lambda t, s: t[WEIGHT].view(torch.uint8)[0].fill_(0x7F), "{weight} holds 128 NaN"),
    "weight-shape": (lambda t, s: t.update({WEIGHT: t[WEIGHT][:64]}), "{weight} has shape"),
    "e5m2": (
        lambda t, s: t.update({WEIGHT: t[WEIGHT].float().to(torch.float8_e5m2)}),
        "{scale} comes with {weight}|unused tensors: {module}.[a-z]+_scale",
    ),
}


@pytest.mark.parametrize("name", FOREIGN)
def test_bad_scales_are_refused_by_name(tmp_path: Path, one_layer: ModelConfig, edit_tensors: Edit, name: str) -> None:
    path = write_foreign(tmp_path / "m", one_layer, FOREIGN[name])
    good = (path / "model.safetensors").read_bytes()
    assert inspect_checkpoint(path).problems == []
    scale = scale_of(name)
    for what, (change, text) in CHANGES.items():
        edit_tensors(path, lambda tensors, change=change: change(tensors, scale))
        names = {"weight": WEIGHT, "scale": scale, "module": MODULE}
        with pytest.raises(CheckpointError, match=text.format(**names)):
            load_model(path, recipe="auto")
        if what not in ("nan", "zero", "negative", "codes-nan"):  # which headers do not show
            assert 1 <= len(inspect_checkpoint(path).problems) <= 2, what
        (path / "model.safetensors").write_bytes(good)


@pytest.mark.parametrize("name", STATIC_DIALECTS)
def test_bad_input_scales_are_refused_by_name(
    tmp_path: Path, one_layer: ModelConfig, edit_tensors: Edit, name: str
) -> None:
    path = write_foreign(tmp_path / "m", one_layer, FOREIGN[name])
    scale = f"{MODULE}.{FOREIGN[name].input_scale}"
    good = (path / "model.safetensors").read_bytes()
    for value, text in (
        (None, f"missing tensors: {MODULE}.input_scale"),
        (torch.ones(128), rf"{scale} has shape \(128,\)"),
        (torch.tensor(0.0), f"{scale} holds 1 scales"),
        (torch.tensor(float("inf")), f"{scale} holds 1 NaN or infinite"),
        (torch.tensor(1), f"{scale} is torch.int64"),
    ):
        edit_tensors(path, lambda t, value=value: t.pop(scale) if value is None else t.update({scale: value}))
        with pytest.raises(CheckpointError, match=text):
            load_model(path, recipe="auto")
        (path / "model.safetensors").write_bytes(good)


def test_an_input_scale_may_lack_by_permission(tmp_path: Path, one_layer: ModelConfig, edit_tensors: Edit) -> None:
    path = write_foreign(tmp_path / "m", one_layer, FOREIGN["tensor-static"])
    edit_tensors(path, lambda t: [t.pop(f"{MODULE}.input_scale"), t.pop(f"{MODULE}.weight_scale")])
    with pytest.raises(CheckpointError, match=f"missing tensors: {MODULE}.input_scale"):
        load_model(path, recipe="auto")
    with pytest.raises(CheckpointError, match=f"its scale {MODULE}.weight_scale is missing"):  # never to be guessed
        load_model(path, recipe="auto", allow_missing=("*_scale",))
    path = write_foreign(tmp_path / "n", one_layer, FOREIGN["tensor-static"])
    edit_tensors(path, lambda t: t.pop(f"{MODULE}.input_scale"))
    with pytest.warns(UserWarning, match=r"in high precision: layers\.1\.mlp\.down_proj"):
        model = load_model(path, recipe="auto", allow_missing=("*.down_proj.input_scale",))
    assert model.layers[1].mlp.down_proj.weight is not None and model.layers[0].mlp.down_proj.weight is None


def test_scales_of_a_dynamic_dialect_s_inputs_are_unused(
    tmp_path: Path, one_layer: ModelConfig, edit_tensors: Edit
) -> None:
    path = write_foreign(tmp_path / "m", one_layer, FOREIGN["compressed-channel"])
    edit_tensors(path, lambda t: t.update({f"{MODULE}.input_scale": torch.ones(1)}))
    with pytest.raises(CheckpointError, match=f"unused tensors: {MODULE}.input_scale"):
        load_model(path, recipe="auto")
    assert inspect_checkpoint(path).problems == [f"unused scale: {MODULE}.input_scale"]
    load_model(path, recipe="auto", allow_unused=("*.input_scale",))


def test_two_spellings_of_one_scale(tmp_path: Path, one_layer: ModelConfig, edit_tensors: Edit) -> None:
    path = write_foreign(tmp_path / "m", one_layer, FOREIGN["tensor-dynamic"])
    edit_tensors(path, lambda t: t.update({f"{MODULE}.weight_scale_inv": torch.ones(())}))
    with pytest.raises(CheckpointError, match=r"weight_scale and .*weight_scale_inv are two scales of"):
        load_model(path, recipe="auto")


def test_a_module_that_the_config_keeps_out_holds_no_codes(tmp_path: Path, one_layer: ModelConfig) -> None:
    for name, field, pattern in (
        ("compressed-channel", "ignore", r"re:.*mlp\.down_proj"),
        ("tensor-static", "ignored_layers", "down_proj"),
    ):
        how = FOREIGN[name]
        how = dataclasses.replace(how, config={**how.config, field: [pattern]})
        path = write_foreign(tmp_path / name, one_layer, how)
        with pytest.raises(CheckpointError, match=r"down_proj\.weight holds FP8 codes, but config.json keeps"):
            load_model(path, recipe="auto")
        assert len(inspect_checkpoint(path).problems) == 2
    how = dataclasses.replace(FOREIGN["modelopt"], file=modelopt("FP8", "FP8"))
    assert how.file is not None
    how.file["quantization"]["exclude_modules"] = ["model.layers.1*"]
    with pytest.raises(CheckpointError, match=r"layers\.1\..* holds FP8 codes, but config.json keeps"):
        load_model(write_foreign(tmp_path / "m", one_layer, how), recipe="auto")


BLOCK = {"quant_method": "fp8", "weight_block_size": [128, 128], "activation_scheme": "dynamic"}


@pytest.mark.parametrize(
    ("config", "text"),
    [
        ([], None),
        ("fp8", "must be a JSON object"),
        ({"quant_method": "awq"}, "quant_method = 'awq'"),
        ({"quant_method": "torchao"}, "quant_method = 'torchao'"),
        ({"quant_method": "fp8"}, "activation_scheme = None"),
        ({"quant_method": "fp8", "activation_scheme": "per_token"}, "activation_scheme = 'per_token'"),
        ({**BLOCK, "activation_scheme": "static"}, "activation_scheme = 'static'"),
        ({**BLOCK, "weight_block_size": [64, 64]}, r"weight_block_size = \[64, 64\]"),
        ({**BLOCK, "expert_dtype": "fp4"}, "expert_dtype = 'fp4'"),
        ({**STATIC_FP8, "fmt": "e5m2"}, "fmt = 'e5m2'"),
        ({**STATIC_FP8, "ignored_layers": "lm_head"}, "ignored_layers must be a list"),
        (compressed("group", TOKEN), "weights by 'group' with inputs by 'token'"),
        (compressed("channel", STATIC), "weights by 'channel' with inputs by 'tensor'"),
        (compressed("channel", {**TOKEN, "type": "int"}), "input_activations.type = 'int'"),
        (compressed("channel", TOKEN, num_bits=4), "weights.num_bits = 4"),
        (compressed("channel", TOKEN, symmetric=False), "weights.symmetric = False"),
        (compressed("channel", TOKEN, dynamic=True), "weights.dynamic = True"),
        (compressed("block", {**GROUP, "group_size": 64}, block_structure=[128, 128]), "group_size"),
        (compressed("block", GROUP, block_structure=[64, 64]), "block_structure"),
        ({**compressed("channel", TOKEN), "config_groups": {}}, "config_groups"),
        ({**compressed("channel", TOKEN), "format": "pack-quantized"}, "format = 'pack-quantized'"),
        ({**compressed("channel", TOKEN), "sparsity_config": {"format": "sparse-24"}}, "sparsity_config"),
        ({**compressed("channel", TOKEN), "transform_config": {"config_groups": {"u": {}}}}, "transform_config"),
        ({**compressed("channel", TOKEN), "ignore": ["re:("]}, "no regular expression"),
        ({**compressed("channel", TOKEN), "kv_cache_scheme": {"num_bits": 4, "type": "int"}}, "kv_cache_scheme.num"),
        ({**compressed("channel", TOKEN), "kv_cache_scheme": 8}, "kv_cache_scheme must be an object, got 8"),
        (compressed("channel", {**TOKEN, "strategy": ["token"]}), r"with inputs by \['token'\]"),
        (modelopt_config("NVFP4"), "quant_algo = 'NVFP4'"),
        (modelopt_config("FP8", kv_cache_quant_algo="NVFP4"), "kv_cache_quant_algo = 'NVFP4'"),
    ],
    ids=str,
)
def test_configs_that_octavo_does_not_read(
    tmp_path: Path, one_layer: ModelConfig, config: Any, text: str | None
) -> None:
    path = tmp_path / "m"
    save_model(load_model(one_layer), path, "compressed-tensors-channel")
    fields = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps({**fields, "quantization_config": config}))
    with pytest.raises(CheckpointError, match=text or "unused tensors: .*weight_scale"):
        load_model(path, recipe="auto")


def test_groups_with_schemes_of_their_own_are_refused(tmp_path: Path, one_layer: ModelConfig) -> None:
    config = compressed("channel", TOKEN)
    other = compressed("tensor", STATIC)["config_groups"]["group_0"]
    config["config_groups"]["group_1"] = {**other, "targets": ["re:.*mlp.*"]}
    how = dataclasses.replace(FOREIGN["compressed-channel"], config=config)
    with pytest.raises(CheckpointError, match="groups of different schemes"):
        load_model(write_foreign(tmp_path / "m", one_layer, how), recipe="auto")


@pytest.mark.parametrize(
    ("file", "text"),
    [
        ("{", "not a quantization of ModelOpt"),
        ('{"quantization": []}', "must be a JSON object"),
        (json.dumps(modelopt("FP8_PB_WO")), "config.json has quant_algo 'FP8', hf_quant_config.json has 'FP8_PB_WO'"),
        (json.dumps(modelopt("W4A8_AWQ")), "quant_algo = 'W4A8_AWQ'"),
    ],
)
def test_bad_files_of_modelopt(tmp_path: Path, one_layer: ModelConfig, file: str, text: str) -> None:
    path = write_foreign(tmp_path / "m", one_layer, FOREIGN["modelopt"])
    (path / "hf_quant_config.json").write_text(file)
    with pytest.raises(CheckpointError, match=text):
        load_model(path, recipe="auto")


def test_modelopts_file_beside_another_method(tmp_path: Path, one_layer: ModelConfig) -> None:
    how = dataclasses.replace(FOREIGN["fbgemm"], file=modelopt("FP8"))
    with pytest.raises(CheckpointError, match=r"quant_method 'fbgemm_fp8', but hf_quant_config.json is there"):
        load_model(write_foreign(tmp_path / "m", one_layer, how), recipe="auto")


# Scales of the KV cache

KV_SPELLINGS = {
    "compressed-tensors": "self_attn.{r}_scale",
    "vllm": "self_attn.attn.{r}_scale",
    "modelopt": "self_attn.{r}_proj.{r}_scale",
    "modelopt-fused": "self_attn.qkv_proj.{r}_scale",
    "autofp8": "self_attn.{r}_proj.output_scale",
    "cache": "self_attn.{r}_cache.scale",
    "bare": "self_attn.{r}.scale",
}


def kv_checkpoint(path: Path, config: ModelConfig, spelling: str | None, name: str = "tensor-dynamic") -> Path:
    return write_foreign(path, config, dataclasses.replace(FOREIGN[name], kv=spelling))


@pytest.mark.parametrize("spelling", KV_SPELLINGS.values(), ids=KV_SPELLINGS)
def test_kv_scales_of_every_spelling(tmp_path: Path, one_layer: ModelConfig, edit_tensors: Edit, spelling: str) -> None:
    path = kv_checkpoint(tmp_path / "m", one_layer, spelling)
    for recipe in ("auto", "rowwise"):
        found = load_model(path, recipe=recipe).kv_scales
        assert [(float(s.k_scale), float(s.v_scale)) for s in found] == [(0.25, 0.5), (1.25, 1.5)]
        assert all(s.k_scale.shape == (1,) and s.k_scale.dtype == torch.float32 for s in found)
    assert inspect_checkpoint(path).problems == []
    assert set(inspect_checkpoint(path).kv_scales.values()) == {2}
    lost = f"model.layers.1.{spelling.format(r='v')}"
    edit_tensors(path, lambda t: t.pop(lost))
    with pytest.raises(CheckpointError, match=f"missing tensors: {lost}"):
        load_model(path, recipe="auto")
    assert inspect_checkpoint(path).problems == [f"missing scale: {lost}"]
    found = load_model(path, recipe="auto", allow_missing=(lost,)).kv_scales
    assert float(found[1].k_scale) == 1.25 and found[1].v_scale is None


def test_one_scale_for_k_and_v_and_zero_points(tmp_path: Path, one_layer: ModelConfig, edit_tensors: Edit) -> None:
    path = kv_checkpoint(tmp_path / "m", one_layer, None)
    both = {f"model.layers.{i}.self_attn.kv_scale": torch.tensor([0.5 + i]) for i in range(2)}
    zero = {"model.layers.0.self_attn.k_zero_point": torch.zeros(1, dtype=torch.int8)}
    edit_tensors(path, lambda t: t.update(both | zero))
    found = load_model(path, recipe="auto").kv_scales
    assert [(float(s.k_scale), float(s.v_scale)) for s in found] == [(0.5, 0.5), (1.5, 1.5)]
    edit_tensors(path, lambda t: t.update({next(iter(zero)): torch.ones(1, dtype=torch.int8)}))
    with pytest.raises(CheckpointError, match=r"self_attn\.k_zero_point is not zero"):
        load_model(path, recipe="auto")


def test_promised_kv_scales_must_be_there(tmp_path: Path, one_layer: ModelConfig) -> None:
    for name in ("compressed-channel", "modelopt", "tensor-static"):
        path = kv_checkpoint(tmp_path / name, one_layer, None, name)
        with pytest.raises(CheckpointError, match=r"missing tensors: model\.layers\.0\.self_attn\.k_scale"):
            load_model(path, recipe="auto")
        loaded = load_model(path, recipe="auto", allow_missing=("*.self_attn.[kv]_scale",))
        assert loaded.kv_scales == ()


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (torch.ones(3), r"has shape \(3,\); a KV-cache scale is one number or one a head \(2\)"),
        (torch.zeros(1), "zero or negative"),
        (torch.tensor([float("nan")]), "NaN"),
        (torch.ones(1, dtype=torch.int8), "is torch.int8"),
    ],
    ids=["shape", "zero", "nan", "dtype"],
)
def test_bad_kv_scales(
    tmp_path: Path, one_layer: ModelConfig, edit_tensors: Edit, value: torch.Tensor, text: str
) -> None:
    path = kv_checkpoint(tmp_path / "m", one_layer, "self_attn.{r}_scale")
    edit_tensors(path, lambda t: t.update({"model.layers.1.self_attn.k_scale": value}))
    with pytest.raises(CheckpointError, match=rf"layers\.1\.self_attn\.k_scale .*{text}|k_scale {text}"):
        load_model(path, recipe="auto")


def test_odd_kv_scales(tmp_path: Path, one_layer: ModelConfig, edit_tensors: Edit) -> None:
    path = kv_checkpoint(tmp_path / "m", one_layer, "self_attn.{r}_scale")
    heads = {"model.layers.1.self_attn.k_scale": torch.tensor([1.0, 2.0]).reshape(2, 1, 1).bfloat16()}
    edit_tensors(path, lambda t: t.update(heads | {"model.layers.0.self_attn.q_scale": torch.ones(1)}))
    model = load_model(path, recipe="auto")
    assert model.kv_scales[1].k_scale.tolist() == [1.0, 2.0] and float(model.kv_scales[0].q_scale) == 1.0
    for dialect in ("bf16", "fp8-tensor-dynamic"):
        save_model(model, tmp_path / dialect, dialect)
        again = load_model(tmp_path / dialect, recipe="auto").kv_scales
        assert torch.equal(again[1].k_scale, model.kv_scales[1].k_scale) and again[1].q_scale is None
    for name, text in (
        ("model.layers.0.self_attn.k_proj.output_scale", "two scales for K of layer 0"),
        ("model.layers.0.self_attn.prob_output_scale", r"unused tensors: .*prob_output_scale"),
        ("model.layers.7.self_attn.k_scale", r"unused tensors: model\.layers\.7\.self_attn\.k_scale"),
    ):
        good = (path / "model.safetensors").read_bytes()
        edit_tensors(path, lambda t, name=name: t.update({name: torch.ones(1)}))
        with pytest.raises(CheckpointError, match=text):
            load_model(path, recipe="auto")
        (path / "model.safetensors").write_bytes(good)


def test_kv_scales_of_gpt_j_have_its_names() -> None:
    parameters = [
        ParameterNames(f"layers.{i}.self_attn.qkv_proj.weight", ((f"h.{i}.attn.q_proj.weight", 4),), (4, 4))
        for i in range(2)
    ]
    assert kv_scales.attention_modules(parameters) == ["h.0.attn", "h.1.attn"]
    found = kv_scales.find_names(["transformer.h.0.attn.k_scale", "transformer.h.0.attn.q_proj.weight"])
    assert found.scales == {(0, "k"): "transformer.h.0.attn.k_scale"}
    lost = kv_scales.missing_names(found, Layout("bf16"), ["transformer.h.0.attn", "transformer.h.1.attn"])
    assert lost == [f"transformer.h.{name}_scale" for name in ("0.attn.v", "1.attn.k", "1.attn.v")]
