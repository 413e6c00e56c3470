"""Recipes for single linears, switched-off GEMMs, recomputed layers: they reach model, report and checkpoint."""

import json
from pathlib import Path

import pytest
import torch

from octavo.config import load_config
from octavo.errors import ConfigError, RecipeError
from octavo.nn import Linear
from octavo.train import train
from octavo.train.build import build_model, recompute_layers
from octavo.train.config import PrecisionSection, TrainConfig
from octavo.train.step import train_step
from tests.assertions import assert_raises

from .conftest import MakeConfig

RECIPES = ("bf16", "delayed", "tensorwise", "rowwise", "blockwise", "mxfp8", "nvfp4")


def recipes_of(config: TrainConfig) -> dict[str, str]:
    model = build_model(config, 280, 0, torch.device("cpu"))
    assert model.conversion_report is not None
    linears = {
        name: m.recipe.name if m.recipe else "bf16" for name, m in model.named_modules() if isinstance(m, Linear)
    }
    assert linears == {row.name: row.recipe or "bf16" for row in model.conversion_report.rows}
    return linears


def test_names_mean_modules_and_the_most_specific_decides(make_config: MakeConfig) -> None:
    modules = {"layers.0": "bf16", "down_proj": "rowwise", "layers.0.mlp.down_proj": {"recipe": "tensorwise"}}
    found = recipes_of(make_config(precision={"recipe": "blockwise", "modules": modules}))
    linears = ("self_attn.qkv_proj", "self_attn.o_proj", "mlp.gate_up_proj", "mlp.down_proj")
    wanted = ["bf16", "bf16", "bf16", "tensorwise", "blockwise", "blockwise", "blockwise", "rowwise"]
    assert found == dict(zip((f"layers.{i}.{name}" for i in (0, 1) for name in linears), wanted, strict=True))


def test_fields_of_a_modules_recipe(make_config: MakeConfig) -> None:
    down = {"recipe": "delayed", "amax_history_len": 4, "high_precision_gemms": ["grad_weight"]}
    model = build_model(make_config(precision={"modules": {"down_proj": down}}), 280, 0, torch.device("cpu"))
    recipe = model.layers[1].mlp.down_proj.recipe
    assert recipe.delayed.amax_history_len == 4
    assert recipe.high_precision_gemms == ("grad_weight",)


def test_names_that_mean_nothing_are_refused(make_config: MakeConfig) -> None:
    for name in ("layers.7", "own_proj", "ayers.0"):
        with pytest.raises(RecipeError, match=f"names no linear of this model: '{name}'"):
            recipes_of(make_config(precision={"modules": {name: "bf16"}}))
    assert_raises(ConfigError, "unknown recipe 'fp9'", make_config, precision={"modules": {"down_proj": "fp9"}})


def test_dotted_names_in_toml_and_set(tmp_path: Path) -> None:
    path = tmp_path / "config.toml"
    path.write_text('[precision.modules]\nlayers.0.mlp = "bf16"\n"layers.1" = "rowwise"\n')
    config = load_config(TrainConfig, path, ["precision.modules.down_proj={recipe='tensorwise', fp8_format='e4m3'}"])
    assert config.precision.modules["layers.0.mlp"] == "bf16"
    assert config.precision.module_recipes()["layers.1"].name == "rowwise"
    assert config.precision.module_recipes()["down_proj"].fp8_format.name == "E4M3"


def test_switches_reach_the_recipe() -> None:
    section = PrecisionSection(high_precision_gemms=("grad_input",), fake_quant=True, saved_activations="bf16")
    recipe = section.make_recipe()
    assert (recipe.high_precision_gemms, recipe.fake_quant, recipe.saved_activations) == (("grad_input",), True, None)
    assert_raises(ConfigError, "high_precision_gemms", PrecisionSection, high_precision_gemms=("dgrad",))


def losses(config: TrainConfig) -> list[float]:
    return [row.loss for row in train(config, progress=False).rows]


def test_switches_change_the_loss(make_config: MakeConfig) -> None:
    plain = losses(make_config("plain", run={"steps": 3}))
    for i, field in enumerate(({"high_precision_gemms": ("grad_input",)}, {"fake_quant": True})):
        switched = losses(make_config(str(i), run={"steps": 3}, precision=field))
        assert switched != plain, field
        assert switched == pytest.approx(plain, rel=0.05), field


