"""DeepSpeed itself over converted models: the bits of plain torch, checkpoints, kills, exports, refusals."""

import importlib.util
import os
import re
import runpy
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import octavo
from octavo.errors import BackendError, ConfigError
from octavo.integrations import deepspeed as integration
from octavo.testing import assert_bitwise
from tests.ecosystem.cases import cases
from tests.ecosystem.deepspeed_ranks import alone, together
from tests.ecosystem.launched import ROOT, finish, goes_on_after_a_kill, launch
from tests.ecosystem.plain_run import Case
from tests.ranks import free_port, run_ranks

EXAMPLE = ROOT / "examples" / "deepspeed" / "train.py"
BUILD = (
    "from deepspeed.accelerator import get_accelerator;"
    "get_accelerator().create_op_builder('ShareMemCommBuilder').load()"
)
ON_CPU = {"DS_ACCELERATOR": "cpu"}

pytestmark = [
    pytest.mark.ecosystem,
    pytest.mark.timeout(900),  # the first run builds DeepSpeed's op for the CPU, for a minute or two
    pytest.mark.filterwarnings("ignore"),
    pytest.mark.skipif(importlib.util.find_spec("deepspeed") is None, reason="needs ecosystem/deepspeed.txt"),
]

KINDS: list[dict[str, Any]] = [
    {"stage": 0, "dtype": "fp32"},
    {"stage": 3, "dtype": "bf16"},
    {"stage": 2, "dtype": "bf16"},
    {"stage": 1, "dtype": "fp32"},
]
ALONE = [*cases(1, Case, *KINDS), Case(2, "blockwise", "bf16", 4, own_layers=True)]
TOGETHER = [
    *cases(2, Case, *KINDS),
    Case(1, "blockwise", "fp32", 4, resumed=True),
    Case(2, "rowwise", "fp32", 4),
    Case(3, "delayed-step", "fp32", 4, resumed=True),
    Case(3, "blockwise", "bf16", 1, own_layers=True),
]


@pytest.fixture(scope="module")
def built() -> Iterator[None]:
    """DeepSpeed's op, once for all ranks; ninja, which it asks for, lies beside this Python."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PATH", str(Path(sys.executable).parent), prepend=os.pathsep)
        run = subprocess.run([sys.executable, "-c", BUILD], env=os.environ | ON_CPU, capture_output=True, text=True)
        assert run.returncode == 0, run.stderr
        yield


@pytest.fixture(scope="module")
def of_one_rank(built: None, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    return run_ranks(alone, 1, ALONE, str(tmp_path_factory.mktemp("alone")))[0]


@pytest.fixture(scope="module")
def of_two_ranks(built: None, tmp_path_factory: pytest.TempPathFactory) -> list[Any]:
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
        mine, theirs, other_weights = results[index]
        assert mine == theirs
        assert not other_weights
    assert of_two_ranks[0][index][0] != of_two_ranks[1][index][0], "each rank has inputs of its own"


@pytest.mark.parametrize("load", ["octavo's load_checkpoint", "engine.load_checkpoint"])
def test_weights_that_a_universal_checkpoint_writes_unseen_are_noticed(load: str, of_one_rank: dict[str, Any]) -> None:
    outputs = of_one_rank["universal"]
    assert_bitwise(outputs[load], outputs["wanted"])


def test_a_model_that_zero_init_has_partitioned_can_be_converted(of_one_rank: dict[str, Any]) -> None:
    mine, theirs = of_one_rank["zero_init"]
    assert mine == theirs


@pytest.mark.parametrize(
    ("mistake", "words"),
    [
        ("not converted", "ConfigError: .*octavo.convert.* first, then octavo.integrations.deepspeed.initialize"),
        ("prepared before convert", "ConfigError: .*octavo.convert.* first, then octavo.integrations"),
        ("converted late", "ConfigError: .*ZeRO-3 follows layers.1 .*octavo.convert first, then deepspeed.initialize"),
        ("section fp8", "ConfigError: .*one FP8 backend, got octavo's .*section 'fp8'.*leave one of the two out"),
        ("section fp8, off", "nothing"),
        ("pipeline", "ConfigError: .*ZeRO 0 to 3, and this engine has a pipeline; turn that off"),
        ("state not loaded", "CheckpointError: .*call octavo.integrations.deepspeed.load_checkpoint"),
        ("state loaded after that", "nothing"),
        ("no state", "CheckpointError: .*mp_rank_00_model_states.pt has no state .*fp8_state=False"),
        ("no state, wanted", "nothing"),
    ],
)
def test_a_mistake_is_said_in_one_line(mistake: str, words: str, of_one_rank: dict[str, Any]) -> None:
    said = of_one_rank["refusals"][mistake]
    assert re.fullmatch(f"{words}.*", said), said


def start(folder: Path, steps: int) -> subprocess.Popen[str]:
    """The example under DeepSpeed's launcher, two ranks."""
    launcher = ("-m", "deepspeed.launcher.runner", "--num_gpus", "2", "--master_port", str(free_port()))
    options = ("--folder", folder, "--recipe", "delayed", "--steps", str(steps), "--save-every", "2")
    return launch(*launcher, EXAMPLE, *options, **ON_CPU)


