"""Megatron-Core's own GPT over octavo's layers: the bits of plain torch, checkpoints, pipelines, experts, kills, flags.

tests/ecosystem/megatron_cpu.py has the shims for its CUDA calls.
"""

import importlib
import importlib.util
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from octavo.errors import BackendError
from octavo.integrations import tested
from octavo.numerics import get_recipe
from octavo.testing import assert_bitwise
from tests.ecosystem.cases import cases
from tests.ecosystem.launched import ROOT, finish, goes_on_after_a_kill, torchrun
from tests.ecosystem.megatron_more import FEW, alone, together
from tests.ecosystem.megatron_ranks import Case
from tests.ranks import run_ranks

EXAMPLE = ROOT / "examples" / "megatron" / "train.py"

pytestmark = [
    pytest.mark.ecosystem,
    pytest.mark.timeout(600),
    pytest.mark.filterwarnings("ignore"),
    pytest.mark.skipif(importlib.util.find_spec("megatron") is None, reason="needs ecosystem/megatron.txt"),
]


def case(resumed: bool, dtype: str = "fp32", **fields: Any) -> Case:
    """Without Apex or TransformerEngine Megatron's distributed optimizer does not load its own checkpoint."""
    return Case(resumed=resumed, dtype=dtype.removesuffix("-sharded") if resumed else dtype, **fields)


ALONE = cases(1, case, {"dtype": "fp32"}, {"dtype": "bf16"})
TOGETHER = [
    *cases(2, case, {"cut": "sequence"}, {"dtype": "bf16-sharded"}, {"cut": "tensor"}, {"cut": "data"}),
    Case("delayed", 4, dtype="bf16-sharded"),
]


