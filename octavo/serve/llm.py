"""LLM: offline generation from a checkpoint or a live model."""

import contextlib
import dataclasses
import logging
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from octavo.errors import ConfigError, RequestError
from octavo.models import Decoder
from octavo.models.chat import describe_template, render
from octavo.models.checkpoint.dialects import newest_model
from octavo.models.tokenizer import Tokenizer, load_tokenizer
from octavo.nn.cut_linear import TensorMode
from octavo.nn.finite_weights import check_finite_weights
from octavo.parallel.gather import gathered, is_sharded
from octavo.serve.compile_ahead import compile_missing, compiling_ahead
from octavo.serve.engine import Engine, EngineConfig, EngineStats
from octavo.serve.engine.driver import Advanced, EngineDriver
from octavo.serve.keywords import CHAT_NAMES, ENGINE_NAMES, GENERATE_NAMES, METHODS, of_a_request, takes_foreign
from octavo.serve.model_choice import (
    Device,
    as_dtype,
    check_numerics,
    eos_ids_of_generation,
    load_for_inference,
    named_kv_cache_dtype,
)
from octavo.serve.outputs import RequestOutput
from octavo.serve.prompts import Conversation, Prompt, encode_prompt, params_of, plain_message, plain_prompt
from octavo.serve.sampling_params import SamplingParams
from octavo.serve.tensor_workers import EngineOrder, LeadingEngine, TensorParallel, chosen_device
from octavo.weights.disk import stage_checkpoint
from octavo.weights.manifest import manifest_of
from octavo.weights.update import RunningPolicy, WeightUpdate, check_policy

_REQUEST_FIELDS = tuple(field.name for field in dataclasses.fields(SamplingParams))

logger = logging.getLogger(__name__)


