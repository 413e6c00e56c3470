"""octavo inside transformers' Trainer: its losses are plain torch's in bits, its checkpoints are plain ones."""

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

import octavo
from octavo.errors import CheckpointError, ConfigError, RecipeError
from octavo.models import quantize_checkpoint
from octavo.testing import assert_bitwise
from tests.ecosystem.cases import cases
from tests.ranks import run_ranks

transformers = pytest.importorskip("transformers")
pytest.importorskip("accelerate")

from octavo.integrations.huggingface import OctavoCallback, OctavoConfig, convert  # noqa: E402
from tests.integrations.toy_trainer import (  # noqa: E402
    Case,
    load_model,
    make_model,
    make_rows,
    make_trainer,
    run_plain,
    run_trainer,
)

ONE_PROCESS = [
    pytest.param(case, marks=pytest.mark.slow) if case.recipe == "rowwise" else case for case in cases(1, Case)
]
TWO_RANKS = cases(2, Case)


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("llama")
    make_model().save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def saved_in_blocks(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model whose weights divide into blocks of 128 x 128, as the dialect fp8-block wants them."""
    folder = tmp_path_factory.mktemp("blocks")
    make_model(hidden_size=128, intermediate_size=256, num_key_value_heads=4).bfloat16().save_pretrained(folder)
    return folder


def assert_same(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    assert list(found) == list(expected)
    for key, tensor in expected.items():
        assert_bitwise(found[key], tensor)


@pytest.mark.parametrize("case", ONE_PROCESS, ids=str)
def test_the_trainers_losses_are_plain_torchs(case: Case, saved: Path, tmp_path: Path) -> None:
    found, expected = run_trainer(case, saved, tmp_path), run_plain(case)
    assert_same(found, expected)
    assert expected["losses"][-1] < expected["losses"][0]


def on_two_ranks(rank: int, chosen: list[Case], source: Path, folder: Path) -> list[tuple[Any, Any]]:
    results = [(run_trainer(case, source, folder / str(i)), run_plain(case)) for i, case in enumerate(chosen)]
    torch.distributed.destroy_process_group()
    return results


@pytest.fixture(scope="module")
def of_two_ranks(saved: Path, tmp_path_factory: pytest.TempPathFactory) -> list[Any]:
    return run_ranks(on_two_ranks, 2, TWO_RANKS, saved, tmp_path_factory.mktemp("together"))


@pytest.mark.slow
@pytest.mark.parametrize("index", range(len(TWO_RANKS)), ids=map(str, TWO_RANKS))
def test_and_so_they_are_on_two_ranks(index: int, of_two_ranks: list[Any]) -> None:
    for results in of_two_ranks:
        assert_same(*results[index])


def test_a_saved_model_is_a_plain_one(saved: Path, tmp_path: Path) -> None:
    model = load_model(saved, "blockwise")
    assert isinstance(model.model.layers[0].mlp.up_proj, octavo.nn.Linear)
    make_trainer(model, tmp_path / "run", 2).train()
    model.bfloat16().save_pretrained(tmp_path / "out")
    tensors = load_file(tmp_path / "out" / "model.safetensors")
    assert list(tensors) == list(load_file(saved / "model.safetensors"))
    assert {tensor.dtype for tensor in tensors.values()} == {torch.bfloat16}
    assert "octavo" not in (tmp_path / "out" / "config.json").read_text()
    plain, loading = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out", output_loading_info=True)
    assert not any(loading.values()), loading
    assert not any(isinstance(module, octavo.nn.Linear) for module in plain.modules())
    assert_same(plain.state_dict(), model.state_dict())


def test_an_exported_checkpoint_has_the_codes_that_were_trained_with(saved_in_blocks: Path, tmp_path: Path) -> None:
    model = load_model(saved_in_blocks, "blockwise", torch.bfloat16)
    make_trainer(model, tmp_path / "run", 2).train()
    ids = make_rows(1)
    with torch.no_grad():
        model.eval()(input_ids=ids)
    model.save_pretrained(tmp_path / "out")
    quantize_checkpoint(tmp_path / "out", tmp_path / "fp8", "fp8-block")
    tensors = load_file(tmp_path / "fp8" / "model.safetensors")
    recipe = octavo.get_recipe("blockwise")
    assert recipe.weight is not None
    linears = {name: module for name, module in model.named_modules() if isinstance(module, octavo.nn.Linear)}
    assert len(linears) == 14
    for name, linear in linears.items():
        codes = octavo.quantize(linear.weight.detach(), recipe.weight)
        ((_, held),) = linear.forward_operands(recipe)
        for q in (
            held,
            octavo.QuantizedTensor(tensors[f"{name}.weight"], tensors[f"{name}.weight_scale_inv"], recipe.weight),
        ):
            assert_bitwise(q.qdata, codes.qdata)
            assert_bitwise(q.scale, codes.scale)


@pytest.mark.parametrize("optim", ["adamw_torch_fused", "adamw_torch", "adafactor", "sgd", "adagrad"])
def test_no_codes_are_stale_after_the_trainers_optimizers(optim: str, tmp_path: Path) -> None:
    model = make_model(tie_word_embeddings=True)
    convert(model, "blockwise", ignore=())
    assert model.lm_head.weight is model.model.embed_tokens.weight
    make_trainer(model, tmp_path, 3, optim=optim).train()
    before = model.lm_head.weight.detach().clone()
    check_weights(model)
    model.load_state_dict({name: tensor * 2 for name, tensor in model.state_dict().items()})
    assert_bitwise(model.lm_head.weight, before * 2)
    check_weights(model)


def check_weights(model: Any) -> None:
    """Every linear's codes are those of its weight, where it keeps any; and its product is of them."""
    octavo.nn.check_weights(model)
    scaling = octavo.get_recipe("blockwise").weight
    for linear in (module for module in model.modules() if isinstance(module, octavo.nn.Linear)):
        ((_, held),) = linear.forward_operands(octavo.get_recipe("blockwise"))
        assert_bitwise(held.qdata, octavo.quantize(linear.weight.detach().bfloat16(), scaling).qdata)


def test_the_callback_reports_logs_and_changes_levels(
    saved: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model = load_model(saved, "blockwise")
    statistics = octavo.nn.TensorStatistics(model, stats=("underflows%",), tensors=("activation",), layers=("up_proj",))
    callback = OctavoCallback(statistics=statistics, schedule=[(0, "O2"), (2, "O1"), (4, "O2")])
    trainer = make_trainer(model, tmp_path, 5, logging_steps=1, callbacks=[callback])
    trainer.train()
    assert "14 of 15 linears in FP8" in capsys.readouterr().out
    key = "model.layers.1.mlp.up_proj_activation_underflows%"
    assert [key in row for row in trainer.state.log_history] == [False, False, True, True, False, False]


def test_a_run_that_ended_in_o2_trains_again(saved: Path, tmp_path: Path) -> None:
    model = load_model(saved, "blockwise")
    trainer = make_trainer(model, tmp_path, 2, callbacks=[OctavoCallback(schedule=[(1, "O2")])])
    for _ in range(2):
        trainer.train()
        assert model.model.layers[0].mlp.up_proj.recipe.name == "bf16"


def test_the_best_model_has_the_fp8_state_of_its_checkpoint(saved: Path, tmp_path: Path) -> None:
    each_step = {"save_strategy": "steps", "save_steps": 1, "eval_strategy": "steps", "eval_steps": 1}
    trainer = make_trainer(
        load_model(saved, "delayed"), tmp_path, 4, **each_step, learning_rate=0.3, load_best_model_at_end=True
    )
    trainer.train()
    assert trainer.state.best_model_checkpoint != str(tmp_path / "checkpoint-4")
    assert trainer.evaluate()["eval_loss"] == trainer.state.best_metric


def test_a_config_with_recipes_can_be_printed() -> None:
    recipe = octavo.get_recipe("blockwise")
    assert '"name": "blockwise"' in repr(OctavoConfig(recipe=recipe, overrides={"q_proj": recipe}))
    assert '"recipe": "rowwise"' in repr(OctavoConfig(recipe="rowwise"))


def test_a_resumed_run_needs_its_fp8_state(saved: Path, tmp_path: Path) -> None:
    options = {"save_strategy": "steps", "save_steps": 1}
    make_trainer(load_model(saved, "delayed"), tmp_path, 1, **options).train()
    (tmp_path / "checkpoint-1" / "fp8.safetensors").unlink()
    with pytest.raises(CheckpointError, match=r"fp8\.safetensors is missing"):
        make_trainer(load_model(saved, "delayed"), tmp_path, 2, **options).train(resume_from_checkpoint=True)
    again = make_trainer(load_model(saved, "delayed"), tmp_path, 2, **options)
    again.callback_handler.remove_callback(OctavoCallback)
    again.add_callback(OctavoCallback(fp8_state=False))
    again.train(resume_from_checkpoint=True)
    assert (tmp_path / "checkpoint-2" / "fp8.safetensors").is_file()


def test_what_cannot_work_is_refused_in_one_line(saved: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError, match=r"found no linear in FP8; load the model with quantization_config"):
        make_trainer(make_model(), tmp_path, 1).train()
    with pytest.raises(RecipeError, match=r"ignore takes a list or tuple of names, got the string 'lm_head'"):
        OctavoConfig(ignore="lm_head")  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="one device, got device_map='auto'"):
        transformers.AutoModelForCausalLM.from_pretrained(saved, quantization_config=OctavoConfig(), device_map="auto")
    monkeypatch.setenv("ACCELERATE_MIXED_PRECISION", "fp8")
    with pytest.raises(ConfigError, match="accelerate's own FP8 is on"):
        convert(make_model(), "blockwise")
    monkeypatch.delenv("ACCELERATE_MIXED_PRECISION")
    quantized = make_model()
    quantized.is_quantized, quantized.quantization_method = True, "fp8"
    with pytest.raises(ConfigError, match="quantized by fp8 already; load a bf16 checkpoint"):
        convert(quantized, "blockwise")
    other = make_model()
    other.lm_head = type("Linear4bit", (torch.nn.Linear,), {"__module__": "bitsandbytes.nn.modules"})(64, 64)
    with pytest.raises(ConfigError, match=r"one FP8 backend, .* and bitsandbytes \(lm_head, a Linear4bit\)"):
        convert(other, "blockwise")


def test_a_checkpoint_in_fp8_is_not_converted(saved_in_blocks: Path, tmp_path: Path) -> None:
    quantize_checkpoint(saved_in_blocks, tmp_path / "fp8", "fp8-block")
    with pytest.raises(ValueError, match=r"quantized with FineGrainedFP8Config but you are passing a OctavoConfig"):
        transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "fp8", quantization_config=OctavoConfig())


