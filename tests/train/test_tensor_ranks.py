"""A run whose linears are cut among ranks: its loss, its bits from run to run, and how it goes on in other layouts."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import octavo
from octavo.distributed.mesh import Mesh
from octavo.errors import NonFiniteError, OctavoError
from octavo.parallel import parallelize
from octavo.parallel.checkpoint import load_state
from octavo.run.checkpoint_store import SHARDS as SHARDS_DIR
from octavo.run.metrics import METRICS_FILE, read_metrics
from octavo.run.optimizer import MasterAdamW
from octavo.train import train
from octavo.train.build import build_model
from octavo.train.config import TrainConfig
from octavo.train.data import make_batch
from octavo.train.memory_plan import plan_memory
from octavo.train.statistics import STATISTICS_FILE, read_statistics
from octavo.train.step import train_step
from tests.ranks import run_ranks

from .conftest import build_config
from .test_ranks import summary

SIZES = {
    "hidden_size": 256, "intermediate_size": 256, "num_hidden_layers": 1, "num_attention_heads": 2,
    "num_key_value_heads": 2, "head_dim": 128, "tie_word_embeddings": False,
}  # fmt: skip
CUT = {"tensor_parallel_degree": 2, "tensor_parallel_mode": "gather", "timeout_s": 60}
REDUCE = {**CUT, "tensor_parallel_mode": "reduce"}
OWN_TOKENS = {"sequence_parallel": True}
STATISTICS = {"every": 4, "layers": ["layers.0.mlp.down_proj", "layers.0.self_attn.qkv_proj"]}
COMPACT = {"state_dtype": "fp8"}
STEPS = 20
RECIPES = ("blockwise", "rowwise")
REFUSED: dict[str, dict[str, Any]] = {
    "3 heads": {"model": {"num_attention_heads": 3, "num_key_value_heads": 3}},
    "scales": {"optimizer": COMPACT, "parallel": REDUCE, "recipe": "bf16", "model": {"intermediate_size": 320}},
    "delayed": {"recipe": "delayed"},
    "shared rows": {"recipe": "rowwise", "model": {"num_key_value_heads": 1}},
}


def config_of(
    corpus: Path, folder: Path, name: str, recipe: str = "blockwise", steps: int = 4, **sections: Any
) -> TrainConfig:
    """Nothing in it depends on run.steps."""
    sizes = {**SIZES, **sections.pop("model", {})}
    places = {"steps": steps, "dir": folder / name, "device": "cpu"}
    fixed: dict[str, Any] = {
        "data": {"batch_size": 2, "micro_batch_size": 2, "seq_len": 16},
        "schedule": {"warmup_steps": 0, "kind": "constant"},
        "checkpoint": {"every": 0},
        "metrics": {"eval_every": 10, "eval_tokens": 32},
        "optimizer": {"lr": 0.0003},
    }
    return build_config(
        corpus, folder, name, model=sizes, precision={"recipe": recipe}, run=places, **{**fixed, **sections}
    )


def job(rank: int, corpus: str, folder: str) -> dict[str, str]:
    def run(name: str, **settings: Any) -> None:
        settings = {"parallel": CUT, **settings}
        train(config_of(Path(corpus), Path(folder), name, **settings), progress=False)

    for recipe in RECIPES:
        run(recipe, recipe=recipe, steps=STEPS)
    run("again", steps=4)
    run("reduce", parallel=REDUCE, statistics=STATISTICS)
    run("gather", statistics=STATISTICS)
    run("chain", optimizer=COMPACT, steps=2)
    for name, mode in (("own tokens", CUT), ("own tokens reduce", REDUCE)):
        run(name, parallel=mode | OWN_TOKENS, steps=3)
        run(name, parallel=mode, steps=4)  # goes on with all tokens on every rank
    for name, steps in (("delayed", 2), ("delayed again", 3)):
        run(name, recipe="delayed", parallel=REDUCE, steps=steps)
    found = {}
    for name, settings in REFUSED.items():
        with pytest.raises(OctavoError) as error:
            run(f"refused {name}", steps=1, **settings)
        assert not Path(folder, f"refused {name}", METRICS_FILE).exists()  # nothing was written yet
        found[name] = f"{type(error.value).__name__}: {error.value}"
    found["infinite"] = hidden_infinity(config_of(Path(corpus), Path(folder), "infinite", parallel=CUT))
    return found


def hidden_infinity(config: TrainConfig) -> str:
    """The error of a step in which one rank's codes hide an infinite weight of its slice."""
    mesh = Mesh.from_config(config.parallel, "cpu")
    model = build_model(config, 280, None, torch.device("cpu"))
    parallelize(model, mesh, mode="gather")
    optimizer = MasterAdamW(model, config.optimizer)
    if not mesh.is_first:
        with torch.no_grad():
            model.layers[0].mlp.down_proj.weight[0, 0] = torch.inf  # type: ignore[union-attr, index]
        model.mark_weights_updated()
    batch = make_batch([np.arange(17)], None)
    with pytest.raises(NonFiniteError) as error:
        train_step(model, optimizer, [batch], lr=0.0, max_grad_norm=1.0, step=1, mesh=mesh)
    return str(error.value)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("tensor")


