"""Whether a waiting sequence may begin: will the pages last to the end of all whose length is known? Pure Python.

Beginning as many sequences as have room now is best where their final lengths are unknown. Where that is known, those
that lose their pages later were begun in vain: what they computed is computed again.
"""

from collections.abc import Iterable

import numpy as np

from octavo.serve.engine.page_manager import PageManager
from octavo.serve.engine.sequence import Sequence


class KVCapacityForecast:
    """The pages that running sequences will need, for the admissions of one step.

    Args:
        running: each grows by a token a step; those of known length give their pages back at their end, the others
            are taken to stay as they are.
    """

    def __init__(self, page_manager: PageManager, running: Iterable[Sequence]) -> None:
        self._manager = page_manager
        self._lengths: list[tuple[int, int]] = []  # (tokens now, tokens at the end), of known ends
        self._num_held = 0  # pages of the others, and of shared pages one less for each further holder
        num_listed = 0
        for seq in running:
            num_listed += self._add(seq)
        self._num_held += page_manager.num_used_pages - num_listed

    def _add(self, seq: Sequence) -> int:
        """Returns how many pages _lengths stands for."""
        if seq.known_final_len <= seq.num_tokens_ahead:
            return 0
        self._lengths.append((seq.num_tokens_ahead, seq.known_final_len))
        return self._manager.pages_for(seq.num_tokens_ahead)

    def begin(self, seq: Sequence) -> bool:
        """Whether the pages last with this one, too; it counts as running from then on."""
        num_held, num_known = self._num_held, len(self._lengths)
        if not self._add(seq):
            self._num_held += self._manager.pages_for(seq.num_tokens)
        if not num_known or self._peak() <= self._manager.num_pages:  # a sequence alone always runs
            return True
        self._num_held = num_held
        del self._lengths[num_known:]
        return False

    def _peak(self) -> int:
        """The most pages in use at any later step."""
        size = self._manager.page_size
        now, end = np.array(self._lengths, dtype=np.int64).T
        if self._num_held + (-(-end // size)).sum() <= self._manager.num_pages:
            return 0
        left = end - now
        steps = np.unique(left)[:, None]  # just before some of them end
        pages = -(-(now + steps) // size) * (left >= steps)
        return int(self._num_held + pages.sum(axis=1).max())
