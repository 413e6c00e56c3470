"""A rank of a reinforcement-learning job is killed, in the hand-over of weights too, and torchrun starts all again."""

from pathlib import Path

import pytest

from octavo.integrations.config import to_toml
from octavo.rl.config import RLConfig
from octavo.rl.history import StepRow
from octavo.run.metrics import METRICS_FILE, read_metrics
from tests.faulty_ranks import start

from .test_ranks import ORDERED, config_of, summary, train

pytestmark = pytest.mark.nightly
SYNC = "gather in step 2: refit"
PLACES = ("step 2: sampling", "step 2: micro-batch", "step 2: refit", SYNC, "step 2: save")


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("undisturbed")
    train("exact", config_of(folder, 2))
    return folder


def write(folder: Path, *, keeps_weights: bool) -> Path:
    config = config_of(folder / "run", 2, parallel=ORDERED, rollout={"keep_weights": keeps_weights})
    run = config.run.model_copy(update={"checkpoint_every": 1})
    file = folder / "run.toml"
    file.write_text(to_toml(RLConfig(**config.model_copy(update={"run": run}).model_dump())), encoding="utf-8")
    return file


# how weights are handed over, kept or lent, matters there alone
@pytest.mark.parametrize(
    ("rank", "place", "keeps_weights"),
    [*((1, place, True) for place in PLACES), *((rank, SYNC, False) for rank in (1, 0)), (0, SYNC, True)],
)
def test_a_killed_rank_is_restarted_to_the_same_bits(
    rank: int, place: str, keeps_weights: bool, undisturbed: Path, tmp_path: Path
) -> None:
    ended = start(write(tmp_path, keeps_weights=keeps_weights), "kill", place, restarts=2, rank=rank)
    assert ended.returncode == 0, ended.stderr[-4000:]
    rows, expected = (read_metrics(path / METRICS_FILE, StepRow) for path in (tmp_path / "run", undisturbed))
    assert [summary(row) for row in rows] == [summary(row) for row in expected] and len(rows) == 3
    final = Path("final", "model.safetensors")
    assert (tmp_path / "run" / final).read_bytes() == (undisturbed / final).read_bytes()
