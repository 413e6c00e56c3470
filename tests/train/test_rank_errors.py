"""What goes wrong on one rank of a training run ends all of them, and what need not is no error; without torchrun."""

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from octavo.errors import ConfigError, NonFiniteError, OctavoError
from octavo.run.folder_lock import locked_folder
from octavo.run.metrics import METRICS_FILE, read_metrics
from octavo.train import loop, step, train
from octavo.train.config import TrainConfig
from octavo.train.data import IGNORED, Batch
from octavo.train.dataset import Dataset
from tests.ranks import run_ranks

from .test_ranks import ORDERED, config_of, summary

Change = Callable[[int, TrainConfig, pytest.MonkeyPatch], Any]  # (rank, config, patch) -> what is to be kept


def spoil_loss(rank: int, _: TrainConfig, patch: pytest.MonkeyPatch) -> None:
    whole, scale = step.summed_loss, torch.nan if rank else 1.0
    patch.setattr(step, "summed_loss", lambda *args: whole(*args) * scale)


def take_other_data(rank: int, config: TrainConfig, patch: pytest.MonkeyPatch) -> None:
    if rank:
        path = config.run.dir.parent / "others.jsonl"
        path.write_text("".join(Path(config.data.path).read_text().splitlines(keepends=True)[1:]))
        data = config.data.model_copy(update={"path": str(path)})
        other = loop.load_dataset(config.model_copy(update={"data": data}))
        patch.setattr(loop, "load_dataset", lambda _: other)


def hold_folder(rank: int, config: TrainConfig, _: pytest.MonkeyPatch) -> Any:
    """Another job, of the first rank's process."""
    lock = locked_folder(config.run.dir)
    if not rank:
        lock.__enter__()
    return lock


FAULTS: dict[str, tuple[Change, type[OctavoError], str]] = {
    "loss": (spoil_loss, NonFiniteError, "step 1: .* the first tensor to go bad: rank 1: the loss itself"),
    "data": (take_other_data, ConfigError, r"the data is '\w+' on rank 0 and '\w+' on rank 1"),
    "folder": (hold_folder, ConfigError, r"is used by process \d+, and one job writes into a run's folder"),
}


def take_targets_away(patch: pytest.MonkeyPatch) -> None:
    """From every other micro-batch: from all of the second of two ranks."""
    load = loop.load_dataset

    def without(batch: Batch) -> Batch:
        return dataclasses.replace(batch, targets=torch.full_like(batch.targets, IGNORED), num_targets=0)

    def load_without(config: TrainConfig) -> Dataset:
        data = load(config)

        def batches(number: int) -> list[Batch]:
            return [without(batch) if index % 2 else batch for index, batch in enumerate(data.batches(number))]

        return dataclasses.replace(data, batches=batches)

    patch.setattr(loop, "load_dataset", load_without)


def job(rank: int, corpus: Path, folder: Path) -> dict[str, str]:
    found = {}
    for name, (change, kind, _) in FAULTS.items():
        config = config_of(corpus, folder / name, "blockwise", steps=3, parallel=ORDERED)
        with pytest.MonkeyPatch.context() as patch:
            kept = change(rank, config, patch)
            with pytest.raises(kind) as error:
                train(config, progress=False)
        del kept
        found[name] = str(error.value)
    with pytest.MonkeyPatch.context() as patch:
        take_targets_away(patch)
        train(config_of(corpus, folder / "targets", "blockwise", steps=3, parallel=ORDERED), progress=False)
    found["memory"] = run_out_of_memory(rank, config_of(corpus, folder / "memory", "bf16", steps=3, parallel=ORDERED))
    return found


def run_out_of_memory(rank: int, config: TrainConfig) -> str:
    """The error that each rank ends with; no rank can go on after it."""

    def fail(row: Any) -> None:
        if rank and row.step == 2:
            raise torch.OutOfMemoryError("CUDA out of memory (injected)")

    with pytest.raises(RuntimeError) as error:
        train(config, progress=False, on_step=fail)
    return type(error.value).__name__


@pytest.fixture(scope="module")
def ranks(corpus: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[dict[str, str]]]:
    folder = tmp_path_factory.mktemp("ranks")
    return folder, run_ranks(job, 2, corpus, folder)


@pytest.mark.parametrize("name", FAULTS)
def test_what_is_wrong_on_one_rank_is_said_on_all(name: str, ranks: tuple[Path, list[dict[str, str]]]) -> None:
    one, other = (found[name] for found in ranks[1])
    assert one == other
    pytest.raises(AssertionError, match=FAULTS[name][2]).matches(AssertionError(one))


def test_a_rank_without_targets_changes_no_bit(
    corpus: Path, ranks: tuple[Path, list[dict[str, str]]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    take_targets_away(monkeypatch)
    train(config_of(corpus, tmp_path / "one", "blockwise", steps=3), progress=False)
    assert summary(ranks[0] / "targets") == summary(tmp_path / "one")


def test_a_rank_out_of_memory_ends_all(ranks: tuple[Path, list[dict[str, str]]]) -> None:
    folder, found = ranks
    assert [each["memory"] for each in found] == ["RuntimeError", "OutOfMemoryError"]  # gloo's own, of the connection
    assert [row.step for row in read_metrics(folder / "memory" / METRICS_FILE)] == [1, 2]
