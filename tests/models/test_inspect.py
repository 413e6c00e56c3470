"""octavo inspect: every tensor with its scheme, and what is missing or unused."""

import re
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from octavo.errors import CheckpointError
from octavo.models import ModelConfig, load_model
from octavo.models.checkpoint.inspect import inspect_checkpoint
from octavo.models.checkpoint.safetensors_io import SINGLE_FILE
from tests.conftest import RunOctavo
from tests.models.foreign import FOREIGN, write_foreign

Save = Callable[..., Path]
Edit = Callable[..., None]
Change = Callable[[dict[str, torch.Tensor]], object]
DOWN, NORM = "model.layers.0.mlp.down_proj.weight", "model.norm.weight"


def test_a_good_checkpoint_has_no_problems(config: ModelConfig, save: Save) -> None:
    report = inspect_checkpoint(save(config, "fp8-block"))
    rows = {row.name: row for row in report.rows}
    assert report.dialect == "fp8-block" and report.problems == []
    down, norm = rows[DOWN], rows["model.norm.weight"]
    assert (down.dtype, down.scheme, down.scale_shape) == ("float8_e4m3fn", "block_128x128", (1, 2))
    assert (norm.dtype, norm.scheme, norm.scale_shape) == ("bfloat16", "high precision", None)
    assert rows[f"{DOWN}_scale_inv"].scheme == "scale"
    assert report.num_bytes == sum(row.num_bytes for row in report.rows)
    assert down.num_bytes == 128 * 256


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        (lambda t: t.pop(f"{DOWN}_scale_inv"), f"missing scale: {DOWN}"),
        (lambda t: t.update({DOWN: torch.zeros(128, 256)}), f"unused scale: {DOWN}_scale_inv"),
        (lambda t: t.update({"x.weight_scale": torch.ones(1)}), "unused scale: x.weight_scale"),
        (lambda t: t.update({f"{DOWN}_scale_inv": torch.ones(3, 5)}), "unknown scheme"),
        (lambda t: t.pop("model.norm.weight"), "missing tensor: model.norm.weight"),
        (lambda t: t.update({"model.norm.weight": torch.ones(4)}), r"wrong shape: model.norm.weight is \(4,\)"),
        (lambda t: t.update({"extra": torch.ones(4)}), "unused tensor: extra"),
        (lambda t: t.update({NORM: t[NORM].double()}), f"wrong dtype: {NORM} is float64"),
    ],
    ids=["missing-scale", "unused-scale", "orphan-scale", "scheme", "missing", "shape", "unused", "dtype"],
)
def test_problems_are_named(config: ModelConfig, save: Save, edit_tensors: Edit, change: Change, problem: str) -> None:
    path = save(config, "fp8-block")
    edit_tensors(path, change)
    problems = inspect_checkpoint(path).problems
    assert len(problems) == 1
    assert re.match(problem, problems[0]), problems


@pytest.mark.parametrize("scale", [torch.ones(3), torch.ones(1, dtype=torch.int32)], ids=["shape", "dtype"])
@pytest.mark.parametrize("name", ["mlp.down_proj.input_scale", "self_attn.k_proj.k_scale"])
def test_scales_that_loading_refuses_are_named(
    config: ModelConfig, tmp_path: Path, edit_tensors: Edit, name: str, scale: torch.Tensor
) -> None:
    path = write_foreign(tmp_path / "m", config, FOREIGN["modelopt"])
    assert inspect_checkpoint(path).problems == []
    edit_tensors(path, lambda tensors: tensors.update({f"model.layers.0.{name}": scale}))
    (problem,) = inspect_checkpoint(path).problems
    assert problem.startswith(f"wrong scale: model.layers.0.{name} ")
    with pytest.raises(CheckpointError) as refused:
        load_model(path, recipe="auto")
    assert str(refused.value) == problem.replace("wrong scale", str(path))


@pytest.mark.parametrize(
    ("shape", "scheme"),
    [
        ((), "per_tensor"), ((1,), "per_tensor"), ((256,), "per_row"), ((256, 1), "per_row"), ((2, 3), "block_128x128"),
        ((256, 3), "block_1x128"), ((256, 10), "block_1x32"), ((7,), "?"),
    ],
    ids=str,
)  # fmt: skip
def test_schemes_of_other_dialects_are_shown(tmp_path: Path, shape: tuple[int, ...], scheme: str) -> None:
    codes = torch.zeros(256, 300, dtype=torch.uint8).view(torch.float8_e4m3fn)
    tensors = {"a.weight": codes, "a.weight_scale": torch.ones(shape), "a.input_scale": torch.ones(1)}
    save_file(tensors, tmp_path / SINGLE_FILE)
    for path in (tmp_path, tmp_path / SINGLE_FILE):
        rows = {row.name: row for row in inspect_checkpoint(path).rows}
        assert rows["a.weight"].scheme == scheme
        assert rows["a.weight"].scale_shape == shape
        assert rows["a.input_scale"].scheme == "scale"


