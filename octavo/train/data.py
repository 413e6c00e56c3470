"""From tokens to packed batches. What a step sees is a pure function of (seed, step): nothing to save, nothing to
restore.
"""

import dataclasses
import functools
from collections.abc import Iterator

import numpy as np
import torch

IGNORED = -100  # the target of a position whose next token is another document's


@dataclasses.dataclass(frozen=True)
class Batch:
    """Packed sequences, with no padding.

    Attributes:
        input_ids: [tokens] int64.
        targets: [tokens] int64, the next token or IGNORED.
        cu_seqlens: [sequences + 1] int64, where each sequence starts; the last is the number of tokens.
        num_targets: targets that count.
    """

    input_ids: torch.Tensor
    targets: torch.Tensor
    cu_seqlens: torch.Tensor
    num_targets: int

    def to(self, device: torch.device | str) -> "Batch":
        """The same batch on a device."""
        moved = (self.input_ids.to(device), self.targets.to(device), self.cu_seqlens.to(device))
        return Batch(*moved, self.num_targets)


def make_batch(windows: list[np.ndarray], eos_id: int | None) -> Batch:
    """Pack windows of the token stream into one batch.

    Args:
        windows: each [n + 1] tokens, n >= 1: n inputs and, one further, their targets.
        eos_id: ends a document: attention restarts after it and nothing is predicted from it. None: windows are
            not cut further.
    """
    inputs = np.concatenate([window[:-1] for window in windows]).astype(np.int64)
    targets = np.concatenate([window[1:] for window in windows]).astype(np.int64)
    starts = np.cumsum([0] + [len(window) - 1 for window in windows])
    if eos_id is not None:
        ends = np.flatnonzero(inputs == eos_id)
        targets[ends] = IGNORED
        starts = np.union1d(starts, ends + 1)
    return Batch(
        input_ids=torch.from_numpy(inputs),
        targets=torch.from_numpy(targets),
        cu_seqlens=torch.from_numpy(starts.astype(np.int64)),
        num_targets=int((targets != IGNORED).sum()),
    )


@dataclasses.dataclass(frozen=True)
class Sampler:
    """Draws windows without replacement, epoch after epoch, each in an order of its own.

    Args:
        tokens: the training stream, longer than seq_len.
        eos_id: see make_batch.
    """

    tokens: np.ndarray
    seq_len: int
    batch_size: int
    num_micro_batches: int
    seed: int
    eos_id: int | None

    def batches(self, step: int) -> list[Batch]:
        """The micro-batches of one optimizer step (0-based): a pure function of (seed, step)."""
        first = step * self.batch_size
        windows = [self._window(index) for index in range(first, first + self.batch_size)]
        size = self.batch_size // self.num_micro_batches
        return [make_batch(windows[i : i + size], self.eos_id) for i in range(0, self.batch_size, size)]

    def _window(self, index: int) -> np.ndarray:
        num_windows = (len(self.tokens) - 1) // self.seq_len
        epoch, place = divmod(index, num_windows)
        order = epoch_order(self.seed, epoch, num_windows)
        start = int(order[place]) * self.seq_len
        return self.tokens[start : start + self.seq_len + 1]


def validation_batches(
    tokens: np.ndarray, seq_len: int, batch_size: int, eos_id: int | None, max_tokens: int = 0
) -> Iterator[Batch]:
    """The validation stream in order, in windows of seq_len, up to max_tokens (0: all of it)."""
    end = len(tokens) - 1 if max_tokens == 0 else min(max_tokens, len(tokens) - 1)
    starts = range(0, end, seq_len)
    windows = [tokens[start : min(start + seq_len, end) + 1] for start in starts]
    for i in range(0, len(windows), batch_size):
        yield make_batch(windows[i : i + batch_size], eos_id)


@functools.lru_cache(maxsize=2)
def epoch_order(seed: int, epoch: int, num_windows: int) -> np.ndarray:
    """A permutation of the windows, sorted by a hash (splitmix64), so that no library version can change it."""
    key = splitmix64(np.array([seed], dtype=np.uint64)) + np.uint64(epoch)
    return np.argsort(splitmix64(np.arange(num_windows, dtype=np.uint64) ^ splitmix64(key)), kind="stable")


def splitmix64(x: np.ndarray) -> np.ndarray:
    """Of Steele, Lea, Flood, "Fast Splittable Pseudorandom Number Generators" (2014)."""
    x = x + np.uint64(0x9E3779B97F4A7C15)
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))
