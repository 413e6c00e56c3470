"""Every FP8 dialect: files made by hand give the very codes, the decoded values and the logits that they stand for."""

import dataclasses
import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from octavo.errors import CheckpointError, RecipeError
from octavo.models import Decoder, ModelConfig, load_model, save_model
from octavo.models.checkpoint.dialects import DIALECTS, read_config, read_layout
from octavo.models.checkpoint.inspect import inspect_checkpoint
from octavo.models.checkpoint.layout import matches
from octavo.models.checkpoint.names import parameter_names
from octavo.models.checkpoint.safetensors_io import SafetensorsReader
from octavo.nn import Linear, PackedContext
from octavo.numerics import Numerics, QuantizedTensor, Scaling, get_recipe
from tests.models.foreign import FOREIGN, Foreign, input_scale_of, write_foreign

KEPT = ("model.layers.1.self_attn.o_proj", "model.layers.0.mlp.gate_proj", "model.layers.0.mlp.up_proj")
TOKENS = torch.arange(1, 40)
STATIC = get_recipe("tensorwise", static_input=True)


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """One of each dialect, as another tool writes it."""
    config = ModelConfig("qwen3", 96, 128, 256, 2, 4, 4, 32, qk_norm=True, max_position_embeddings=128)
    folder = tmp_path_factory.mktemp("foreign")
    return {name: write_foreign(folder / name, config, how) for name, how in FOREIGN.items()}


def logits(model: Decoder) -> torch.Tensor:
    with torch.no_grad():
        return model.logits(model(TOKENS, PackedContext.from_lengths([len(TOKENS)], model.numerics)))


