"""octavo.amp under ColossalAI's booster: the bits of plain torch, levels, FP8 on the wire, a kill, refusals."""

import importlib.util
import re
import subprocess
from pathlib import Path
from typing import Any

import pytest
import torch

import octavo
from octavo.errors import BackendError
from octavo.testing import assert_bitwise
from tests.ecosystem.cases import cases
from tests.ecosystem.colossalai_ranks import alone, together
from tests.ecosystem.launched import ROOT, goes_on_after_a_kill, import_again, torchrun
from tests.ecosystem.plain_run import Case, make
from tests.ranks import run_ranks

EXAMPLE = ROOT / "examples" / "colossalai" / "train.py"

pytestmark = [
    pytest.mark.ecosystem,
    pytest.mark.timeout(300),
    pytest.mark.filterwarnings("ignore"),
    pytest.mark.skipif(importlib.util.find_spec("colossalai") is None, reason="needs ecosystem/colossalai.txt"),
]


def case(stage: int, recipe: str, accumulation: int, resumed: bool) -> Case:
    """Stage 0 is TorchDDPPlugin. ZeRO's checkpoints have no fp32 masters of bf16 weights, so that a resumed run has
    other bits than one that was not."""
    return Case(stage, recipe, "bf16" if stage and not resumed else "fp32", accumulation, resumed)


STAGES: list[dict[str, Any]] = [{"stage": stage} for stage in range(3)]
ALONE = cases(1, case, *STAGES)
TOGETHER = [
    *cases(2, case, *STAGES),
    Case(1, "blockwise", "bf16", 4),
    Case(2, "delayed", "bf16", 4),
    Case(2, "delayed-step", "fp32", 4, resumed=True),
]


