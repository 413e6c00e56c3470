"""The paged attention kernel: right, and the same bits however a sequence is cut and whatever else is in the batch."""

import random
from typing import Any

import pytest
import torch

from octavo.errors import BackendError
from octavo.numerics import Scaling, quantize_reference
from octavo.ops.attention import (
    PackedLengths,
    PagedKVLayer,
    allocate_kv_layer,
    as_pages,
    attention_packed,
    quantize_kv,
    write_kv,
)
from octavo.ops.attention import triton as kernels
from octavo.ops.attention.triton import attend_tiles, tiles
from octavo.testing import assert_bitwise, assert_sqnr
from octavo.testing.interpreter import is_interpreting
from tests.assertions import assert_codes, assert_raises
from tests.ops.attention.pages import Span, shuffled_tables, tokens_and_slots
from tests.ops.attention.softmax import softmax_fp64

DEVICE = "cpu" if is_interpreting() else "cuda"
# lengths, query heads, kv heads, head_dim
SMALL = ((150, 1, 77, 64), 4, 2, 32)
CASES = [SMALL, ((70, 3), 6, 1, 32), ((65,), 2, 2, 256)]
if not is_interpreting():
    CASES += [((1500, 2049, 1, 515), 32, 8, 128), ((700, 64), 16, 16, 256), ((3000,), 32, 8, 64)]
EACH_CASE = pytest.mark.parametrize(("lengths", "heads", "kv_heads", "dim"), CASES, ids=lambda v: str(v))
# groups, rows, warps; the interpreter knows no warps
SHAPES = [(1, 32, 4)] if is_interpreting() else [(1, 16, 1), (1, 16, 2), (1, 16, 4), (1, 32, 4), (2, 16, 2)]
EACH_CACHE = pytest.mark.parametrize("kv", ["fp8", "bf16", "fp8 attention"])


@pytest.fixture(autouse=True)
def short_splits(monkeypatch: pytest.MonkeyPatch) -> None:
    """So short that small sequences have several; the GPU also meets the real ones (test_real_splits)."""
    monkeypatch.setattr(kernels, "SPLIT", 64)


class Sequences:
    """Random queries, keys and values of sequences [T, heads, D], and a cache with shuffled pages for them."""

    def __init__(self, lengths: tuple[int, ...], heads: int, kv_heads: int, dim: int, kv: str, seed: int = 0) -> None:
        generator = torch.Generator().manual_seed(seed)
        total = sum(lengths)
        self.lengths, self.kv, self.scale = lengths, kv, dim**-0.5
        self.q, self.k, self.v = (
            torch.randn(total, n, dim, generator=generator).to(DEVICE, torch.bfloat16)
            for n in (heads, kv_heads, kv_heads)
        )
        self.starts = [sum(lengths[:i]) for i in range(len(lengths))]
        kinds = ("fp8", "fp8") if kv == "fp8 attention" else (kv, "bf16")
        self.tables, num_pages = shuffled_tables(lengths, 1, generator)
        self.layer = allocate_kv_layer(num_pages + 1, kv_heads, dim, kinds[0], torch.bfloat16, DEVICE, kinds[1])

    def attend(self, spans: list[Span], exact: bool = True, out_scaling: Scaling | None = None, **limits: int) -> Any:
        """Write and attend the tokens of each span."""
        index, slots = tokens_and_slots(self.tables, self.starts, spans)
        q, k, v = (x[index.to(DEVICE)] for x in (self.q, self.k, self.v))
        write_kv(self.layer, k, v, slots.to(DEVICE))
        counts = [b - a for _, a, b in spans]
        queries = kernels.Queries(
            self.tables[[i for i, _, _ in spans]].to(DEVICE),
            torch.tensor([0, *counts]).cumsum(0).to(DEVICE, torch.int32),
            torch.tensor([b for _, _, b in spans], dtype=torch.int32, device=DEVICE),
            limits.get("max_query_len", max(counts)),
            limits.get("max_seq_len", max(b for _, _, b in spans)),
        )
        options = {"exact": exact, "out_scaling": out_scaling}
        return kernels.attention_paged(q, self.layer, queries, self.scale, **options)[0]

    def whole(self, exact: bool = True, **limits: int) -> torch.Tensor:
        """All tokens of all sequences at once."""
        return self.attend([(i, 0, n) for i, n in enumerate(self.lengths)], exact, **limits)

    def wanted(self) -> torch.Tensor:
        """Plain causal attention over what the cache holds, sequence by sequence; the reference's in FP8 attention."""
        k, v = self.k, self.v
        if self.kv == "fp8 attention":
            ends = torch.tensor([0, *self.lengths]).cumsum(0)
            qkv = (x.float().cpu() for x in (self.q, k, v))
            kinds = {"kv_cache_dtype": "fp8", "attention_dtype": "fp8"}
            return attention_packed(*qkv, ends, softmax_scale=self.scale, **kinds)[0].to(DEVICE)  # type: ignore[arg-type]
        if self.kv == "fp8":
            k, v = (codes.double() * scale[..., None] for codes, scale in map(quantize_kv, (k, v)))
        return softmax_fp64(self.q, k, v, self.lengths, scale=self.scale)


