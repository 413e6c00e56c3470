"""launcher_of: it launches what triton would have launched, and leaves to triton what it does not know."""

import importlib
import pkgutil
from collections.abc import Iterable, Iterator
from typing import Any

import pytest
import torch

pytest.importorskip("triton", reason="triton is only packaged for Linux")

import triton
import triton.language as tl
from triton import knobs
from triton.backends.compiler import GPUTarget
from triton.runtime.jit import JITFunction

import octavo.ops
from octavo.numerics import Scaling
from octavo.ops._runtime.launch import triton as launch
from octavo.ops._runtime.launch.triton import launcher_of
from octavo.ops.quantize import quantize, quantize_both
from octavo.testing import assert_bitwise, generate
from octavo.testing.interpreter import is_interpreting
from tests.assertions import assert_codes, assert_raises
from tests.ops.fake_gpu import FakeGpu

pytestmark = pytest.mark.skipif(is_interpreting(), reason="the interpreter has no launches to spare")


@triton.jit
def fold(OUT, x, size, scale, BLOCK: tl.constexpr):
    """out += scale * x, for what the tests below pass."""
    n = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    values = tl.load(x + n, mask=n < size, other=0.0).to(tl.float32)
    if OUT[1] is not None:
        values += tl.load(OUT[1] + n, mask=n < size, other=0.0)
    tl.store(OUT[0] + n, values * scale, mask=n < size)


class Calls(FakeGpu):
    """A launcher of `fold`."""

    def __call__(self, *args: Any, **fixed: Any) -> bool:
        """Launch; whether directly."""
        before = len(self.direct)
        launcher_of(fold, **{"BLOCK": 64, "num_warps": 2, **fixed})((3,), *args)
        return len(self.direct) > before


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> Iterator[Calls]:
    launch._compiled.clear()
    yield Calls(monkeypatch)
    launch._compiled.clear()


def test_second_launch_is_direct(calls: Calls) -> None:
    assert not calls(*FIRST)
    assert calls.by_triton == [((3,), FIRST, {"BLOCK": 64, "num_warps": 2})]
    assert calls(*FIRST) and len(calls.by_triton) == 1
    addresses = ((OUT.data_ptr(), None), X.data_ptr(), 96, 2.0)
    assert calls.direct == [(3, 1, 1, 99, 17, b"packed", None, None, None, *addresses, 64)]


SPACE = torch.zeros(4096, dtype=torch.bfloat16)
OUT, X = SPACE[:1024], SPACE[1024:2048]
FIRST = ((OUT, None), X, 96, 2.0)
OTHERS = {
    "misaligned": ((OUT, None), X[1:], 96, 2.0),
    "misaligned in a tuple": ((OUT[1:], None), X, 96, 2.0),
    "a dtype": ((OUT.view(torch.float32), None), X, 96, 2.0),
    "none": ((OUT, None), None, 96, 2.0),
    "not none": ((OUT, X), X, 96, 2.0),
    "one": ((OUT, None), X, 1, 2.0),
    "no multiple of 16": ((OUT, None), X, 98, 2.0),
    "a float for an int": ((OUT, None), X, 96.0, 2.0),
    "a bool for an int": ((OUT, None), X, True, 2.0),
    "a longer tuple": ((OUT, None, None), X, 96, 2.0),
}


@pytest.mark.parametrize("other", OTHERS)
def test_what_triton_specializes_on_is_in_the_key(calls: Calls, other: str) -> None:
    calls(*FIRST)
    assert not calls(*OTHERS[other])
    assert calls(*FIRST) and calls(*OTHERS[other])


def test_values_that_triton_does_not_specialize_on(calls: Calls) -> None:
    calls(*FIRST)
    assert calls((X, None), OUT, 16 << 20, 1.0)
    assert calls.direct[-1][9:] == ((X.data_ptr(), None), OUT.data_ptr(), 16 << 20, 1.0, 64)


def test_constants_options_and_devices_have_their_kernels(calls: Calls, monkeypatch: pytest.MonkeyPatch) -> None:
    calls(*FIRST)
    assert not calls(*FIRST, BLOCK=32) and not calls(*FIRST, num_warps=4)
    calls.device = 1  # memory of another device
    assert not calls(*FIRST)
    calls.device = 0
    monkeypatch.setattr(launch, "current_device", lambda: 1)
    assert not calls(*FIRST)


