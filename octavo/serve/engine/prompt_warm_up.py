"""Warm-up steps over dummy tokens: what steps of their kind compile and load, no request has to wait for.

A kernel is compiled again where a size that it is given becomes 1 or (no) multiple of 16, or passes a bound between two
tiles. The steps pass through those of tokens, of sequences that decode beside the prompts, and of both.
"""

import dataclasses
from typing import NamedTuple

import torch

from octavo.models import Decoder
from octavo.ops.attention import PAGE_SIZE, PagedKVLayer
from octavo.ops.sampling import sample
from octavo.serve.engine.paged_context import PagedContext
from octavo.serve.engine.slots import Slots

_TOKENS = (32, 64, 128, 256, 1024, 4096)  # between the bounds of what takes few tokens and of what takes many
_FEW = 5  # tokens of a prompt that attends as those that decode do
_NUM_DECODES = (0, 5, 15)  # one sequence beside them makes 1, 6 and 16
# tokens of a sequence that decodes: in one piece of an attention, or in several
_DECODED_AT, _DECODED_LATE_AT = 5, 1100
_DECODES_ALONE = (1, 5, 16, 24, 37, 64, 100, 128, 200, 256)  # sequences of steps without prompts, likewise


class WarmUpStep(NamedTuple):
    """One step: sequences that decode, tokens of prompts, and tokens of each sequence that decodes."""

    num_decodes: int
    num_prompt_tokens: int
    decoded_at: int = _DECODED_AT

    @property
    def num_tokens(self) -> int:
        """Of the whole step."""
        return self.num_decodes + self.num_prompt_tokens

    def run(self, model: Decoder, layers: list[PagedKVLayer], slots: Slots, longest: int) -> None:
        """Compute it as the model runner would; it writes into no page, and reads whatever the first one holds.

        Args:
            longest: tokens of a sequence at most.
        """
        end = min(self.decoded_at, longest)
        spans = [(end - 1, end)] * self.num_decodes
        left = self.num_prompt_tokens
        while left:
            spans.append((0, min(left, longest)))
            left -= spans[-1][1]
        tables = [[0] * -(-end // PAGE_SIZE) for _, end in spans]
        context = PagedContext.build(spans, tables, layers, model.numerics.exact, model.device)
        context = dataclasses.replace(context, slot_mapping=torch.full_like(context.slot_mapping, -1))
        hidden = model(torch.zeros(self.num_tokens, dtype=torch.int64, device=model.device), context)
        logits = model.logits(hidden[context.cu_seqlens_q[1:].long() - 1])
        dummies = torch.zeros(len(spans), dtype=torch.int64, device=model.device)
        sample(logits, *slots.controls(dummies), context.seq_lens.long())


def plan_warm_up(num_seqs: int, max_tokens: int) -> list[WarmUpStep]:
    """Steps with prompts: all that an engine of so many sequences and tokens a step needs, each once."""
    sizes = sorted({*(n for n in _TOKENS if n < max_tokens), max_tokens})
    decodes = sorted({min(n, num_seqs - 1) for n in _NUM_DECODES})
    steps = [
        WarmUpStep(num_decodes, size - odd - num_decodes)
        for size in sizes
        for num_decodes in decodes
        for odd in (0, 3)
        if size - odd - num_decodes > 1
    ]
    # what these leave: sequences in several pieces of an attention beside any prompts, and prompts of few tokens
    most = decodes[-1]
    others = [WarmUpStep(0, _FEW), WarmUpStep(most, _FEW, _DECODED_LATE_AT)]
    others.append(WarmUpStep(most, max_tokens - most, _DECODED_LATE_AT))
    fitting = [step for step in others if step.num_prompt_tokens > 1 and step.num_tokens <= max_tokens]
    return list(dict.fromkeys([*steps, *fitting]))


def plan_decodes(num_seqs: int) -> list[WarmUpStep]:
    """Steps without prompts, for an engine that captures none."""
    sizes = sorted({*(n for n in _DECODES_ALONE if n < num_seqs), num_seqs})
    return [WarmUpStep(size, 0, end) for end in (_DECODED_AT, _DECODED_LATE_AT) for size in sizes]
