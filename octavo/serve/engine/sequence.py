"""A sequence, one sample of a request: tokens, pages, progress. Pure Python."""

import dataclasses
from typing import TYPE_CHECKING

from octavo.serve.engine.detokenizer import Detokenizer
from octavo.serve.engine.grammar import Grammar
from octavo.serve.outputs import FlatLogprobs, Logprob
from octavo.serve.sampling_params import SamplingParams

if TYPE_CHECKING:
    from octavo.serve.engine.expert_choices import RoutedExpertsFuture


@dataclasses.dataclass(eq=False)
class Sequence:
    """One sample of one request.

    Attributes:
        index: which of the request's samples.
        token_ids: the prompt, then the output.
        seed: 64-bit seed of its noise (ops.sampling.request_seed).
        max_len: tokens in all at which it ends.
        stop_token_ids: tokens that end it, the end of sequence included.
        detokenizer: its text so far; None while it is not needed before the end.
        page_table: its pages, in order.
        page_hashes: chained hash of each full page, as far as they were needed.
        num_pending: tokens that a step under way samples, 0 or 1: on the device, not in token_ids yet.
        num_computed_tokens: tokens whose keys and values are in its pages, or will be after the step under way.
        num_cached_tokens: how many of them the prefix cache had when it first began to run; None before.
        prefill_len: tokens that it had when it last began to run; computing these is its prefill.
        num_prefill_chunks: chunks that this prefill took so far.
        logprobs: one entry an output token; empty if they were not asked for.
        weight_versions: one entry an output token.
        prompt_logprobs: one entry for each token of the prompt but the first, as far as they were computed and asked
            for (of a request's first sequence).
        grammar: what its output must keep to; None for anything.
        routed_experts: set at its end where choices are recorded; see RoutedExpertsRecorder.read.
    """

    index: int
    token_ids: list[int]
    prompt_len: int
    params: SamplingParams
    seed: int
    max_len: int
    stop_token_ids: frozenset[int] = frozenset()
    detokenizer: Detokenizer | None = None
    page_table: list[int] = dataclasses.field(default_factory=list)
    page_hashes: list[bytes] = dataclasses.field(default_factory=list)
    num_computed_tokens: int = 0
    num_cached_tokens: int | None = None
    prefill_len: int = 0
    num_prefill_chunks: int = 0
    num_pending: int = 0
    logprobs: FlatLogprobs = dataclasses.field(default_factory=FlatLogprobs)
    weight_versions: list[int] = dataclasses.field(default_factory=list)
    prompt_logprobs: list[dict[int, Logprob]] = dataclasses.field(default_factory=list)
    grammar: Grammar | None = None
    routed_experts: "RoutedExpertsFuture | None" = None
    finish_reason: str | None = None
    stop_reason: str | int | None = None

    @property
    def scores_prompt(self) -> bool:
        """Logprobs of its prompt are still to be computed; no cached page can stand for that."""
        if self.params.prompt_logprobs is None or self.index:
            return False
        return len(self.prompt_logprobs) < self.prompt_len - 1

    @property
    def num_tokens(self) -> int:
        return len(self.token_ids)

    @property
    def num_tokens_ahead(self) -> int:
        """Tokens when the steps under way are done."""
        return len(self.token_ids) + self.num_pending

    @property
    def known_final_len(self) -> int:
        """Tokens that it will have when it ends, as far as its request says so; 0 where its text decides."""
        can_stop = self.stop_token_ids or self.params.stop_strings or self.grammar is not None
        return 0 if can_stop else self.max_len

    @property
    def output_token_ids(self) -> list[int]:
        return self.token_ids[self.prompt_len :]

    @property
    def is_finished(self) -> bool:
        return self.finish_reason is not None

    def append(self, token_id: int, logprobs: float | dict[int, Logprob] | None, weight_version: int) -> None:
        """Add a sampled token and decide whether it is the last.

        Args:
            logprobs: see FlatLogprobs.append; not read where the request asked for none.
        """
        self.token_ids.append(token_id)
        self.weight_versions.append(weight_version)
        if self.params.logprobs is not None and logprobs is not None:
            self.logprobs.append(token_id, logprobs)
        stop_string = None
        if token_id in self.stop_token_ids:
            self.finish_reason = "stop"
            self.stop_reason = token_id if token_id in self.params.stop_ids else None
        elif self.detokenizer is not None:
            stop_string = self.detokenizer.push(token_id)
        if stop_string is None and len(self.token_ids) >= self.max_len and self.finish_reason is None:
            self.finish_reason = "length"
        if self.finish_reason is not None and self.detokenizer is not None:
            stop_string = self.detokenizer.flush()
        if stop_string is not None:
            self.finish_reason, self.stop_reason = "stop", stop_string
        if self.grammar is not None:
            self.grammar.accept(token_id)
            if self.grammar.error is not None:
                self.finish_reason, self.stop_reason = "error", self.grammar.error
