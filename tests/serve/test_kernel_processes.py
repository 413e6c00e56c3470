"""Processes compile kernels that were named into the cache on disk; one that cannot is compiled when it is needed."""

import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("triton", reason="triton is only packaged for Linux")


from octavo.ops._runtime.kernel_requests.triton import KernelRequest
from octavo.ops.norm import triton as kernels
from octavo.serve.engine.request import UnavailableError
from octavo.serve.kernel_processes import KernelProcesses
from octavo.serve.nursery import Nursery
from octavo.testing.interpreter import is_interpreting
from tests.ops.fake_gpu import TARGET, X, hopper, launch_norm, requests_of

pytestmark = pytest.mark.skipif(is_interpreting(), reason="nothing compiles in the interpreter")


@pytest.fixture(autouse=True)
def gpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    with hopper(tmp_path / "cache", monkeypatch):
        yield


@pytest.fixture
def processes() -> Iterator[KernelProcesses]:
    started = KernelProcesses(TARGET, 2)
    yield started
    started.close()


def test_processes_compile_all_but_what_cannot_be(processes: KernelProcesses) -> None:
    """Also a kernel that calls others, of which a process has hashed none."""
    codes, scale = X.to(torch.float8_e4m3fn), torch.ones(2, 16).t()

    def backward() -> None:
        rstd = torch.ones(16)
        kernels.norm_backward(X, codes, scale, X[0], None, rstd, None, False, [1, 128])

    found = requests_of(launch_norm, backward)
    bad = found[0]._replace(constants={})
    for request in (found[0], bad, *found[1:]):
        processes.compile(request)
    assert processes.wait() == len(found) == processes.num_asked - 1
    assert all(request.entry().is_there() for request in found) and not bad.entry().is_there()


@pytest.mark.parametrize("when", ["before", "after"])
def test_processes_that_end_leave_the_rest(when: str, processes: KernelProcesses) -> None:
    (request,) = requests_of(launch_norm)
    if when == "after":
        processes.compile(request)
        assert processes.wait() == 1
    processes.close()
    processes.compile(request)
    assert processes.wait() == processes.num_asked == (when == "after")


def test_an_end_amid_a_queue_is_waited_for_no_longer(monkeypatch: pytest.MonkeyPatch) -> None:
    """As when loading fails while kernels wait for a process."""
    go_on = threading.Event()
    monkeypatch.setattr(KernelProcesses, "_compile", lambda *_: go_on.wait(20))
    started = KernelProcesses(TARGET, 1, at_once=False)
    for _ in range(4):
        started.compile(KernelRequest("m", "n", {}, {}, {}, {}, TARGET))
    found: list[int] = []
    waiting = threading.Thread(target=lambda: found.append(started.wait()))
    waiting.start()
    started.close()
    go_on.set()
    waiting.join(10)
    assert found == [1]


def test_an_answer_that_cannot_be_read_is_one_kernel_less(monkeypatch: pytest.MonkeyPatch) -> None:
    def fork(self: Nursery, niceness: int) -> Any:
        raise TypeError("an exception that does not unpickle")

    monkeypatch.setattr(Nursery, "fork", fork)
    started = KernelProcesses(TARGET, 1, at_once=False)
    for _ in range(2):
        started.compile(KernelRequest("m", "n", {}, {}, {}, {}, TARGET))
    assert started.wait() == 0 and started.num_asked == 2
    started.close()


def test_a_program_that_does_not_start_compiles_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """One try, whatever the number of kernels."""
    tries: list[int] = []
    monkeypatch.setattr(Nursery, "_start", lambda _: tries.append(1) or fail("no memory"))
    started = KernelProcesses(TARGET, 2)
    for _ in range(8):
        started.compile(KernelRequest("m", "n", {}, {}, {}, {}, TARGET))
    assert started.wait() == 0 and len(tries) <= 3
    started.close()


def fail(text: str) -> None:
    raise UnavailableError(text)


def test_none_is_started_where_nothing_is_missing() -> None:
    started = KernelProcesses(TARGET, 2, at_once=False)
    assert started.wait() == 0 and started._nursery._process is None
    started.close()


@pytest.mark.parametrize("at_once", [True, False])
def test_a_fork_comes_before_their_threads(at_once: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    before, found = threading.active_count(), list[int]()
    monkeypatch.setattr(Nursery, "start_as_fork", lambda _: found.append(threading.active_count()))
    monkeypatch.setattr(Nursery, "start", lambda _: None)
    KernelProcesses(TARGET, 2, at_once=at_once).close()
    assert found == [before] * at_once