@pytest.fixture(scope="module")
def ranks(corpus: Path, folder: Path) -> list[dict[str, str]]:
    return run_ranks(job, 2, str(corpus), str(folder))


def one_process(corpus: Path, folder: Path, recipe: str, steps: int = STEPS, **settings: Any) -> Path:
    name = " ".join(["one", recipe, str(steps), *settings])  # a run of another test would go on
    train(config_of(corpus, folder, name, recipe, steps, **settings), progress=False)
    return folder / name


@pytest.mark.parametrize("recipe", RECIPES)
def test_a_run_begins_with_the_bits_of_one_process_and_stays_near(
    recipe: str, corpus: Path, folder: Path, ranks: list[dict[str, str]]
) -> None:
    own, one = (read_metrics(at / "metrics.jsonl") for at in (folder / recipe, one_process(corpus, folder, recipe)))
    assert own[0].loss == one[0].loss
    assert own[0].grad_norm == pytest.approx(one[0].grad_norm, rel=1e-2)
    assert [row.loss for row in own] == pytest.approx([row.loss for row in one], rel=0.02)
    assert own[-1].val_loss == pytest.approx(one[-1].val_loss, rel=0.02)
    assert own[-1].loss < 0.8 * own[0].loss


def test_a_run_repeats_itself(folder: Path, ranks: list[dict[str, str]]) -> None:
    first, again = (summary(folder / name) for name in ("blockwise", "again"))
    assert [row[:4] for row in again] == [row[:4] for row in first[: len(again)]]


def test_a_run_of_own_tokens_stays_near_and_goes_on_without(folder: Path, ranks: list[dict[str, str]]) -> None:
    for name, without in (("own tokens", "blockwise"), ("own tokens reduce", "reduce")):
        own, plain = (read_metrics(folder / run / METRICS_FILE) for run in (name, without))
        assert [row.step for row in own] == [1, 2, 3, 4]
        assert own[0].loss == plain[0].loss  # two ranks' partial sums have one order
        for key in ("loss", "grad_norm"):
            found = [[getattr(row, key) for row in rows[:4]] for rows in (own, plain)]
            assert found[0] == pytest.approx(found[1], rel=0.01)


def test_statistics_are_of_whole_tensors(corpus: Path, folder: Path, ranks: list[dict[str, str]]) -> None:
    """Of the run's first steps; codes of weights and activations are one process's, but not those of later weights."""
    one = statistics_of(one_process(corpus, folder, "blockwise", steps=4, statistics=STATISTICS))
    for name, missing in (("gather", ("dgrad", "dgrad")), ("reduce", ("dgrad", "output"))):
        own = statistics_of(folder / name)
        qkv, down = reversed(STATISTICS["layers"])  # type: ignore[call-overload]
        assert one.keys() - own.keys() == {(qkv, missing[0]), (down, missing[1])}
        for key, row in own.items():
            for stat in ("l1_norm", "l2_norm", "cur_amax", "std"):
                assert row[stat] == pytest.approx(one[key][stat], rel=0.1), (name, key, stat)


def statistics_of(run: Path) -> dict[tuple[str, str], dict[str, float]]:
    return {(row["layer"], row["tensor"]): row for row in read_statistics(run / STATISTICS_FILE)}


def test_a_checkpoint_is_of_the_whole_model(folder: Path, ranks: list[dict[str, str]]) -> None:
    for run in (folder / "blockwise", folder / "reduce"):  # rows; rows and columns
        checkpoint = sorted((run / "checkpoints").glob("step-*"))[-1]
        model, state = octavo.load_model(checkpoint / "model", trainable=True), load_state(checkpoint / SHARDS_DIR)
        for name, parameter in model.named_parameters():
            assert torch.equal(parameter, state[f"master.{name}"].bfloat16()), name
            assert state[f"exp_avg.{name}"].shape == parameter.shape


