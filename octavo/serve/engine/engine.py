"""The engine: takes requests and steps until they are done; an EngineDriver steps it."""

import logging
import math
import time
from collections.abc import Callable, Iterable
from typing import Any, TypeVar

from octavo.errors import BackendError, ConfigError, RequestError
from octavo.models import Decoder
from octavo.models.stream_decoder import StreamDecoder
from octavo.models.tokenizer import Tokenizer
from octavo.nn import Linear, pin_codes
from octavo.nn.finite_weights import check_finite_weights
from octavo.nn.weights.version import ModelState
from octavo.ops._runtime.kernel_cache import use_checked_cache
from octavo.ops.attention import PAGE_SIZE
from octavo.ops.sampling import request_seed
from octavo.serve.engine.completion import make_output
from octavo.serve.engine.config import READY_LEN, EngineConfig
from octavo.serve.engine.detokenizer import Detokenizer
from octavo.serve.engine.grammar import CompiledSchema, GrammarFactory
from octavo.serve.engine.kv_cache import allocate_kv_cache, page_bytes, plan_num_pages, release_memory
from octavo.serve.engine.model_runner import ModelRunner
from octavo.serve.engine.page_manager import PageManager
from octavo.serve.engine.pass_queue import PassQueue
from octavo.serve.engine.request import RequestInput, RequestState
from octavo.serve.engine.request_limits import RequestLimits
from octavo.serve.engine.scheduler import Scheduler
from octavo.serve.engine.sequence import Sequence
from octavo.serve.engine.stats import EngineStats
from octavo.serve.outputs import RequestOutput
from octavo.serve.sampling_params import SamplingParams
from octavo.weights.update import RunningPolicy, WeightUpdate, check_policy

T = TypeVar("T")

# an engine that is not ready by then is it all the same, and goes on when it is idle
_READY_S = 120.0
_PROGRESS_S = 3.0  # between two lines on the log

logger = logging.getLogger(__name__)


