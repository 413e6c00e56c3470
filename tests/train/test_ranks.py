"""A run on several ranks under torchrun's environment: the bits of one process, resumed on any number of ranks."""

from pathlib import Path
from typing import Any

import pytest

from octavo.errors import ConfigError, DataError
from octavo.run.metrics import read_metrics
from octavo.train import train
from octavo.train.config import TrainConfig
from octavo.train.statistics import STATISTICS_FILE, read_statistics
from tests.ranks import run_ranks

from .conftest import build_config

ORDERED = {"reduction": "ordered", "timeout_s": 60}
RECIPES = ("blockwise", "delayed")
STATISTICS = {"every": 2, "tensors": ["activation", "weight", "gradient", "wgrad"]}
COMPACT = {"state_dtype": "fp8"}
EXPERTS = {"family": "qwen3_moe", "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
SIZES = {"hidden_size": 128, "intermediate_size": 256}  # whole blocks on each of two ranks


def config_of(corpus: Path, folder: Path, recipe: str, steps: int = 6, **sections: Any) -> TrainConfig:
    data = {"batch_size": 8, "micro_batch_size": 2}  # four micro-batches a step
    run = {"steps": steps, "dir": folder, "device": "cpu"}
    schedule = {"warmup_steps": 2, "kind": "constant"}  # which does not depend on run.steps
    precision = {"recipe": recipe}
    return build_config(
        corpus, folder.parent, folder.name, data=data, run=run, precision=precision, schedule=schedule, **sections
    )


def summary(folder: Path) -> list[list[float | None]]:
    """What must not depend on the clock or on the ranks."""
    return [[r.step, r.loss, r.lr, r.grad_norm, r.val_loss] for r in read_metrics(folder / "metrics.jsonl")]


def job(rank: int, corpus: str, folder: str) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for recipe in RECIPES:
        config = config_of(Path(corpus), Path(folder, recipe), recipe, parallel=ORDERED)
        result = train(config, progress=False)
        found[recipe] = [result.step, len(result.rows), str(result.checkpoint)]
    experts = {"model": EXPERTS, "statistics": STATISTICS}
    config = config_of(Path(corpus), Path(folder, "experts"), "blockwise", steps=3, parallel=ORDERED, **experts)
    train(config, progress=False)
    coded = {**ORDERED, "all_gather_dtype": "fp8"}
    train(config_of(Path(corpus), Path(folder, "coded"), "blockwise", parallel=coded, model=SIZES), progress=False)
    compact = config_of(
        Path(corpus), Path(folder, "compact"), "blockwise", steps=6, parallel=ORDERED, optimizer=COMPACT
    )
    train(compact, progress=False)  # of which one process has made three steps
    half = config_of(Path(corpus), Path(folder, "half"), "blockwise", steps=3, parallel=ORDERED)
    train(half, progress=False)
    found["refused"] = refusals(rank, corpus, folder)
    return found


def refusals(rank: int, corpus: str, folder: str) -> list[str]:
    texts = []
    cases: list[dict[str, Any]] = [
        {"optimizer": {"lr": 0.001 * (rank + 1)}},
        {"parallel": {"data_parallel_shard_degree": 3}},
    ]
    for sections in cases:
        with pytest.raises(ConfigError) as error:
            train(config_of(Path(corpus), Path(folder, "refused"), "bf16", **sections), progress=False)
        texts.append(str(error.value))
    gone = config_of(Path(corpus), Path(folder, "refused"), "bf16")
    gone = gone.model_copy(update={"data": gone.data.model_copy(update={"path": "gone.jsonl"})})
    with pytest.raises(DataError) as missing:
        train(gone, progress=False)
    return [*texts, str(missing.value)]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("ranks")


@pytest.fixture(scope="module", params=[2, pytest.param(4, marks=pytest.mark.largest)])
def ranks(request: pytest.FixtureRequest, corpus: Path, folder: Path) -> tuple[Path, list[dict[str, Any]]]:
    own = folder / f"of-{request.param}"
    own.mkdir()
    train(config_of(corpus, own / "compact", "blockwise", steps=3, optimizer=COMPACT), progress=False)
    return own, run_ranks(job, request.param, str(corpus), str(own))


def one_process(corpus: Path, folder: Path, name: str, recipe: str = "blockwise", **settings: Any) -> Path:
    """The folder of a run that this process makes, once for all tests."""
    own = folder / f"one-{name}"
    if not own.exists():
        train(config_of(corpus, own, recipe, **settings), progress=False)
    return own


@pytest.mark.parametrize("recipe", RECIPES)
def test_a_run_on_ranks_has_the_bits_of_one_process(
    recipe: str, corpus: Path, folder: Path, ranks: tuple[Path, list[dict[str, Any]]]
) -> None:
    own, found = ranks
    one = one_process(corpus, folder, recipe, recipe)
    assert all(each[recipe] == found[0][recipe] for each in found)
    assert summary(own / recipe) == summary(one)
    names = [str(path.relative_to(one)) for path in sorted(one.glob("checkpoints/*/model/*.safetensors"))]
    assert names
    for name in names:
        assert (own / recipe / name).read_bytes() == (one / name).read_bytes(), name


def test_a_run_goes_on_with_another_number_of_ranks(
    corpus: Path, folder: Path, ranks: tuple[Path, list[dict[str, Any]]]
) -> None:
    """Three steps on all ranks, the others in this process."""
    own, _ = ranks
    config = config_of(corpus, own / "half", "blockwise", steps=6)
    train(config, progress=False)
    one = one_process(corpus, folder, "blockwise")
    # the last step's validation of the first half has no counterpart
    assert [row[:4] for row in summary(own / "half")] == [row[:4] for row in summary(one)]


def test_ranks_go_on_with_compact_state_of_one_process(
    corpus: Path, folder: Path, ranks: tuple[Path, list[dict[str, Any]]]
) -> None:
    """bf16 parameters with masters there, fp32 shards that are their own masters here."""
    own, _ = ranks
    one = one_process(corpus, folder, "compact", optimizer=COMPACT)
    assert [row[:4] for row in summary(own / "compact")] == [row[:4] for row in summary(one)]


def test_experts_have_the_bits_of_one_process_and_metrics_and_statistics_of_all_ranks(
    corpus: Path, folder: Path, ranks: tuple[Path, list[dict[str, Any]]]
) -> None:
    own, _ = ranks
    one = one_process(corpus, folder, "experts", steps=3, model=EXPERTS, statistics=STATISTICS)
    assert summary(own / "experts") == summary(one)
    for mine, theirs in zip(*(read_metrics(path / "metrics.jsonl") for path in (own / "experts", one)), strict=True):
        routers = {key: value for key, value in theirs.as_dict().items() if key.startswith("router_")}
        assert len(routers) >= 6
        assert {key: getattr(mine, key) for key in routers} == pytest.approx(routers, rel=1e-12)
    ours, theirs = (
        {(row.pop("step"), row.pop("layer"), row.pop("tensor")): row for row in read_statistics(path / STATISTICS_FILE)}
        for path in (own / "experts", one)
    )
    assert ours.keys() == theirs.keys() and {step for step, *_ in theirs} == {2}
    for key, row in theirs.items():
        assert ours[key] == pytest.approx(row, rel=1e-9), key  # fp64 sums in another order


def test_codes_on_the_wire_change_no_bit(corpus: Path, folder: Path, ranks: tuple[Path, list[dict[str, Any]]]) -> None:
    own, _ = ranks
    one = one_process(corpus, folder, "coded", model=SIZES)
    assert summary(own / "coded") == summary(one)


def test_what_the_ranks_do_not_agree_on_is_refused_everywhere(ranks: tuple[Path, list[dict[str, Any]]]) -> None:
    for found in ranks[1]:
        lr, degrees, data = found["refused"]
        assert "config.optimizer.lr is 0.001 on rank 0 and 0.002 on rank 1" in lr
        assert "must be the number of ranks" in degrees
        assert data.startswith("rank 0: gone.jsonl: no such file")
