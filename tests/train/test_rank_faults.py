"""Faults of one rank among several, with real processes; the oracle is the run that nothing disturbs."""

import re
from pathlib import Path

import pytest

from octavo.train import train
from tests.faulty_ranks import start

from .conftest import written
from .test_ranks import config_of, summary

PLACES = ("forward", "gather in step 2: forward", "backward", "gradient norm", "optimizer", "validation", "save")


def write(corpus: Path, folder: Path, timeout_s: int = 60) -> Path:
    """A config file of the run that test_ranks holds to one process."""
    return written(
        folder / "run.toml",
        corpus,
        data={"batch_size": 8, "micro_batch_size": 2, "vocab_size": 280, "seq_len": 32, "validation_fraction": 0.1}
        | {"path": str(corpus), "cache_dir": str(corpus.parent / "cache")},
        run={"steps": 6, "dir": str(folder / "run"), "device": "cpu"},
        schedule={"warmup_steps": 2, "kind": "constant"},
        precision={"recipe": "blockwise"},
        parallel={"reduction": "ordered", "timeout_s": timeout_s},
    )


@pytest.fixture(scope="module")
def undisturbed(corpus: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("undisturbed") / "run"
    train(config_of(corpus, folder, "blockwise"), progress=False)
    return folder


KILLS = [(rank, place) for rank in (1, 0) for place in PLACES]


@pytest.mark.parametrize(
    ("rank", "place"),
    [kill if kill == (1, "backward") else pytest.param(*kill, marks=pytest.mark.nightly) for kill in KILLS],
)
def test_a_killed_rank_is_restarted_to_the_same_bits(
    rank: int, place: str, corpus: Path, undisturbed: Path, tmp_path: Path
) -> None:
    ended = start(write(corpus, tmp_path), "kill", place, restarts=2, rank=rank)
    assert ended.returncode == 0, ended.stderr[-4000:]
    assert summary(tmp_path / "run") == summary(undisturbed)
    (model,) = (tmp_path / "run").glob("checkpoints/step-00000006/model/model.safetensors")
    assert model.read_bytes() == (undisturbed / model.relative_to(tmp_path / "run")).read_bytes()


@pytest.mark.slow
def test_a_stopped_rank_is_named_and_all_end(corpus: Path, tmp_path: Path) -> None:
    ended = start(write(corpus, tmp_path, timeout_s=8), "stop", "step 3: backward")
    assert ended.returncode != 0
    named = re.findall(
        r"octavo: rank 1 has not moved for \d+ s since 'step 3: backward of its micro-batch 0'", ended.stderr
    )
    assert len(named) == 1, ended.stderr[-4000:]


@pytest.mark.slow
def test_a_slow_rank_is_named_and_the_run_goes_on(corpus: Path, undisturbed: Path, tmp_path: Path) -> None:
    ended = start(write(corpus, tmp_path, timeout_s=8), "slow", "step 3: backward")
    assert ended.returncode == 0, ended.stderr[-4000:]
    assert "octavo: rank 1 has not moved" in ended.stderr
    assert summary(tmp_path / "run") == summary(undisturbed)


@pytest.mark.slow
def test_sigterm_to_one_rank_saves_on_all(corpus: Path, undisturbed: Path, tmp_path: Path) -> None:
    """The others learn of it at the end of the step; the same command then goes on."""
    config = write(corpus, tmp_path)
    ended = start(config, "terminate", "step 3: backward")
    assert ended.returncode != 0  # torchrun's, of ranks that ended with 143
    assert (tmp_path / "run" / "checkpoints" / "LATEST").read_text() == "step-00000003\n"
    train(config_of(corpus, tmp_path / "run", "blockwise"), progress=False)
    assert [row[:4] for row in summary(tmp_path / "run")] == [row[:4] for row in summary(undisturbed)]