def test_a_killed_rank_ends_the_run_which_goes_on_from_its_checkpoint(built: None, tmp_path: Path) -> None:
    def saved(folder: Path) -> int:
        return int((folder / "checkpoints" / "latest").read_text().removeprefix("global_step"))

    goes_on_after_a_kill(start, tmp_path, saved, depth=2)


def test_an_export_has_the_codes_of_its_weights(built: None, tmp_path: Path) -> None:
    """What ZeRO-3 gathers, by both of DeepSpeed's ways, loads into torch's own model and into a converted one."""
    finish(start(tmp_path, 2))
    exported = torch.load(tmp_path / "model.bin", weights_only=True)
    checkpoints = tmp_path / "checkpoints"
    script = [sys.executable, str(checkpoints / "zero_to_fp32.py"), str(checkpoints), str(tmp_path)]
    subprocess.run(script, env=os.environ | ON_CPU, check=True, capture_output=True)
    masters = torch.load(tmp_path / "pytorch_model.bin", weights_only=True)
    model = runpy.run_path(str(EXAMPLE))["NextToken"]().bfloat16()
    assert list(exported) == list(masters) == list(model.state_dict())
    for name, weight in exported.items():
        assert_bitwise(masters[name].bfloat16(), weight)
    octavo.convert(model, "blockwise")
    model.load_state_dict(exported)
    scaling = octavo.get_recipe("blockwise").weight
    for name in ("layers.1", "layers.3"):
        (codes,) = model.get_submodule(name).quantized_weight()
        wanted = octavo.quantize(exported[f"{name}.weight"], scaling)
        assert_bitwise(codes.qdata.view(torch.uint8), wanted.qdata.view(torch.uint8))
        assert_bitwise(codes.scale, wanted.scale)


def converted() -> nn.Module:
    model = nn.Sequential(nn.Linear(128, 128))
    octavo.convert(model, "blockwise")
    return model


@pytest.mark.parametrize(("version", "words"), [("0.18.9", "too old"), ("0.20.0", "too new"), (None, "not installed")])
def test_another_deepspeed_is_refused(version: str | None, words: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if version is None:
        monkeypatch.setitem(sys.modules, "deepspeed", None)
    else:
        monkeypatch.setattr("deepspeed.__version__", version)
    with pytest.raises(BackendError, match=rf"DeepSpeed .*{words}; .*0\.19; .*ecosystem/deepspeed.txt"):
        integration.initialize(model=converted(), config={})


@pytest.mark.parametrize(
    ("module", "name"),
    [
        ("deepspeed.linear.quantization", "DeepSpeed's own FP8"),
        ("transformer_engine.pytorch.module.linear", "TransformerEngine"),
        ("torchao.float8.float8_linear", "torchao"),
    ],
)
def test_another_fp8_backend_is_named_beside_octavo(module: str, name: str) -> None:
    """Stand-ins by name: theirs need a GPU."""
    model = converted()
    model.append(type("TheirLinear", (nn.Linear,), {"__module__": module})(128, 128))
    with pytest.raises(ConfigError, match=f"one FP8 backend, got octavo's .* and {name}.*1, a TheirLinear"):
        integration.initialize(model=model, config={})


def test_a_lock_that_a_killed_build_left_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path))
    lock = tmp_path / "deepspeed_shm_comm" / "lock"
    lock.parent.mkdir()
    with lock.open("w"):  # as a build in progress has it
        integration._check_builds()
    with pytest.raises(BackendError, match=rf"{lock} is of a build that was killed, .*remove it"):
        integration.initialize(model=converted(), config={})
