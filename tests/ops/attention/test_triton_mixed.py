"""Attention of mixed steps from lists of work: the same as without them, whatever fills the lists up."""

import functools
import random
from typing import Any

import numpy as np
import pytest
import torch

from octavo.errors import BackendError
from octavo.ops.attention import MixedBatch
from octavo.ops.attention import triton as kernels
from octavo.ops.attention.mixed import list_splits, list_tiles
from octavo.testing import assert_bitwise, assert_sqnr
from octavo.testing.interpreter import is_interpreting
from tests.assertions import assert_raises
from tests.ops.attention.pages import Span, tokens_and_slots
from tests.ops.attention.test_triton import DEVICE, EACH_CACHE, Sequences

UNWRITTEN = 7.0  # what stands in the output before


@pytest.fixture(autouse=True)
def short_splits(monkeypatch: pytest.MonkeyPatch) -> None:
    """As in test_triton."""
    monkeypatch.setattr(kernels, "SPLIT", 64)


class Step:
    """A step over sequences: decodes of some, chunks of others, padding tokens and padding sequences.

    Args:
        sequences: of which all tokens stand in the cache.
        spans: (sequence, start, end), single tokens first.
        rows: of a tile in the list; None for the kernel's own.
        padding: tokens, sequences, splits and tiles too many.
    """

    def __init__(
        self, sequences: Sequences, spans: list[Span], exact: bool, rows: int | None = None,
        padding: int = 5, as_tiles: bool = False,
    ) -> None:  # fmt: skip
        self.sequences, self.spans, self.exact = sequences, spans, exact
        index, _ = tokens_and_slots(sequences.tables, sequences.starts, spans)
        self.index = index.to(DEVICE)
        q = sequences.q[self.index]
        filler = torch.full((padding, *q.shape[1:]), float("nan"), dtype=q.dtype, device=DEVICE)
        self.q = torch.cat([q, filler])
        counts = np.array([end - start for _, start, end in spans])
        ends = np.array([end for _, _, end in spans])
        num_decodes = 0 if as_tiles else int((counts == 1).sum())
        group = q.shape[1] // sequences.layer.k.shape[1]
        rows = rows or kernels.mixed_tile_rows(sequences.layer, exact=exact)
        num = len(spans) + padding
        tables = torch.zeros(num, sequences.tables.shape[1], dtype=torch.int32)
        tables[: len(spans)] = sequences.tables[[i for i, _, _ in spans]]
        cu = np.concatenate([[0], np.cumsum(counts), np.full(padding, counts.sum())])
        lists = list_splits(ends[:num_decodes], 64), list_tiles(num_decodes, counts[num_decodes:], group, rows)
        splits, tiles = (np.concatenate([x, np.full((padding, 2), -1)]) for x in lists)
        self.batch = MixedBatch(tables.to(DEVICE), *map(on_device, (cu, [*ends, *[0] * padding], splits, tiles)))

    def attend(self) -> torch.Tensor:
        out = torch.full_like(self.q, UNWRITTEN)
        kernels.attention_mixed(self.q, self.sequences.layer, self.batch, self.sequences.scale, out, exact=self.exact)
        return out


def on_device(values: Any) -> torch.Tensor:
    return torch.tensor(np.asarray(values), dtype=torch.int32, device=DEVICE)


def random_spans(
    rng: random.Random, lengths: tuple[int, ...], num: int, num_decodes: int
) -> list[tuple[int, int, int]]:
    spans = []
    for i in rng.sample(range(len(lengths)), num):
        end = rng.randint(2, lengths[i])
        start = end - 1 if len(spans) < num_decodes else rng.randint(max(0, end - 90), end - 2)
        spans.append((i, start, end))
    return spans


LENGTHS = (150, 65, 77, 64, 200, 129, 3)


@functools.cache
def usual(kv: str) -> tuple[Sequences, torch.Tensor]:
    """The sequences of most tests, which write nothing to their cache, and what their tokens attend to."""
    sequences = Sequences(LENGTHS, 4, 2, 32, kv)
    return sequences, sequences.whole()


@EACH_CACHE
@pytest.mark.parametrize("exact", [True, False])
@pytest.mark.parametrize("seed", range(1 if is_interpreting() else 10))
def test_any_mix(kv: str, exact: bool, seed: int) -> None:
    rng = random.Random(seed)
    sequences, whole = usual(kv)
    step = Step(sequences, random_spans(rng, LENGTHS, rng.randint(3, 6), rng.randint(1, 3)), exact)
    out, wanted = step.attend(), whole[step.index]
    n = len(wanted)
    if exact:
        assert_bitwise(out[:n], wanted)
    else:
        assert_sqnr(out[:n], sequences.wanted()[step.index], 44.0)
    assert (out[n:] == UNWRITTEN).all()
    assert_bitwise(step.attend(), out)  # the counters of splits are as they were


