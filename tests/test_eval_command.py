"""`octavo eval`: its table, one precision beside another; the error without the harness is tested in tests/serve."""

import importlib
import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from octavo import cli
from octavo.errors import ConfigError, StorageError
from octavo.integrations.lm_eval import TaskScore
from octavo.models import ModelConfig, char_tokenizer, load_model, save_model
from octavo.serve import LLM

eval_command = importlib.import_module("octavo.cli.eval")


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    config = ModelConfig("llama", 64, 128, 128, 1, 4, 4, 32, max_position_embeddings=64)
    save_model(load_model(config), tmp_path / "model", "fp8-block", tokenizer=char_tokenizer("abc"))
    save_model(load_model(config), tmp_path / "other", tokenizer=char_tokenizer("abc"))
    return tmp_path / "model"


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, str, list[str], object]]:
    """(recipe, KV format, tasks, limit) of every run of the harness, which scores by the recipe."""
    runs: list[tuple[str, str, list[str], object]] = []

    def run(llm: LLM, tasks: list[str], *, limit: int | None, **_: object) -> list[TaskScore]:
        numerics = llm.model.numerics
        runs.append((numerics.recipe.name, numerics.kv_cache_dtype, tasks, limit))
        return [TaskScore(tasks[0], "acc", 0.25 if numerics.recipe.is_fp8 else 0.5, 0.125)]

    monkeypatch.setattr(eval_command, "run_tasks", run)
    monkeypatch.setattr(eval_command, "require_harness", lambda: None)
    return runs


def invoke(*args: object) -> str:
    result = CliRunner().invoke(cli.app, ["eval", *map(str, args)])
    assert result.exit_code == 0, result.output
    return result.output


@pytest.mark.filterwarnings("ignore:.*were decoded")
@pytest.mark.parametrize("compare", ["bf16", "other"])
def test_one_precision_beside_another(checkpoint: Path, asked: list[object], compare: str) -> None:
    reference = checkpoint.parent / "other" if compare == "other" else "bf16"
    out = invoke(
        *(checkpoint, "--tasks", "arc_easy,piqa", "-t", "boolq", "--limit", 3),
        *("--compare", reference, "--kv-cache-dtype", "fp8", "--device", "cpu", "--output", checkpoint / "scores.json"),
    )
    written = json.loads((checkpoint / "scores.json").read_text())
    assert written["limit"] == 3
    assert [row[0]["value"] for row in written["scores"].values()] == [0.25, 0.5]
    assert list(written["scores"]) == ["auto", str(reference)]
    tasks = ["arc_easy", "piqa", "boolq"]
    assert asked == [("blockwise", "fp8", tasks, 3), ("bf16", "bf16", tasks, 3)]
    assert out.splitlines()[-1].split() == ["arc_easy", "acc", "0.2500", "0.1250", "0.5000", "0.1250", "-0.2500"]


@pytest.mark.filterwarnings("ignore:.*were decoded")
def test_without_a_comparison_there_is_one_column(checkpoint: Path, asked: list[object]) -> None:
    out = invoke(checkpoint, "--tasks", "piqa", "--recipe", "rowwise", "--device", "cpu")
    assert [run[0] for run in asked] == ["rowwise"]
    assert [line.split() for line in out.splitlines()] == [
        ["task", "metric", "rowwise", "+-"],
        ["piqa", "acc", "0.2500", "0.1250"],
    ]


def test_a_comparison_with_nothing_is_refused_before_anything_runs(checkpoint: Path, asked: list[object]) -> None:
    with pytest.raises(ConfigError, match="got 'bf61'; did you mean 'bf16'"):
        eval_command.command(checkpoint, ["t"], compare="bf61")
    assert not asked


@pytest.mark.filterwarnings("ignore:.*were decoded")
def test_one_recipe_with_two_kv_caches_keeps_both_columns(checkpoint: Path, asked: list[object]) -> None:
    """Into a folder that is made for it."""
    output = checkpoint.parent / "new" / "scores.json"
    options = ("--compare", "auto", "--kv-cache-dtype", "fp8", "--device", "cpu", "--output", output)
    invoke(checkpoint, "--tasks", "piqa", *options)
    assert asked == [("blockwise", "fp8", ["piqa"], None), ("blockwise", "bf16", ["piqa"], None)]
    assert list(json.loads(output.read_text())["scores"]) == ["auto", "auto with bf16 KV"]


def test_an_output_that_cannot_be_written_is_refused_before_anything_runs(
    checkpoint: Path, asked: list[object]
) -> None:
    for output in (checkpoint / "config.json" / "scores.json", checkpoint):
        with pytest.raises(StorageError, match="--output"):
            eval_command.command(checkpoint, ["t"], output=output)
    assert not asked
