"""What a capture must not meet is found before it, in the thread that captures and in no other."""

import threading
from collections.abc import Callable

import pytest
import torch

from octavo.nn import PackedContext
from octavo.ops._runtime import registry
from octavo.ops.gemm.grouped_mm import grouped_mm
from octavo.serve.engine.graph_capture import GraphRecorder
from octavo.serve.engine.waiting import NoWaiting, try_out
from tests.serve.random_models import make_model

X = torch.empty(4, 3, device="meta")
INDEX = torch.empty(4, dtype=torch.int64, device="meta")
MASK = torch.empty(4, dtype=torch.bool, device="meta")

FREE: dict[str, Callable[[], object]] = {
    "a sum": lambda: X + 1,
    "rows by number": lambda: X[INDEX],
    "rows put by number": lambda: X.index_put_((INDEX,), X),
    "repeats of a known size": lambda: torch.repeat_interleave(INDEX, INDEX, output_size=7),
    "as many repeats of each": lambda: X.repeat_interleave(3, dim=0),
    "a number put by mask": lambda: X.index_put_((MASK,), torch.zeros(())),
    "another dtype": lambda: X.to(torch.bfloat16),
    "a mask's choice": lambda: torch.where(MASK, INDEX, -1),
    "a copy that goes by itself": lambda: torch.ones(2).to("meta", non_blocking=True),
    "a number of the host": lambda: torch.ones(1).item(),
    "rows by mask on the host": lambda: torch.ones(4)[torch.ones(4, dtype=torch.bool)],
}
WAITING: dict[str, Callable[[], object]] = {
    "rows by mask": lambda: X[MASK],
    "rows put by mask": lambda: X.index_put_((MASK,), torch.empty(1, 3, device="meta")),
    "rows added by mask": lambda: X.index_put_((MASK,), torch.ones(()), accumulate=True),
    "rows by numbers of the host": lambda: X[torch.tensor([0, 1])],
    "places": X.nonzero,
    "a number": lambda: INDEX.sum().item(),
    "a list": INDEX.tolist,
    "a truth": lambda: bool(MASK.any()),
    "equality": lambda: torch.equal(X, X),
    "repeats": lambda: torch.repeat_interleave(INDEX, INDEX),
    "a choice of elements": lambda: X.masked_select(MASK[:, None]),
    "a copy to the host": lambda: torch.empty(4, 3).copy_(X),
    "a copy from the host": lambda: torch.ones(2).to("meta"),
}


def call(what: Callable[[], object], where: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """As it is, or within an op of octavo's: there torch takes no op apart before the mode sees it."""
    op = torch.ops.octavo.grouped_mm.default
    monkeypatch.setitem(registry._implementations, op, (lambda *_: None, lambda *_: (what(), None)[1]))
    if where == "octavo":
        grouped_mm(torch.ones(4, 8), torch.ones(2, 8, 8), torch.tensor([2, 4], dtype=torch.int32))
    else:
        what()


@pytest.mark.parametrize("where", ["torch", "octavo"])
@pytest.mark.parametrize("name", FREE)
def test_what_a_graph_holds_goes_on(name: str, where: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with NoWaiting(), torch.no_grad():
        call(FREE[name], where, monkeypatch)


@pytest.mark.parametrize("where", ["torch", "octavo"])
@pytest.mark.parametrize("name", WAITING)
def test_what_would_wait_is_refused(name: str, where: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with NoWaiting(), torch.no_grad(), pytest.raises(RuntimeError, match="waits for the GPU"):
        call(WAITING[name], where, monkeypatch)


def test_octavos_ops_go_on() -> None:
    model = make_model("qwen3_moe", "blockwise")
    ids, context = torch.arange(5), PackedContext.from_lengths([5], model.numerics)
    with torch.no_grad():
        expected = model(ids, context)
        with NoWaiting():
            assert torch.equal(model(ids, context), expected)


def test_another_thread_may_wait() -> None:
    found: list[float] = []
    host = torch.zeros(4, 3)
    thread = threading.Thread(target=lambda: found.append(host.to("meta").numel() + host.sum().item()))
    with NoWaiting():
        thread.start()
        thread.join()
    assert found == [12.0]


def test_what_waits_once_is_tried_again() -> None:
    watched: list[bool] = []

    def run(times: int) -> None:
        watched.append(torch._C._len_torch_dispatch_stack() > 0)
        if watched[-1] and watched.count(True) <= times:
            raise RuntimeError("it waits for the GPU")

    for times, expected in ((0, [True]), (1, [True, False, True])):
        try_out(lambda times=times: run(times))
        assert watched == expected
        watched.clear()
    with pytest.raises(RuntimeError, match="waits for the GPU"):
        try_out(lambda: run(2))


@pytest.mark.gpu
@pytest.mark.parametrize("where", ["first", "second", "beginning", "end", "python"])
def test_a_failed_recording_leaves_everything_usable(where: str) -> None:
    """Another recorder, a draw of the default generator, memory that was on two streams."""
    device = torch.device("cuda")
    recorder, x = GraphRecorder(device), torch.ones(4, device=device)
    pieces = []

    def fail() -> None:
        if where == "python":
            raise RuntimeError("nothing to do with CUDA")
        if where == "end":  # another stream joins the recording and does not come back
            side = torch.cuda.Stream()
            side.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(side):
                x.add(1)
            return
        if where != "first":
            pieces.append(recorder.end())
            if where == "beginning":
                pieces.clear()  # with it goes the pool, in which torch 2.11 begins no other graph
            recorder.begin()
        x.sum().item()

    with recorder.ready(), pytest.raises(RuntimeError):
        recorder.record(fail)
    assert torch.rand(4, device=device).shape == (4,)
    for other in (recorder, GraphRecorder(device)):
        with other.ready():
            graph, out = other.record(lambda: x * 2)
        graph.replay()
        assert out.tolist() == [2.0] * 4
    torch.cuda.empty_cache()
    assert torch.randn(4, device=device).isfinite().all()


@pytest.mark.gpu
def test_a_failed_try_is_waited_for() -> None:
    """Its inputs' memory goes to others as soon as it has failed: what it still writes must come before they do."""
    recorder = GraphRecorder(torch.device("cuda"))
    target = torch.zeros(8, dtype=torch.int64, device="cuda")

    def fail() -> None:
        slots = torch.zeros(4, dtype=torch.int64, device="cuda")  # of the current stream's memory
        with recorder.ready():
            torch.cuda._sleep(50_000_000)
            target[slots] = 1
            raise RuntimeError("it waits")

    with pytest.raises(RuntimeError, match="it waits"):
        fail()
    others = [torch.full((4,), 5, dtype=torch.int64, device="cuda") for _ in range(8)]
    torch.cuda.synchronize()
    assert target.tolist() == [1, *[0] * 7] and all(int(x.sum()) == 20 for x in others)
