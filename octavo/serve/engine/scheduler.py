"""The scheduler: one token budget a step, no phases. Pure Python; it decides, the model runner computes.

A sequence has tokens and a count of those computed; a step hands out the difference, to running sequences first, then
to waiting ones. Decoding (one token), prefill, chunks of it, prefix hits and recomputation after a preemption are all
this one case. A token that a step under way samples counts as one of its sequence's: the next step is scheduled before
its value is known.
"""

from collections import deque
from itertools import islice
from typing import NamedTuple

from octavo.serve.engine.admission import KVCapacityForecast
from octavo.serve.engine.page_manager import PageManager
from octavo.serve.engine.sequence import Sequence
from octavo.serve.engine.stats import EngineStats

_MOST_COUNTED = 1024  # sequences that wait; more make no step larger


class Chunk(NamedTuple):
    """Tokens [start, end) of a sequence, to be computed in this step.

    Attributes:
        is_last: they reach the sequence's end, so the next token is sampled from them.
        has_pending: the last of them is being sampled by the step before, on the device.
    """

    sequence: Sequence
    start: int
    end: int
    is_last: bool
    has_pending: bool = False

    @property
    def num_tokens(self) -> int:
        return self.end - self.start

    @property
    def is_decode(self) -> bool:
        """The newest token alone, which its sequence's slot has."""
        return self.is_last and self.end - self.start == 1 and not self.sequence.scores_prompt


