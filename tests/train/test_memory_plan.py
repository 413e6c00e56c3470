"""The predicted memory: activations against what autograd really saves, sums against the sizes of real tensors."""

import re
import sys
from pathlib import Path

import pytest
import torch

from octavo import cli
from octavo.config import load_config
from octavo.errors import CheckpointError, ConfigError
from octavo.models import save_model
from octavo.nn import Linear
from octavo.run.optimizer import MasterAdamW
from octavo.train.build import build_model
from octavo.train.config import TrainConfig
from octavo.train.data import Batch
from octavo.train.memory_plan import ACTIVATIONS, GRADIENTS, STATE, TRANSIENT, plan_memory
from octavo.train.memory_report import observe_memory, print_plan, saved_bytes
from tests.assertions import assert_raises
from tests.conftest import RunOctavo

from .conftest import MakeConfig

CONFIGS = Path(__file__).parents[2] / "configs"
VOCAB_SIZE, SEQ_LEN, BATCH_SIZE = 300, 128, 2
SIZES = {"hidden_size": 256, "intermediate_size": 384, "num_attention_heads": 4, "num_key_value_heads": 2}


def configure(make_config: MakeConfig, **sections: dict[str, object]) -> TrainConfig:
    data = {"vocab_size": VOCAB_SIZE, "seq_len": SEQ_LEN, "batch_size": BATCH_SIZE, "micro_batch_size": 0}
    return make_config(
        **{"model": {**SIZES, **sections.pop("model", {})}, "data": {**data, **sections.pop("data", {})}, **sections}
    )


def make_batch() -> Batch:
    num_tokens = SEQ_LEN * BATCH_SIZE
    ids = torch.randint(VOCAB_SIZE, (num_tokens,), generator=torch.Generator().manual_seed(0))
    return Batch(ids, ids.roll(-1), torch.arange(0, num_tokens + 1, SEQ_LEN), num_tokens)


def observed_and_predicted(config: TrainConfig) -> tuple[int, int]:
    model = build_model(config, VOCAB_SIZE, 0, torch.device("cpu"))
    return saved_bytes(model, make_batch()), plan_memory(config).total(ACTIVATIONS)


@pytest.mark.parametrize("family", ["llama", "qwen3"])
@pytest.mark.parametrize("recipe", ["bf16", "delayed", "tensorwise", "rowwise", "blockwise", "mxfp8"])
def test_activations_are_predicted(make_config: MakeConfig, recipe: str, family: str) -> None:
    observed, predicted = observed_and_predicted(
        configure(make_config, model={"family": family}, precision={"recipe": recipe})
    )
    assert predicted == pytest.approx(observed, rel=0.1)


@pytest.mark.parametrize(
    "sections",
    [
        {"precision": {"saved_activations": "bf16"}},
        {"precision": {"high_precision_gemms": ("grad_weight",)}},
        {"precision": {"backward": "bf16"}},
        {"precision": {"num_layers_at_start_in_bf16": 1}},
        {"precision": {"modules": {"down_proj": "rowwise"}}},
        {"precision": {"recipe": "bf16", "dtype": "fp32"}},
        {"run": {"recompute": "full"}},
        {"run": {"recompute": "full", "recompute_num_layers": 1}},
        {"model": {"intermediate_size": 200}},  # blocks end with ragged parts, so nothing is fused there
        {"model": {"tie_word_embeddings": False}},
    ],
    ids=str,
)
def test_activations_are_predicted_whatever_is_kept(make_config: MakeConfig, sections: dict) -> None:
    observed, predicted = observed_and_predicted(configure(make_config, **sections))
    assert predicted == pytest.approx(observed, rel=0.1)


@pytest.mark.parametrize(("state", "master"), [("fp32", "fp32"), ("bf16", "remainder"), ("fp8", "none")])
def test_state_is_predicted(make_config: MakeConfig, state: str, master: str) -> None:
    config = configure(make_config, optimizer={"state_dtype": state, "master_weights": master})
    model = build_model(config, VOCAB_SIZE, 0, torch.device("cpu"))
    adamw = MasterAdamW(model, config.optimizer)
    for param in model.parameters():
        param.grad = torch.ones_like(param)
    adamw.accumulate_gradients()
    adamw.step(lr=1e-3)
    # where there is no master, a checkpoint of the state holds the parameters too
    own = [t for key, t in adamw.state_dict().items() if t.dim() > 0 and not key.startswith("param.")]
    kept = sum(t.numel() * t.element_size() for t in own)
    plan = plan_memory(config)
    assert plan.total(STATE, "master weights", "moments") == pytest.approx(kept, rel=0.02)
    assert plan.total(STATE, "parameters") == sum(p.numel() * p.element_size() for p in model.parameters())


