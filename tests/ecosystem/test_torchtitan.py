"""octavo inside torchtitan's Trainer, on its debug model: the bits of plain torch, checkpoints, a kill, refusals."""

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
from tests.ecosystem.launched import ROOT, goes_on_after_a_kill, import_again, torchrun
from tests.ecosystem.plain_run import Case
from tests.ranks import run_ranks

pytestmark = [
    pytest.mark.ecosystem,
    pytest.mark.filterwarnings("ignore"),
    pytest.mark.skipif(importlib.util.find_spec("torchtitan") is None, reason="needs ecosystem/torchtitan.txt"),
]
RUN = ROOT / "tests" / "ecosystem" / "torchtitan_ranks.py"

# All shard by FSDP2.
KINDS: list[dict[str, Any]] = [{"stage": 3, "dtype": dtype} for dtype in ("fp32", "bf16")]
ALONE = cases(1, Case, *KINDS)
TOGETHER = [*cases(2, Case, *KINDS[::-1]), Case(3, "delayed-step", "bf16", 4)]


@pytest.fixture(scope="module")
def of_one_rank(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    from tests.ecosystem.torchtitan_ranks import alone

    return run_ranks(alone, 1, ALONE, str(tmp_path_factory.mktemp("alone")))[0]


@pytest.fixture(scope="module")
def of_two_ranks(tmp_path_factory: pytest.TempPathFactory) -> list[Any]:
    from tests.ecosystem.torchtitan_ranks import ranks

    return run_ranks(ranks, 2, TOGETHER, str(tmp_path_factory.mktemp("together")))


@pytest.mark.parametrize("index", range(len(ALONE)), ids=map(str, ALONE))
def test_one_rank_has_the_bits_of_plain_torch(index: int, of_one_rank: dict[str, Any]) -> None:
    mine, theirs, other_weights = of_one_rank["cases"][index]
    assert mine == theirs
    assert not other_weights


@pytest.mark.parametrize("index", range(len(TOGETHER)), ids=map(str, TOGETHER))
def test_two_ranks_have_the_bits_of_plain_torch(index: int, of_two_ranks: list[Any]) -> None:
    for results in of_two_ranks:
        mine, theirs, other_weights = results[index]
        assert mine == theirs
        assert not other_weights
        assert mine[20] < mine[1] - 0.5


def test_recomputed_activations_change_no_bit(of_one_rank: dict[str, Any]) -> None:
    with_it, without = of_one_rank["recomputed"]
    assert with_it == without


def test_torchtitan_goes_on_without_octavo_and_codes_are_those_of_its_weights(of_one_rank: dict[str, Any]) -> None:
    found = of_one_rank["leaving"]
    assert list(found["losses"]) == list(range(1, 21))
    assert found["kinds"].isdisjoint({"OctavoLinear"}) and "Linear" in found["kinds"]
    ours, theirs, saved = found["keys"]
    assert ours == theirs == saved
    assert found["saved"] == {"fp8_amax_history", "fp8_quant_scale"}
    weight = found["weights"]["layers.0.feed_forward.w1.weight"].bfloat16()
    linear = octavo.nn.Linear(*weight.shape[::-1])
    linear.load_state_dict({"weight": weight})
    linear.set_recipe(octavo.get_recipe("blockwise"))
    (codes,) = linear.quantized_weight()
    wanted = octavo.quantize(weight, octavo.get_recipe("blockwise").weight)
    assert_bitwise(codes.qdata.view(torch.uint8), wanted.qdata.view(torch.uint8))
    assert_bitwise(codes.scale, wanted.scale)


BOTH = r"ConfigError: .*one FP8 backend, got octavo's .* and torchtitan's Float8Linear \(layers.0"


@pytest.mark.parametrize(
    ("mistake", "words"),
    [
        ("theirs before", BOTH),
        ("theirs after", BOTH),
        ("ignore", "RecipeError: ignore names no linear of this model: 'wq_of_none'"),
        ("tensor parallel", "ConfigError: .*FSDP2 and HSDP, got parallelism.tensor_parallel_degree=2.*turn that off"),
        ("pipeline", "ConfigError: .*got parallelism.pipeline_parallel_degree"),
        ("full_dtensor", "ConfigError: .*got parallelism.spmd_backend='full_dtensor'"),
        ("graphs", "ConfigError: .*got CUDA graphs of the whole step; set training.disable_cuda_graphs"),
    ],
)
def test_a_mistake_is_said_in_one_line(mistake: str, words: str, of_one_rank: dict[str, Any]) -> None:
    assert re.match(words, of_one_rank["said"][mistake]), of_one_rank["said"][mistake]


def test_adapters_before_octavo_are_refused_by_torchtitan() -> None:
    from torchtitan.components.lora import LoRAConverter

    import tests.ecosystem.torchtitan_ranks as titan

    with pytest.raises(ValueError, match="must be applied before LoRAConverter"):
        titan.spec_of(LoRAConverter.Config(rank=4, alpha=8.0), titan.converter(ALONE[0]))


def test_torchtitans_command_line_takes_the_example() -> None:
    from torchtitan.config import ConfigManager

    import tests.ecosystem.torchtitan_ranks  # noqa: F401

    place = ["--module", "examples.torchtitan.llama3_fp8", "--config", "debugmodel_fp8"]
    config = ConfigManager().parse_args([*place, "--training.steps", "3", "--checkpoint.interval", "7"])
    assert config.training.steps == 3 and config.checkpoint.interval == 7
    assert type(config.checkpoint).__module__ == "octavo.integrations.torchtitan"
    kinds = [type(config.model_spec.model.layers[0].feed_forward.w1), type(config.model_spec.model.lm_head)]
    assert [kind.__module__ for kind in kinds] == ["octavo.integrations.torchtitan", "torchtitan.models.common.linear"]


@pytest.mark.parametrize(("version", "words"), [("0.2.2", "too old"), (None, "not installed")])
def test_another_torchtitan_is_refused(version: str | None, words: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(BackendError, match=rf"octavo.integrations.torchtitan: torchtitan .*{words}; .*0\.3\.0"):
        import_again("torchtitan", "torchtitan.components.checkpoint", version, monkeypatch)


def test_a_newer_torchtitan_is_used_with_a_warning(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.warns(UserWarning, match=r"torchtitan 0\.4\.0 is newer than what octavo was tested with"):
        import_again("torchtitan", "torchtitan.components.checkpoint", "0.4.0", monkeypatch)


def test_a_killed_rank_ends_the_run_which_goes_on_from_its_checkpoint(tmp_path: Path) -> None:
    def start(folder: Path, steps: int) -> subprocess.Popen[str]:
        folder.mkdir(exist_ok=True)
        return torchrun(RUN, folder, str(steps), LOSSES=str(folder))

    def saved(folder: Path) -> int:
        return max(int(each.parent.name.removeprefix("step-")) for each in folder.glob("checkpoint/*/.metadata"))

    goes_on_after_a_kill(start, tmp_path, saved)
