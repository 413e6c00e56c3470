"""The engine: takes requests and steps until they are done; LLM drives it."""

import math
import time

from octavo.errors import ConfigError, RequestError
from octavo.models import Decoder
from octavo.models.tokenizer import StreamDecoder, Tokenizer
from octavo.ops.attention import PAGE_SIZE
from octavo.ops.sampling import request_seed
from octavo.serve.engine.block_manager import BlockManager
from octavo.serve.engine.config import EngineConfig
from octavo.serve.engine.detokenizer import Detokenizer
from octavo.serve.engine.grammar import Grammar, GrammarFactory
from octavo.serve.engine.kv_cache import allocate_kv_cache, plan_num_pages, release_memory
from octavo.serve.engine.model_runner import ModelRunner
from octavo.serve.engine.scheduler import Scheduler
from octavo.serve.engine.sequence import Request, Sequence
from octavo.serve.engine.stats import EngineStats
from octavo.serve.outputs import CompletionOutput, RequestOutput
from octavo.serve.sampling_params import ParameterError, SamplingParams


class Engine:
    """Continuous batching over one model.

    Args:
        model: its numerics decide every bit.
        tokenizer: for text; None for token ids only.
        config: limits.

    Attributes:
        stats: counters. max_model_len: the longest sequence, prompt and output.
        weight_version: of the weights that the cache's pages were made with.
    """

    def __init__(self, model: Decoder, tokenizer: Tokenizer | None, config: EngineConfig) -> None:
        self.model, self.tokenizer, self.config = model, tokenizer, config
        num_pages = plan_num_pages(model, config)
        self.max_model_len = config.resolve_max_model_len(model.config.max_position_embeddings, num_pages * PAGE_SIZE)
        self.weight_version, self.numerics = model.weight_version, model.numerics
        self.stats = EngineStats(num_kv_pages=num_pages)
        self.block_manager = BlockManager(num_pages, PAGE_SIZE, self._salt(), config.enable_prefix_caching)
        self.scheduler = Scheduler(self.block_manager, config.max_num_seqs, config.max_num_batched_tokens, self.stats)
        self.model_runner = ModelRunner(model, allocate_kv_cache(model, num_pages))
        self._eos_ids = {*model.config.eos_token_ids}
        if tokenizer is not None and tokenizer.eos_id is not None:
            self._eos_ids.add(tokenizer.eos_id)
        self.grammars = GrammarFactory(tokenizer, model.config.vocab_size, frozenset(self._eos_ids))
        self._num_requests = 0

    @property
    def has_unfinished(self) -> bool:
        return self.scheduler.has_unfinished

    def check_request(self, prompt_ids: list[int], params: SamplingParams) -> None:
        """Refuse what can never be served.

        Raises:
            RequestError: an empty or too long prompt, ids outside the vocabulary, stop strings without a tokenizer, a
                schema that cannot be kept to.
        """
        vocab_size = self.model.config.vocab_size
        if not prompt_ids:
            raise RequestError("a prompt needs at least one token, got none; give a start token for free generation")
        bad = next((t for t in prompt_ids if type(t) is not int or not 0 <= t < vocab_size), None)
        if bad is not None:
            raise RequestError(f"prompt token ids must be integers from 0 to {vocab_size - 1}, got {bad!r}")
        if len(prompt_ids) >= self.max_model_len:
            raise RequestError(f"the prompt has {len(prompt_ids)} tokens, {self._limit_text()}; shorten it")
        if params.stop_strings and self.tokenizer is None:
            raise ParameterError("stop", "strings need a tokenizer, and this engine has none; use stop_token_ids")
        bad = next((t for t in params.logit_bias or () if t >= vocab_size), None)
        if bad is not None:
            raise ParameterError("logit_bias", f"names token {bad}, but the vocabulary ends at {vocab_size - 1}")
        if params.schema_text is not None:
            self.grammars.check(params.schema_text)

    def add_request(
        self, prompt_ids: list[int], params: SamplingParams, prompt: str | None = None, keep_text: bool = False
    ) -> Request:
        """Queue a prompt.

        Args:
            prompt: its text, if it was one. keep_text: decode token by token, for streaming.
        Raises:
            RequestError: see check_request.
        """
        self.check_request(prompt_ids, params)
        if not self.has_unfinished:
            self.refit()
        request_id = self._num_requests
        self._num_requests += 1
        root = (params.seed, 0) if params.seed is not None else (self.config.seed, request_id)
        max_tokens = math.inf if params.max_tokens is None else params.max_tokens
        stop_ids = params.stop_ids if params.ignore_eos else params.stop_ids | self._eos_ids
        sequences = [
            Sequence(
                index=index,
                token_ids=list(prompt_ids),
                prompt_len=len(prompt_ids),
                params=params,
                seed=request_seed(*root, index),
                max_len=int(min(len(prompt_ids) + max_tokens, self.max_model_len)),
                stop_token_ids=stop_ids,
                detokenizer=self._make_detokenizer(params, keep_text),
                grammar=self._make_grammar(params),
            )
            for index in range(params.n)
        ]
        for seq in sequences:
            self.scheduler.add(seq)
        self.stats.num_requests += 1
        return Request(request_id, prompt, list(prompt_ids), sequences)

    def step(self) -> list[Sequence]:
        """Run one forward pass.

        Returns:
            The sequences that got a token; look at their is_finished.
        Raises:
            RequestError: if the model's weights changed since they started.
        """
        self.refit()
        began = time.perf_counter()
        chunks = self.scheduler.schedule()
        assert chunks, "a step without work: no sequence is unfinished, or none fits"
        try:
            sampled = self.model_runner.run(chunks)
        except BaseException:
            self.abort_all()  # the step's pages may not have been written
            raise
        advanced = [chunk.sequence for chunk in chunks if chunk.is_last]
        for seq, token in zip(advanced, sampled, strict=True):
            seq.append(token.token_id, token.logprobs, self.weight_version)
            if seq.is_finished:
                self.scheduler.finish(seq)
        self.stats.num_steps += 1
        self.stats.output_tokens += len(advanced)
        self.stats.seconds += time.perf_counter() - began
        return advanced

    def abort(self, request: Request) -> None:
        """Drop a request's unfinished sequences."""
        for seq in request.sequences:
            if not seq.is_finished:
                self.scheduler.finish(seq)
                seq.finish_reason = "abort"

    def abort_all(self) -> None:
        """Drop every sequence and forget the prefix cache."""
        for seq in (*self.scheduler.running, *self.scheduler.waiting):
            self.scheduler.finish(seq)
            seq.finish_reason = "abort"
        self.block_manager.reset_prefix_cache(self._salt())

    def refit(self) -> int:
        """Take note of new weights in the model: pages of older ones are never used again.

        Returns:
            The weight version.
        Raises:
            RequestError: while sequences are unfinished. ConfigError: the model's numerics changed.
        """
        if self.model.numerics != self.numerics:
            raise ConfigError("the model's numerics changed under the engine; make a new LLM for the new ones")
        if self.model.weight_version != self.weight_version:
            if self.has_unfinished:
                raise RequestError("the weights changed while sequences were unfinished; finish or abort them first")
            self.weight_version = self.model.weight_version
            self.block_manager.reset_prefix_cache(self._salt())
        return self.weight_version

    def forget_prefixes(self) -> None:
        """Empty the prefix cache; running sequences keep their pages."""
        self.block_manager.forget_cached_pages()

    def sleep(self) -> None:
        """Give the KV cache's memory back until wake(); the weights stay.

        Raises:
            RequestError: while sequences are unfinished.
        """
        if self.has_unfinished:
            raise RequestError("sequences are unfinished; finish or abort them before the engine sleeps")
        self.block_manager.reset_prefix_cache(self._salt())
        self.model_runner.layers.clear()
        release_memory(self.model)

    def wake(self) -> None:
        """Take memory for the KV cache again, as many pages as before."""
        if not self.model_runner.layers:
            self.model_runner.layers = allocate_kv_cache(self.model, self.stats.num_kv_pages)

    def check_integrity(self) -> None:
        """Assert that the pages' bookkeeping holds; see BlockManager.check_integrity."""
        self.block_manager.check_integrity([*self.scheduler.running, *self.scheduler.waiting])

    def make_output(self, request: Request) -> RequestOutput:
        """A request's state as its caller sees it."""
        return RequestOutput(
            request.request_id,
            request.prompt,
            request.prompt_token_ids,
            [self._make_completion(seq) for seq in request.sequences],
            request.prompt_logprobs,
        )

    def _make_completion(self, seq: Sequence) -> CompletionOutput:
        token_ids = seq.output_token_ids
        logprobs = seq.logprobs if seq.params.logprobs is not None else None
        return CompletionOutput(
            index=seq.index,
            text=self._text(seq),
            token_ids=token_ids,
            logprobs=None if logprobs is None else list(logprobs),
            cumulative_logprob=None
            if logprobs is None
            else math.fsum(entry[token].logprob for entry, token in zip(logprobs, token_ids, strict=True)),
            finish_reason=seq.finish_reason,
            stop_reason=seq.stop_reason,
            weight_versions=list(seq.weight_versions),
        )

    def _text(self, seq: Sequence) -> str:
        """The output's text; the token that ended it has none, and ids that only the model knows have none."""
        if seq.detokenizer is not None:
            return seq.detokenizer.text if seq.is_finished else seq.detokenizer.settled_text
        if self.tokenizer is None:
            return ""
        ids = seq.output_token_ids
        if seq.finish_reason == "stop":
            ids.pop()
        return self.tokenizer.decode([t for t in ids if t < self.tokenizer.vocab_size])

    def _make_detokenizer(self, params: SamplingParams, keep_text: bool) -> Detokenizer | None:
        if self.tokenizer is None or not (params.stop_strings or keep_text):
            return None
        return Detokenizer(StreamDecoder(self.tokenizer), params.stop_strings, self.tokenizer.vocab_size)

    def _make_grammar(self, params: SamplingParams) -> Grammar | None:
        return None if params.schema_text is None else self.grammars.make(params.schema_text)

    def _limit_text(self) -> str:
        if self.max_model_len == self.model.config.max_position_embeddings:
            return f"but the model's context is {self.max_model_len}, one of them for the output"
        if self.max_model_len == self.config.max_model_len:
            return f"but max_model_len is {self.max_model_len}, one of them for the output"
        return (
            f"but the whole KV cache holds {self.max_model_len} ({self.stats.num_kv_pages} pages of {PAGE_SIZE}), "
            "one of them for the output; raise num_kv_pages or gpu_memory_utilization"
        )

    def _salt(self) -> str:
        """What a cached page depends on beside its tokens."""
        return f"{self.weight_version} {self.numerics.fingerprint()} {self.model.config!r}"