def test_a_run_goes_on_in_one_process_and_cut_again(corpus: Path, folder: Path, ranks: list[dict[str, str]]) -> None:
    """In `reduce` columns are cut too; FP8 moments go along with their scales, and amax histories with both."""
    settings: dict[str, Any] = {"optimizer": COMPACT}
    assert train(config_of(corpus, folder, "chain", steps=3, **settings), progress=False).first_step == 2
    run_ranks(continue_job, 2, str(corpus), str(folder))
    one = read_metrics(one_process(corpus, folder, "blockwise", 5, **settings) / "metrics.jsonl")
    own = read_metrics(folder / "chain" / "metrics.jsonl")
    assert [row.step for row in own] == [1, 2, 3, 4, 5]
    delayed, again = (summary(folder / name) for name in ("delayed", "delayed again"))
    assert [row[:4] for row in delayed] == [row[:4] for row in again]
    assert [row.loss for row in own] == pytest.approx([row.loss for row in one], rel=0.02)


def continue_job(rank: int, corpus: str, folder: str) -> None:
    config = config_of(Path(corpus), Path(folder), "chain", steps=5, optimizer=COMPACT, parallel=REDUCE)
    assert train(config, progress=False).first_step == 3
    config = config_of(Path(corpus), Path(folder), "delayed", "delayed", steps=3, parallel=REDUCE)
    assert train(config, progress=False).first_step == 2


def test_an_infinite_slice_ends_the_step_on_all_ranks(ranks: list[dict[str, str]]) -> None:
    for found in ranks:
        assert "rank 1: parameter layers.0.mlp.down_proj.weight" in found["infinite"]


def test_what_cannot_be_cut_is_refused(ranks: list[dict[str, str]]) -> None:
    for found in ranks:
        assert found["3 heads"].startswith("ShapeError: tensor-parallel ranks must divide the heads")
        assert found["scales"].startswith("ConfigError: 8-bit moments have a scale for each 128 neighbouring elements")
        assert "layers.0.mlp.down_proj.weight" in found["scales"]
        assert found["delayed"].startswith("RecipeError: recipe 'delayed' has one scale for a whole weight")
        assert found["shared rows"].startswith("ConfigError: training with more tensor-parallel ranks than KV heads")
        assert "no_grad" not in found["shared rows"]  # which no training can take


WIDE = {"hidden_size": 512, "intermediate_size": 512, "num_attention_heads": 4, "num_key_value_heads": 4}
EXPERTS = {"family": "qwen3_moe", "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 128}
TWO = {"batch_size": 2, "micro_batch_size": 1, "seq_len": 16}  # micro-batches a step
SHARDED: dict[str, dict[str, Any]] = {
    "dense": {"model": WIDE, "checkpoint": {"every": 0, "async_mode": "async"}, "data": TWO},
    "experts": {"model": EXPERTS, "statistics": STATISTICS | {"layers": []}, "data": TWO},
}
SHARDS = {"data_parallel_shard_degree": 2, "reduction": "ordered", "all_gather_dtype": "fp8"}


def layout_job(rank: int, corpus: str, folder: str, prefix: str, steps: int, parallel: dict[str, object]) -> None:
    for name, settings in SHARDED.items():
        own = f"{prefix} {name}"
        train(config_of(Path(corpus), Path(folder), own, steps=steps, parallel=parallel, **settings), progress=False)


@pytest.mark.slow
def test_cut_and_sharded_has_the_bits_of_cut_alone_and_goes_on_so(corpus: Path, folder: Path) -> None:
    """Two steps on four ranks, which share slices and send codes of them, then two on two ranks."""
    places = str(corpus), str(folder)
    run_ranks(layout_job, 4, *places, "sharded", 2, CUT | SHARDS)
    run_ranks(layout_job, 2, *places, "sharded", 4, CUT)
    run_ranks(layout_job, 2, *places, "cut", 4, CUT)
    for name in SHARDED:
        sharded, cut = (folder / f"{prefix} {name}" for prefix in ("sharded", "cut"))
        assert [row[:4] for row in summary(sharded)] == [row[:4] for row in summary(cut)]
        assert routers_of(sharded) == [pytest.approx(row, rel=1e-12) for row in routers_of(cut)]
    one = one_process(corpus, folder, "blockwise", steps=4, **SHARDED["experts"])
    own, theirs = (read_metrics(at / "metrics.jsonl")[0] for at in (folder / "cut experts", one))
    assert own.loss == theirs.loss
    assert routers_of(folder / "cut experts")[0] == pytest.approx(routers_of(one)[0], rel=1e-12)


def routers_of(run: Path) -> list[dict[str, float]]:
    rows = (row.as_dict() for row in read_metrics(run / "metrics.jsonl"))
    return [{key: value for key, value in row.items() if key.startswith("router_")} for row in rows]


@pytest.mark.parametrize("name", ["3 heads", "delayed", "shared rows"])
def test_a_plan_refuses_what_its_run_refuses(name: str, corpus: Path, tmp_path: Path) -> None:
    settings: dict[str, Any] = {"parallel": CUT, **REFUSED[name]}
    with pytest.raises(OctavoError):
        plan_memory(config_of(corpus, tmp_path, "plan", **settings))