def test_weight_codes_are_predicted(make_config: MakeConfig) -> None:
    for recipe in ("rowwise", "blockwise"):
        config = configure(make_config, precision={"recipe": recipe})
        model = build_model(config, VOCAB_SIZE, 0, torch.device("cpu"))
        linears = [module for module in model.layers.modules() if isinstance(module, Linear)]
        made = [way(m.recipe) for m in linears for way in (m.forward_operands, m.backward_operands)]
        held = sum(q.qdata.numel() + 4 * q.scale.numel() for operands in made for _, q in operands)
        assert plan_memory(config).total(STATE, "weight codes") == held


def test_choices_that_save_memory_do_so_in_the_plan(make_config: MakeConfig) -> None:
    def peak(**sections: dict[str, object]) -> int:
        return plan_memory(configure(make_config, **sections)).peak_bytes

    assert peak(optimizer={"state_dtype": "fp8", "master_weights": "remainder"}) < peak()
    assert peak(data={"seq_len": 2048, "micro_batch_size": 1}) < peak(data={"seq_len": 2048})
    deep, long = {"num_hidden_layers": 8}, {"seq_len": 2048}
    assert peak(model=deep, data=long, run={"recompute": "full"}) < peak(model=deep, data=long)
    assert peak(model=deep, data=long) < peak(model=deep, data=long, precision={"recipe": "bf16"})


def test_sums_of_micro_batches(make_config: MakeConfig) -> None:
    compact = {"state_dtype": "fp8", "master_weights": "remainder"}
    one = plan_memory(configure(make_config, optimizer=compact))
    two = plan_memory(configure(make_config, optimizer=compact, data={"micro_batch_size": 1}))
    assert one.total(GRADIENTS, "sums of micro-batches") == 0
    assert two.total(GRADIENTS, "sums of micro-batches") == 4 * two.num_params
    assert (one.num_tokens, two.num_tokens) == (256, 128)
    assert one.total(TRANSIENT, "optimizer") == 0


def spread(shards: int, **parallel: object) -> dict[str, dict[str, object]]:
    """Sections of a run whose step is one micro-batch for each of four ranks."""
    degrees = {"data_parallel_shard_degree": shards, **parallel}
    return {"parallel": degrees, "data": {"batch_size": 4, "micro_batch_size": 1}}


@pytest.mark.parametrize("optimizer", [{}, {"state_dtype": "fp8", "master_weights": "remainder"}], ids=["fp32", "fp8"])
def test_a_rank_keeps_its_share(make_config: MakeConfig, optimizer: dict) -> None:
    one, two, four = (plan_memory(configure(make_config, optimizer=optimizer, **spread(n))) for n in (1, 2, 4))
    assert [plan.num_ranks for plan in (one, two, four)] == [1, 2, 4]
    assert [plan.num_micro_batches for plan in (one, two, four)] == [4, 2, 1]
    rows = ("parameters", "master weights", "moments")
    for plan, share in ((two, 2), (four, 4)):
        # fp32 shards are their own masters
        own = one.total(STATE, *rows) - (0 if optimizer else 2 * one.num_params)
        assert plan.total(STATE, *rows) == pytest.approx(own / share, rel=0.001)
        assert plan.total(STATE, "weight codes") == 0 < one.total(STATE, "weight codes")
        assert plan.total(ACTIVATIONS) == one.total(ACTIVATIONS)
    assert four.total(GRADIENTS, "sums of micro-batches") == 0 < one.total(GRADIENTS, "sums of micro-batches")


def test_replicas_keep_the_share_of_their_shards(make_config: MakeConfig) -> None:
    hybrid = plan_memory(configure(make_config, **spread(2, data_parallel_replicate_degree=2)))
    two = plan_memory(configure(make_config, **spread(2)))
    assert (hybrid.num_ranks, hybrid.total(STATE)) == (4, two.total(STATE))
    assert (hybrid.num_micro_batches, two.num_micro_batches) == (1, 2)


def test_recomputing_and_shards_take_memory_from_the_peak(make_config: MakeConfig) -> None:
    long = {"seq_len": 2048, "batch_size": 4, "micro_batch_size": 1}

    def peak(shards: int, **run: object) -> int:
        config = configure(
            make_config, **{**spread(shards), "data": long, "run": run, "model": {"num_hidden_layers": 8}}
        )
        return plan_memory(config).peak_bytes

    assert peak(4) < peak(2) < peak(1)
    assert peak(2, recompute="full") < peak(2)


