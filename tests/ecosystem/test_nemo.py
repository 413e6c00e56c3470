"""octavo inside NeMo AutoModel's recipe: the bits of plain torch, checkpoints, a kill, refusals."""

import importlib.util
import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch

import octavo
from octavo.errors import BackendError
from octavo.testing import assert_bitwise
from tests.ecosystem.cases import cases
from tests.ecosystem.launched import ROOT, finish, import_again, kill_a_rank, launch
from tests.ecosystem.plain_run import STEPS, Case
from tests.forks import PRELOADED
from tests.ranks import run_ranks

pytestmark = [
    pytest.mark.ecosystem,
    pytest.mark.filterwarnings("ignore"),
    pytest.mark.skipif(importlib.util.find_spec("nemo_automodel") is None, reason="needs ecosystem/nemo.txt"),
]

# Stage 3 is FSDP2, which one process runs without, stage 0 DDP; dtype says where updates are summed: in bf16 weights by
# torch's AdamW, in fp32 masters by octavo's.
FSDP = [{"stage": 3, "dtype": dtype} for dtype in ("bf16", "fp32")]
ALONE = cases(1, Case, *FSDP)
TOGETHER = [
    *cases(2, Case, *FSDP, {"stage": 0, "dtype": "bf16"}),
    Case(3, "delayed-step", "bf16", 4),
    Case(3, "delayed-recent", "bf16", 1, resumed=True),
    Case(0, "blockwise", "bf16", 4),
]