def test_a_weight_of_one_block_is_what_the_config_declares(save: Save) -> None:
    config = ModelConfig("llama", 96, 128, 128, 1, 4, 4, 32, max_position_embeddings=128)  # every linear is 128 x 128
    for dialect, recipe, scheme in (
        ("fp8-block", "blockwise", "block_128x128"),
        ("fp8-tensor-dynamic", "tensorwise", "per_tensor"),
    ):
        report = inspect_checkpoint(save(config, dialect, recipe))
        assert {row.scheme for row in report.modules} == {scheme, "high precision"}
        assert report.problems == []


def test_an_unknown_architecture_is_still_shown(config: ModelConfig, save: Save, edit_config: Edit) -> None:
    path = save(config)
    edit_config(path, model_type="gpt2")
    report = inspect_checkpoint(path)
    assert report.dialect == "unknown" and len(report.rows) > 10
    assert "gpt2" in report.problems[0]


def test_the_command(config: ModelConfig, save: Save, edit_tensors: Edit, run_octavo: RunOctavo) -> None:
    path = save(config, "fp8-block")
    code, out, _ = run_octavo("inspect", path)
    assert code == 0
    line = next(line for line in out.splitlines() if line.startswith(f"{DOWN} "))
    assert line.split() == [DOWN, "float8_e4m3fn", "128", "x", "256", "block_128x128", "1", "x", "2"]
    assert "dialect fp8-block" in out and "no missing or unused" in out
    assert "written by octavo from a bf16 model, weight version 0" in out
    edit_tensors(path, lambda tensors: tensors.pop(f"{DOWN}_scale_inv"))
    code, out, said = run_octavo("inspect", path)
    assert code == 2
    assert f"missing scale: {DOWN}" in out
    assert "1 problem, listed above" in said


def test_the_command_reads_the_newest_model_of_a_run(
    config: ModelConfig, save: Save, tmp_path: Path, run_octavo: RunOctavo
) -> None:
    step = tmp_path / "run" / "checkpoints" / "step-00000200"
    step.mkdir(parents=True)
    model = save(config).rename(step / "model")
    save_file({"moment": torch.zeros(2)}, step / "trainer.safetensors")
    (step.parent / "LATEST").write_text(f"{step.name}\n")
    (tmp_path / "run" / "metrics.jsonl").touch()
    for path in (tmp_path / "run", step.parent, step):
        code, out, said = run_octavo("inspect", path)
        assert (code, said) == (0, f"{path}: a run; reading {model}\n")
        assert "model.layers.0" in out
    (model / "config.json").unlink()  # tensors without one are shown as they are
    assert "no config.json beside the tensors" in run_octavo("inspect", model)[1]


def test_the_command_says_dialect_formats_and_kv_scales(
    config: ModelConfig, tmp_path: Path, run_octavo: RunOctavo
) -> None:
    path = write_foreign(tmp_path / "m", config, FOREIGN["modelopt"], keep=("model.layers.1.self_attn.o_proj",))
    code, out, _ = run_octavo("inspect", path, "--modules")
    assert code == 0
    lines = [line.split() for line in out.splitlines()]
    o_proj, scalar = "model.layers.*.self_attn.o_proj", ["per_tensor", "float8_e4m3fn", "float32", "float32"]
    assert [o_proj, "1", *scalar] in lines and [o_proj, "1", "high", "precision", "bfloat16"] in lines
    assert ["model.layers.*.mlp.down_proj", "2", *scalar] in lines
    assert "dialect modelopt-tensor" in out and "recipe auto is tensorwise with static input scales" in out
    codes = (2 * (4 * 128 * 128 + 3 * 128 * 256) - 128 * 128) / 1e6
    assert f"{codes:,.2f} MB FP8 codes, 0.00 MB scales" in out
    assert "kept in high precision by config.json: lm_head, model.layers.1.self_attn.o_proj, *embed*" in out
    assert "KV cache scales: 2 x model.layers.*.self_attn.k_proj.k_scale" in out
    assert DOWN not in out  # every tensor is shown without --modules