def test_the_oldest_kernel_goes_and_is_made_again(calls: Calls, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launch, "_MOST_KEPT", 3)
    for warps in (1, 2, 4, 8):
        assert not calls(*FIRST, num_warps=warps)
    assert len(launch._compiled) == 3
    assert calls(*FIRST, num_warps=2) and not calls(*FIRST, num_warps=1)
    assert calls(*FIRST, num_warps=1) and len(launch._compiled) == 3


@pytest.mark.parametrize("value", [1 << 31, -(1 << 31) - 1, "text", torch.float32, [1], "memory off the GPU"], ids=str)
def test_unknown_arguments_are_tritons(calls: Calls, value: object) -> None:
    if value == "memory off the GPU":
        calls.device, value = -1, 96
    for _ in range(2):
        assert not calls((OUT, None), X, value, 2.0)


CHAIN = knobs.HookChain()
CHAIN.add(print)
HOOKS = {
    "enter": (knobs.runtime, "launch_enter_hook", CHAIN),
    "exit": (knobs.runtime, "launch_exit_hook", CHAIN),
    "function": (knobs.runtime, "launch_enter_hook", print),
    "pre_run": (fold, "pre_run_hooks", [print]),
    "debug": (knobs.runtime, "debug", True),
    "instrumentation": (knobs.compilation, "instrumentation_mode", "consan"),
    "stages": (knobs.runtime, "add_stages_inspection_hook", print),
    "version": (launch, "IS_KNOWN_VERSION", False),
    "replaced": (launch, "_TRITON_RUN", None),
}


@pytest.mark.parametrize("how", HOOKS)
def test_launches_with_hooks_are_tritons(calls: Calls, monkeypatch: pytest.MonkeyPatch, how: str) -> None:
    calls(*FIRST)
    with monkeypatch.context() as patch:
        patch.setattr(*HOOKS[how])
        assert not calls(*FIRST)
    assert calls(*FIRST)


def test_only_cuda_kernels_are_kept(calls: Calls) -> None:
    calls.compiled.metadata.target = GPUTarget("hip", 90, 32)
    calls(*FIRST)
    assert not calls(*FIRST)
    calls.compiled = None
    calls(*FIRST)
    assert not calls(*FIRST)


def test_constants_must_come_last(calls: Calls) -> None:
    assert_raises(AssertionError, "not its last", launcher_of(fold, size=3, BLOCK=64), (3,), (OUT, None), X, 2.0)


# On a GPU: bits of direct launches against triton's own


def check_third_launch(launcher: launch.Launcher, monkeypatch: pytest.MonkeyPatch, *args: Any) -> None:
    """Three launches, of which the third at least is direct, against one by triton."""
    wanted = torch.zeros(1000, device="cuda")
    with monkeypatch.context() as patch:
        patch.setattr(launch, "IS_KNOWN_VERSION", False)
        launcher((16,), (wanted, None), *args)
    for _ in range(3):
        found = torch.zeros(1000, device="cuda")
        launcher((16,), (found, None), *args)
        assert_bitwise(found, wanted)


@pytest.mark.gpu
def test_views_and_sizes_on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    launch._compiled.clear()
    launcher = launcher_of(fold, BLOCK=64, num_warps=2)
    x = torch.randn(1040, device="cuda", dtype=torch.bfloat16)
    for start, size in ((0, 1000), (1, 1000), (0, 992), (8, 999), (3, 1), (0, 1000)):
        check_third_launch(launcher, monkeypatch, x[start:], size, 0.5)
    assert len(launch._compiled) >= 4, "launches were direct"


