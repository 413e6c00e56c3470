"""Ragged sequences attend as each would on its own, and what does not fit together is refused."""

import gc
import weakref

import pytest
import torch

from octavo.errors import BackendError, DtypeError, ShapeError
from octavo.ops.attention import PackedLengths, attention_packed
from octavo.ops.attention.varlen import TILE_ROWS, VarlenBatch, attention_varlen
from octavo.testing import assert_sqnr
from tests.ops.attention.varlen.spans import MIXED, NEW, draw, expected

HEADS = (4, 2, 64)


@pytest.mark.parametrize(("dtype", "floor"), [(torch.bfloat16, 45.0), (torch.float32, 90.0)], ids=["bf16", "fp32"])
@pytest.mark.parametrize("dim", [64, 80])
@pytest.mark.parametrize("spans", [MIXED, NEW, [(0, 40)] * 3], ids=["mixed", "new", "equal"])
def test_each_on_its_own(
    spans: list[tuple[int, int]], dim: int, dtype: torch.dtype, floor: float, device: torch.device
) -> None:
    q, k, v = draw(spans, (4, 2, dim), dtype, device)
    out = torch.full_like(q, 7.0)
    attention_varlen(q, k, v, VarlenBatch.of(spans, device), out, softmax_scale=dim**-0.5)
    assert_sqnr(out, expected(q, k, v, spans), floor)


def test_tiles_hold_every_query_once_and_most_keys_first() -> None:
    batch = VarlenBatch.of(MIXED, torch.device("cpu"))
    tiles = [tuple(tile) for tile in batch.tiles.tolist()]
    assert sorted(tiles) == [(b, i) for b, (start, end) in enumerate(MIXED) for i in range(0, end - start, TILE_ROWS)]
    keys = [MIXED[b][0] + first for b, first in tiles]
    assert keys == sorted(keys, reverse=True)
    assert batch.lengths.cu_seqlens.diff().tolist() == [end - start for start, end in MIXED]
    assert batch.key_lengths.cu_seqlens.diff().tolist() == [end for _, end in MIXED]
    new = VarlenBatch.of(NEW, torch.device("cpu"))
    assert new.key_lengths is new.lengths


def test_measured_lengths_are_their_own() -> None:
    cu_seqlens = torch.tensor([0, 3, 8], dtype=torch.int32)
    lengths = PackedLengths.from_cu_seqlens(cu_seqlens)
    assert not lengths.has_tiles
    batch = lengths.varlen
    assert lengths.has_tiles and lengths.varlen.tiles is batch.tiles
    cu_seqlens.fill_(100)
    assert batch.lengths.cu_seqlens.tolist() == [0, 3, 8]
    lengths_left = weakref.ref(lengths)
    gc.disable()  # the collector would free a circle of them, later than a GPU's memory is wanted
    try:
        del lengths, batch
        assert lengths_left() is None
    finally:
        gc.enable()


def test_nothing_to_do() -> None:
    q, k, v = draw([], HEADS, torch.bfloat16, "cpu")
    batch, out = VarlenBatch.of([], torch.device("cpu")), q.clone()
    attention_varlen(q, k, v, batch, out, softmax_scale=1.0)
    assert out.shape == (0, *HEADS[::2]) and batch.tiles.shape == (0, 2)


def test_what_does_not_fit_together() -> None:
    q, k, v = draw(NEW, HEADS, torch.bfloat16, "cpu")
    batch, out = VarlenBatch.of(NEW, torch.device("cpu")), torch.empty_like(q)
    wrong = [
        (q, k, v[:, :1], out),
        (q, k[..., :32], v[..., :32], out),
        (q[:, :3], k, v, out[:, :3].contiguous()),
        (q, k, v, out[:1]),
        (q, k, v, out.transpose(0, 1).contiguous().transpose(0, 1)),
    ]
    for *operands, where in wrong:
        with pytest.raises(ShapeError, match=r"attention_varlen takes q \[T, H, D\], k and v \[Tk, KH, D\]"):
            attention_varlen(*operands, batch, where, softmax_scale=1.0)
    with pytest.raises(ShapeError, match="must end with the number of tokens"):
        attention_varlen(q[1:], k, v, batch, out[1:], softmax_scale=1.0)
    with pytest.raises(ShapeError, match="must end with the number of tokens"):
        attention_varlen(q, k[1:], v[1:], batch, out, softmax_scale=1.0)
    with pytest.raises(BackendError, match="softmax_scale above 0, got 0"):
        attention_varlen(q, k, v, batch, out, softmax_scale=0)
    with pytest.raises(DtypeError, match=r"one dtype, got torch\.bfloat16, torch\.bfloat16 and torch\.float16"):
        attention_varlen(q, k, v.half(), batch, out, softmax_scale=1.0)
    with pytest.raises(DtypeError, match=r"one dtype, got torch\.bfloat16, torch\.float16 and torch\.float16"):
        attention_packed(q, k.half(), v.half(), batch.lengths, softmax_scale=1.0)
