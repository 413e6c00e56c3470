"""`octavo eval MODEL --tasks NAME`: tasks of lm-evaluation-harness through the engine, beside another precision."""

import dataclasses
import errno
import gc
import json
from pathlib import Path
from typing import Annotated

import typer
from rich.table import Table

from octavo.cli.checkpoint_folder import Checkpoint, newest_model
from octavo.cli.console import plain_console
from octavo.errors import ConfigError, did_you_mean
from octavo.integrations.lm_eval import TaskScore, require_harness, run_tasks
from octavo.models.checkpoint.storage import check_writable, storage_error
from octavo.models.load import AUTO_RECIPE
from octavo.numerics.recipe import RECIPE_NAMES
from octavo.serve import LLM


def command(
    model: Checkpoint,
    tasks: Annotated[list[str], typer.Option("--tasks", "-t", help="Tasks, with commas or given several times.")],
    limit: Annotated[int | None, typer.Option(min=1, help="Documents a task, at most.")] = None,
    recipe: Annotated[str, typer.Option(help=f"auto (the checkpoint's own), {', '.join(RECIPE_NAMES)}.")] = AUTO_RECIPE,
    compare: Annotated[
        str | None, typer.Option(help="A recipe for the same checkpoint, or another checkpoint's directory.")
    ] = None,
    kv_cache_dtype: Annotated[str, typer.Option(help="bf16 or fp8; the comparison's is bf16.")] = "bf16",
    attention_dtype: Annotated[
        str, typer.Option(help="bf16, or fp8, which needs an FP8 cache; the comparison's is bf16.")
    ] = "bf16",
    num_fewshot: Annotated[
        int | None, typer.Option(min=0, help="Examples a document; the task's own if empty.")
    ] = None,
    task_dir: Annotated[Path | None, typer.Option(help="Directory of YAML files with tasks of your own.")] = None,
    chat_template: Annotated[bool, typer.Option("--chat-template", help="Ask by the model's chat template.")] = False,
    max_model_len: Annotated[int | None, typer.Option(min=3, help="Tokens of a sequence.")] = None,
    device: Annotated[str | None, typer.Option(help="cpu or cuda; the GPU if there is one by default.")] = None,
    output: Annotated[
        Path | None, typer.Option(help="Also write the scores here, as JSON: octavo upload --eval takes it.")
    ] = None,
) -> None:
    """Run lm-evaluation-harness tasks in this process; --compare puts a second precision beside the first.

    Needs the extra `eval`. The harness downloads the data sets of its tasks; those of --task-dir may be local files.
    """
    require_harness()
    known = (AUTO_RECIPE, *RECIPE_NAMES)
    if compare is not None and compare not in known and not Path(compare).is_dir():
        raise ConfigError(
            f"--compare takes a recipe ({', '.join(known)}) or a checkpoint's directory, got {compare!r}"
            f"{did_you_mean(compare, known)}"
        )
    if output is not None:
        if output.is_dir():
            raise storage_error(f"--output = {output}", errno.EISDIR)
        check_writable(output.parent, "--output")
        output.parent.mkdir(parents=True, exist_ok=True)
    names = [name for entry in tasks for name in entry.split(",") if name]

    def scores(path: Path, quantization: str, kv_dtype: str, attention: str) -> list[TaskScore]:
        llm = LLM(
            path,
            quantization=None if quantization == AUTO_RECIPE else quantization,
            kv_cache_dtype=kv_dtype,
            attention_dtype=attention,
            max_model_len=max_model_len,
            device=device,
        )
        return run_tasks(
            llm, names, limit=limit, num_fewshot=num_fewshot, task_dir=task_dir, apply_chat_template=chat_template
        )

    found = scores(model, recipe, kv_cache_dtype, attention_dtype)
    reference = None
    if compare is not None:
        is_path = Path(compare).is_dir()
        gc.collect()  # the first engine's memory is the second one's
        reference = scores(
            newest_model(Path(compare)) if is_path else model, AUTO_RECIPE if is_path else compare, "bf16", "bf16"
        )
    plain_console().print(_table(found, reference, recipe, compare))
    if output is not None:
        columns = {recipe: found}
        if compare is not None and reference is not None:
            columns[f"{compare} with bf16 KV" if compare == recipe else compare] = reference
        scores_by_column = {name: [dataclasses.asdict(score) for score in column] for name, column in columns.items()}
        output.write_text(json.dumps({"limit": limit, "scores": scores_by_column}, indent=2) + "\n", encoding="utf-8")


def _table(found: list[TaskScore], reference: list[TaskScore] | None, recipe: str, compare: str | None) -> Table:
    table = Table("task", "metric", recipe, "+-", box=None, pad_edge=False, header_style="bold")
    beside = {(score.task, score.metric): score for score in reference or ()}
    for column in (compare, "+-", "difference") if compare is not None else ():
        table.add_column(column)
    for score in found:
        cells = [score.task, score.metric, *_cells(score)]
        if compare is not None:
            other = beside[score.task, score.metric]
            cells += [*_cells(other), f"{score.value - other.value:+.4f}"]
        table.add_row(*cells)
    return table


def _cells(score: TaskScore) -> tuple[str, str]:
    return f"{score.value:.4f}", "" if score.stderr is None else f"{score.stderr:.4f}"
