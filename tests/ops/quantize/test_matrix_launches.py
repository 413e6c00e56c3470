"""A quantizer's later launches, made by addresses alone, say what its first said to triton."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch

pytest.importorskip("triton", reason="triton is only packaged for Linux")

from octavo.numerics import QuantizedTensor, Scaling
from octavo.numerics.infinity import infinity_flag
from octavo.ops._runtime.launch import triton as launch
from octavo.ops.quantize.triton import clear_plans, matrix, plan, quantize_matrix, zero_pool
from octavo.testing.interpreter import is_interpreting
from tests.ops.fake_gpu import STREAM, FakeGpu

pytestmark = pytest.mark.skipif(is_interpreting(), reason="the interpreter has no launches to spare")
TENSOR, ROW = Scaling.per_tensor(), Scaling.per_row()
PAIRS = {
    "tensor": (TENSOR, TENSOR),
    "rows and columns": (ROW, ROW),
    "groups and squares": (Scaling(), Scaling.block_128x128()),
    "squares": (Scaling.block_128x128(), Scaling.block_128x128()),
}


class Launches(FakeGpu):
    """Of quantizers, within a graph's capture or not."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        super().__init__(monkeypatch)
        self.is_capturing = False
        monkeypatch.setattr(plan, "_empty_on_gpu", None)
        monkeypatch.setattr(matrix, "is_capturing", lambda: self.is_capturing)


@pytest.fixture
def launches(monkeypatch: pytest.MonkeyPatch) -> Iterator[Launches]:
    clears = (clear_plans, launch._compiled.clear, zero_pool._slabs.clear)
    for clear in clears:
        clear()
    yield Launches(monkeypatch)
    for clear in clears:
        clear()


def addresses_in(args: tuple[Any, ...]) -> tuple[Any, ...]:
    """Arguments as kernels get them: a number for everything but None."""
    return tuple(
        addresses_in(a) if isinstance(a, tuple) else a.data_ptr() if isinstance(a, torch.Tensor) else a for a in args
    )


def kinds_in(args: tuple[Any, ...]) -> tuple[Any, ...]:
    """Arguments without the addresses of what a call allocates."""
    return tuple(kinds_in(a) if isinstance(a, tuple) else None if a is None else type(a) for a in args)


def addresses(launches: Launches) -> list[Any]:
    """What direct launches were given, tuples opened."""
    return [v for values in launches.direct for a in values[9:] for v in (a if isinstance(a, tuple) else (a,))]


def check_second_call(launches: Launches, x: torch.Tensor, quantize: Any) -> tuple[QuantizedTensor, ...]:
    """Run twice; the second call's launches are direct, of the first's arguments but for addresses it allocated."""
    quantize()
    first = launches.by_triton
    assert first and not launches.direct
    launches.clear()
    found = quantize()
    assert not launches.by_triton and len(launches.direct) == len(first)
    for (grid, args, _), values in zip(first, launches.direct, strict=True):
        assert values[:9] == (*(*grid, 1, 1)[:3], STREAM, 17, b"packed", None, None, None)
        given = values[9 : 9 + len(args)]
        assert kinds_in(given) == kinds_in(addresses_in(args))
        place = given.index(x.data_ptr())
        assert args[place] is x and given[place + 1 :] == args[place + 1 :]
    return tuple(q for q in found if q is not None)


@pytest.mark.parametrize("pair", PAIRS)
@pytest.mark.parametrize("shape", [(256, 384), (131, 133)], ids=str)
def test_either_direction_and_both(launches: Launches, pair: str, shape: tuple[int, int]) -> None:
    x, (rows, columns) = torch.ones(shape, dtype=torch.bfloat16), PAIRS[pair]
    for asked in ((rows, columns), (rows, None), (None, columns)):
        clear_plans()
        launch._compiled.clear()
        launches.clear()
        found = check_second_call(launches, x, lambda asked=asked: quantize_matrix(x, *asked))
        for tensor in (tensor for q in found for tensor in (q.qdata, q.scale)):
            assert addresses(launches).count(tensor.data_ptr()) == 1


def test_a_known_scale_and_its_amax(launches: Launches) -> None:
    x, state = torch.ones(256, 384, dtype=torch.bfloat16), torch.ones(8)
    check_second_call(launches, x, lambda: quantize_matrix(x, TENSOR, TENSOR, state[0], state[4:5]))
    flag = infinity_flag(x.device).data_ptr()  # beside the amax: an infinite one is noted
    assert launches.direct[0][9][6:] == (state.data_ptr(), state[4:].data_ptr(), flag)


@pytest.mark.parametrize("pair", PAIRS)
@pytest.mark.parametrize("has_columns", [False, True], ids=["rows", "both"])
def test_a_given_place_is_written_and_not_allocated(launches, monkeypatch, pair, has_columns):
    x, (scaling, other) = torch.ones(256, 384, dtype=torch.bfloat16), PAIRS[pair]
    place, _ = quantize_matrix(x, scaling, None)
    made: list[Any] = []
    allocate = plan.Output.allocate
    monkeypatch.setattr(plan.Output, "allocate", lambda *args: made.append(args[0]) or allocate(*args))
    for _ in range(2):
        launches.clear()
        made.clear()
        rows, _ = quantize_matrix(x, scaling, other if has_columns else None, out=place)
        assert rows is place and len(made) == has_columns
    assert not launches.by_triton and launches.direct
    taken = addresses(launches)
    assert taken.count(place.qdata.data_ptr()) == taken.count(place.scale.data_ptr()) == 1