def test_an_override_is_one_line_however_many_linears_it_means(make_config, capsys):
    train(make_config(precision={"recipe": "rowwise", "modules": {"mlp": "bf16", "layers.1": "delayed"}}))
    said = [line for line in capsys.readouterr().err.splitlines() if "override" in line]
    assert said == [
        "layers.0.mlp.gate_up_proj, layers.0.mlp.down_proj: bf16 (override 'mlp')",
        "layers.1.self_attn.qkv_proj, layers.1.self_attn.o_proj and 2 more: delayed "
        "(octavo.nn.Linear, override 'layers.1')",
    ]


def test_resolved_list_is_printed_and_saved_and_resumes(make_config, capsys):
    precision = {"recipe": "rowwise", "modules": {"down_proj": {"recipe": "delayed", "amax_history_len": 4}}}
    result = train(make_config(precision=precision, run={"steps": 4}))
    said = " ".join(capsys.readouterr().err.split())
    assert "layers.1.mlp.down_proj: delayed" in said
    assert "override 'down_proj'" in said
    saved = json.loads((result.checkpoint / "trainer.json").read_text())["linear_recipes"]
    assert saved["layers.0.mlp.down_proj"] == "delayed"
    assert saved["layers.0.mlp.gate_up_proj"] == "rowwise"
    train(make_config(precision=precision, run={"steps": 6}))
    assert "starts with an empty one" not in capsys.readouterr().err
    history = result.model.layers[1].mlp.down_proj.fp8_amax_history
    assert history.shape[0] == 4
    assert history.any()


@pytest.mark.parametrize("recipe", ["bf16", "blockwise", "delayed"])
def test_recompute_keeps_the_bits(make_config: MakeConfig, recipe: str) -> None:
    sections = {"precision": {"recipe": recipe}, "schedule": {"kind": "constant", "warmup_steps": 1}}
    sections |= {"checkpoint": {"every": 0}, "metrics": {"eval_every": 0}}
    runs = ({}, {"recompute": "full"}, {"recompute": "full", "recompute_num_layers": 1})
    kept, *again = (losses(make_config(str(i), run={"steps": 3, **run}, **sections)) for i, run in enumerate(runs))
    assert again == [kept, kept]


def test_recompute_of_more_layers_than_there_are(make_config: MakeConfig) -> None:
    config = make_config(run={"recompute": "full", "recompute_num_layers": 3})
    with pytest.raises(ConfigError, match=r"recompute_num_layers=3 is more than the model's 2 layers"):
        build_model(config, 280, 0, torch.device("cpu"))
    model = build_model(make_config(), 280, 0, torch.device("cpu"))
    recompute_layers(model, make_config(run={"recompute_num_layers": 1}).run)
    assert "forward" not in vars(model.layers[0])


@pytest.mark.gpu
@pytest.mark.parametrize("recipe", RECIPES)
def test_learns_on_a_gpu(make_config: MakeConfig, recipe: str) -> None:
    sizes = {"hidden_size": 256, "intermediate_size": 512, "num_attention_heads": 4, "num_key_value_heads": 2}
    sections = {"precision": {"recipe": recipe}, "metrics": {"eval_every": 0}, "optimizer": {"lr": 3e-3}}
    result = train(make_config(model=sizes, run={"steps": 20, "device": "cuda"}, **sections), progress=False)
    assert result.rows[-1].loss < result.rows[0].loss - 0.5
    assert result.model.device.type == "cuda"


@pytest.mark.gpu
@pytest.mark.parametrize("recipe", ["bf16", "blockwise", "delayed"])
def test_recompute_on_a_gpu_keeps_less(make_config: MakeConfig, recipe: str) -> None:
    from octavo.run.optimizer import MasterAdamW
    from octavo.train.dataset import load_dataset

    peaks = []
    for run in ({"device": "cuda"}, {"device": "cuda", "recompute": "full"}):
        data = {"seq_len": 512, "batch_size": 8, "micro_batch_size": 0}
        config = make_config(data=data, precision={"recipe": recipe}, run=run, model={"num_hidden_layers": 6})
        dataset = load_dataset(config)
        model = build_model(config, dataset.tokenizer.vocab_size, dataset.tokenizer.eos_id, torch.device("cuda"))
        optimizer = MasterAdamW(model, config.optimizer)
        torch.cuda.reset_peak_memory_stats()
        train_step(model, optimizer, dataset.batches(0), lr=1e-3, max_grad_norm=1.0, step=1)
        peaks.append(torch.cuda.max_memory_allocated())
    assert peaks[1] < peaks[0]