@pytest.fixture(scope="module")
def of_one_rank(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    return run_ranks(alone, 1, ALONE, str(tmp_path_factory.mktemp("alone")))[0]


@pytest.fixture(scope="module")
def of_two_ranks(tmp_path_factory: pytest.TempPathFactory) -> list[Any]:
    return run_ranks(together, 2, TOGETHER, str(tmp_path_factory.mktemp("together")))


@pytest.mark.parametrize("index", range(len(ALONE)), ids=map(str, ALONE))
def test_one_rank_has_the_bits_of_plain_torch(index: int, of_one_rank: dict[str, Any]) -> None:
    mine, theirs, other_weights = of_one_rank["cases"][index]
    assert mine == theirs
    assert not other_weights
    assert mine[-1] < mine[0]


@pytest.mark.parametrize("index", range(len(TOGETHER)), ids=map(str, TOGETHER))
def test_two_ranks_have_the_bits_of_plain_torch(index: int, of_two_ranks: list[Any]) -> None:
    for results in of_two_ranks:
        mine, theirs, other_weights = results["cases"][index]
        assert mine == theirs
        assert not other_weights
    first, second = (results["cases"][index][0] for results in of_two_ranks)
    assert first != second, "each rank has inputs of its own"


def test_levels_are_switched_during_a_run(of_one_rank: dict[str, Any]) -> None:
    under_ddp, under_zero = of_one_rank["switched"]
    assert under_ddp["switched"] == under_ddp["by octavo.amp"]
    for losses in (under_ddp, under_zero):
        assert losses["switched"][:7] == losses["O1"][:7]
        assert losses["switched"][7] not in (losses["O1"][7], losses["O2"][7])
    assert under_zero["O2"] == under_zero["without octavo"], "bf16 is ColossalAI's own, bit for bit"
    assert under_zero["O1"] != under_zero["O2"]


def test_a_loss_that_jumps_makes_the_run_fall_back(of_one_rank: dict[str, Any]) -> None:
    assert of_one_rank["falls back"] == ["O1"] * 6 + ["O2"] * 2 + ["O1"] * 2


@pytest.mark.parametrize("index", [0, 1], ids=["DDP", "ZeRO-1"])
def test_a_bad_update_is_left_out_on_all_ranks(index: int, of_two_ranks: list[Any]) -> None:
    for results in of_two_ranks:
        num_skipped, changed, changed_after = results["skips"][index]
        assert num_skipped == 1
        assert not changed
        assert changed_after


def test_gradients_travel_in_fp8_by_octavo(of_two_ranks: list[Any]) -> None:
    """ColossalAI's own all_reduce_fp8 is a plain one: with it nothing would be rounded."""
    for results in of_two_ranks:
        theirs, in_fp32 = results["own_reduction"]
        assert_bitwise(theirs, in_fp32)
        losses = results["in_fp8"]
        assert losses["by the booster"] == losses["by hand"] == losses["resumed"]
        assert losses["by the booster"] != losses["not in FP8"]


def test_an_export_has_the_codes_of_its_weights(of_one_rank: dict[str, Any]) -> None:
    (path,) = of_one_rank["exported"].glob("*.bin")
    weights = torch.load(path, weights_only=True)
    model = make(Case(0, "blockwise", "bf16", 1), seed=5).bfloat16()
    model.load_state_dict(weights)
    octavo.convert(model, "blockwise")
    for name in ("layers.1", "layers.3"):
        (codes,) = model.get_submodule(name).quantized_weight()
        wanted = octavo.quantize(weights[f"{name}.weight"], octavo.get_recipe("blockwise").weight)
        assert_bitwise(codes.qdata.view(torch.uint8), wanted.qdata.view(torch.uint8))
        assert_bitwise(codes.scale, wanted.scale)


@pytest.mark.parametrize(
    ("mistake", "words"),
    [
        ("no optimizer", "ConfigError: .*got no optimizer; give boost one, or call octavo.convert alone"),
        ("no boost", "ConfigError: .*no model yet; give it to a Booster and call boost first"),
        ("no boost before its state", "ConfigError: .*no model yet"),
        ("ignored by the booster", "ConfigError: .*no model yet"),
        ("twice", "ConfigError: .*has a model already; make one for each boost"),
        ("amp before", "ConfigError: .*given to octavo.amp.initialize before"),
        ("converted before", "nothing"),
        ("not converted", "RecipeError: no linear of this model would run in FP8"),
        ("dtype", "ConfigError: O2 is bf16 here .*got dtype; leave it out, or use octavo.amp"),
        ("fallback under ZeRO", "ConfigError: fallback.* low-level ZeRO.* use schedule or handle.switch"),
        ("FP8 communication under ZeRO", "ConfigError: fp8_communication .*low-level ZeRO has none .*TorchDDPPlugin"),
        ("use_fp8", "ConfigError: .*one FP8 backend, got octavo's .* and ColossalAI's own FP8 .*leave one"),
        ("overlap_allgather", "ConfigError: overlap_allgather=True waits .*leave it out"),
        ("fp16", "DtypeError: parameter 0.weight is float16"),
        ("two hooks", "ConfigError: .*one FP8 backend, got octavo's .* and ColossalAI's hook .*leave one"),
        ("buffers", r"ConfigError: under delayed scaling .*TorchDDPPlugin\(broadcast_buffers=False\)"),
        ("another plug-in", "ConfigError: octavo runs under TorchDDPPlugin and LowLevelZeroPlugin, got a ModelWrapper"),
        ("another backend", "ConfigError: .*one FP8 backend, got octavo's .* TransformerEngine .1, a TheirLinear"),
        ("adapters before", "ConfigError: .*has PEFT's adapters already; convert the base first"),
        ("no residuals", "CheckpointError: .*no residuals of FP8 communication; save state_dict"),
    ],
)
def test_a_mistake_is_said_in_one_line(mistake: str, words: str, of_one_rank: dict[str, Any]) -> None:
    said = of_one_rank["refusals"][mistake]
    assert re.fullmatch(f"{words}.*", said), said


def test_low_level_zero_needs_a_device(of_one_rank: dict[str, Any]) -> None:
    """Of ColossalAI's own accelerators; the other tests give it one that runs on a CPU and says that it is none."""
    assert re.search("not supported for cpu accelerator|device is required", of_one_rank["zero_on_a_cpu"])


def test_a_killed_rank_ends_the_run_which_goes_on_from_its_checkpoint(tmp_path: Path) -> None:
    def start(folder: Path, steps: int) -> subprocess.Popen[str]:
        options = ("--recipe", "delayed", "--save-every", "2", "--bf16-from", "4")
        return torchrun(EXAMPLE, *options, "--folder", folder, "--steps", str(steps))

    found = goes_on_after_a_kill(start, tmp_path, lambda folder: int((folder / "latest").read_text()[len("step-") :]))
    assert [rest.split()[1] for rest in found.values()] == ["O1"] * 4 + ["O2"] * (len(found) - 4)


@pytest.mark.parametrize(("version", "words"), [("0.4.9", "too old"), (None, "not installed")])
def test_another_colossalai_is_refused(version: str | None, words: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(
        BackendError, match=rf"octavo.integrations.colossalai: colossalai .*{words}; .*colossalai 0\.5\.0"
    ):
        import_again("colossalai", "colossalai.booster.mixed_precision", version, monkeypatch)


def test_a_newer_colossalai_is_used_with_a_warning(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.warns(UserWarning, match=r"colossalai 0\.6\.0 is newer than what octavo was tested with"):
        import_again("colossalai", "colossalai.booster.mixed_precision", "0.6.0", monkeypatch)