FAMILIES = {
    "Mixtral": {"num_local_experts": 4, "num_experts_per_tok": 2},
    "Qwen3Moe": {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 96, "head_dim": 16},
    "GptOss": {"num_local_experts": 4, "num_experts_per_tok": 2, "head_dim": 16, "layer_types": ["full_attention"] * 2},
    "GPT2": {"n_embd": 64, "n_layer": 2, "n_head": 4, "bos_token_id": 0, "eos_token_id": 0},
}


@pytest.mark.parametrize("family", list(FAMILIES))
def test_experts_and_gpt2_train_and_are_saved_as_they_were(family: str, tmp_path: Path) -> None:
    make_model(family, **FAMILIES[family]).save_pretrained(tmp_path / "model")
    model = load_model(tmp_path / "model", "blockwise")
    report = model.conversion_report
    left = [row.name for row in report.rows if row.recipe is None and "router" not in row.reason]
    assert left == ["lm_head"]
    trainer = make_trainer(model, tmp_path / "run", 12, learning_rate=2e-3)
    trainer.train()
    assert sum(trainer.losses[-3:]) < sum(trainer.losses[:3])
    model.save_pretrained(tmp_path / "out")
    files = [load_file(tmp_path / folder / "model.safetensors") for folder in ("model", "out")]
    assert [(key, tensor.shape) for key, tensor in files[1].items()] == [(k, t.shape) for k, t in files[0].items()]
    plain = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype=torch.float32)
    assert_same(plain.state_dict(), model.state_dict())


@pytest.mark.filterwarnings("ignore:`gradient_checkpointing:FutureWarning")  # its name up to 5.23
@pytest.mark.parametrize("recipe", ["blockwise", "delayed"])
def test_checkpointed_activations_change_no_bit(recipe: str, saved: Path, tmp_path: Path) -> None:
    found = []
    for is_on in (False, True):
        model = load_model(saved, recipe)
        if is_on:
            model.gradient_checkpointing_enable()
        trainer = make_trainer(model, tmp_path, 4)
        trainer.train()
        found.append(torch.stack(trainer.losses))
    assert_bitwise(found[1], found[0])