@EACH_CACHE
@EACH_CASE
def test_it_is_softmax_attention(lengths: tuple[int, ...], heads: int, kv_heads: int, dim: int, kv: str) -> None:
    sequences = Sequences(lengths, heads, kv_heads, dim, kv)
    assert_sqnr(sequences.whole(), sequences.wanted(), 44.0)


@EACH_CACHE
@EACH_CASE
def test_decode_gives_prefill_s_bits(lengths: tuple[int, ...], heads: int, kv_heads: int, dim: int, kv: str) -> None:
    sequences = Sequences(lengths, heads, kv_heads, dim, kv)
    whole = sequences.whole()
    for i, length in enumerate(lengths):
        edges = {0, 1, 15, 16, 62, 63, 64, 65, 127, 128, 129, length - 1}
        edges = {0, 17, 63, 64, length - 1} if is_interpreting() else edges
        positions = sorted(p for p in edges if p < length)
        for position in positions:
            alone = sequences.attend([(i, position, position + 1)], max_seq_len=2 * length + 64)
            assert_bitwise(alone[0], whole[sequences.starts[i] + position], f"position {position} of sequence {i}")


@EACH_CACHE
@pytest.mark.parametrize("longest", [64, 200], ids=["one split", "splits"])
@pytest.mark.parametrize(("heads", "kv_heads", "dim"), [(6, 2, 128), (2, 2, 256)], ids=str)
def test_codes_are_those_of_the_output(heads: int, kv_heads: int, dim: int, longest: int, kv: str) -> None:
    lengths = (1, 40, 64) if longest == 64 else (70, 1, 150)
    sequences, scaling = Sequences(lengths, heads, kv_heads, dim, kv), Scaling.block_1x128()
    sequences.q[sequences.starts[1]] = 0.0
    sequences.whole()
    spans = [(i, n - 1, n) for i, n in enumerate(lengths)]
    out = sequences.attend(spans, max_seq_len=longest)
    codes = sequences.attend(spans, out_scaling=scaling, max_seq_len=longest)
    assert_codes(codes, quantize_reference(out.reshape(len(lengths), -1).cpu(), scaling))


@EACH_CACHE
@pytest.mark.parametrize(("groups", "rows", "num_warps"), SHAPES, ids=str)
def test_a_tile_s_shape_decides_no_bit(kv, groups, rows, num_warps, monkeypatch):
    sequences = Sequences((70, 5), 4, 2, 32, kv)
    wanted = sequences.whole()
    old = tiles.tiles_of(sequences.layer)
    other = tiles.Tile(old.prefill.block, groups, rows, num_warps, 2)
    monkeypatch.setattr(kernels, "tiles_of", lambda _: tiles.Tiles(other, other, other))
    assert_bitwise(sequences.whole(), wanted)
    assert_bitwise(sequences.attend([(0, 69, 70)], max_seq_len=400)[0], wanted[69])


@EACH_CACHE
def test_fast_tiles(kv: str) -> None:
    sequences = Sequences((70, 5), 4, 2, 32, kv)
    assert_sqnr(sequences.whole(exact=False), sequences.wanted(), 44.0)


def test_a_scale_that_turns_the_order_round_is_refused() -> None:
    sequences = Sequences((3,), 2, 1, 32, "bf16")
    sequences.scale = -1.0
    assert_raises(BackendError, "softmax_scale above 0, got -1", sequences.whole)


@EACH_CACHE
def test_any_chunks_in_any_batch(kv: str) -> None:
    sequences = Sequences(*SMALL, kv)
    whole = sequences.whole()
    for seed in range(1 if is_interpreting() else 20):
        rng, done = random.Random(seed), [0] * len(sequences.lengths)
        while any(d < n for d, n in zip(done, sequences.lengths, strict=True)):
            active = [i for i, n in enumerate(sequences.lengths) if done[i] < n]
            chosen = rng.sample(active, rng.randint(1, len(active)))
            spans = [(i, done[i], min(done[i] + rng.choice([1, 7, 33, 90]), sequences.lengths[i])) for i in chosen]
            found = sequences.attend(spans)
            index, _ = tokens_and_slots(sequences.tables, sequences.starts, spans)
            assert_bitwise(found, whole[index.to(DEVICE)])
            for i, _, end in spans:
                done[i] = end