@EACH_CACHE
@pytest.mark.parametrize("spans", [[(0, 149, 150), (4, 199, 200)], [(4, 100, 200)]], ids=["decodes", "prompts"])
def test_one_kind_alone(kv: str, spans: list[Span]) -> None:
    sequences, whole = usual(kv)
    step = Step(sequences, spans, exact=True)
    assert_bitwise(step.attend()[:-5], whole[step.index])


@EACH_CACHE
def test_a_list_of_smaller_tiles_and_single_tokens_as_tiles(kv: str) -> None:
    sequences, whole = usual(kv)
    spans = [(0, 149, 150), (4, 100, 200), (1, 0, 65)]
    own = kernels.mixed_tile_rows(sequences.layer, exact=True)
    for how in ({"rows": own // 2}, {"as_tiles": True}):
        step = Step(sequences, spans, exact=True, **how)
        assert_bitwise(step.attend()[:-5], whole[step.index])


def test_an_entry_within_a_tile_is_skipped() -> None:
    """Two programs of the same rows would write what they merged so far over each other's."""
    sequences, _ = usual("fp8")
    step = Step(sequences, [(4, 100, 200)], exact=True)
    within = step.batch.tiles[:, 1] + kernels.mixed_tile_rows(sequences.layer, exact=True) // 2
    step.batch.tiles[:, 1] = within
    assert (step.attend() == UNWRITTEN).all()


def test_each_sequence_counts_its_own_splits(monkeypatch: pytest.MonkeyPatch) -> None:
    """One whose splits are not all there is left; the others end as ever, though programs run in any order."""
    monkeypatch.setattr(kernels, "arrivals_of", lambda device, num: torch.zeros(num, dtype=torch.int32, device=device))
    sequences, whole = usual("fp8")
    for missing in (2, 7):  # of the first sequence, and of the last one
        step = Step(sequences, [(0, 149, 150), (2, 76, 77), (5, 128, 129)], exact=True)
        assert step.batch.splits[missing].tolist() == [2 * (missing // 7), 2]
        step.batch.splits[missing] = -1
        out = step.attend()
        whole_ones = slice(1, 3) if missing == 2 else slice(0, 2)
        assert (out[0 if missing == 2 else 2] == UNWRITTEN).all()
        assert_bitwise(out[whole_ones], whole[step.index[whole_ones]])


def test_heads_that_do_not_divide_a_tile() -> None:
    sequences = Sequences((70, 100, 33), 6, 2, 32, "fp8")
    whole = sequences.whole()
    step = Step(sequences, [(0, 69, 70), (1, 13, 100), (2, 0, 33)], exact=True)
    assert_bitwise(step.attend()[:-5], whole[step.index])


def test_nothing_but_padding_writes_nothing() -> None:
    sequences = Sequences((70,), 4, 2, 32, "fp8")
    sequences.whole()
    step = Step(sequences, [(0, 69, 70)], exact=True)
    for x in step.batch[3:]:
        x.fill_(-1)
    assert (step.attend() == UNWRITTEN).all()


def test_a_scale_that_turns_the_order_round_is_refused() -> None:
    sequences = Sequences((3,), 2, 1, 32, "bf16")
    step = Step(sequences, [(0, 2, 3)], exact=True)
    sequences.scale = -1.0
    assert_raises(BackendError, "softmax_scale above 0, got -1", step.attend)


@pytest.mark.skipif(is_interpreting(), reason="the interpreter's time goes to short splits")
@EACH_CACHE
def test_in_a_cuda_graph(kv: str) -> None:
    """A replay over another step's lists gives that step's bits."""
    sequences = Sequences(LENGTHS, 32, 8, 128, kv)
    whole = sequences.whole()
    step = Step(sequences, [(0, 149, 150), (4, 100, 200), (1, 0, 65)], exact=True, padding=40)
    q, out = step.q.clone(), torch.empty_like(step.q)
    batch = MixedBatch(*(x.clone() for x in step.batch))

    def attend() -> None:
        kernels.attention_mixed(q, sequences.layer, batch, sequences.scale, out)

    attend()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        attend()
    other = Step(sequences, [(4, 150, 151), (2, 76, 77), (0, 30, 130)], exact=True, padding=0)
    n = len(other.index)
    q[:n] = other.q
    for x, new in zip(batch, other.batch, strict=True):
        x.fill_(-1 if x.dim() == 2 and x.shape[1] == 2 else 0)
        x[: len(new)] = new
    batch.cu_seqlens[len(other.batch.cu_seqlens) :] = n
    graph.replay()
    assert_bitwise(out[:n], whole[other.index])
