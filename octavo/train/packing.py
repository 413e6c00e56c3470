"""Whole examples packed into batches without crossing: each attends to itself alone, and only answers are targets.

What a step sees is a pure function of (seed, step), as in data.py.
"""

import dataclasses
from collections.abc import Iterator

import numpy as np
import torch

from octavo.errors import DataError
from octavo.train.data import IGNORED, Batch, epoch_order
from octavo.train.examples import Examples


@dataclasses.dataclass(frozen=True)
class Fitted:
    """Examples that a run can use.

    Attributes:
        indices: [usable] int64, those with at least one target within max_len inputs.
        lengths: [usable] int64, their inputs (tokens less one), none above max_len.
        num_skipped: too long and left out.
        num_cut: too long and cut at their end.
        num_empty: left out because no target remains.
    """

    examples: Examples
    indices: np.ndarray
    lengths: np.ndarray
    num_skipped: int
    num_cut: int
    num_empty: int

    def read(self, index: int) -> tuple[np.ndarray, np.ndarray]:
        """(inputs, targets), each [length] int64, of the usable example number `index`; targets outside answers are
        IGNORED.
        """
        start = int(self.examples.starts[self.indices[index]])
        end = start + int(self.lengths[index]) + 1
        tokens = self.examples.tokens[start:end].astype(np.int64)
        answers = self.examples.answers[start + 1 : end]
        return tokens[:-1], np.where(answers == 1, tokens[1:], IGNORED)


def fit(examples: Examples, max_len: int, long_examples: str) -> Fitted:
    """Apply the truncation policy.

    Args:
        max_len: the most inputs of an example.
        long_examples: "skip", "cut" or "error".
    Raises:
        DataError: "error" and an example is longer; or nothing remains.
    """
    lengths = examples.lengths - 1
    is_long = lengths > max_len
    if long_examples == "error" and is_long.any():
        raise DataError(
            f"{int(is_long.sum())} of {len(lengths)} examples are longer than data.seq_len={max_len}, the longest has "
            f"{int(lengths.max()) + 1} tokens; raise data.seq_len, or set data.long_examples to 'skip' or 'cut'"
        )
    kept = np.minimum(lengths, max_len)
    # answers[start + 1 : start + 1 + kept] are what could be targets
    marked = np.concatenate([[0], np.cumsum(examples.answers, dtype=np.int64)])
    first = examples.starts[:-1] + 1
    num_targets = marked[np.minimum(first + kept, len(marked) - 1)] - marked[np.minimum(first, len(marked) - 1)]
    is_skipped = is_long & (long_examples == "skip")
    is_empty = (num_targets == 0) & ~is_skipped
    indices = np.flatnonzero(~is_skipped & ~is_empty)
    if not len(indices):
        raise DataError(
            f"none of {len(lengths)} examples fits data.seq_len={max_len} with an answer; raise data.seq_len"
        )
    num_cut = int((is_long & ~is_skipped & ~is_empty).sum())
    return Fitted(examples, indices, kept[indices], int(is_skipped.sum()), num_cut, int(is_empty.sum()))


def pack(lengths: np.ndarray, order: np.ndarray, max_len: int) -> list[np.ndarray]:
    """Fill packs of at most max_len inputs with whole examples, in order: a full pack is closed, the next begun."""
    ends = np.cumsum(lengths[order])
    packs, start, used = [], 0, 0
    while start < len(order):
        stop = max(int(np.searchsorted(ends, used + max_len, side="right")), start + 1)
        packs.append(order[start:stop])
        start, used = stop, int(ends[stop - 1])
    return packs


def make_batch(fitted: Fitted, packs: list[np.ndarray]) -> Batch:
    """One batch of some packs' examples; no token sees another example's."""
    pairs = [fitted.read(int(index)) for packed in packs for index in packed]
    starts = np.cumsum([0, *(len(inputs) for inputs, _ in pairs)])
    targets = np.concatenate([targets for _, targets in pairs])
    return Batch(
        input_ids=torch.from_numpy(np.concatenate([inputs for inputs, _ in pairs])),
        targets=torch.from_numpy(targets),
        cu_seqlens=torch.from_numpy(starts.astype(np.int64)),
        num_targets=int((targets != IGNORED).sum()),
    )


class PackSampler:
    """Draws packs, epoch after epoch; each epoch has an order, and so packs, of its own.

    Args:
        seq_len: the most inputs in a pack.
        batch_size: packs in an optimizer step.
    """

    def __init__(self, fitted: Fitted, seq_len: int, batch_size: int, num_micro_batches: int, seed: int) -> None:
        self.fitted = fitted
        self._seq_len, self._batch_size, self._num_micro_batches = seq_len, batch_size, num_micro_batches
        self._seed = seed
        self._num_packs: list[int] = []  # of the epochs met so far
        self._latest: tuple[int, list[np.ndarray]] = (-1, [])

    def batches(self, step: int) -> list[Batch]:
        """The micro-batches of one optimizer step (0-based): a pure function of (seed, step)."""
        first = step * self._batch_size
        packs = [self._pack(number) for number in range(first, first + self._batch_size)]
        size = self._batch_size // self._num_micro_batches
        return [make_batch(self.fitted, packs[i : i + size]) for i in range(0, self._batch_size, size)]

    def _pack(self, number: int) -> np.ndarray:
        epoch = 0
        while number >= self._packs_in(epoch):
            number -= self._packs_in(epoch)
            epoch += 1
        return self._packs(epoch)[number]

    def _packs_in(self, epoch: int) -> int:
        if epoch == len(self._num_packs):
            self._num_packs.append(len(self._packs(epoch)))
        return self._num_packs[epoch]

    def _packs(self, epoch: int) -> list[np.ndarray]:
        if self._latest[0] != epoch:
            order = epoch_order(self._seed, epoch, len(self.fitted.indices))
            self._latest = epoch, pack(self.fitted.lengths, order, self._seq_len)
        return self._latest[1]


def validation_packs(fitted: Fitted, seq_len: int, batch_size: int, max_tokens: int = 0) -> Iterator[Batch]:
    """The validation examples in order, packed, up to max_tokens inputs (0: all of them) and at least one pack."""
    packs = pack(fitted.lengths, np.arange(len(fitted.indices)), seq_len)
    if max_tokens:
        sizes = np.cumsum([fitted.lengths[packed].sum() for packed in packs])
        packs = packs[: max(int(np.searchsorted(sizes, max_tokens, side="right")), 1)]
    for i in range(0, len(packs), batch_size):
        yield make_batch(fitted, packs[i : i + batch_size])
