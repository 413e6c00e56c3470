"""Whole runs: they learn, they resume bit for bit, they change recipe, they stop when asked, they refuse nonsense."""

import json
import os
import shutil
import signal
from pathlib import Path

import pytest
import torch

from octavo import load_model
from octavo.errors import CheckpointError, ConfigError, DataError, NonFiniteError
from octavo.models import load_tokenizer
from octavo.parallel.staging import HostCopies
from octavo.run.metrics import Row, read_metrics
from octavo.train import TrainResult, train
from octavo.train.loop import _Run
from octavo.train.step import train_step
from tests.assertions import assert_raises

from .conftest import MakeConfig, build_config


def quiet(config, **fields):  # type: ignore[no-untyped-def]
    return train(config, progress=False, **fields)


def numbers(rows: tuple[Row, ...] | list[Row]) -> list[tuple[float | None, ...]]:
    """What must not depend on the clock."""
    return [(r.step, r.loss, r.lr, r.grad_norm, r.val_loss, r.val_ppl) for r in rows]


def times(directory: Path) -> dict[Path, int]:
    """When each file of a run was written, but for its lock, which says which process was the last."""
    return {path: path.stat().st_mtime_ns for path in directory.rglob("*") if path.name != ".lock"}


def assert_same(a: TrainResult, b: TrainResult) -> None:
    assert numbers(a.rows) == numbers(b.rows)
    for name in ("trainer.safetensors", "model/model.safetensors", "model/octavo/numerics.json"):
        assert (a.checkpoint / name).read_bytes() == (b.checkpoint / name).read_bytes(), name


@pytest.fixture(scope="module")
def whole(corpus: Path, tmp_path_factory: pytest.TempPathFactory) -> TrainResult:
    """The run that nothing interrupts; no test writes into its directory."""
    return quiet(build_config(corpus, tmp_path_factory.mktemp("whole")))


