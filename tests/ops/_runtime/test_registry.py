"""Ops past the dispatcher: nothing that looks on misses one, and each gives what the dispatched op gives."""

import importlib
import re
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

from octavo.nn import Linear
from octavo.numerics import Scaling, get_recipe
from octavo.ops._runtime import registry
from octavo.ops._runtime.registry import can_bypass_dispatcher
from octavo.ops.gemm.scaled_mm import scaled_mm
from octavo.ops.quantize import quantize, quantize_both, quantize_columns
from octavo.testing import generate
from tests.assertions import assert_codes

OPS = Path(registry.__file__).parent.parent
TESTS = Path(__file__).parent.parent
# what has no kernel of its own, and what tests/ops/quantize tests by the ops above it
UNNAMED = {
    *(f"octavo.ops._runtime.{name}" for name in ("kernel_cache", "kernel_requests", "launch")),
    "octavo.ops.attention.rope",  # which others' kernels call
    "octavo.ops.quantize.delayed",
}
X = generate("normal", (33, 140), torch.bfloat16)
ROW = Scaling.per_row()
OPERAND = quantize(X, ROW)
CALLS: dict[str, Callable[[], object]] = {
    "quantize_rows": lambda: quantize(X, ROW),
    "quantize_columns": lambda: quantize_columns(X, ROW),
    "quantize_both": lambda: quantize_both(X, ROW),
    "scaled_mm": lambda: scaled_mm(OPERAND, OPERAND),
}


def names_in(profile: torch.profiler.profile) -> Counter[str]:
    """How often each of octavo's ops is in a profile."""
    names = [event.name for event in profile.events()]
    return Counter(name.removeprefix("octavo::") for name in names if name.startswith("octavo::"))


@pytest.mark.parametrize("grad", [False, True], ids=["direct", "dispatched"])
@pytest.mark.parametrize("name", CALLS)
def test_a_profiler_sees_the_op_once(name: str, grad: bool) -> None:
    activities = [torch.profiler.ProfilerActivity.CPU]
    with torch.profiler.profile(activities=activities) as profile, torch.set_grad_enabled(grad):
        CALLS[name]()
    assert names_in(profile) == {name: 1}


def test_a_profiler_sees_a_linears_forward_and_backward() -> None:
    layer = Linear(140, 64, dtype=torch.bfloat16)
    layer.set_recipe(get_recipe("rowwise"))
    x = X.clone().requires_grad_()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        layer(x).sum().backward()
    assert names_in(profile) == {"quantize_both": 3, "scaled_mm": 3}


class Watch(TorchDispatchMode):
    """Counts octavo's ops."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        if func.namespace == "octavo":
            self.names.append(func._opname)
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("name", CALLS)
def test_a_dispatch_mode_sees_the_op(name: str) -> None:
    with torch.no_grad(), Watch() as watch:
        CALLS[name]()
    assert watch.names == [name]


class Subclass(torch.Tensor):
    """A tensor that could have a say in every op."""


def test_who_is_not_passed_by() -> None:
    assert not can_bypass_dispatcher(X), "autograd is on"
    with torch.no_grad():
        assert can_bypass_dispatcher(X) and can_bypass_dispatcher(torch.nn.Parameter(X))
        assert not can_bypass_dispatcher(X.as_subclass(Subclass))
        assert not can_bypass_dispatcher(X.to("meta"))
        with FakeTensorMode() as fake:
            assert not can_bypass_dispatcher(fake.from_tensor(X))
        with Watch():
            assert not can_bypass_dispatcher(X)
    assert can_bypass_dispatcher(X, has_gradient=False)


def test_the_direct_calls_bits_are_the_ops() -> None:
    for square in (Scaling.block_128x128(), Scaling.per_tensor(), Scaling(), ROW):
        known = torch.full((1,), 3.0) if square.is_per_tensor else None
        with torch.no_grad():
            direct = quantize_both(X, square, quant_scale=known)
        dispatched = quantize_both(X, square, quant_scale=known)
        for ours, theirs in zip(direct, dispatched, strict=True):
            assert_codes(ours, theirs)
            assert ours.scale.stride() == theirs.scale.stride()


@pytest.mark.parametrize("tests", ["test_triton*.py", "test_compile.py"])
def test_every_kernel_is_run_and_compiled_by_a_test(tests: str) -> None:
    text = "\n".join(path.read_text(encoding="utf-8") for path in TESTS.rglob(tests))
    packages = {kernel.parent.relative_to(OPS) for kernel in (*OPS.rglob("triton.py"), *OPS.rglob("triton/"))}
    names = {".".join(("octavo.ops", *package.parts)) for package in packages} - UNNAMED
    missing = {name for name in names if not re.search(rf"{re.escape(name)}( import .*\btriton\b|\.triton\b)", text)}
    assert len(names) > 10
    assert not missing, f"no {tests} in tests/ops imports the kernels of {missing}"


def test_every_kernel_is_where_its_op_looks_for_it() -> None:
    pytest.importorskip("triton", reason="triton is only packaged for Linux")
    for init in OPS.rglob("__init__.py"):
        importlib.import_module(".".join(("octavo.ops", *init.parent.relative_to(OPS).parts)))
    names = [getattr(run, "__qualname__", "") for run, _ in registry._implementations.values()]
    places = [name for name in names if ".triton." in name]
    assert len(places) >= 15
    for place in places:
        module, _, name = place.rpartition(".")
        assert callable(getattr(importlib.import_module(f"octavo.ops.{module}"), name)), place