@pytest.mark.gpu
def test_quantizers_on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    for start, shape in ((0, (256, 512)), (1, (256, 512)), (0, (131, 133)), (0, (256, 512))):
        x = generate("normal", (shape[0] * shape[1] + 1,), torch.bfloat16, device="cuda")[start:][: shape[0] * shape[1]]
        x = x.view(shape)
        for scaling in (Scaling(), Scaling.block_128x128(), Scaling.per_row(), Scaling.per_tensor()):
            with monkeypatch.context() as patch, torch.no_grad():
                patch.setattr(launch, "IS_KNOWN_VERSION", False)
                wanted = (quantize(x, scaling), *quantize_both(x, scaling))
            for _ in range(3):
                with torch.no_grad():
                    found = (quantize(x, scaling), *quantize_both(x, scaling))
                for ours, theirs in zip(found, wanted, strict=True):
                    assert_codes(ours, theirs)
                    assert ours.scale.stride() == theirs.scale.stride()


@pytest.mark.gpu
def test_current_stream_and_graph_capture_on_a_gpu() -> None:
    launcher = launcher_of(fold, BLOCK=64, num_warps=2)
    x, out = torch.ones(1000, device="cuda"), torch.zeros(1000, device="cuda")
    for _ in range(2):
        launcher((16,), (out, None), x, 1000, 1.0)
    torch.cuda.synchronize()
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        torch.cuda._sleep(50_000_000)
        x.fill_(2.0)  # on that stream: seen only by a launch behind it
        launcher((16,), (out, None), x, 1000, 1.0)
    stream.synchronize()
    assert (out == 2.0).all()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        launcher((16,), (out, None), x, 1000, 1.0)
    x.fill_(3.0)
    graph.replay()
    torch.cuda.synchronize()
    assert (out == 3.0).all()


@pytest.mark.gpu
def test_two_gpus() -> None:
    if torch.cuda.device_count() < 2:
        pytest.skip("needs two GPUs")
    x = generate("normal", (256, 512), torch.bfloat16)
    with torch.no_grad():
        codes = [quantize(x.to(device), Scaling()) for device in ("cuda:0", "cuda:1", "cuda:1", "cuda:0")]
    for q in codes[1:]:
        assert_bitwise(q.qdata.cpu(), codes[0].qdata.cpu())


LIMIT = tl.constexpr(4)


@triton.jit
def clipped(x):
    return tl.minimum(x, LIMIT)


@triton.jit
def clip(out, x, BLOCK: tl.constexpr):
    n = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(out + n, clipped(tl.load(x + n)))


def forget_keys(kernels: Iterable[Any]) -> None:
    """As in a new process."""
    for kernel in kernels:
        kernel.hash, kernel.used_global_vals = None, {}
    launch._settled.clear()


@pytest.fixture
def all_kernels() -> Iterator[dict[str, Any]]:
    """Every triton.jit function of the operations, by name."""
    found: dict[str, Any] = {}
    for module in pkgutil.walk_packages(octavo.ops.__path__, "octavo.ops."):
        if ".triton" in module.name:
            values = vars(importlib.import_module(module.name)).values()
            found |= {kernel._fn_name: kernel for kernel in values if isinstance(kernel, JITFunction)}
    yield found
    forget_keys(found.values())


def test_a_key_does_not_depend_on_what_was_hashed_before() -> None:
    keys = []
    for first in (clip, clipped):
        forget_keys((clip, clipped))
        keys.append([first.cache_key, clip.cache_key][1])
    assert keys[0] != keys[1]  # triton's own
    for first in (clip, clipped):
        forget_keys((clip, clipped))
        launch.settle_key(first)
        launch.settle_key(clip)
        assert clip.cache_key == keys[1]


def test_nor_does_any_of_ours(all_kernels: dict[str, Any]) -> None:
    found = []
    for names in (sorted(all_kernels), sorted(all_kernels, reverse=True)):
        forget_keys(all_kernels.values())
        for name in names:
            launch.settle_key(all_kernels[name])
        found.append({name: kernel.cache_key for name, kernel in all_kernels.items()})
    assert found[0] == found[1] and len(found[0]) > 150


@pytest.mark.parametrize("how", ["hooks", "unknown", "first"])
def test_every_launch_by_triton_has_its_key_settled(how: str, calls: Calls, monkeypatch: pytest.MonkeyPatch) -> None:
    forget_keys([fold])
    if how == "hooks":
        monkeypatch.setattr(knobs.runtime, "debug", True)
    assert not calls(*FIRST[:3], object() if how == "unknown" else 2.0)
    assert fold.hash is not None and fold.fn in launch._settled