class LLM:
    """Generates text.

    Args:
        model: a checkpoint directory, that of a training run or step (its newest model), or a Decoder. A Decoder is
            shared, never copied: LLM takes its numerics and refuses others, and sees its new weights at the next call.
            Under torch's fully_shard its weights are gathered for the time of each call, which all ranks must make,
            each with prompts of its own; there are no CUDA graphs then.
        tokenizer: a Tokenizer or a path; None for the one beside the checkpoint, else none (token ids only).
        quantization: None (what the model or checkpoint is), "fp8" (rowwise; the recipe of a checkpoint that is
            FP8), or a recipe's name.
        kv_cache_dtype: "bf16" (or "bfloat16"), "fp8" (or "fp8_e4m3"), or "auto" (the model's; bf16 for a checkpoint).
        exact: logprobs equal sequence_logprobs' of the same model, bit for bit; None for the model's (False for a
            checkpoint).
        max_num_seqs: sequences that run at a time.
        max_num_batched_tokens: tokens a step, over all sequences.
        max_model_len: tokens of a sequence, prompt and output; None for what model and cache allow.
        num_kv_pages: pages of 64 tokens of the KV cache; None for what the memory allows.
        gpu_memory_utilization: share of the GPU's memory that weights, cache and activations may take together.
        enable_prefix_caching: share pages between sequences with the same beginning.
        seed: of all requests that bring none of their own.
        enforce_eager: capture no CUDA graphs. A warm-up then compiles kernels alone.
        async_scheduling: launch a step before the one before it is read; None for on a GPU. Neither changes a token.
        device: where a checkpoint is loaded to; None for the GPU if there is one. A Decoder stays where it is.
        attention_dtype: what attention multiplies in: "bf16", "fp8" (needs an FP8 cache), or "auto" (the model's; bf16
            for a checkpoint).
        enable_return_routed_experts: give each sample the experts that its tokens went to
            (CompletionOutput.routed_experts).
        plan_known_lengths: begin no sequence whose known length (ignore_eos, nothing that stops it) would make others
            lose their pages later. It changes no token.
        max_num_mixed_tokens: tokens of a step that decodes beside prompts, while few prompts wait; None for
            max_num_batched_tokens. `octavo serve` takes half of that, so that answers under way come evenly.
        dtype: of activations and of weights in high precision: "bfloat16", "float32", the torch dtype, or "auto" (the
            model's or checkpoint's own, in which fp16 is bf16).
        tensor_parallel_size: GPUs (on a CPU: processes) among which each linear of a checkpoint is cut; the others are
            started here and end with close(), at the latest with this process. Use `with LLM(...) as llm:`, and see
            docs/distributed.md.
        tensor_parallel_mode: "gather" or "reduce", as octavo.parallel.parallelize has it; None for gather where exact.
        kv_scales: of an FP8 cache, as octavo.Numerics has it, or "auto" (the model's; per_token_head for a checkpoint).
        warm_up: compile kernels and capture CUDA graphs here, of every other size of a step, for sequences of up to
            2048 tokens and for prompts, so that no request waits for it; a size between runs in the next larger graph.
            False leaves each to the first step that needs it. Exact bits stay, and there is nothing to do on a CPU.

    vLLM's other keywords are taken where they ask for what is so anyway (data_parallel_size=1); `recipe`, as
    load_model has it, is another name of quantization.

    Raises:
        ConfigError: numerics that a given Decoder does not have, or limits that do not fit together.
        NonFiniteError: a given Decoder with inf or NaN in a weight.
        CheckpointError: from loading.
        RecipeError: from loading.
        BackendError: from loading, and where no memory is left for the cache.
        KeywordError: another keyword; also a TypeError.
    """

    _is_closed = False

    @takes_foreign(of_a_request(_REQUEST_FIELDS, "give generate") | ENGINE_NAMES)
    def __init__(
        self,
        model: str | Path | Decoder,
        tokenizer: Tokenizer | str | Path | None = None,
        quantization: str | None = None,
        kv_cache_dtype: str = "auto",
        exact: bool | None = None,
        max_num_seqs: int = 256,
        max_num_batched_tokens: int = 8192,
        max_model_len: int | None = None,
        num_kv_pages: int | None = None,
        gpu_memory_utilization: float = 0.9,
        enable_prefix_caching: bool = True,
        seed: int = 0,
        enforce_eager: bool = False,
        async_scheduling: bool | None = None,
        device: Device | None = None,
        attention_dtype: str = "auto",
        enable_return_routed_experts: bool = False,
        plan_known_lengths: bool = True,
        max_num_mixed_tokens: int | None = None,
        dtype: str | torch.dtype | None = "auto",
        kv_scales: str = "auto",
        tensor_parallel_size: int = 1,
        tensor_parallel_mode: TensorMode | None = None,
        warm_up: bool = True,
    ) -> None:
        parallel = TensorParallel(tensor_parallel_size, tensor_parallel_mode)
        parallel.check(model.device if isinstance(model, Decoder) else chosen_device(device))
        config = EngineConfig(
            max_num_seqs=max_num_seqs,
            max_num_batched_tokens=max_num_batched_tokens,
            max_model_len=max_model_len,
            num_kv_pages=num_kv_pages,
            gpu_memory_utilization=gpu_memory_utilization,
            enable_prefix_caching=enable_prefix_caching,
            seed=seed,
            enforce_eager=enforce_eager,
            async_scheduling=async_scheduling,
            enable_return_routed_experts=enable_return_routed_experts,
            plan_known_lengths=plan_known_lengths,
            max_num_mixed_tokens=max_num_mixed_tokens,
            warm_up=warm_up,
        )
        eos_ids: tuple[int, ...] = ()
        asked: dict[str, Any] = {
            "quantization": quantization,
            "kv_cache_dtype": named_kv_cache_dtype(kv_cache_dtype),
            "exact": exact,
            "device": device,
            "attention_dtype": attention_dtype,
            "dtype": as_dtype(dtype),
            "kv_scales": kv_scales,
        }
        if isinstance(model, Decoder):
            if parallel.size > 1:
                raise ConfigError(
                    f"tensor_parallel_size={parallel.size} goes with a checkpoint's path, and this is a Decoder in one "
                    "process; save it, or start ranks by torchrun, call octavo.parallel.parallelize and make an LLM of "
                    "the model on each"
                )
            check_numerics(model, **asked)
            if is_sharded(model):  # gathered again for each call, so at other addresses
                config = dataclasses.replace(config, enforce_eager=True)
            with gathered(model):
                check_finite_weights(model)  # a checkpoint's are checked as they are read
            decoder = model
        else:
            path = newest_model(Path(model))
            eos_ids = eos_ids_of_generation(path)  # refused before the weights are read
            if tokenizer is None and (path / "tokenizer.json").is_file():
                tokenizer = path
            if parallel.size > 1:
                self.engine: Engine = _start_ranks(EngineOrder(path, tokenizer, asked, config, eos_ids, parallel))
                self.tokenizer = self.engine.tokenizer
                self._set_up()
                return
            with compiling_ahead(path, asked, config):
                decoder = load_for_inference(path, **asked)
        self.tokenizer = load_tokenizer(tokenizer) if isinstance(tokenizer, str | Path) else tokenizer
        with gathered(decoder):
            if isinstance(model, Decoder):
                compile_missing(decoder, config)
            self.engine = Engine(decoder, self.tokenizer, config, eos_ids)
            self._set_up()

    def _set_up(self) -> None:
        if self.engine.config.warm_up:
            try:
                self.engine.prepare()
            except BaseException:
                self.engine.close()  # the other ranks, where there are any
                raise
        self._driver = EngineDriver(self.engine)
        self._has_named_template = False

    def close(self) -> None:
        """End the other ranks, and let go of model and KV cache; `with LLM(...) as llm:` does it at its end.

        Afterwards every call is a RequestError, and another LLM over several ranks can be made; on GPUs its small
        messages go by NCCL, with the same bits. Closing twice is fine.
        """
        if not self._is_closed:
            self._is_closed = True
            self.engine.close()
            del self.engine, self._driver

    def __enter__(self) -> "LLM":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    if not TYPE_CHECKING:

        def __getattr__(self, name: str) -> Any:
            if name in ("engine", "_driver") and self._is_closed:
                raise RequestError("this LLM is closed; make a new one")
            if name in METHODS:
                raise AttributeError(f"octavo's LLM has no attribute {name!r}; {METHODS[name]}")
            return object.__getattribute__(self, name)  # which says what is missing, and what has a name like it

    @property
    def model(self) -> Decoder:
        return self.engine.model

    def get_tokenizer(self) -> Any:
        """The tokenizer as transformers' PreTrainedTokenizerFast; `tokenizer` is octavo's own.

        Raises:
            RequestError: this LLM has no tokenizer.
            BackendError: transformers is not installed.
        """
        if self.tokenizer is None:
            raise RequestError("this LLM has no tokenizer; pass LLM(..., tokenizer=PATH)")
        return self.tokenizer.as_transformers

    @property
    def stats(self) -> EngineStats:
        """What the engine did since the start or stats.reset()."""
        return self.engine.stats

    @takes_foreign(of_a_request(_REQUEST_FIELDS, "give") | GENERATE_NAMES)
    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        use_progress: bool = False,
    ) -> list[RequestOutput]:
        """Generate for all prompts, batched as the limits allow.

        Args:
            prompts: strings, lists of token ids, {"prompt": a string} or {"prompt_token_ids": ids}, with "prompt" too
                where its text is known; a single string or dict will do. An empty string is the tokenizer's BOS token
                alone, where it has one.
            sampling_params: one for all, one a prompt, or None for the defaults.
            use_progress: show a progress bar.
        Returns:
            One RequestOutput a prompt, in order.
        Raises:
            RequestError: a prompt or parameters that cannot be honoured; then nothing was generated.
        """
        several: Sequence[Any] = [prompts] if isinstance(prompts, str | Mapping) else prompts
        given = [plain_prompt(prompt) for prompt in several]
        params = params_of(sampling_params, len(given))
        token_ids = [encode_prompt(prompt, self.tokenizer) for prompt, _ in given]
        inputs = [
            self.engine.make_input(ids, p, text) for (_, text), ids, p in zip(given, token_ids, params, strict=True)
        ]
        with gathered(self.model), _progress(self.stats, sum(p.n for p in params), use_progress) as on_step:
            requests = self._driver.run(inputs, on_step)
            self._driver.drain()  # an open stream's, too
        return [self.engine.make_output(request) for request in requests]

    @takes_foreign(of_a_request(_REQUEST_FIELDS, "give") | CHAT_NAMES)
    def chat(
        self,
        messages: Conversation | Sequence[Conversation],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        use_progress: bool = False,
        add_generation_prompt: bool = True,
        chat_template_kwargs: Mapping[str, Any] | None = None,
    ) -> list[RequestOutput]:
        """Generate the next answer of each conversation, by the tokenizer's chat template.

        A tokenizer without one takes octavo's default, as behind `octavo serve`: a line "User:" or "Assistant:" before
        each content. The log says once which it is.

        Args:
            messages: one conversation, a list of {"role", "content"}, or a list of conversations. A content is a
                string, or a list of {"type": "text", "text": ...}, which are joined.
            add_generation_prompt: end with what begins an answer.
            chat_template_kwargs: further variables of the template, such as enable_thinking. The rest is as in
                generate.
        Returns:
            One RequestOutput a conversation, in order; its prompt is the text that the template made.
        Raises:
            RequestError: as generate, and without a tokenizer.
            DataError: a chat template that refuses them.
        """
        conversations = [messages] if messages and isinstance(messages[0], Mapping) else messages
        if self.tokenizer is None:
            raise RequestError("a conversation needs a tokenizer, and this LLM has none")
        if not self._has_named_template:
            logger.info("chat: %s", describe_template(self.tokenizer))
            self._has_named_template = True
        prompts = []
        for conversation in conversations:
            text = render(
                self.tokenizer,
                [plain_message(message) for message in conversation],  # type: ignore[arg-type]
                add_generation_prompt=add_generation_prompt,
                template_kwargs=chat_template_kwargs,
            )
            # the template writes the special tokens itself
            prompts.append({"prompt": text, "prompt_token_ids": self.tokenizer.encode(text)})
        return self.generate(prompts, sampling_params, use_progress)

    def stream(self, prompt: Prompt, sampling_params: SamplingParams | None = None) -> Iterator[RequestOutput]:
        """Generate for one prompt, and give out its state after each token.

        Yields:
            RequestOutput with all text and tokens so far; characters that may begin a stop string are held back. An
            iterator that is closed early ends the request.
        """
        plain, text = plain_prompt(prompt)
        (params,) = params_of(sampling_params, 1)
        with gathered(self.model):
            given = self.engine.make_input(encode_prompt(plain, self.tokenizer), params, text)
            states = self._driver.stream(given)
            with contextlib.closing(states):
                for request in states:
                    yield self.engine.make_output(request)

    def refit(self, *, is_checked: bool = False) -> int:
        """Take over new weights of the shared model: cached pages of older ones are dropped. See Engine.refit.

        generate and stream do this by themselves when they start.

        Args:
            is_checked: the caller has looked for inf and NaN in the weights.
        Returns:
            The weight version that the next tokens will carry.
        Raises:
            RequestError: while a stream is unfinished.
            NonFiniteError: a new weight is inf or NaN; no token is generated until there are others.
        """
        with gathered(self.model):
            return self.engine.refit(is_checked=is_checked)

    def update_weights(
        self,
        weights: str | Path | Mapping[str, torch.Tensor] | Iterable[tuple[str, torch.Tensor]],
        *,
        checksums: Mapping[str, str] | None = None,
        partial: str | Sequence[str] = (),
        running: RunningPolicy = "wait",
        staging_device: Device | None = None,
    ) -> int:
        """Replace the model's weights in place, all or nothing: verified first, then copied; see WeightUpdate.

        A failure at any point leaves the old weights, bit for bit, and their version. A good update gives the bits of a
        freshly loaded model.

        Args:
            weights: a checkpoint directory of the same architecture, or Hugging Face names with tensors: bf16, fp16,
                fp32, or FP8 codes with scales where the model holds codes alone. An iterable is read one at a time.
            checksums: SHA-256 in hex (tensor_sha256) of every tensor; not for an iterable.
            partial: names or patterns of the tensors that come, where not all do.
            running: of open streams: "wait" finishes them first, "abort" ends them, "keep" goes on with them.
            staging_device: where the new weights wait, as large as the old ones; None for the CPU.
        Returns:
            The weight version that the next tokens will carry.
        Raises:
            CheckpointError: what was given does not fit the model, or is damaged.
            RequestError: no such policy for open streams.
            BackendError: the writing failed.
        """
        if is_sharded(self.model):
            raise ConfigError(
                "update_weights writes whole weights into the model's own storages, and fully_shard has cut those; "
                "load the state dict into the sharded model (torch.distributed.checkpoint), then call refit()"
            )
        check_policy(running)
        partial = [partial] if isinstance(partial, str) else partial
        update = self.engine.on_all_ranks(lambda: self._stage(weights, checksums, partial, staging_device))
        if running == "wait":
            self._driver.drain()
        return self.engine.commit_update(update, running)

    def _stage(
        self,
        weights: str | Path | Mapping[str, torch.Tensor] | Iterable[tuple[str, torch.Tensor]],
        checksums: Mapping[str, str] | None,
        partial: Sequence[str],
        device: Device | None,
    ) -> WeightUpdate:
        begin = self.engine.begin_update
        if isinstance(weights, str | Path):
            update = stage_checkpoint(
                self.model, weights, checksums=checksums, partial=partial, staging_device=device, begin=begin
            )
            update.verify()
            return update
        manifest = None
        if checksums is not None:
            if not isinstance(weights, Mapping):
                raise RequestError("checksums go with a checkpoint or a dict of tensors, not with an iterable of pairs")
            manifest = manifest_of(weights, checksums)
        update = begin(manifest=manifest, partial=partial, staging_device=device)
        with update.ending_at_error():
            for pair in weights.items() if isinstance(weights, Mapping) else weights:
                if not (isinstance(pair, tuple) and len(pair) == 2 and isinstance(pair[1], torch.Tensor)):
                    raise RequestError(
                        f"update_weights takes names with torch tensors, or such pairs, got {pair!r:.80}"
                    )
                update.stage(*pair)
            update.verify()
        return update


def _start_ranks(order: EngineOrder) -> LeadingEngine:
    if order.tokenizer is not None and not isinstance(order.tokenizer, str | Path):
        raise ConfigError("with tensor_parallel_size > 1 the tokenizer must be a path, which every rank reads")
    return LeadingEngine.start(order)


@contextlib.contextmanager
def _progress(stats: EngineStats, num_sequences: int, is_shown: bool) -> Iterator[Callable[[Advanced], None]]:
    """What is to be told of each step, to show how far a batch has come."""
    if not is_shown:
        yield lambda advanced: None
        return
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    columns = (TextColumn("generating"), BarColumn(), MofNCompleteColumn(), TextColumn("{task.fields[speed]}"))
    with Progress(*columns, TimeRemainingColumn()) as progress:
        task = progress.add_task("", total=num_sequences, speed="")

        def note(advanced: Advanced) -> None:
            speed = f"{stats.output_tokens_per_s:.0f} tokens/s"
            progress.update(task, advance=sum(seq.is_finished for seq in advanced), speed=speed)

        yield note