def test_torchruns_ranks_are_those_of_the_plan(make_config: MakeConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    all_left, two = configure(make_config, **spread(-1)), configure(make_config, **spread(2))
    assert plan_memory(all_left).num_ranks == 1
    for name, value in {"RANK": "1", "LOCAL_RANK": "1", "WORLD_SIZE": "4", "LOCAL_WORLD_SIZE": "4"}.items():
        monkeypatch.setenv(name, value)
    assert plan_memory(all_left).num_ranks == 4
    assert_raises(ConfigError, "data_parallel_shard_degree=2 must be the number of ranks, got 4", plan_memory, two)


def test_what_a_sharded_run_refuses_its_plan_refuses(make_config: MakeConfig, capsys) -> None:
    uneven = configure(make_config, **spread(3))
    assert_raises(ConfigError, "must be a multiple of the ranks, got 4 for 3", plan_memory, uneven)
    two = configure(make_config, **spread(2))
    assert_raises(ConfigError, "--observe runs two steps in one process", print_plan, two, observe=True)
    print_plan(two, observe=False)
    assert "on each of 2 ranks" in " ".join(capsys.readouterr().out.split())


def test_a_runs_folder_is_its_newest_model(make_config: MakeConfig, tmp_path: Path) -> None:
    model, step = build_model(configure(make_config), VOCAB_SIZE, 0, torch.device("cpu")), tmp_path / "step-00000002"
    save_model(model, step / "model")
    (tmp_path / "LATEST").write_text(f"{step.name}\n")
    of_run, of_model = (plan_memory(configure(make_config, model={"path": str(p)})) for p in (tmp_path, step / "model"))
    assert of_run == of_model
    missing = configure(make_config, model={"path": str(tmp_path / "none")})
    assert_raises(CheckpointError, "no config.json there", plan_memory, missing)


def test_command_prints_the_plan_and_trains_nothing(make_config, monkeypatch, capsys):
    config = configure(make_config)
    path = config.run.dir.parent / "config.toml"
    data = f"path = '{config.data.path}'\ncache_dir = '{config.data.cache_dir}'\nseq_len = 32\nvocab_size = 280\n"
    path.write_text(f"[data]\n{data}batch_size = 2\n[run]\ndir = '{config.run.dir}'\ndevice = 'cpu'\n")
    for flags in (["--plan"], ["--plan", "--observe"]):
        monkeypatch.setattr(sys, "argv", ["octavo", "train", str(path), *flags])
        with pytest.raises(SystemExit) as ended:
            cli.main()
        assert not ended.value.code
        said = capsys.readouterr().out
        assert "master weights" in said
        assert ("observed MiB" in said) == ("--observe" in flags)
    assert "a CPU's peak is not measured" in said
    assert not config.run.dir.exists()


@pytest.mark.parametrize(
    ("name", "num_ranks", "num_params"),
    [("train_8b_8gpus", 8, 8.03e9), ("train_70b_8gpus", 8, 70.55e9), ("train_70b_64gpus", 64, 70.55e9)],
)
def test_configs_of_many_gpus_have_the_plan_that_they_tell(
    name: str, num_ranks: int, num_params: float, run_octavo: RunOctavo
) -> None:
    path = CONFIGS / f"{name}.toml"
    ended = run_octavo("train", path, "--plan")
    assert ended.code == 0 and f"on each of {num_ranks} ranks" in " ".join(ended.out.split()), ended.err
    plan = plan_memory(load_config(TrainConfig, path))
    assert plan.num_params == pytest.approx(num_params, rel=1e-3)
    told = re.search(r"--plan +# (\d+) GiB a rank", path.read_text(encoding="utf-8"))
    assert told is not None and plan.peak_bytes / 2**30 == pytest.approx(int(told[1]), abs=0.5)


@pytest.mark.gpu
@pytest.mark.parametrize("recipe", ["bf16", "blockwise"])
def test_peak_on_a_gpu_is_near_the_plan(make_config: MakeConfig, recipe: str) -> None:
    config = configure(
        make_config,
        model={"hidden_size": 1024, "intermediate_size": 3072, "num_attention_heads": 16, "num_hidden_layers": 4},
        data={"seq_len": 256, "batch_size": 16},
        precision={"recipe": recipe},
        run={"device": "cuda"},
    )
    plan, seen = plan_memory(config), observe_memory(config)
    assert plan.total(ACTIVATIONS) == pytest.approx(seen.activation_bytes, rel=0.1)
    assert seen.state_bytes is not None
    assert seen.peak_bytes is not None
    assert plan.total(STATE) == pytest.approx(seen.state_bytes, rel=0.1)
    assert plan.peak_bytes == pytest.approx(seen.peak_bytes, rel=0.25)


def test_sequences_longer_than_the_context_are_refused_as_the_run_does(make_config: MakeConfig) -> None:
    config = configure(make_config, model={"max_position_embeddings": SEQ_LEN - 1})
    message = f"data.seq_len={SEQ_LEN} is more than the model's max_position_embeddings={SEQ_LEN - 1}"
    assert_raises(ConfigError, message, plan_memory, config)
    assert_raises(ConfigError, message, build_model, config, VOCAB_SIZE, 0, torch.device("cpu"))
