"""Steps run without kernels that would have to be compiled, and name them."""

import contextlib
import pickle
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("triton", reason="triton is only packaged for Linux")

from triton import knobs
from triton.backends.nvidia import driver as nvidia
from triton.runtime.driver import driver

from octavo.numerics import Scaling
from octavo.numerics.quantized import QuantizedTensor
from octavo.ops._runtime.kernel_cache.triton import use_checked_cache
from octavo.ops._runtime.kernel_requests import leaves_out_launches
from octavo.ops._runtime.kernel_requests import triton as kernel_requests
from octavo.ops._runtime.kernel_requests.triton import (
    KernelRequest,
    compile_kernel,
    load_kernels,
    preparing_triton,
    requesting_kernels,
)
from octavo.ops._runtime.registry import can_bypass_dispatcher
from octavo.ops.gemm.grouped_swiglu import triton as grouped_swiglu
from octavo.ops.norm import triton as kernels
from octavo.ops.quantize.triton import matrix, plan
from octavo.testing.interpreter import is_interpreting
from tests.ops.fake_gpu import TARGET, X, hopper, launch_norm, requests_of

pytestmark = pytest.mark.skipif(is_interpreting(), reason="nothing compiles in the interpreter")


@pytest.fixture(autouse=True)
def gpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    with hopper(tmp_path / "cache", monkeypatch):
        yield


def test_a_kernel_is_named_once_for_what_it_specializes_on() -> None:
    others = (lambda: launch_norm(X.float()), lambda: launch_norm(X[:, :128].contiguous()))
    found = requests_of(launch_norm, launch_norm, *others)
    assert [request.name for request in found] == ["norm_rows"] * 3
    assert len({pickle.dumps(request) for request in found}) == 3
    assert {request.target for request in found} == {TARGET}
    assert found[0].module == "octavo.ops.norm.triton"
    assert knobs.runtime.jit_cache_hook is None


def test_what_was_compiled_is_found_and_launched() -> None:
    (request,) = requests_of(launch_norm)
    again: KernelRequest = pickle.loads(pickle.dumps(request))
    assert not again.entry().is_there()
    compile_kernel(again)
    assert request.entry().is_there()
    with pytest.raises(AttributeError, match="FakeDriver"):  # it goes on to the launch
        requests_of(launch_norm)
    (file,) = Path(knobs.cache.dir).rglob("norm_rows.cubin")
    file.unlink()
    kernels.norm_rows.device_caches.clear()
    use_checked_cache()
    assert not request.entry().is_there() and len(requests_of(launch_norm)) == 1


def test_those_that_are_met_are_told_on_disk_or_not() -> None:
    requests = requests_of(launch_norm, lambda: launch_norm(X.float()))
    compile_kernel(requests[0])
    kernels.norm_rows.device_caches.clear()
    found: list[KernelRequest] = []
    with requesting_kernels(found.append) as entries:
        for x in (X, X.float(), X.float()):
            with contextlib.suppress(AttributeError):  # the launch of what was compiled
                launch_norm(x)
    assert found == requests[1:] and entries == {request.entry() for request in requests}


def test_ops_need_no_dispatcher_within() -> None:
    with requesting_kernels(lambda _: None), torch.no_grad():
        assert can_bypass_dispatcher(X)


def test_a_thread_knows_that_it_leaves_out_launches() -> None:
    said: list[bool] = []
    with requesting_kernels(lambda _: None):
        other = threading.Thread(target=lambda: said.append(leaves_out_launches()))
        other.start()
        other.join()
        assert leaves_out_launches() and said == [False]
    assert not leaves_out_launches()


def test_what_is_left_out_reads_as_zeros() -> None:
    torch.empty(1 << 20).fill_(7.0)  # memory that is likely to be used again
    found: list[KernelRequest] = []
    with requesting_kernels(found.append):
        written = launch_norm()
        others = [torch.empty(1 << 20), torch.empty_like(X), X.new_empty(5), torch.empty_strided((4, 4), (1, 4))]
        codes = torch.empty(64, dtype=torch.float8_e4m3fn)
        full = torch.ones(3)
    assert found and all(not tensor.any() for tensor in (written, *others, codes.float()))
    assert full.all()


