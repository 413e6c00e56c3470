"""DeepSpeed itself over converted models: the bits of plain torch, checkpoints, kills, exports, refusals."""

import importlib.util
import os
import re
import runpy
import signal
import socket
import subprocess
import sys
import time
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
from tests.ecosystem.deepspeed_ranks import alone, together
from tests.ecosystem.plain_run import Case
from tests.ranks import run_ranks

ROOT = Path(__file__).parents[2]
EXAMPLE = ROOT / "examples" / "deepspeed" / "train.py"
BUILD = (
    "from deepspeed.accelerator import get_accelerator;"
    "get_accelerator().create_op_builder('ShareMemCommBuilder').load()"
)
ON_CPU = {"DS_ACCELERATOR": "cpu", "OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "ignore", "PYTHONPATH": str(ROOT)}

pytestmark = [
    pytest.mark.ecosystem,
    pytest.mark.timeout(900),  # the first run builds DeepSpeed's op for the CPU, for a minute or two
    pytest.mark.filterwarnings("ignore"),
    pytest.mark.skipif(importlib.util.find_spec("deepspeed") is None, reason="needs ecosystem/deepspeed.txt"),
]

# Each pair of recipe, ranks, micro-batches, fresh or resumed, is in some case. A state that one rank saved must be that
# of all: only "recent" scales would show it. Delayed scaling with micro-batches under
# ZeRO-3 is "step": there every gather of a weight is quantized again, with the scale of that micro-batch.
ALONE = [
    Case(1, "delayed", "bf16", 4),
    Case(2, "blockwise", "bf16", 4, own_layers=True),
    Case(2, "rowwise", "fp32", 1, resumed=True),
    Case(3, "blockwise", "fp32", 4, resumed=True),
]
TOGETHER = [
    Case(0, "rowwise", "fp32", 4),
    Case(1, "blockwise", "fp32", 4, resumed=True),
    Case(2, "rowwise", "fp32", 4),
    Case(2, "delayed-recent", "bf16", 1, resumed=True),
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


def launch(folder: Path, steps: int) -> subprocess.Popen[str]:
    """The example under DeepSpeed's launcher, two ranks."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    command = [sys.executable, "-m", "deepspeed.launcher.runner", "--num_gpus", "2", "--master_port", port]
    options = ["--folder", str(folder), "--recipe", "delayed", "--steps", str(steps), "--save-every", "2"]
    return subprocess.Popen(
        [*command, str(EXAMPLE), *options],
        env=os.environ | ON_CPU,
        cwd=folder.parent,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def losses(folder: Path) -> list[str]:
    return (folder / "losses.txt").read_text().splitlines()


@pytest.fixture(scope="module")
def whole(built: None, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a run that was not disturbed."""
    folder = tmp_path_factory.mktemp("runs") / "whole"
    run = launch(folder, 5)
    out, _ = run.communicate(timeout=400)
    assert run.returncode == 0, out
    return folder


def test_a_killed_rank_ends_the_run_which_goes_on_from_its_checkpoint(whole: Path, tmp_path: Path) -> None:
    folder = tmp_path / "killed"
    run = launch(folder, 500)
    assert run.stdout is not None
    ranks = [int(found[1]) for _, found in zip(range(2), pids(run), strict=False)]
    deadline = time.monotonic() + 300
    while not (folder / "losses.txt").exists() or len(losses(folder)) < 3:
        assert time.monotonic() < deadline
        assert run.poll() is None
        time.sleep(0.1)
    os.kill(ranks[1], signal.SIGKILL)
    run.communicate(timeout=100)
    assert run.returncode != 0
    saved = int((folder / "checkpoints" / "latest").read_text().removeprefix("global_step"))
    assert saved >= 2
    kept = losses(folder)[:saved]
    (folder / "losses.txt").write_text("".join(f"{line}\n" for line in kept))
    again = launch(folder, max(5, saved + 1))
    out, _ = again.communicate(timeout=400)
    assert again.returncode == 0, out
    assert len(losses(folder)) == max(5, saved + 1)
    assert losses(folder)[:5] == losses(whole)


def pids(run: subprocess.Popen[str]) -> Any:
    assert run.stdout is not None
    return (found for line in run.stdout if (found := re.search(r"process (\d+) spawned", line)))


def test_an_export_has_the_codes_of_its_weights(whole: Path) -> None:
    """What ZeRO-3 gathers, by both of DeepSpeed's ways, loads into torch's own model and into a converted one."""
    exported = torch.load(whole / "model.bin", weights_only=True)
    script = [sys.executable, str(whole / "checkpoints" / "zero_to_fp32.py"), str(whole / "checkpoints"), str(whole)]
    subprocess.run(script, env=os.environ | ON_CPU, check=True, capture_output=True)
    masters = torch.load(whole / "pytorch_model.bin", weights_only=True)
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
        ("torchao.float8.float8_linear", "torchao's float8"),
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