@EACH_CACHE
def test_remains_of_others_are_not_read(kv: str) -> None:
    outputs = []
    for poison in (0.0, float("nan")):
        sequences = Sequences((70, 5), 4, 2, 32, kv)
        for cache in (sequences.layer.k, sequences.layer.v):
            cache.copy_(torch.full(cache.shape, poison).to(cache.dtype))
        for scale in (sequences.layer.k_scale, sequences.layer.v_scale):
            if scale is not None:
                scale.fill_(poison)
        outputs.append(sequences.whole())
    assert_bitwise(outputs[1], outputs[0])
    assert outputs[1].isfinite().all()


@pytest.mark.parametrize("size", [1e-30, 1e-3, 1e4, 1e30])
def test_queries_of_any_size(size: float) -> None:
    """They go through fp16 divided by a power of two."""
    sequences = Sequences((90,), 4, 2, 32, "fp8")
    wanted = Sequences((90,), 4, 2, 32, "fp8")
    sequences.q, sequences.scale = (sequences.q.float() * size).bfloat16(), wanted.scale / size
    wanted.q = (sequences.q.float() / size).bfloat16()
    assert_sqnr(sequences.whole(), wanted.wanted(), 40.0)


def watch_grids(grids: list[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """Note each kernel that is launched, and its grid."""
    launcher_of = kernels.launcher_of

    def watched(kernel: object, **how: object) -> Any:
        launch = launcher_of(kernel, **how)
        return lambda grid, *given: grids.append((kernel, grid)) or launch(grid, *given)

    monkeypatch.setattr(kernels, "launcher_of", watched)


@EACH_CACHE
@pytest.mark.parametrize("out_scaling", [None, Scaling()])
@pytest.mark.parametrize(("longest", "limit"), [(200, "MAX_SPLIT_TILES"), (128, "MAX_HALVED_TILES")])
def test_many_tiles_walk_their_splits_alone_with_the_same_bits(
    kv: str, longest: int, limit: str, out_scaling: Scaling | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    sequences = Sequences((101, 64, 65, 1, longest), 4, 2, 128, kv)
    sequences.whole()  # so that all keys are in the cache
    newest = [(i, n - 1, n) for i, n in enumerate(sequences.lengths)]
    outputs, grids = [], list[Any]()
    watch_grids(grids, monkeypatch)
    num_splits = -(-longest // kernels.SPLIT)
    for most, splits in ((10, num_splits), (9, 1), (10, num_splits)):  # of 5 sequences and 2 heads, counters as before
        monkeypatch.setattr(kernels, limit, most)
        grids.clear()
        outputs.append(sequences.attend(newest, out_scaling=out_scaling))
        assert grids == [(attend_tiles, (5, 2, splits))]
    for found in outputs[1:]:
        if out_scaling is None:
            assert_bitwise(found, outputs[0])
        else:
            assert_codes(found, outputs[0])


def test_two_splits_of_one_softmax_walk_from_half_as_many_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    sequences = Sequences((101, 64, 65, 1, 128), 4, 2, 128, "fp8")
    sequences.whole()
    newest, grids = [(i, n - 1, n) for i, n in enumerate(sequences.lengths)], list[Any]()
    watch_grids(grids, monkeypatch)
    for most, splits in ((20, 2), (19, 1)):  # 10 tiles
        monkeypatch.setattr(kernels, "MAX_HALVED_TILES", most)
        sequences.attend(newest, exact=False)
        assert grids.pop() == (attend_tiles, (5, 2, splits))


def test_packed_keys_as_pages_and_the_log_of_the_sum() -> None:
    sequences = Sequences(*SMALL, "fp8")
    lengths = PackedLengths.from_lengths(list(sequences.lengths), DEVICE)
    (k, k_scale), (v, v_scale) = quantize_kv(sequences.k), quantize_kv(sequences.v)
    layer, tables = as_pages((k, v, k_scale, v_scale), lengths)
    assert isinstance(layer, PagedKVLayer)
    starts = lengths.cu_seqlens
    queries = kernels.Queries(tables, starts, starts[1:] - starts[:-1], lengths.max_len, lengths.max_len)
    out, lse = kernels.attention_paged(sequences.q, layer, queries, sequences.scale, with_lse=True)
    assert_bitwise(out, sequences.whole())
    assert lse is not None
    first = sequences.starts[3]  # its first token sees itself alone
    key = (k[first].float() * k_scale[first][:, None]).repeat_interleave(2, dim=0)
    score = (sequences.q[first].float() * key).sum(-1) * sequences.scale
    assert torch.allclose(lse[first], score, atol=1e-5)


@pytest.mark.skipif(is_interpreting(), reason="the interpreter's time goes to short splits")
@EACH_CACHE
def test_real_splits(kv: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    sequences = Sequences((4000, 700), 32, 8, 128, kv)
    whole = sequences.whole()
    for position in (0, 511, 512, 513, 1023, 1024, 3999):
        alone = sequences.attend([(0, position, position + 1)], max_seq_len=4096)
        assert_bitwise(alone[0], whole[position])