class Engine:
    """Continuous batching over one model.

    Args:
        model: its numerics decide every bit.
        tokenizer: for text; None for token ids only.
        config: limits.
        eos_ids: ends of a sequence beside those of the model's config and of the tokenizer.

    Attributes:
        stats: counters.
        max_model_len: the longest sequence, prompt and output.
        weight_version: of the weights that the cache's pages were made with.
        num_requests: that came so far: with config.seed it seeds the next one, so a resumed run must set it back.
    """

    def __init__(
        self, model: Decoder, tokenizer: Tokenizer | None, config: EngineConfig, eos_ids: Iterable[int] = ()
    ) -> None:
        use_checked_cache(model.device)
        self.model, self.tokenizer, self.config = model, tokenizer, config
        pin_codes(model)  # CUDA graphs and weight updates go by the addresses
        num_pages = plan_num_pages(model, config)
        self.max_model_len = config.resolve_max_model_len(model.config.max_position_embeddings, num_pages * PAGE_SIZE)
        self.weight_version, self.numerics = model.weight_version, model.numerics
        # FSDP2's gathered parameters do not tell who wrote the sharded ones
        self._is_sharded = any(isinstance(module, Linear) and module.source.is_sharded for module in model.modules())
        self._model_state = ModelState(model)
        self._known_state = self._model_state.now()
        self._kv_table = model.kv_table
        self._kv_generation = self._generation_of_scales()
        self.stats = EngineStats(num_kv_pages=num_pages)
        self.page_manager = PageManager(num_pages, PAGE_SIZE, self._salt(), config.enable_prefix_caching)
        self.scheduler = Scheduler(
            self.page_manager,
            config.max_num_seqs,
            config.max_num_batched_tokens,
            self.stats,
            config.plan_known_lengths,
            config.max_num_mixed_tokens,
        )
        self.model_runner = ModelRunner(model, allocate_kv_cache(model, num_pages), config, self.max_model_len)
        self._passes = PassQueue(
            model,
            self.scheduler,
            self.model_runner,
            self.stats,
            looks_ahead=model.device.type == "cuda" if config.async_scheduling is None else config.async_scheduling,
        )
        self._eos_ids = {*model.config.eos_token_ids, *(i for i in eos_ids if i < model.config.vocab_size)}
        if tokenizer is not None and tokenizer.eos_id is not None:
            self._eos_ids.add(tokenizer.eos_id)
        self.grammars = GrammarFactory(tokenizer, model.config.vocab_size, frozenset(self._eos_ids))
        self.num_requests = 0

    @property
    def has_unfinished(self) -> bool:
        return self.scheduler.has_unfinished

    def watch_ranks(self, on_lost: Callable[[Any, bool], None], limit_s: float) -> None:
        """Be told of a lost rank, where others compute with this process: see RankWatch."""

    def kill_ranks(self) -> None:
        """End the other ranks at once, where there are any, so that a call which waits for them fails."""

    def close(self) -> None:
        """End the other ranks, where there are any; nothing is asked of the engine after this."""

    def make_input(
        self,
        prompt_ids: list[int],
        params: SamplingParams,
        prompt: str | None = None,
        schema: CompiledSchema | None = None,
    ) -> RequestInput:
        """Check a request, once and in any thread: what it returns is admitted without another look.

        Args:
            prompt: its text, if it was one.
            schema: of params, where it was compiled ahead.
        Raises:
            RequestError: an empty or too long prompt, ids outside the vocabulary, stop strings without a tokenizer, a
                schema that cannot be kept to.
        """
        limits = RequestLimits(self.model.config, self.config, self.max_model_len, self.stats.num_kv_pages)
        limits.check(prompt_ids, params, has_tokenizer=self.tokenizer is not None)
        if params.schema_text is not None:
            schema = schema or self.grammars.compile(params.schema_text)
        return RequestInput(list(prompt_ids), params, prompt, schema)

    def add_request(
        self, prompt_ids: list[int], params: SamplingParams, prompt: str | None = None, keep_text: bool = False
    ) -> RequestState:
        """Check a prompt and queue it: make_input and admit in one."""
        return self.admit(RequestState(self.make_input(prompt_ids, params, prompt)), keep_text)

    def admit(self, request: RequestState, keep_text: bool = False) -> RequestState:
        """Queue a request.

        Args:
            keep_text: decode token by token, for streaming.
        """
        if not self.has_unfinished:
            self.refit()
        prompt_ids, params = request.input.prompt_ids, request.input.params
        request.request_id = self.num_requests
        self.num_requests += 1
        root = (params.seed, 0) if params.seed is not None else (self.config.seed, request.request_id)
        max_tokens = math.inf if params.max_tokens is None else params.max_tokens
        stop_ids = params.stop_ids if params.ignore_eos else params.stop_ids | self._eos_ids
        request.sequences = [
            Sequence(
                index=index,
                token_ids=list(prompt_ids),
                prompt_len=len(prompt_ids),
                params=params,
                seed=request_seed(*root, index),
                max_len=int(min(len(prompt_ids) + max_tokens, self.max_model_len)),
                stop_token_ids=stop_ids,
                detokenizer=self._make_detokenizer(request.input, keep_text),
                grammar=None if params.schema_text is None else self.grammars.make(params.schema_text),
            )
            for index in range(params.n)
        ]
        for seq in request.sequences:
            self.scheduler.add(seq)
        self.stats.num_requests += 1
        return request

    def step(self) -> list[Sequence]:
        """Launch a forward pass, and take in the tokens of the oldest one under way.

        With async_scheduling the pass before stays under way meanwhile, so that the first call returns none.

        Returns:
            The sequences that got a token, or ended without one; look at their is_finished.
        Raises:
            RequestError: if the model's weights changed since they started.
            StaleScaleError: the KV scales are of other weights.
        """
        self.refit()
        began = time.perf_counter()
        try:
            advanced = self._passes.advance(self.weight_version)
            if not self.has_unfinished:
                self.model_runner.release_idle_buffers()
        except BaseException:
            self.abort_all()  # the step's pages may not have been written
            raise
        self.stats.seconds += time.perf_counter() - began
        return advanced

    def prepare_next(
        self,
        num_seqs: int | None = None,
        max_len: int | None = None,
        least_seqs: int = 1,
        sparse: bool = False,
    ) -> bool:
        """Compile, load or capture one thing that steps to come will need; see warm_up.

        Args:
            sparse: of CUDA graphs every other size under the longest bound, which hold the steps between them as well.
        Returns:
            False where all is ready.
        """
        most, longest = self.config.max_num_seqs, self.max_model_len
        most = min(num_seqs or most, most)
        least = min(least_seqs, most)
        return self.model_runner.prepare_next(most, min(max_len or longest, longest), least, sparse=sparse)

    def warm_up(self, num_seqs: int | None = None, max_len: int | None = None, least_seqs: int = 1) -> None:
        """Get ready for steps of least_seqs to num_seqs sequences of up to max_len tokens; None is the engine's limit.

        Without it, kernels are compiled and a step's CUDA graph is captured when the first step of its size comes,
        which then takes longer. Steps with prompts are warmed up once, whatever was asked for. It changes no token, and
        does nothing on a CPU.
        """
        while self.prepare_next(num_seqs, max_len, least_seqs):
            pass

    def prepare(self) -> None:
        """Get ready for sequences of up to READY_LEN tokens, with the progress on the log.

        Kernels are compiled, and CUDA graphs captured of every other size of a step. A step between takes the next
        larger graph until its own is captured: while the engine is idle, or once it has come often. It does nothing on
        a CPU.
        """
        runner, began = self.model_runner, time.perf_counter()
        if not runner.compiles:
            return
        limits = self.config.max_num_seqs, min(READY_LEN, self.max_model_len)
        total, told = runner.num_missing_graphs(*limits, sparse=True), began
        while (now := time.perf_counter()) - began < _READY_S and self.prepare_next(max_len=READY_LEN, sparse=True):
            if now - told >= _PROGRESS_S:
                told, num = now, total - runner.num_missing_graphs(*limits, sparse=True)
                logger.info("preparing %s", f"{num} of {total} CUDA graphs" if num else "kernels")
        runner.wait()
        num = total - runner.num_missing_graphs(*limits, sparse=True)
        logger.info("kernels and %d of %d CUDA graphs prepared in %.1f s", num, total, time.perf_counter() - began)

    def abort(self, request: RequestState) -> None:
        """Drop a request's unfinished sequences."""
        self._drop([seq for seq in request.sequences if not seq.is_finished])

    def abort_all(self) -> None:
        """Drop every sequence and forget the prefix cache."""
        self._passes.clear()
        self._drop([*self.scheduler.running, *self.scheduler.waiting])
        self.page_manager.reset_prefix_cache(self._salt())

    def _drop(self, sequences: list[Sequence]) -> None:
        for seq in sequences:
            self.scheduler.finish(seq)
            seq.finish_reason = "abort"
        self.model_runner.release_idle_buffers()

    def refit(self, *, is_checked: bool = False) -> int:
        """Take note of new weights in the model: pages of older ones are never used again.

        New are those of another weight version and, while no request is unfinished, those that an optimizer or another
        in-place operation wrote; a write into .data needs mark_weights_updated.

        Args:
            is_checked: the caller has looked for inf and NaN in the weights.
        Returns:
            The weight version.
        Raises:
            RequestError: while sequences are unfinished.
            ConfigError: the model's numerics changed.
            NonFiniteError: a new weight is inf or NaN; the engine keeps refusing until there are others.
        """
        if self.model.numerics != self.numerics or self.model.kv_table is not self._kv_table:
            raise ConfigError("the model's numerics changed under the engine; make a new LLM for the new ones")
        is_new = self.model.weight_version != self.weight_version
        if not (is_new or self.has_unfinished):
            is_new = self._is_sharded or self._model_state.now() != self._known_state
        if is_new or self._generation_of_scales() != self._kv_generation:
            if self.has_unfinished:
                what = "weights" if is_new else "KV scales"
                raise RequestError(f"the {what} changed while sequences were unfinished; finish or abort them first")
            if is_new and not is_checked:
                check_finite_weights(self.model)
            self._on_weights_written(self.model.weight_version)
        return self.weight_version

    def replace_weights(self, write: Callable[[], int], running: RunningPolicy = "wait") -> int:
        """Let the weights change in place, between two steps.

        Args:
            write: changes them, and gives the model's new weight version.
            running: of unfinished sequences, as in commit_update.
        Returns:
            The new weight version. No page of an older one is used again.
        Raises:
            RequestError: sequences are unfinished, and running is "wait". What write raises; "abort" and "keep" have
                acted by then.
        """
        self._check_policy(running)
        if running == "abort":
            self.abort_all()
        while self.has_pending:
            self.collect_pending()  # their tokens are of the old weights
        self._preempt_all()
        try:
            version = write()
        except BackendError:
            self._on_weights_updated(self.weight_version)  # undoing wrote too, which is no news
            raise
        self._on_weights_updated(version)
        return self.weight_version

    def _on_weights_written(self, weight_version: int) -> None:
        """Take note of what refit has found."""
        self._on_weights_updated(weight_version)

    def _on_weights_updated(self, weight_version: int) -> None:
        """Take note of new weights, or of new scales under the old ones; no request holds a page."""
        if self.model.kv_table is not None and weight_version != self.weight_version:
            self.model.kv_table.note_new_weights()
        self.weight_version, self._kv_generation = weight_version, self._generation_of_scales()
        self._known_state = self._model_state.now()
        self.page_manager.reset_prefix_cache(self._salt())
        self.model_runner.note_new_weights()

    def _generation_of_scales(self) -> int:
        return 0 if self.model.kv_table is None else self.model.kv_table.generation

    def begin_update(self, **given: Any) -> WeightUpdate:
        """A transaction for commit_update; the arguments are WeightUpdate's, without the model."""
        return WeightUpdate(self.model, **given)

    def on_all_ranks(self, work: Callable[[], T]) -> T:
        """Do what each rank of a model that is cut does for itself, such as staging; where it fails on one, all raise.

        For one process it is a call.
        """
        if self.model.tensor_group is None:
            return work()
        done: list[T] = []
        self.model.tensor_group.together(lambda: done.append(work()))
        return done[0]

    def commit_update(self, update: WeightUpdate, running: RunningPolicy = "wait") -> int:
        """Put staged weights in the place of the live ones; tokens from now on carry the new version.

        Args:
            running: what becomes of unfinished sequences. "abort" ends them. "keep" lets them go on: all their keys and
                values are computed again, each token keeps the version that sampled it. "wait" wants none: see LLM and
                EngineLoop, which finish them first.
        Returns:
            The new weight version. No page of an older one is used again.
        Raises:
            RequestError: sequences are unfinished, or the update is none of this model or has ended.
            CheckpointError: the update is not whole; nothing has changed.
            BackendError: writing failed and was undone; "abort" and "keep" have acted by then.
            LostWeightsError: it could not be undone.
        """
        self._check_policy(running)
        if update.model is not self.model:
            raise RequestError("the update was made for another model than the one that this engine runs")
        update.verify()
        return self.replace_weights(update.write, running)

    def _check_policy(self, running: RunningPolicy) -> None:
        check_policy(running)
        if running == "wait" and self.has_unfinished:
            raise RequestError("sequences are unfinished; finish them first, or commit with running='abort' or 'keep'")

    @property
    def has_pending(self) -> bool:
        """Whether passes are under way whose tokens were not taken in."""
        return bool(self._passes)

    def collect_pending(self) -> list[Sequence]:
        """Take in the oldest pass under way without launching another; its sequences that got a token, as step."""
        try:
            return self._passes.collect(self.weight_version) if self._passes else []
        except BaseException:
            self.abort_all()  # its tokens are lost
            raise

    def _preempt_all(self) -> None:
        """Take every sequence's pages; what was computed or looked up with the weights of now is forgotten."""
        self.scheduler.preempt_all()
        for seq in self.scheduler.waiting:
            seq.page_hashes.clear()
            if seq.scores_prompt:
                seq.prompt_logprobs.clear()

    def reset_prefix_cache(self) -> None:
        """Empty the prefix cache; running sequences keep their pages."""
        self.page_manager.forget_cached_pages()

    def sleep(self) -> None:
        """Give the KV cache's memory back until wake(); the weights stay.

        Raises:
            RequestError: while sequences are unfinished.
        """
        if self.has_unfinished:
            raise RequestError("sequences are unfinished; finish or abort them before the engine sleeps")
        self.page_manager.reset_prefix_cache(self._salt())
        self.model_runner.drop_cache()
        release_memory(self.model)

    def wake(self) -> None:
        """Take memory for the KV cache again, as many pages as before."""
        if not self.model_runner.layers:
            self.model_runner.set_cache(allocate_kv_cache(self.model, self.stats.num_kv_pages))

    def reallocate_kv_cache(self) -> None:
        """Allocate the KV cache again after layers fell back to high precision: as many pages as its bytes then hold.

        Unfinished sequences go on; their keys and values are computed again.
        """
        while self.has_pending:
            self.collect_pending()
        self._preempt_all()
        num_pages = self.stats.num_kv_pages
        num_bytes = sum(layer.num_bytes for layer in self.model_runner.layers)
        self.model_runner.drop_cache()
        release_memory(self.model)
        num_pages = min(num_pages, max(num_bytes // page_bytes(self.model), -(-self.max_model_len // PAGE_SIZE)))
        self.stats.num_kv_pages = num_pages
        self._kv_generation = self._generation_of_scales()
        self.page_manager = PageManager(num_pages, PAGE_SIZE, self._salt(), self.config.enable_prefix_caching)
        self.scheduler.page_manager = self.page_manager
        self.wake()

    def check_integrity(self) -> None:
        """Assert that the pages' bookkeeping holds; see PageManager.check_integrity."""
        self.page_manager.check_integrity([*self.scheduler.running, *self.scheduler.waiting])

    def make_output(self, request: RequestState) -> RequestOutput:
        """A request's state as its caller sees it."""
        return make_output(request, self.tokenizer)

    def _make_detokenizer(self, given: RequestInput, keep_text: bool) -> Detokenizer | None:
        stops = given.params.stop_strings
        if self.tokenizer is None or not (stops or keep_text):
            return None
        decoder = StreamDecoder(self.tokenizer, context=given.prompt_ids)
        return Detokenizer(decoder, stops, self.tokenizer.vocab_size)

    def _salt(self) -> str:
        """What a cached page depends on beside its tokens."""
        return f"{self.weight_version} {self._kv_generation} {self.numerics.fingerprint()} {self.model.config!r}"