def test_a_scale_at_another_address_is_another_kernel(launches: Launches) -> None:
    x, state = torch.ones(256, 384, dtype=torch.bfloat16), torch.ones(8)
    for known in (state[0], state[1], state.double()[0]):
        quantize_matrix(x, TENSOR, TENSOR, known)
    assert len(launches.by_triton) == 3 and not launches.direct
    quantize_matrix(x, TENSOR, TENSOR, state[2])
    assert len(launches.direct) == 1 and launches.direct[0][9][6] == state[2].data_ptr()


def test_an_observer_sees_kept_launches(launches: Launches) -> None:
    x = torch.ones(256, 384, dtype=torch.bfloat16)
    for pair in ((ROW, None), (None, ROW)) * 2:
        quantize_matrix(x, *pair)
    launches.clear()
    launches.stack.setattr(launch, "_TRITON_RUN", None)
    for pair in ((ROW, None), (None, ROW)):
        quantize_matrix(x, *pair)
    assert len(launches.by_triton) == 3 and not launches.direct  # whole rows; columns' amaxes and codes


def test_a_matrix_at_another_address_is_another_kernel(launches: Launches) -> None:
    x = torch.ones(256 * 384 + 1, dtype=torch.bfloat16)
    for start in (0, 1):
        quantize_matrix(x[start : start + 256 * 384].view(256, 384), Scaling(), None)
    assert len(launches.by_triton) == 2 and not launches.direct


def amaxes_of(launches: Launches) -> list[Any]:
    """Addresses of the rows' and the columns' amaxes in each direct launch."""
    return [values[9][4:6] for values in launches.direct]


def test_amaxes_are_fresh_zeroes(launches: Launches) -> None:
    """Both launches of a call share them, no two calls do, and no call zeroes any."""
    x = torch.ones(256, 384, dtype=torch.bfloat16)
    for _ in range(4):
        quantize_matrix(x, ROW, ROW, shares_zeros=True)
    found = amaxes_of(launches)  # of three calls, of two launches each
    assert found[::2] == found[1::2]
    (slab,) = zero_pool._slabs.values()
    taken = [(rows - slab.address, columns - slab.address) for rows, columns in found[::2]]
    assert taken == [(2560 * i, 2560 * i + 4 * 256) for i in range(3)]  # 256 + 384 numbers
    assert not slab.tensor.any() and slab.taken == 3 * 640
    quantize_matrix(x, TENSOR, TENSOR, shares_zeros=True)
    launches.clear()
    quantize_matrix(x, TENSOR, TENSOR, shares_zeros=True)
    assert amaxes_of(launches) == [(slab.address + 7680,) * 2] * 2  # one number for both directions


def test_a_full_slab_is_replaced(launches: Launches, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(zero_pool, "SLAB_NUMBERS", 64)
    x = torch.ones(256, 384, dtype=torch.bfloat16)
    slabs = []
    for _ in range(6):
        quantize_matrix(x, TENSOR, TENSOR, shares_zeros=True)
        slabs += zero_pool._slabs.values()
    assert len(zero_pool._slabs) == 1 and len(set(map(id, slabs))) == 3  # two lines each
    assert len({rows for rows, _ in amaxes_of(launches)}) == 5


@pytest.mark.parametrize("reason", ["captured", "large", "not asked"])
def test_amaxes_of_their_own(launches: Launches, monkeypatch: pytest.MonkeyPatch, reason: str) -> None:
    """A graph's replays must zero them again; another allocator's call is not to leave a slab in it."""
    launches.is_capturing = reason == "captured"
    monkeypatch.setattr(matrix, "MOST_TAKEN", 16 if reason == "large" else zero_pool.MOST_TAKEN)
    x = torch.ones(256, 384, dtype=torch.bfloat16)
    for _ in range(2):
        quantize_matrix(x, ROW, ROW, shares_zeros=reason != "not asked")
    assert not zero_pool._slabs and len(launches.direct) == 2
    assert all(isinstance(address, int) for pair in amaxes_of(launches) for address in pair)


@pytest.mark.parametrize("shape", [(5, 1), (1, 7), (0, 3), (3, 0)], ids=str)
def test_thin_matrices_of_any_strides(launches: Launches, shape: tuple[int, int]) -> None:
    x = torch.ones(shape[::-1], dtype=torch.bfloat16).t()
    for scaling in (TENSOR, ROW, Scaling()):
        rows, columns = quantize_matrix(x, scaling, scaling)
        assert rows.shape == shape and columns.shape == shape[::-1]
        assert quantize_matrix(x, scaling, None)[0].shape == shape


def test_equal_scalings_share_a_quantizer_and_stay_apart_from_others(launches: Launches) -> None:
    x = torch.ones(256, 384, dtype=torch.bfloat16)
    for _ in range(3):
        for kind in ("block_1x128", "per_row", "block_128x128"):
            assert quantize_matrix(x, Scaling.of_kind(kind), None)[0].scaling.kind == kind
        quantize_matrix(x, Scaling(amax_floor=1e-4), None)
    assert len(launches.by_triton) == 4 and len(launches.direct) == 8


def test_the_oldest_quantizer_goes_and_is_made_again(launches: Launches, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launch, "_MOST_KEPT", 2)
    x = torch.ones(64, 384, dtype=torch.bfloat16)
    for rows in (16, 32, 48):
        for _ in range(2):
            quantize_matrix(x[:rows], Scaling(), None)
    assert len(matrix.prepared_quantizers) == 2
    launches.clear()
    wanted = [(rows, quantize_matrix(x[:rows], Scaling(), None)[0]) for rows in (48, 16, 16)]
    assert all(q.shape == (rows, 384) for rows, q in wanted)
    assert len(launches.direct) == 3, "a compiled kernel outlives the quantizers that launch it"
