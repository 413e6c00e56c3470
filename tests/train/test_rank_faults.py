"""Faults of one rank among several, with real processes; the oracle is the run that nothing disturbs."""

import re
from pathlib import Path

import pytest

from octavo.train import train
from tests.faulty_ranks import start
from tests.ranks import run_ranks

from .conftest import SIZES, written
from .test_ranks import config_of, summary

PLACES = ("forward", "gather in step 2: forward", "backward", "gradient norm", "optimizer", "validation", "save")


CUT = {"recipe": "rowwise", "model": {**SIZES, "num_key_value_heads": 2}}
CUT_PARALLEL = {"tensor_parallel_degree": 2, "tensor_parallel_mode": "gather", "timeout_s": 60}


def write(
    corpus: Path,
    folder: Path,
    timeout_s: int = 60,
    recipe: str = "blockwise",
    parallel: dict[str, object] | None = None,
    **sections: dict[str, object],
) -> Path:
    """A config file of the run that test_ranks holds to one process."""
    return written(
        folder / "run.toml",
        corpus,
        data={"batch_size": 8, "micro_batch_size": 2, "vocab_size": 280, "seq_len": 32, "validation_fraction": 0.1}
        | {"path": str(corpus), "cache_dir": str(corpus.parent / "cache")},
        run={"steps": 6, "dir": str(folder / "run"), "device": "cpu"},
        schedule={"warmup_steps": 2, "kind": "constant"},
        precision={"recipe": recipe},
        parallel=parallel or {"reduction": "ordered", "timeout_s": timeout_s},
        **sections,
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


def train_cut(_: int, corpus: str, folder: str) -> None:
    config = config_of(Path(corpus), Path(folder), parallel=CUT_PARALLEL, **CUT)
    train(config, progress=False)


@pytest.mark.nightly
@pytest.mark.parametrize(("rank", "place"), [(1, "backward"), (0, "gradient norm"), (1, "save")])
def test_a_killed_rank_of_a_cut_model_is_restarted_to_the_same_bits(
    rank: int, place: str, corpus: Path, tmp_path: Path
) -> None:
    run_ranks(train_cut, 2, str(corpus), str(tmp_path / "undisturbed"))
    config = write(corpus, tmp_path, parallel=CUT_PARALLEL, **CUT)
    ended = start(config, "kill", place, restarts=2, rank=rank)
    assert ended.returncode == 0, ended.stderr[-4000:]
    assert summary(tmp_path / "run") == summary(tmp_path / "undisturbed")
    (model,) = (tmp_path / "run").glob("checkpoints/step-00000006/model/model.safetensors")
    assert model.read_bytes() == (tmp_path / "undisturbed" / model.relative_to(tmp_path / "run")).read_bytes()


@pytest.mark.slow
def test_a_stopped_rank_is_named_and_all_end(corpus: Path, tmp_path: Path) -> None:
    ended = start(write(corpus, tmp_path, timeout_s=8), "stop", "step 3: backward")
    assert ended.returncode != 0
    named = re.findall(
        r"octavo: rank 1 has not moved for \d+ s since 'step 3: backward of its micro-batch 0'", ended.stderr
    )
    assert len(named) == 1, ended.stderr[-4000:]


@pytest.mark.nightly
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