@pytest.fixture(scope="module")
def of_one_rank(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    return shown_by(1, ALONE, tmp_path_factory)[0]


@pytest.fixture(scope="module")
def of_two_ranks(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    return shown_by(2, TOGETHER, tmp_path_factory)


def shown_by(world_size: int, shown: list[Case], folders: pytest.TempPathFactory) -> list[dict[str, Any]]:
    from tests.ecosystem.nemo_ranks import ranks

    if ranks.__module__ not in PRELOADED:
        PRELOADED.append(ranks.__module__)  # NeMo takes half a minute to import
    return run_ranks(ranks, world_size, shown, str(folders.mktemp("ranks")))


@pytest.mark.parametrize("index", range(len(ALONE)), ids=map(str, ALONE))
def test_one_process_has_the_bits_of_plain_torch(index: int, of_one_rank: dict[str, Any]) -> None:
    mine, theirs, other_weights = of_one_rank["cases"][index]
    assert mine == theirs
    assert not other_weights
    assert mine[STEPS - 1] < mine[0] - 0.5


@pytest.mark.parametrize("index", range(len(TOGETHER)), ids=map(str, TOGETHER))
def test_two_ranks_have_the_bits_of_plain_torch(index: int, of_two_ranks: list[dict[str, Any]]) -> None:
    for results in of_two_ranks:
        mine, theirs, other_weights = results["cases"][index]
        assert mine == theirs
        assert not other_weights
        assert mine[STEPS - 1] < mine[0] - 0.5


def test_random_weights_are_those_that_nemo_makes_without_octavo(
    of_one_rank: dict[str, Any], of_two_ranks: list[dict[str, Any]]
) -> None:
    for results in (of_one_rank, *of_two_ranks):
        ours, theirs = results["initial"]
        assert list(ours) == list(theirs)
        for name, weight in theirs.items():
            assert_bitwise(ours[name], weight)


def test_recomputed_activations_change_no_bit(of_one_rank: dict[str, Any], of_two_ranks: list[dict[str, Any]]) -> None:
    for results in (of_one_rank, *of_two_ranks):
        with_it, without = results["recomputed"]
        assert with_it == without and len(with_it) == 5


def test_nemo_goes_on_without_octavo(of_one_rank: dict[str, Any]) -> None:
    found = of_one_rank["leaving"]
    assert sorted(found["losses"]) == list(range(STEPS))
    assert not found["is_octavos"]
    ours, theirs = found["keys"]
    assert ours == theirs
    assert sorted(ours) == sorted(found["exported"][0]) == sorted(found["exported"][1])
    assert found["state"] == {"fp8_amax_history", "fp8_quant_scale"}


def test_a_checkpoint_is_of_bf16_weights_and_codes_are_theirs(of_one_rank: dict[str, Any]) -> None:
    found = of_one_rank["leaving"]
    for exported, weights in zip(found["exported"], found["weights"], strict=True):
        for name, weight in weights.items():
            assert_bitwise(exported[name], weight)
    for name, weight in found["exported"][1].items():
        assert weight.dtype == torch.bfloat16
        assert_bitwise(found["loaded"][name], weight)
    assert len(found["codes"]) == 2
    for name, codes in found["codes"].items():
        wanted = octavo.quantize(found["exported"][1][f"{name}.weight"], octavo.get_recipe("blockwise").weight)
        assert_bitwise(codes.qdata.view(torch.uint8), wanted.qdata.view(torch.uint8))
        assert_bitwise(codes.scale, wanted.scale)


ENGINES = "ConfigError: octavo's linears run under NeMo's FSDP2 and DDP, got "


@pytest.mark.parametrize(
    ("mistake", "words"),
    [
        ("torchao", r"ConfigError: .*one FP8 backend, got octavo's .* and torchao \(model.layers.0.*a Float8Linear\)"),
        ("lora", "ConfigError: model.layers.0.* has NeMo's adapters already .*train without peft"),
        ("no model of NeMo's", "ConfigError: delayed scaling has state, .*a Sequential .*NeMoAutoModelForCausalLM"),
        ("ignore", "RecipeError: ignore names no linear of this model: 'wq'"),
        ("selective", f"{ENGINES}selective activation checkpointing"),
        ("no state", "CheckpointError: .*epoch_0_step_1 has no state of delayed scaling; .*fp8_state=False"),
    ],
)
def test_a_mistake_is_said_in_one_line(mistake: str, words: str, of_one_rank: dict[str, Any]) -> None:
    assert re.match(words, of_one_rank["said"][mistake]), of_one_rank["said"][mistake]


@pytest.mark.parametrize(
    ("mistake", "words"),
    [
        ("tp", f"{ENGINES}tp_size=2, .*turn that off"),
        ("pp", f"{ENGINES}pp_size=2, .*turn that off"),
        ("megatron", f"{ENGINES}Megatron-FSDP, .*turn that off"),
        ("sharded", "ConfigError: .*is sharded already .*call octavo.convert first, then .*fully_shard"),
    ],
)
def test_a_mistake_of_two_ranks_is_said_in_one_line(mistake: str, words: str, of_two_ranks: list[Any]) -> None:
    for results in of_two_ranks:
        assert re.match(words, results["said"][mistake]), results["said"][mistake]


def test_a_checkpoint_without_state_is_taken_if_that_is_asked_for(of_one_rank: dict[str, Any]) -> None:
    assert sorted(of_one_rank["without_state"]) == [2, 3]


@pytest.mark.parametrize(("version", "words"), [("0.6.2", "too old"), (None, "not installed")])
def test_another_nemo_is_refused(version: str | None, words: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(BackendError, match=rf"octavo.integrations.nemo: nemo-automodel .*{words}; .*automodel 0\.7\.0"):
        import_again("nemo", "nemo_automodel.components.distributed.config", version, monkeypatch)


def test_a_newer_nemo_is_used_with_a_warning(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.warns(UserWarning, match=r"nemo-automodel 0\.8\.0 is newer than what octavo was tested with"):
        import_again("nemo", "nemo_automodel.components.distributed.config", "0.8.0", monkeypatch)


def test_a_killed_rank_ends_the_run_which_goes_on_from_its_checkpoint(
    of_two_ranks: list[dict[str, Any]], tmp_path: Path
) -> None:
    """The example by NeMo's command, under torchrun, beside a run of it without a kill."""
    from tests.ecosystem.nemo_ranks import EXAMPLE, example_options

    whole, latest = of_two_ranks[0]["example"], tmp_path / "LATEST"

    def start(steps: int) -> Any:
        script = (ROOT / "tests" / "ecosystem" / "nemo_cpu.py", EXAMPLE, *example_options(tmp_path, steps))
        return launch("-m", "torch.distributed.run", "--nproc-per-node", "2", *script)

    def saved() -> int:
        return int(latest.resolve().name.rpartition("_")[2]) if latest.exists() else 0

    kill_a_rank(start(1000), lambda: saved() > 2)
    begun = saved() + 1
    assert begun + 2 < len(whole), "a step took too little time"
    finish(start(len(whole)))
    rows = map(json.loads, (tmp_path / "training.jsonl").read_text().splitlines())
    assert {row["step"]: row["loss"] for row in rows} == {step: whole[step] for step in range(begun, len(whole))}