class Scheduler:
    """Chooses what each step computes.

    Args:
        page_manager: the cache's pages. A sequence's max_len must fit into them: then the oldest always gets on.
        max_num_seqs: sequences that run at a time.
        max_num_batched_tokens: tokens a step.
        stats: where it counts.
        plan_known_lengths: see EngineConfig.
        max_num_mixed_tokens: see EngineConfig.
    """

    def __init__(
        self,
        page_manager: PageManager,
        max_num_seqs: int,
        max_num_batched_tokens: int,
        stats: EngineStats,
        plan_known_lengths: bool = False,
        max_num_mixed_tokens: int | None = None,
    ) -> None:
        self.page_manager = page_manager
        self.max_num_seqs = max_num_seqs
        self.max_num_batched_tokens = max_num_batched_tokens
        self.stats = stats
        self.plan_known_lengths = plan_known_lengths
        self.max_num_mixed_tokens = max_num_mixed_tokens
        self.waiting: deque[Sequence] = deque()
        self.running: list[Sequence] = []
        self.num_grammars = 0  # unfinished sequences that have one
        self._tokens_left = self._prompt_tokens_left = 0  # of the step that is chosen now
        self._num_computed_before: dict[Sequence, int] = {}  # of preempted sequences

    @property
    def has_unfinished(self) -> bool:
        return bool(self.waiting or self.running)

    def add(self, seq: Sequence) -> None:
        """Queue a new sequence."""
        self.waiting.append(seq)
        self.num_grammars += seq.grammar is not None

    def schedule(self) -> list[Chunk]:
        """Choose the next step's chunks, at most max_num_batched_tokens tokens, and count them as computed."""
        num_preemptions = self.stats.num_preemptions
        chunks: list[Chunk] = []
        self._tokens_left, self._prompt_tokens_left = self.max_num_batched_tokens, self._prompt_tokens()
        self._continue_running(chunks)
        if self.stats.num_preemptions == num_preemptions:
            self._admit_waiting(chunks)
        self.stats.num_computed_tokens += self.max_num_batched_tokens - self._tokens_left
        self.stats.note_pages(self.page_manager.num_used_pages)
        return chunks

    def finish(self, seq: Sequence) -> None:
        """Let go of a sequence, wherever it is, and of its pages."""
        if seq in self.running:
            self.running.remove(seq)
            self.page_manager.free(seq)
        else:
            self.waiting.remove(seq)
        self.num_grammars -= seq.grammar is not None
        self._num_computed_before.pop(seq, None)
        self.stats.note_pages(self.page_manager.num_used_pages)

    def preempt_all(self) -> None:
        """Let every running sequence start over, in the order in which they ran."""
        while self.running:
            self._preempt(self.running.pop())

    def _prompt_tokens(self) -> int:
        """Tokens of prompts in this step: few where others decode and little waits, so that these come evenly."""
        if self.max_num_mixed_tokens is None:
            return self.max_num_batched_tokens
        due = [len(seq.token_ids) + seq.num_pending - seq.num_computed_tokens for seq in self.running]
        num_decodes = due.count(1)
        if not num_decodes:
            return self.max_num_batched_tokens
        waiting = sum(due) - num_decodes + sum([len(seq.token_ids) for seq in islice(self.waiting, _MOST_COUNTED)])
        least = -(-self.max_num_mixed_tokens // 4)
        return max(self.max_num_mixed_tokens - num_decodes, least, waiting // 4)

    def _continue_running(self, chunks: list[Chunk]) -> None:
        """Add what running sequences compute."""
        page_size = self.page_manager.page_size
        for seq in self.running:  # which loses its tail alone, and no sequence that was passed
            if not self._tokens_left:
                break
            num_tokens = len(seq.token_ids) + seq.num_pending
            if seq.num_pending and num_tokens >= seq.max_len:  # it ends with the token under way
                continue
            if not self._prompt_tokens_left and num_tokens - seq.num_computed_tokens > 1:
                continue
            if num_tokens > len(seq.page_table) * page_size and not self._make_room(seq):
                break
            chunks.append(self._take_chunk(seq))

    def _make_room(self, seq: Sequence) -> bool:
        """Grow a running sequence, preempting from the tail; False if it was itself the last to be preempted."""
        while not self.page_manager.grow(seq):
            victim = self.running.pop()
            self._preempt(victim)
            if victim is seq:
                return False
        return True

    def _preempt(self, seq: Sequence) -> None:
        self.page_manager.free(seq)
        self._num_computed_before[seq] = seq.num_computed_tokens
        seq.num_computed_tokens = 0
        self.waiting.appendleft(seq)
        self.stats.num_preemptions += 1

    def _admit_waiting(self, chunks: list[Chunk]) -> None:
        """Begin waiting sequences, in order, and add what they compute."""
        outlook: KVCapacityForecast | None = None
        while self.waiting and len(self.running) < self.max_num_seqs:
            if not (self._tokens_left and self._prompt_tokens_left):
                break
            seq = self.waiting[0]
            if self.plan_known_lengths and seq.known_final_len:
                outlook = outlook or KVCapacityForecast(self.page_manager, self.running)
                if not outlook.begin(seq):
                    break
            num_cached = self.page_manager.allocate(seq)
            if num_cached is None:
                break
            self.running.append(self.waiting.popleft())
            seq.num_computed_tokens = num_cached
            if seq.num_cached_tokens is None:
                seq.num_cached_tokens = num_cached
            seq.prefill_len, seq.num_prefill_chunks = seq.num_tokens, 0
            self.stats.num_prefix_query_tokens += seq.num_tokens
            self.stats.num_prefix_hit_tokens += num_cached
            self.stats.num_recomputed_tokens += max(0, self._num_computed_before.pop(seq, 0) - num_cached)
            chunks.append(self._take_chunk(seq))

    def _take_chunk(self, seq: Sequence) -> Chunk:
        start, num_known = seq.num_computed_tokens, len(seq.token_ids)
        num_tokens = num_known + seq.num_pending
        end = min(num_tokens, start + self._tokens_left)
        if num_tokens - start > 1:
            end = min(end, start + self._prompt_tokens_left)
            self._prompt_tokens_left -= end - start
        self._tokens_left -= end - start
        page_size, known_end = self.page_manager.page_size, min(end, num_known)
        if known_end // page_size > start // page_size:
            self.page_manager.cache_full_pages(seq, start, known_end)
        seq.num_computed_tokens = end
        if start < seq.prefill_len:
            seq.num_prefill_chunks += 1
            self.stats.num_prefill_chunks += 1
            self.stats.num_multi_chunk_prompts += seq.num_prefill_chunks == 2
        return Chunk(seq, start, end, end == num_tokens, end > num_known)

    def commit_tokens(self, chunks: list[Chunk]) -> None:
        """Take note that these chunks' tokens are all known now: pages that they filled become findable."""
        page_size = self.page_manager.page_size
        for seq, start, end, _, has_pending in chunks:
            if has_pending and seq.page_table and end // page_size > start // page_size:
                self.page_manager.cache_full_pages(seq, start, end)