@pytest.fixture(scope="module")
def of_one_rank(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    return run_ranks(alone, 1, ALONE, str(tmp_path_factory.mktemp("alone")))[0]


@pytest.fixture(scope="module")
def of_two_ranks(tmp_path_factory: pytest.TempPathFactory) -> list[Any]:
    return run_ranks(together, 2, TOGETHER, str(tmp_path_factory.mktemp("together")))


@pytest.mark.parametrize("index", range(len(ALONE)), ids=map(str, ALONE))
def test_one_rank_has_the_bits_of_plain_torch(index: int, of_one_rank: dict[str, Any]) -> None:
    mine, theirs = of_one_rank["cases"][index]
    assert mine == theirs
    assert mine[-1] < mine[0] - 1


@pytest.mark.parametrize("index", range(len(TOGETHER)), ids=map(str, TOGETHER))
def test_two_ranks_have_the_bits_of_plain_torch(index: int, of_two_ranks: list[Any]) -> None:
    losses = [results["cases"][index] for results in of_two_ranks]
    for mine, theirs in losses:
        assert mine == theirs
    assert (losses[0][0] != losses[1][0]) == (TOGETHER[index].cut == "data"), "inputs of its own, or the same ones"


def test_two_pipeline_stages_have_the_bits_of_plain_torch_on_one_rank(of_two_ranks: list[Any]) -> None:
    (first, _), (mine, theirs) = (results["pipeline"]["blockwise"] for results in of_two_ranks)
    assert not first
    assert mine == theirs
    assert len(mine) == 4 * FEW


def test_pipeline_stages_reduce_amaxes_among_their_own_ranks(of_two_ranks: list[Any]) -> None:
    """Stages run forwards at other times: a collective of all ranks would wait for ever, or take another's amaxes."""
    mine, of_blockwise = of_two_ranks[1]["pipeline"]["delayed"]
    assert mine[-1] == pytest.approx(of_blockwise[-1], rel=0.01)
    assert mine != of_blockwise


def test_grouped_experts_compute_as_experts_one_after_the_other(of_one_rank: Any, of_two_ranks: Any) -> None:
    """With the same codes. Groups are padded, and a CPU's library may add a longer product in another order: losses are
    equal in bits on one processor, and 1e-5 apart after four steps on another; FP8's own effect is 2e-3."""
    for results in (of_one_rank, *of_two_ranks):
        losses, keys = results["experts"]["losses"], results["experts"]["keys"]
        assert keys == dict.fromkeys(keys, keys["Megatron's"])
        assert losses["grouped"] == pytest.approx(losses["one by one"], rel=1e-4)
        for recipe in ("grouped", "delayed"):
            assert losses[recipe] != losses["bf16"]
            assert losses[recipe][-1] == pytest.approx(losses["bf16"][-1], rel=0.01)  # FP8's own effect is 0.2 %


def test_recomputation_changes_no_bit(of_one_rank: dict[str, Any]) -> None:
    """Under delayed scaling, whose scales a forward in the backward must not change."""
    without, recomputed = of_one_rank["recomputed"]
    assert recomputed == without


def test_norms_in_the_linears_have_transformer_engines_keys(of_one_rank: Any, of_two_ranks: Any) -> None:
    """On one rank they are one step, whose backward reads the norm's input in FP8; on two they run one by one."""
    for results in (of_one_rank, *of_two_ranks):
        found = results["fused norms"]
        assert "decoder.layers.0.self_attention.linear_qkv.layer_norm_weight" in found["keys"]
        assert "decoder.layers.1.mlp.linear_fc1.layer_norm_bias" in found["keys"]
        assert not [name for name in found["keys"] if "input_layernorm" in name]
        assert found["sharded"][0] == found["sharded"][1], "one distributed checkpoint for both"
        apart, fused = found["losses"]
        assert apart[0] == fused[0]
        assert apart[-1] == pytest.approx(fused[-1], rel=0.01)
    one, two = (results["fused norms"]["losses"] for results in (of_one_rank, of_two_ranks[0]))
    assert one[0] != one[1]
    assert two[0] == two[1]


def test_the_codes_are_those_of_the_exported_weights(of_one_rank: dict[str, Any]) -> None:
    assert len(of_one_rank["codes"]) == 8
    for held, wanted, held_scale, wanted_scale in of_one_rank["codes"]:
        assert_bitwise(held, wanted)
        assert_bitwise(held_scale, wanted_scale)


def test_a_model_leaves_octavo_and_comes_back(of_one_rank: dict[str, Any]) -> None:
    """By load_state_dict into Megatron's own local layers, whose attention rounds otherwise."""
    left = of_one_rank["left"]
    assert left["keys"][0] == left["keys"][1]
    assert left["losses"][0] == pytest.approx(left["losses"][1], rel=1e-5)
    assert left["same"]


def test_a_checkpoint_of_two_ranks_is_loaded_by_one(of_two_ranks: list[Any]) -> None:
    for results in of_two_ranks:
        found = results["resharded"]
        assert found["state"]
        assert (found["after"] - found["before"]).abs().max() < 1e-4  # sums over K are cut in two there
    assert of_two_ranks[0]["resharded"]["before"].abs().max() > 0.1


def test_flags_mean_recipes(of_one_rank: dict[str, Any]) -> None:
    found = of_one_rank["recipes"]
    assert found["layers"] == [[None], ["blockwise"], [None], [None]]
    recent = {"amax_history_len": 1, "amax_compute_algo": "most_recent"}
    assert found["default"] == get_recipe("delayed", **recent)
    longest = {"margin": 1, "amax_history_len": 16, "amax_compute_algo": "max"}
    assert found["delayed"] == get_recipe("delayed", high_precision_gemms=("grad_weight",), **longest)
    assert found["tensorwise"] == get_recipe("tensorwise", fp8_format="e4m3")
    assert found["none"] is None


@pytest.mark.parametrize(
    ("mistake", "words"),
    [
        ("fp8 parameters", "ConfigError: fp8_param=True is refused .*leave out --fp8-param-gather"),
        ("fp8 attention", "ConfigError: fp8_dot_product_attention=True is refused .*attention is trained in bf16"),
        ("fp4", "ConfigError: fp4='e2m1' is refused .*TransformerEngine's; leave it out"),
        ("fused gradients", "ConfigError: gradient_accumulation_fusion=True .*--no-gradient-accumulation-fusion"),
        ("custom", r"ConfigError: --fp8-recipe custom makes TransformerEngine's .*gpt_layer_spec\(recipe\)"),
        ("an unused flag", "ConfigError: --fp8-margin has no effect with --fp8-recipe blockwise: it is delayed"),
        (
            "recomputation",
            r"ConfigError: .*TransformerEngine's checkpoint, .*not installed; .*gpt_layer_spec\(recipe\)",
        ),
        ("two recipes", "ConfigError: the spec has the recipe 'rowwise', and --fp8-format hybrid names another; give"),
        ("no recipe", "RecipeError: unknown recipe 'blokwise'; .*did you mean 'blockwise'"),
        ("scales by the step", 'ConfigError: update_every="step" needs an optimizer .*; use "forward"'),
        ("a linear in no layer", r"ConfigError: --first-last-layers-bf16 needs .*from .*gpt_layer_spec\(\)"),
        ("experts with a bias", "ConfigError: grouped experts have no bias; give --disable-bias-linear"),
        ("two backends", "ConfigError: a layer has one FP8 backend, got octavo's and TransformerEngine .*linear_qkv"),
    ],
)
def test_a_mistake_is_said_in_one_line(mistake: str, words: str, of_one_rank: dict[str, Any]) -> None:
    said = of_one_rank["refusals"][mistake]
    assert re.match(words, said), said


def test_convert_changes_the_recipe_of_octavos_layers_and_names_others(of_one_rank: dict[str, Any]) -> None:
    found = of_one_rank["converted"]
    assert found["recipes"] == dict.fromkeys(found["recipes"], "rowwise")
    assert len(found["recipes"]) == 8
    (said,) = [text for text in found["said"] if text.startswith("convert left")]
    assert "of RowParallelLinear" in said
    assert "of ColumnParallelLinear" in said


def test_a_checkpoint_without_delayed_scalings_state_is_said(of_one_rank: dict[str, Any]) -> None:
    said = [text for text in of_one_rank["no state"] if "no state of octavo's delayed scaling" in text]
    assert len(said) == 1, "once for all linears"


@pytest.mark.parametrize(("version", "words"), [("0.15.3", "too old"), (None, "not installed")])
def test_another_megatron_is_refused(version: str | None, words: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tested, "installed_version", lambda _: version)
    monkeypatch.delitem(sys.modules, "octavo.integrations.megatron", raising=False)
    with pytest.raises(BackendError, match=rf"integrations.megatron: megatron-core .*{words}; .*0\.16\.1"):
        importlib.import_module("octavo.integrations.megatron")


def test_a_newer_megatron_gets_a_warning(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tested, "installed_version", lambda _: "0.17.0")
    monkeypatch.delitem(sys.modules, "octavo.integrations.megatron", raising=False)
    with pytest.warns(UserWarning, match=r"megatron-core 0\.17\.0 is newer than .*0\.16\.1"):
        importlib.import_module("octavo.integrations.megatron")


def test_a_megatron_without_the_hook_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    from megatron.core.tensor_parallel.layers import RowParallelLinear

    monkeypatch.delattr(RowParallelLinear, "_forward_impl")
    monkeypatch.delitem(sys.modules, "octavo.integrations.megatron", raising=False)
    with pytest.raises(BackendError, match=r"has no .*_forward_impl, by which octavo multiplies"):
        importlib.import_module("octavo.integrations.megatron")


def on_cpu(script: Path, *options: str | Path, **environment: str) -> subprocess.Popen[str]:
    """A script on two ranks, with the shims."""
    return torchrun("-m", "tests.ecosystem.megatron_cpu", script, *options, **environment)


def test_a_killed_rank_ends_the_run_which_goes_on_from_its_checkpoint(tmp_path: Path) -> None:
    """Two tensor-parallel ranks with delayed scaling."""

    def start(folder: Path, steps: int) -> subprocess.Popen[str]:
        options = ("--tensor", "2", "--recipe", "delayed", "--save-every", "2")
        return on_cpu(EXAMPLE, *options, "--folder", folder, "--steps", str(steps))

    goes_on_after_a_kill(start, tmp_path, lambda folder: int((folder / "latest").read_text().removeprefix("step_")))


CHECKOUT = os.environ.get("MEGATRON_LM", "")
GPT = """--spec octavo.integrations.megatron gpt_layer --num-layers 2 --hidden-size 128 --num-attention-heads 4
    --mock-data
    --seq-length 64 --max-position-embeddings 64 --micro-batch-size 2 --global-batch-size 4 --train-iters 6 --lr 1e-3
    --split 99,1,0 --lr-decay-iters 6 --tokenizer-type NullTokenizer --vocab-size 127 --transformer-impl local --bf16
    --distributed-backend gloo --use-cpu-initialization --no-gradient-accumulation-fusion --no-masked-softmax-fusion
    --no-persist-layer-norm --no-bias-gelu-fusion --no-bias-dropout-fusion --attention-dropout 0 --hidden-dropout 0
    --eval-iters 0 --eval-interval 100 --log-interval 1 --ckpt-format torch_dist --no-load-rng --fp8-format hybrid"""


def pretrain(*flags: str) -> dict[int, str]:
    """Megatron-LM's pretrain_gpt.py on two ranks: iteration -> loss."""
    environment = {"CUDA_DEVICE_MAX_CONNECTIONS": "1", "TORCHDYNAMO_DISABLE": "1"}
    out = finish(on_cpu(Path(CHECKOUT, "pretrain_gpt.py"), *GPT.split(), *flags, **environment))
    return {int(n): loss for n, loss in re.findall(r"iteration +(\d+)/.*lm loss: (\S+)", out)}


@pytest.mark.skipif(
    not CHECKOUT, reason="MEGATRON_LM names no checkout of Megatron-LM (core_v0.16.1, its helpers built)"
)
def test_megatron_lms_own_script_trains_and_resumes(tmp_path: Path) -> None:
    """pretrain_gpt.py with its flags and octavo's spec: tensor ranks, resumed with delayed scaling's state, stages."""
    tensor = ("--tensor-model-parallel-size", "2")
    whole = pretrain(*tensor)
    assert list(whole) == [1, 2, 3, 4, 5, 6]
    assert float(whole[6]) < float(whole[1]) - 1
    saving = ("--save", str(tmp_path / "saved"), "--save-interval", "3", "--exit-interval", "3")
    assert pretrain(*tensor, *saving) == {n: whole[n] for n in (1, 2, 3)}
    resumed = pretrain(*tensor, "--load", str(tmp_path / "saved"))
    assert [resumed[n] for n in (4, 6)] == [whole[n] for n in (4, 6)]  # of 5 it shows the mean of 4 and 5
    assert pretrain(*tensor, "--fp8-recipe", "blockwise")[6] != whole[6]
    stages = pretrain("--pipeline-model-parallel-size", "2")
    assert float(stages[6]) < float(stages[1]) - 1