def test_codes_that_are_left_out_read_as_zeros(monkeypatch: pytest.MonkeyPatch) -> None:
    """Although quantizers allocate past torch.empty: a stand-in keeps them."""
    monkeypatch.setattr(plan, "_empty_on_gpu", lambda shape, *_: torch.full(shape, 7.0))
    monkeypatch.setattr(torch.Tensor, "get_device", lambda _: 0)
    found: list[KernelRequest] = []
    with requesting_kernels(found.append):
        rows, _ = matrix.quantize_matrix(X, Scaling.block_1x128(), None)
    assert rows is not None
    assert len(found) == 1 and not rows.qdata.float().any() and not rows.scale.any()


def test_other_threads_launch_as_ever() -> None:
    errors: list[BaseException] = []

    def step() -> None:
        try:
            launch_norm()
        except AttributeError as error:
            errors.append(error)

    (request,) = requests_of(launch_norm)
    compile_kernel(request)
    kernels.norm_rows.device_caches.clear()
    found: list[KernelRequest] = []
    with requesting_kernels(found.append):
        thread = threading.Thread(target=step)
        thread.start()
        thread.join()
        launch_norm(X.float())
    assert "FakeDriver" in str(errors[0]) and len(found) == 1


def test_a_hook_that_is_set_already_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[Any] = []
    monkeypatch.setattr(knobs.runtime, "jit_cache_hook", lambda **told: seen.append(told) or True)
    assert requests_of(launch_norm) == [] and len(seen) == 1


def test_a_dtype_within_a_constant_is_named_and_compiled() -> None:
    """Of a tuple of constants, which Triton's own account of a launch has no text for."""
    a = QuantizedTensor.trusted(X.to(torch.float8_e4m3fn), torch.ones(2, 16).t(), Scaling.block_1x128())
    weights = X.new_zeros(512, 256).to(torch.float8_e4m3fn)
    whole = QuantizedTensor.trusted(weights, torch.ones(4, 2), Scaling.block_128x128())
    arguments = a, whole, torch.tensor([16, 16], dtype=torch.int32), None, 1, Scaling.block_1x128(), torch.bfloat16
    (request,) = requests_of(lambda: grouped_swiglu.grouped_swiglu(*arguments))
    compile_kernel(pickle.loads(pickle.dumps(request)))
    assert request.entry().is_there()


@pytest.mark.parametrize("are_compiled", [True, False])
def test_a_kernel_comes_with_what_launches_it(are_compiled: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Triton 3.6 compiles a launcher, and would at the first launch; later ones have one for all kernels."""
    made: list[Any] = []
    if are_compiled:
        monkeypatch.setattr(nvidia, "make_launcher", None, raising=False)
    else:
        monkeypatch.delattr(nvidia, "make_launcher", raising=False)
    monkeypatch.setattr(nvidia, "CudaLauncher", lambda source, metadata: made.append((source, metadata)))
    (request,) = requests_of(launch_norm)
    compile_kernel(request)
    names = [(source.signature, metadata.name) for source, metadata in made]
    assert names == [(request.signature, "norm_rows")] * are_compiled


def test_triton_is_prepared_beside_the_rest_and_before_workers_are_forked(monkeypatch: pytest.MonkeyPatch) -> None:
    """It reads 400 MB for the first kernel's name, and so would each of them."""
    began, done = threading.current_thread(), list[bool]()

    def hash_slowly() -> None:
        time.sleep(0.5)
        done.append(threading.current_thread() is not began)

    monkeypatch.setattr(kernel_requests, "triton_key", hash_slowly)
    load_kernels(TARGET)
    assert done == [True]
    assert not [thread.name for thread in threading.enumerate() if thread.name.startswith("octavo-triton")]


def test_the_driver_is_made_meanwhile(monkeypatch: pytest.MonkeyPatch) -> None:
    """By one thread: of two, each would make one. What it fails of is raised."""
    monkeypatch.setattr(driver, "_active", None)
    monkeypatch.setattr(driver, "_default", None)
    made: list[int] = []
    monkeypatch.setitem(type(driver).default.fget.__globals__, "_create_driver", lambda: made.append(1) or "driver")
    with preparing_triton():
        pass
    assert made == [1] and driver.active == "driver"
    monkeypatch.setattr(kernel_requests, "triton_key", lambda: 1 // 0)
    with pytest.raises(ZeroDivisionError), preparing_triton():
        pass