def crash_after(num_steps: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let train die inside step num_steps + 1, as a kill would: nothing is tidied up or saved."""
    done = 0

    def dying_step(*args: object, **kwargs: object) -> object:
        nonlocal done
        if done == num_steps:
            raise KeyboardInterrupt
        done += 1
        return train_step(*args, **kwargs)  # type: ignore[arg-type]

    monkeypatch.setattr("octavo.train.loop.train_step", dying_step)


def test_run_learns_and_leaves_a_servable_checkpoint(make_config: MakeConfig) -> None:
    config = make_config(run={"steps": 30}, metrics={"eval_every": 10}, optimizer={"lr": 1e-2})
    seen: list[Row] = []
    result = quiet(config, on_step=seen.append)
    assert result.step == 30
    assert result.val_loss is not None
    assert result.rows[-1].val_loss == result.val_loss < result.rows[0].loss - 1.0
    assert seen == list(result.rows) == read_metrics(config.run.dir / "metrics.jsonl")
    assert [row.step for row in seen if row.val_loss] == [10, 20, 30]
    assert result.conversion_report.fp8_flop_share == 1.0
    model = load_model(result.checkpoint / "model")
    trained = result.model.state_dict()
    assert all(torch.equal(tensor, trained[name]) for name, tensor in model.state_dict().items())
    text = "the 3 cats of house"
    assert load_tokenizer(result.checkpoint / "model").encode(text) == result.tokenizer.encode(text)


@pytest.mark.parametrize(
    "fields",
    [
        {"recipe": "bf16"},
        {"recipe": "bf16", "dtype": "fp32"},
        {"recipe": "delayed", "amax_history_len": 4},
        *(pytest.param({"recipe": name}, marks=pytest.mark.slow) for name in ("tensorwise", "rowwise")),
        {"recipe": "blockwise"},
        {"state_dtype": "fp8", "master_weights": "remainder"},
    ],
    ids=lambda fields: "-".join(map(str, fields.values())),
)
def test_resume_is_bit_equal(make_config, monkeypatch, fields):
    sections = {"precision" if "recipe" in fields else "optimizer": fields}
    whole = quiet(make_config("whole", **sections))
    assert whole.model.dtype == (torch.float32 if "dtype" in fields else torch.bfloat16)
    config = make_config("broken", **sections)
    with monkeypatch.context() as patch:
        crash_after(5, patch)
        assert_raises(KeyboardInterrupt, None, quiet, config)
    assert [row.step for row in read_metrics(config.run.dir / "metrics.jsonl")] == [1, 2, 3, 4, 5]
    assert (config.run.dir / "checkpoints" / "LATEST").read_text() == "step-00000004\n"
    assert_same(whole, quiet(config))


def test_same_run_twice_is_the_same(make_config: MakeConfig, whole: TrainResult) -> None:
    assert_same(whole, quiet(make_config()))


@pytest.mark.parametrize("wanted", [False, True])
def test_a_deterministic_run_asks_for_cublas_order_before_any_product(
    wanted: bool, make_config: MakeConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """torch asks for it at its first product, and never again."""
    monkeypatch.delenv("CUBLAS_WORKSPACE_CONFIG", raising=False)
    seen: list[str | None] = []

    def build(*_: object) -> None:
        seen.append(os.environ.get("CUBLAS_WORKSPACE_CONFIG"))
        raise DataError("stop")

    monkeypatch.setattr(_Run, "build", build)
    with pytest.raises(DataError, match="stop"):
        train(make_config("run", run={"deterministic": wanted}))
    assert seen == [":4096:8" if wanted else None]


def test_cutting_into_micro_batches_changes_rounding_only(make_config: MakeConfig) -> None:
    fields = {"precision": {"recipe": "bf16", "dtype": "fp32"}, "run": {"steps": 4}}
    whole = quiet(make_config("a", data={"micro_batch_size": 0}, **fields))
    cut = quiet(make_config("b", data={"micro_batch_size": 1}, **fields))
    assert [r.loss for r in cut.rows] == pytest.approx([r.loss for r in whole.rows], rel=1e-4)


def test_finished_run_has_nothing_to_do(make_config, whole, monkeypatch):
    shutil.copytree(whole.checkpoint.parents[1], make_config().run.dir)
    crash_after(0, monkeypatch)
    again = quiet(make_config())
    assert_same(whole, again)
    assert again.val_loss == whole.val_loss
    assert_raises(ConfigError, r"is at step 6, run\.steps is 4", quiet, make_config(run={"steps": 4}))


@pytest.mark.slow
def test_recipe_may_change_on_the_way(make_config: MakeConfig, capsys: pytest.CaptureFixture[str]) -> None:
    losses = []
    for steps, recipe in ((8, "bf16"), (16, "delayed"), (24, "blockwise"), (32, "bf16"), (40, "delayed")):
        config = make_config(run={"steps": steps}, precision={"recipe": recipe}, schedule={"kind": "constant"})
        capsys.readouterr()
        losses.append(train(config).val_loss)
        said = " ".join(capsys.readouterr().err.split())
        assert (f"to {recipe}" in said) == (steps > 8)
        assert ("delayed scaling starts with an empty one" in said) == (recipe == "delayed")
    assert losses == sorted(losses, reverse=True)  # type: ignore[type-var]


def test_a_run_within_its_text_goes_on(corpus: Path, tmp_path: Path) -> None:
    """Its own files, and those of a run beside it, are no text of it."""
    text = tmp_path / "text"
    text.mkdir()
    shutil.copy(corpus, text)

    def run(name: str, steps: int) -> TrainResult:
        return quiet(build_config(corpus, text, name, data={"path": str(text)}, run={"steps": steps}))

    run("first", 3)
    assert run("first", 4).first_step == 3
    assert run("second", 3).step == 3


def test_other_amax_history_starts_anew(make_config: MakeConfig, capsys: pytest.CaptureFixture[str]) -> None:
    quiet(make_config(run={"steps": 3}, precision={"recipe": "delayed", "amax_history_len": 8}))
    train(make_config(run={"steps": 4}, precision={"recipe": "delayed", "amax_history_len": 16}))
    said = " ".join(capsys.readouterr().err.split())
    assert "resuming after step 3" in said
    assert "precision.amax_history_len was 8, is 16" in said
    assert "starts with an empty one" in said


def test_another_architecture_is_refused(corpus: Path, whole: TrainResult) -> None:
    directory = whole.checkpoint.parents[1]
    before = times(directory)
    for change, message in (
        ({"model": {"hidden_size": 64}}, "hidden_size 32 in the checkpoint and 64 here"),
        ({"model": {"num_hidden_layers": 3}}, "num_layers 2 in the checkpoint and 3 here"),
        ({"model": {"family": "llama"}}, "family qwen3 in the checkpoint and llama here"),
        ({"data": {"tokenizer_bytes": 1}}, "another tokenizer"),
    ):
        assert_raises(CheckpointError, message, quiet, build_config(corpus, directory.parent, directory.name, **change))
    assert times(directory) == before


def test_no_resume_moves_the_old_run_aside(make_config: MakeConfig) -> None:
    first = quiet(make_config(run={"steps": 3}))
    second = quiet(make_config(run={"steps": 3}), resume=False)
    assert numbers(second.rows) == numbers(first.rows)
    aside = make_config().run.dir / "previous-1"
    assert sorted(p.name for p in aside.iterdir()) == ["checkpoints", "metrics.jsonl"]


def test_a_job_that_starts_over_does_so_once(make_config: MakeConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    """torchrun starts a command again as it was given, --no-resume and all: what the job has saved is not moved."""

    def attempt(number: int, job: str, killed_after: int = 0) -> TrainResult:
        for name, value in (("RESTART_COUNT", str(number)), ("RUN_ID", job)):
            monkeypatch.setenv(f"TORCHELASTIC_{name}", value)

        def kill(row: Row) -> None:
            if row.step == killed_after:
                raise KeyboardInterrupt

        return quiet(make_config("again"), resume=False, on_step=kill)

    for name, value in (("RANK", "0"), ("LOCAL_RANK", "0"), ("WORLD_SIZE", "1")):
        monkeypatch.setenv(name, value)
    assert attempt(0, "first").first_step == 0
    with pytest.raises(KeyboardInterrupt):
        attempt(0, "second", killed_after=4)
    assert attempt(1, "second").first_step == 4
    assert attempt(1, "third").first_step == 0  # whose first try has not come so far
    assert sorted(path.name for path in make_config("again").run.dir.glob("previous-*")) == ["previous-1", "previous-2"]


def test_every_update_has_the_learning_rate_of_its_own_step(make_config, monkeypatch):
    """The first takes the warm-up's first part and the last the decay's floor; the rows of metrics say the same."""
    taken: list[float] = []

    def recording_step(*args: object, **kwargs: object) -> object:
        taken.append(kwargs["lr"])  # type: ignore[arg-type]
        return train_step(*args, **kwargs)  # type: ignore[arg-type]

    monkeypatch.setattr("octavo.train.loop.train_step", recording_step)
    schedule = {"kind": "linear", "warmup_steps": 2, "min_ratio": 0.1}
    result = quiet(make_config(run={"steps": 5}, optimizer={"lr": 1e-2}, schedule=schedule))
    assert taken == pytest.approx([0.005, 0.01, 0.01, 0.0055, 0.001])
    assert [row.lr for row in result.rows] == taken


@pytest.mark.usefixtures("default_signals")
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_signal_saves_and_leaves(make_config: MakeConfig, whole: TrainResult, number: signal.Signals) -> None:
    before = signal.getsignal(number)

    def stop(row: Row) -> None:
        if row.step == 3:
            os.kill(os.getpid(), number)

    stopped = quiet(make_config("stopped"), on_step=stop)
    assert (stopped.stopped_by, stopped.step) == (number.name, 3)
    assert whole.val_step == whole.step
    assert (stopped.val_step, stopped.val_loss) == (2, whole.rows[1].val_loss)
    assert stopped.checkpoint.name == "step-00000003" and stopped.checkpoint.is_dir()
    assert signal.getsignal(number) is before
    assert_same(whole, quiet(make_config("stopped")))


def test_base_checkpoint_brings_weights_and_tokenizer(make_config: MakeConfig) -> None:
    base = quiet(make_config("base", precision={"recipe": "bf16"}))
    model = {"path": str(base.checkpoint / "model")}
    tuned = quiet(make_config("tuned", model=model, data={"vocab_size": 999}, optimizer={"lr": 1e-6}))
    assert tuned.tokenizer.vocab_size == base.tokenizer.vocab_size
    assert base.val_loss is not None
    assert tuned.val_loss == pytest.approx(base.val_loss, rel=0.02)


def test_layers_left_in_bf16(make_config: MakeConfig) -> None:
    precision = {"recipe": "rowwise", "num_layers_at_start_in_bf16": 1}
    result = quiet(make_config(precision=precision, run={"steps": 3}))
    assert all(name.startswith("layers.1.") for name in result.conversion_report.fp8_names)
    assert len(result.conversion_report.fp8_names) == 4
    with pytest.raises(ConfigError, match=r"leaves 3 \+ 0 layers in bf16, the model has 2"):
        quiet(make_config("other", precision=precision | {"num_layers_at_start_in_bf16": 3}))


@pytest.mark.parametrize("when", ["before the step", "after it"])  # which its validation sees
def test_nonfinite_stops_names_and_saves_nothing(make_config, whole, monkeypatch, when):
    def poison(model, *args, step, **kwargs):  # type: ignore[no-untyped-def]
        def write() -> None:
            if step == 6:
                with torch.no_grad():
                    model.layers[1].mlp.down_proj.weight[3, 5] = torch.nan

        if when == "before the step":
            write()
        result = train_step(model, *args, step=step, **kwargs)
        write()
        return result

    config = make_config()
    said = r"step 6: .* parameter layers\.1\.mlp\.down_proj\.weight.*: 1 NaN"
    with monkeypatch.context() as patch:
        patch.setattr("octavo.train.loop.train_step", poison)
        assert_raises(NonFiniteError, said, quiet, config)
    assert (config.run.dir / "checkpoints" / "LATEST").read_text() == "step-00000004\n"
    assert_same(whole, quiet(config))


def test_exploding_activation_is_named(make_config: MakeConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    def explode(model, *args, **kwargs):  # type: ignore[no-untyped-def]
        with torch.no_grad():
            model.layers[0].mlp.gate_up_proj.weight.fill_(1e38)
        return train_step(model, *args, **kwargs)

    monkeypatch.setattr("octavo.train.loop.train_step", explode)
    with pytest.raises(NonFiniteError, match=r"first tensor to go bad: output of layers\.0\.mlp\.gate_up_proj"):
        quiet(make_config(precision={"recipe": "bf16"}))
    assert not (make_config().run.dir / "checkpoints").exists()


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"data": {"path": "nowhere.txt"}}, DataError, "no such file or directory"),
        ({"run": {"device": "toaster"}}, ConfigError, "run.device must be"),
        ({"model": {"max_position_embeddings": 16}}, ConfigError, "data.seq_len=32 is more than"),
        ({"model": {"path": "gone"}}, CheckpointError, "gone"),
    ],
)
def test_mistakes_write_nothing(make_config: MakeConfig, change: dict, error: type, message: str) -> None:
    assert_raises(error, message, quiet, make_config(**change))
    assert not make_config().run.dir.exists()


def test_checkpoint_says_what_it_is(whole: TrainResult) -> None:
    description = json.loads((whole.checkpoint / "trainer.json").read_text())
    assert description["step"] == description["config"]["run"]["steps"] == 6
    assert description["numerics"]["recipe"]["name"] == "blockwise"
    assert description["fp8_linears"] == list(whole.conversion_report.fp8_names)
    assert description["weight_version"] == whole.model.weight_version


def test_progress_is_plain_where_there_is_no_terminal(make_config, capsys):
    train(make_config(run={"steps": 3}))
    said = capsys.readouterr().err
    assert "8 of 8 linears in FP8, 100.0% of linear FLOPs (lm_head not counted)" in said
    assert "step 3/3  loss" in said
    assert "\x1b" not in said


def test_evaluation_leaves_no_trace(make_config: MakeConfig) -> None:
    fields = {"precision": {"recipe": "delayed"}, "run": {"steps": 4}}
    often = quiet(make_config("a", metrics={"eval_every": 1}, **fields))
    never = quiet(make_config("b", metrics={"eval_every": 0}, **fields))
    assert [r.loss for r in often.rows] == [r.loss for r in never.rows]
    assert often.val_loss == never.val_loss


def test_moved_run_directory_resumes(make_config: MakeConfig, tmp_path: Path) -> None:
    quiet(make_config("here", run={"steps": 4}, schedule={"kind": "constant"}))
    (tmp_path / "here").rename(tmp_path / "there")
    moved = quiet(make_config("there", schedule={"kind": "constant"}))
    assert [row.step for row in moved.rows] == list(range(1, 7))


def test_the_memory_of_saves_in_the_background_is_taken_once(
    corpus: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Moments of AdamW are counted before the first step has made them."""
    places, reserve = [], HostCopies.reserve

    def noted(copies: HostCopies, *mappings: dict[str, torch.Tensor]) -> None:
        reserve(copies, *mappings)
        places.append((copies._memory.data_ptr(), copies._memory.numel()))

    monkeypatch.setattr(HostCopies, "reserve", noted)
    quiet(build_config(corpus, tmp_path, checkpoint={"async_mode": "async", "every": 2}))
    assert len(places) > 2 and len(set(places)) == 1