def stored_scale(scale: torch.Tensor, kind: str, rows: int) -> torch.Tensor:
    """The scale of a file as fp32 in QuantizedTensor's shape."""
    return scale.float().reshape({"per_tensor": (1, 1), "per_row": (rows, 1)}.get(kind, (-(-rows // 128), -1)))


def hand_made(path: Path, how: Foreign, recipe_kind: str) -> Decoder:
    """A model whose linears hold the file's codes, put there without octavo's readers."""
    config = ModelConfig.from_hf(json.loads((path / "config.json").read_text()))
    tensors, model = load_file(path / "model.safetensors"), Decoder(config)
    weights = {}
    for parameter in parameter_names(config):
        if not parameter.is_linear_weight:
            weights[parameter.name] = torch.cat([tensors[name] for name, _ in parameter.parts])
            continue
        linear = model.get_submodule(parameter.name.removesuffix(".weight"))
        assert isinstance(linear, Linear)
        parts = []
        for name, rows in parameter.parts:
            scale = stored_scale(tensors[f"{name.removesuffix('weight')}{how.scale}"], how.kind, rows)
            if recipe_kind == "per_row":
                scale = scale.expand(rows, 1).clone()
            parts.append(QuantizedTensor(tensors[name], scale, Scaling.of_kind(recipe_kind)))
            if how.input_scale:
                linear.set_input_scale(tensors[f"{name.removesuffix('weight')}{how.input_scale}"].float())
        linear.load_quantized(parts)
    model.load_state_dict(weights, strict=False, assign=True)
    return model


# Reading


@pytest.mark.parametrize("name", FOREIGN)
def test_the_dialect_is_found_by_its_config_files(checkpoints: dict[str, Path], name: str) -> None:
    path, how = checkpoints[name], FOREIGN[name]
    layout = read_layout(path, read_config(path))
    assert layout.weight is not None
    assert (layout.dialect, layout.weight.kind, layout.recipe.name) == (how.dialect, how.kind, how.recipe)
    assert layout.recipe.static_input == (how.input_scale is not None)
    assert layout.is_ignored("lm_head") or name in ("block-e8m0", *(n for n in FOREIGN if "transformers" in n))


@pytest.mark.parametrize("name", [name for name, how in FOREIGN.items() if how.recipe != "bf16"])
def test_the_loaded_model_computes_with_the_files_codes(checkpoints: dict[str, Path], name: str) -> None:
    path, how = checkpoints[name], FOREIGN[name]
    loaded = load_model(path, recipe="auto")
    linears = [m for n, m in loaded.named_modules() if isinstance(m, Linear) and n != "lm_head"]
    assert len(linears) == 8 and all(linear.weight is None for linear in linears)
    recipe = loaded.numerics.recipe
    assert recipe.name == how.recipe and recipe.weight is not None
    expected = hand_made(path, how, recipe.weight.kind)
    expected.set_numerics(Numerics(recipe))
    for ours, theirs in zip(linears, (m for m in expected.modules() if isinstance(m, Linear)), strict=False):
        for a, b in zip(ours.quantized_weight(), theirs.quantized_weight(), strict=True):
            assert torch.equal(a.qdata.view(torch.uint8), b.qdata.view(torch.uint8))
            assert torch.equal(a.scale, b.scale)
    assert torch.equal(logits(loaded), logits(expected))


@pytest.mark.parametrize("name", FOREIGN)
def test_decoded_weights_are_the_stored_numbers(checkpoints: dict[str, Path], name: str) -> None:
    path, how = checkpoints[name], FOREIGN[name]
    tensors = load_file(path / "model.safetensors")
    with pytest.warns(UserWarning, match="8 FP8 weights were decoded to torch.float32"):
        model = load_model(path, dtype=torch.float32)
    for parameter in (p for p in parameter_names(model.config) if p.is_linear_weight):
        for weight, got in parameter.split(model.get_parameter(parameter.name).detach()).items():
            rows, cols = got.shape
            scale = stored_scale(tensors[f"{weight.removesuffix('weight')}{how.scale}"], how.kind, rows)
            if how.kind == "block_128x128":
                scale = scale.repeat_interleave(128, 0).repeat_interleave(128, 1)[:rows, :cols]
            assert torch.equal(got, tensors[weight].float() * scale), weight


def test_a_scale_for_the_whole_tensor_is_one_a_row_without_another_rounding(checkpoints: dict[str, Path]) -> None:
    for recipe, kind, num_operands in (("rowwise", "per_row", 1), ("tensorwise", "per_tensor", 3)):
        model = load_model(checkpoints["tensor-dynamic"], recipe=recipe)
        codes = model.layers[1].self_attn.qkv_proj.quantized_weight()
        assert [q.scaling.kind for q in codes] == [kind] * num_operands
    reader = SafetensorsReader(checkpoints["tensor-dynamic"])
    scales = [reader.load(f"model.layers.1.self_attn.{p}_proj.weight_scale") for p in "qkv"]
    assert len({float(scale) for scale in scales}) == 3
    rows = load_model(checkpoints["tensor-dynamic"], recipe="rowwise").layers[1].self_attn.qkv_proj.quantized_weight()
    assert torch.equal(rows[0].scale, torch.cat([scale.expand(128, 1) for scale in scales]))


def test_static_input_scales(checkpoints: dict[str, Path]) -> None:
    model = load_model(checkpoints["tensor-static"], recipe="auto", exact=True)  # one scale for all: a row is its own
    linear = model.layers[1].mlp.down_proj
    seen: list[QuantizedTensor] = []
    linear.observer = lambda role, _, codes: seen.append(codes) if role == "input" else None
    x = torch.randn(5, 256, generator=torch.Generator().manual_seed(0)).bfloat16()
    with torch.no_grad():
        linear(x)
    scale = torch.tensor([input_scale_of("model.layers.1.mlp.down_proj.weight")])
    assert torch.equal(linear.input_scale, scale)
    expected = (x.float() * (1 / scale)).clamp(-448, 448).to(torch.float8_e4m3fn)
    assert torch.equal(seen[0].qdata.view(torch.uint8), expected.view(torch.uint8))
    torch.testing.assert_close(seen[0].scale, scale.reshape(1, 1), rtol=2**-22, atol=0)
    model.to(torch.bfloat16)
    assert torch.equal(linear.input_scale, scale)  # a dtype change leaves it alone


def test_q_k_and_v_with_scales_of_their_own_take_the_largest(
    tmp_path: Path, config: ModelConfig, edit_tensors: Callable[..., None]
) -> None:
    path = write_foreign(tmp_path / "m", config, FOREIGN["tensor-static"])
    name = "model.layers.0.self_attn.v_proj.input_scale"
    edit_tensors(path, lambda t: t.update({name: torch.tensor(0.5)}))
    assert load_model(path, recipe="auto").layers[0].self_attn.qkv_proj.input_scale == 0.5


def test_a_static_recipe_needs_scales(checkpoints: dict[str, Path], config: ModelConfig) -> None:
    with pytest.raises(CheckpointError, match=r"fp8-tensor-dynamic checkpoint holds none; load it with recipe='auto'"):
        load_model(checkpoints["tensor-dynamic"], recipe=STATIC)
    model = load_model(config)
    model.set_numerics(Numerics(STATIC))
    with pytest.raises(RecipeError, match="no input_scale"):
        logits(model)
    for bad in (torch.ones(2), torch.tensor(0.0), torch.tensor(float("nan"))):
        with pytest.raises(CheckpointError, match="one positive finite number"):
            model.layers[0].mlp.down_proj.set_input_scale(bad)


@pytest.mark.parametrize("name", ["tensor-static", "compressed-channel", "modelopt"])
def test_modules_in_bf16_stay_so(tmp_path: Path, config: ModelConfig, name: str) -> None:
    path = write_foreign(tmp_path / "m", config, FOREIGN[name], keep=KEPT)
    model = load_model(path, recipe="auto")
    assert model.conversion_report is not None
    high = {row.name for row in model.conversion_report.rows if row.recipe is None}
    assert high == {"lm_head", "layers.1.self_attn.o_proj", "layers.0.mlp.gate_up_proj"}
    stored = SafetensorsReader(path).load("model.layers.1.self_attn.o_proj.weight")
    assert torch.equal(model.layers[1].self_attn.o_proj.weight, stored)


def test_a_fused_weight_of_which_only_a_part_is_quantized_runs_in_high_precision(
    tmp_path: Path, config: ModelConfig
) -> None:
    keep = ("model.layers.0.mlp.gate_proj",)
    path = write_foreign(tmp_path / "m", config, FOREIGN["compressed-channel"], keep=keep)
    with pytest.warns(UserWarning, match=r"1 FP8 weight was .* in high precision: layers\.0\.mlp\.gate_up_proj"):
        model = load_model(path, recipe="auto")
    weight, reader = model.layers[0].mlp.gate_up_proj.weight, SafetensorsReader(path)
    assert torch.equal(weight[:256], reader.load("model.layers.0.mlp.gate_proj.weight"))
    up = "model.layers.0.mlp.up_proj.weight"
    decoded = reader.load(up).float() * reader.load(f"{up}_scale").float()
    assert torch.equal(weight[256:], decoded.bfloat16())


def test_a_quantized_head_is_decoded(tmp_path: Path, config: ModelConfig, edit_tensors: Callable[..., None]) -> None:
    how = dataclasses.replace(FOREIGN["tensor-dynamic"], config={"quant_method": "fp8", "activation_scheme": "dynamic"})
    path = write_foreign(tmp_path / "m", config, how)

    def quantize_head(tensors: dict[str, torch.Tensor]) -> None:
        tensors["lm_head.weight"], tensors["lm_head.weight_scale"] = how.quantize(tensors["lm_head.weight"])

    edit_tensors(path, quantize_head)
    with pytest.warns(UserWarning, match="in high precision: lm_head"):
        model = load_model(path, recipe="auto")
    reader = SafetensorsReader(path)
    decoded = reader.load("lm_head.weight").float() * reader.load("lm_head.weight_scale")
    assert torch.equal(model.head_weight, decoded.bfloat16())


def test_weights_alone_in_fp8_and_a_bound_that_is_not_applied_are_said(
    checkpoints: dict[str, Path], tmp_path: Path, config: ModelConfig
) -> None:
    with pytest.warns(UserWarning, match="recipe 'bf16' does not take them"):
        assert not load_model(checkpoints["modelopt-block"], recipe="auto").numerics.recipe.is_fp8
    assert load_model(checkpoints["modelopt-block"], recipe="blockwise").layers[0].mlp.down_proj.weight is None
    how = FOREIGN["fbgemm"]
    bounded = dataclasses.replace(how, config={**(how.config or {}), "activation_scale_ub": 1200.0})
    with pytest.warns(UserWarning, match=r"activation_scale_ub = 1200.0 is not applied"):
        load_model(write_foreign(tmp_path / "m", config, bounded), recipe="auto")


def test_power_of_two_scales_stay_such(checkpoints: dict[str, Path], tmp_path: Path) -> None:
    model = load_model(checkpoints["block-e8m0"], recipe="auto")
    assert model.numerics.recipe.input == Scaling.block_1x128(scale_format="e8m0")
    save_model(model, tmp_path / "m", "fp8-block")
    theirs, ours = SafetensorsReader(checkpoints["block-e8m0"]), SafetensorsReader(tmp_path / "m")
    for name in theirs.entries:
        assert torch.equal(theirs.load(name).view(torch.uint8), ours.load(name).view(torch.uint8)), name
    again = load_model(tmp_path / "m", recipe="auto")
    assert again.numerics == model.numerics and torch.equal(logits(again), logits(model))
    with pytest.warns(UserWarning, match="decoded"):  # fp32 scales are another quantization
        load_model(checkpoints["block-e8m0"], recipe="blockwise")


# Writing


# Of dialects that octavo writes too; compressed-tensors with one scale a weight and inputs by token has no kind there.
BOTH_WAYS = [name for name, how in FOREIGN.items() if how.dialect in DIALECTS and name != "compressed-tensor-token"]


@pytest.mark.parametrize("name", BOTH_WAYS)
def test_codes_and_scales_survive_reading_and_writing(checkpoints: dict[str, Path], tmp_path: Path, name: str) -> None:
    path, how = checkpoints[name], FOREIGN[name]
    model = load_model(path, recipe="auto")
    save_model(model, tmp_path / "m", how.dialect)
    theirs, ours = SafetensorsReader(path), SafetensorsReader(tmp_path / "m")
    spelled = {"weight_scale_inv": "weight_scale", "activation_scale": "input_scale"}
    for their_name in (n for n in theirs.entries if ".self_attn.attn." not in n and "output_scale" not in n):
        head, _, last = their_name.rpartition(".")
        our_name = f"{head}.{spelled.get(last, last)}" if "tensor-" in how.dialect else their_name
        theirs_value, ours_value = theirs.load(their_name), ours.load(our_name)
        if theirs_value.dtype == torch.float8_e4m3fn:
            assert torch.equal(theirs_value.view(torch.uint8), ours_value.view(torch.uint8)), their_name
        else:
            assert torch.equal(theirs_value.float().flatten(), ours_value.float().flatten()), their_name
    again = load_model(tmp_path / "m", recipe="auto")
    assert again.numerics == model.numerics
    assert torch.equal(logits(again), logits(model))
    for ours_kv, theirs_kv in zip(again.kv_scales, model.kv_scales, strict=True):
        assert torch.equal(ours_kv.k_scale, theirs_kv.k_scale) and torch.equal(ours_kv.v_scale, theirs_kv.v_scale)


@pytest.mark.parametrize("which", ["config", "ragged_config"])
@pytest.mark.parametrize(
    ("dialect", "recipe"),
    [
        ("fp8-tensor-dynamic", "tensorwise"),
        ("fp8-tensor-static", "delayed"),
        ("compressed-tensors-channel", "rowwise"),
        ("compressed-tensors-tensor", "delayed"),
        ("compressed-tensors-block", "blockwise"),
    ],
)
def test_a_model_written_in_a_dialect_is_that_model(
    tmp_path: Path, request: pytest.FixtureRequest, which: str, dialect: str, recipe: str
) -> None:
    model = load_model(request.getfixturevalue(which), recipe=recipe, seed=5)
    if recipe == "delayed":  # two training steps give it scales
        for _ in range(2):
            model.logits(model(TOKENS, PackedContext.from_lengths([len(TOKENS)], model.numerics))).sum().backward()
            model.mark_weights_updated()
        model.requires_grad_(False)
    save_model(model, tmp_path / "m", dialect)
    loaded = load_model(tmp_path / "m", recipe=STATIC if recipe == "delayed" else recipe)
    held = [m.weight is None for n, m in loaded.named_modules() if isinstance(m, Linear) and n != "lm_head"]
    is_cut = dialect == "compressed-tensors-block" and which == "ragged_config"  # all but o_proj
    assert held == ([False, True, False, False] if is_cut else [True] * 4) * 2
    torch.testing.assert_close(logits(loaded), logits(model), rtol=0, atol=0)
    before = SafetensorsReader(tmp_path / "m")
    save_model(loaded, tmp_path / "again", dialect)
    after = SafetensorsReader(tmp_path / "again")
    assert before.entries.keys() == after.entries.keys()
    for name in before.entries:
        bits = (before.load(name).reshape(-1).view(torch.uint8), after.load(name).reshape(-1).view(torch.uint8))
        assert torch.equal(*bits), name
    assert read_config(tmp_path / "m") == read_config(tmp_path / "again")
    assert inspect_checkpoint(tmp_path / "m").problems == []


def test_what_a_dialect_cannot_hold_is_refused(
    checkpoints: dict[str, Path], tmp_path: Path, config: ModelConfig
) -> None:
    rows = load_model(checkpoints["compressed-channel"], recipe="auto")
    for dialect in ("fp8-tensor-dynamic", "fp8-block"):
        with pytest.raises(CheckpointError, match=r"layers\.0\.self_attn\.qkv_proj holds per_row codes alone"):
            save_model(rows, tmp_path / "m", dialect)
    for recipe in ("bf16", "delayed"):
        with pytest.raises(CheckpointError, match=r"layers\.0\.self_attn\.qkv_proj has no known input scale"):
            save_model(load_model(config, recipe=recipe), tmp_path / "m", "fp8-tensor-static")
    assert list(tmp_path.iterdir()) == []


# Names


@pytest.mark.parametrize(
    ("pattern", "module", "expected"),
    [
        ("lm_head", "lm_head", True),
        ("model.layers.1", "model.layers.1.mlp.up_proj", True),
        ("model.layers.1", "model.layers.10.mlp.up_proj", False),
        ("mlp.gate", "model.layers.1.mlp.gate", True),
        ("gate", "model.layers.1.mlp.gate_proj", False),
        ("model.layers.0*", "model.layers.0.mlp.up_proj", True),
        ("*self_attn*", "model.layers.0.mlp.up_proj", False),
        ("re:.*mlp.*", "model.layers.0.mlp.up_proj", True),
        ("re:mlp", "model.layers.0.mlp.up_proj", False),
    ],
)
def test_patterns_of_ignored_modules(pattern: str, module: str, expected: bool) -> None:
    assert matches(pattern, module) is expected


def test_memory_is_what_the_codes_take(checkpoints: dict[str, Path]) -> None:
    report = inspect_checkpoint(checkpoints["modelopt"])
    linears = 2 * (4 * 128 * 128 + 3 * 128 * 256)
    assert report.num_bytes_by_kind["FP8 codes"] == linears
    assert report.num_bytes_by_kind["scales"] == 4 * 2 * (7 * 2 + 2)
    assert report.num_bytes == sum(report.num_bytes_by_kind.values())


def test_a_single_file_of_scales_alone_is_shown(tmp_path: Path) -> None:
    save_file({"model.layers.3.self_attn.k_cache.scale": torch.ones(1)}, tmp_path / "a.safetensors")
    assert inspect_checkpoint(tmp_path / "a.safetensors").kv_scales == {"model.layers.*.self_attn.k_cache.scale": 1}
