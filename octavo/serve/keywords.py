"""Keywords that other libraries' users give to LLM and SamplingParams: renamed, taken where they ask for nothing, or
refused with what octavo calls them. vLLM's names, and those of transformers' `generate` and `from_pretrained`.
"""

import functools
import inspect
import logging
import warnings
from collections.abc import Callable, Iterable, Mapping
from typing import Any, NamedTuple, ParamSpec, TypeVar

from octavo.errors import KeywordError, nearest

P = ParamSpec("P")
R = TypeVar("R")
T = TypeVar("T")
Keywords = Mapping[str, Any]

logger = logging.getLogger(__name__)
_noted: set[tuple[str, str]] = set()


class Foreign(NamedTuple):
    """What another library's keyword means here.

    Attributes:
        ours: the keyword of the same call that means the same; its value is taken over.
        is_harmless: whether a value, among all keywords of the call, asks for nothing that octavo does not do anyway.
        advice: what to do instead, for other values.
        is_former: ours was called so; taken for one more release, with a warning.
    """

    ours: str = ""
    is_harmless: Callable[[Any, Keywords], bool] = lambda value, keywords: False
    advice: str = "leave it out"
    is_former: bool = False


def same(ours: str) -> Foreign:
    """Another name of one of ours."""
    return Foreign(ours=ours)


def former_name_of(ours: str) -> Foreign:
    """What one of ours was called."""
    return Foreign(ours=ours, is_former=True)


def only(*values: Any, advice: str) -> Foreign:
    """Harmless at these values; None, which means left out, is harmless everywhere."""
    return Foreign(is_harmless=lambda value, _: value in values, advice=advice)


def any_value() -> Foreign:
    """Harmless whatever its value: it changes no token, or asks for what is always so."""
    return Foreign(is_harmless=lambda *_: True)


def refused(advice: str) -> Foreign:
    """Nothing here is like it."""
    return Foreign(advice=advice)


def takes_foreign(names: Mapping[str, Foreign]) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """Decorates a method: keywords that it lacks are looked up in names.

    Raises:
        KeywordError: when called, for a keyword that is refused or unknown.
    """

    def decorate(function: Callable[P, R]) -> Callable[P, R]:
        own = frozenset(inspect.signature(function).parameters) - {"self"}
        call = function.__qualname__.removesuffix(".__init__")

        @functools.wraps(function)
        def wrapper(*args: P.args, **kwargs: P.kwargs) -> R:
            if not own.issuperset(kwargs):
                return function(*args, **_translate(call, own, names, kwargs))  # type: ignore[arg-type]
            return function(*args, **kwargs)

        return wrapper

    return decorate


def takes_foreign_fields(names: Mapping[str, Foreign]) -> Callable[[type[T]], type[T]]:
    """takes_foreign for the fields of a dataclass."""

    def decorate(cls: type[T]) -> type[T]:
        cls.__init__ = takes_foreign(names)(cls.__init__)  # type: ignore[method-assign]
        return cls

    return decorate


def of_a_request(fields: Iterable[str], how: str) -> dict[str, Foreign]:
    """SamplingParams' names where they do not belong, with its keywords of other libraries."""
    ours = {name: entry.ours or name for name, entry in SAMPLING_NAMES.items()} | {name: name for name in fields}
    return {name: refused(f"it is a request's: {how} SamplingParams({mine}=...)") for name, mine in ours.items()}


def _translate(call: str, own: frozenset[str], names: Mapping[str, Foreign], keywords: Keywords) -> dict[str, Any]:
    """The call's own keywords in the place of all that were given."""
    taken = {name: value for name, value in keywords.items() if name in own}
    for name, value in keywords.items():
        if name in own:
            continue
        entry = names.get(name)
        if entry is None:
            raise KeywordError(f"{call} has no keyword {name!r}; {_suggest(name, own, names)}")
        if entry.ours:
            if entry.ours in taken:
                raise KeywordError(f"{call}: {name} is another name of {entry.ours}; give {entry.ours} alone")
            taken[entry.ours] = value
            if entry.is_former:
                text = f"{call}({name}=...) leaves octavo with the next release; use {entry.ours}"
                warnings.warn(text, DeprecationWarning, stacklevel=3)
        elif value is None or entry.is_harmless(value, keywords):
            _note(call, name, value)
        else:
            raise KeywordError(f"{call} does not take {name}={value!r:.80}; {entry.advice}")
    return taken


def _suggest(name: str, own: frozenset[str], names: Mapping[str, Foreign]) -> str:
    near = nearest(name, {*own, *names})
    if near is None:
        return f"its keywords are {', '.join(sorted(own))}"
    ours = names[near].ours if near in names else ""
    return f"did you mean {near!r}, which is {ours!r} here?" if ours else f"did you mean {near!r}?"


def _note(call: str, name: str, value: Any) -> None:
    if (call, name) not in _noted:
        _noted.add((call, name))
        logger.info("%s: %s=%.80r is taken and changes nothing here", call, name, value)


_ONE_GPU = "give tensor_parallel_size, make one LLM a GPU, or start octavo serve --data-parallel-size"
_LOCAL = "octavo reads local folders and downloads nothing: download the checkpoint first and give its path"
_NO_LORA = "octavo runs no LoRA adapters: merge them into the weights first"
_NO_BEAMS = "octavo has no beam search: sample n answers with logprobs=0 and keep the best cumulative_logprob"
_PLAIN_TEXT = "an output's text never has special tokens; decode its token_ids with the tokenizer for them"
_SCHEMA = "give json_schema, a JSON schema: choices are {'enum': [...]}; there are no regular expressions or grammars"
_TEXT_ONLY = "octavo's models read text alone"

ENGINE_NAMES: dict[str, Foreign] = {
    # octavo's own other name, of load_model
    "recipe": same("quantization"),
    # vLLM
    **dict.fromkeys(("model_path", "model_name", "model_name_or_path"), same("model")),
    **dict.fromkeys(("max_seq_len", "max_seq_length", "max_context_len", "context_length"), same("max_model_len")),
    **dict.fromkeys(("max_batch_size", "max_num_sequences"), same("max_num_seqs")),
    **dict.fromkeys(
        ("pipeline_parallel_size", "data_parallel_size", "prefill_context_parallel_size"),
        only(1, advice=_ONE_GPU),
    ),
    "enable_expert_parallel": only(False, advice=_ONE_GPU),
    **dict.fromkeys(
        ("trust_remote_code", "swap_space", "max_seq_len_to_capture", "max_context_len_to_capture"), any_value()
    ),
    **dict.fromkeys(("disable_custom_all_reduce", "disable_log_stats", "disable_log_requests"), any_value()),
    **dict.fromkeys(("distributed_executor_backend", "worker_use_ray", "enable_sleep_mode"), any_value()),
    **dict.fromkeys(("served_model_name", "num_scheduler_steps", "scheduler_delay_factor"), any_value()),
    **dict.fromkeys(("guided_decoding_backend", "use_v2_block_manager", "disable_cascade_attn"), any_value()),
    **dict.fromkeys(("prefix_caching_hash_algo", "stream_interval", "use_tqdm_on_load", "model_impl"), any_value()),
    "scheduling_policy": only("fcfs", advice="requests run in the order in which they come"),
    "calculate_kv_scales": only(False, advice="an FP8 cache has scales a token and head, which nothing can outdate"),
    "logprobs_mode": refused("a logprob is log_softmax(logits / temperature), over the whole vocabulary"),
    "config_format": only("auto", "hf", advice="octavo reads config.json alone"),
    "cpu_offload_gb": only(0, advice="weights stay on the GPU; quantization='fp8' halves them"),
    "tokenizer_mode": only("auto", "hf", advice="octavo reads tokenizer.json alone"),
    "skip_tokenizer_init": only(False, advice="octavo needs no tokenizer for prompts of token ids; leave it out"),
    "load_format": only("auto", "safetensors", advice="octavo reads safetensors alone"),
    **dict.fromkeys(("revision", "tokenizer_revision", "code_revision", "hf_token", "download_dir"), refused(_LOCAL)),
    "hf_overrides": only({}, advice="edit the checkpoint's config.json"),
    "block_size": only(64, advice="pages of the KV cache have 64 tokens"),
    "num_gpu_blocks_override": same("num_kv_pages"),
    "kv_cache_memory_bytes": refused("give num_kv_pages, or gpu_memory_utilization"),
    "enable_chunked_prefill": only(
        True, advice="long prompts always come in pieces; raise max_num_batched_tokens for fewer of them"
    ),
    "enable_lora": only(False, advice=_NO_LORA),
    "lora_modules": refused(_NO_LORA),
    **dict.fromkeys(
        ("speculative_config", "speculative_model", "num_speculative_tokens"),
        refused("octavo has no speculative decoding"),
    ),
    **dict.fromkeys(("limit_mm_per_prompt", "mm_processor_kwargs"), only({}, advice=_TEXT_ONLY)),
    "convert": only("auto", "none", advice="an LLM generates; it gives no embeddings"),
    "generation_config": only(
        "vllm", advice="octavo takes no sampling defaults from a checkpoint; give SamplingParams"
    ),
    "override_generation_config": only({}, advice="give SamplingParams"),
    "compilation_config": refused("enforce_eager=True captures no CUDA graphs; there is nothing else to set"),
    "task": only("auto", "generate", advice="an LLM generates; it gives no embeddings"),
    "runner": only("auto", "generate", advice="an LLM generates; it gives no embeddings"),
    "logits_processors": only([], (), advice="give logit_bias or json_schema of SamplingParams"),
    "max_logprobs": Foreign(
        is_harmless=lambda value, _: isinstance(value, int) and 0 <= value <= 20, advice="at most 20 are given"
    ),
    **dict.fromkeys(("structured_outputs_config", "optimization_level", "disable_sliding_window"), any_value()),
    **dict.fromkeys(("disable_hybrid_kv_cache_manager", "show_hidden_metrics_for_version"), any_value()),
    "attention_backend": refused("attention kernels are octavo's own; attention_dtype chooses what they multiply in"),
    **dict.fromkeys(("pooler_config", "override_pooler_config"), refused("an LLM generates; it gives no embeddings")),
    "enable_prompt_embeds": only(False, advice="give token ids"),
    "reasoning_parser": only("", advice="reasoning is part of the text; cut it out of that yourself"),
    "allowed_local_media_path": only("", advice=_TEXT_ONLY),
    **dict.fromkeys(
        ("max_num_partial_prefills", "max_long_partial_prefills"), only(1, advice="lower max_num_batched_tokens")
    ),
    "long_prefill_token_threshold": only(0, advice="lower max_num_batched_tokens"),
    **dict.fromkeys(("kv_transfer_config", "kv_events_config", "ec_transfer_config"), refused(_ONE_GPU)),
    "decode_context_parallel_size": only(1, advice=_ONE_GPU),
    "enable_eplb": only(False, advice=_ONE_GPU),
    "profiler_config": refused("put torch.profiler around the calls"),
    "otlp_traces_endpoint": refused("octavo sends no traces"),
    "additional_config": only({}, advice="leave it out"),
    # transformers
    "torch_dtype": same("dtype"),
    "device_map": only("auto", advice="give device"),
    "load_in_8bit": only(False, advice="give quantization='fp8'"),
    "load_in_4bit": only(False, advice="give quantization, such as 'fp8'"),
    "quantization_config": refused(
        "give quantization, a recipe's name; a checkpoint's own is read from its config.json"
    ),
    **dict.fromkeys(("token", "use_auth_token", "cache_dir"), refused(_LOCAL)),
    **dict.fromkeys(
        ("attn_implementation", "low_cpu_mem_usage", "local_files_only", "use_safetensors", "use_cache"), any_value()
    ),
}

SAMPLING_NAMES: dict[str, Foreign] = {
    **dict.fromkeys(
        ("max_new_tokens", "max_completion_tokens", "max_output_tokens", "max_gen_toks"), same("max_tokens")
    ),
    **dict.fromkeys(("min_new_tokens",), same("min_tokens")),
    **dict.fromkeys(("num_return_sequences", "num_samples"), same("n")),
    **dict.fromkeys(("stop_strings", "stop_sequences", "until"), same("stop")),
    **dict.fromkeys(("random_seed",), same("seed")),
    **dict.fromkeys(("guided_json",), same("json_schema")),
    "top_logprobs": same("logprobs"),
    # vLLM
    "best_of": Foreign(is_harmless=lambda value, keywords: value == keywords.get("n", 1), advice=_NO_BEAMS),
    "use_beam_search": only(False, advice=_NO_BEAMS),
    "beam_width": only(1, advice=_NO_BEAMS),
    "length_penalty": only(0.0, 1.0, advice=_NO_BEAMS),
    "early_stopping": only(False, advice=_NO_BEAMS),
    **dict.fromkeys(
        ("guided_decoding", "structured_outputs", "guided_regex", "guided_choice", "guided_grammar"), refused(_SCHEMA)
    ),
    "response_format": refused("give json_schema; {} is any JSON object"),
    "allowed_token_ids": refused("give logit_bias: 100 for each of them"),
    "bad_words": only([], (), advice="give logit_bias: -100 for a token of theirs"),
    "logits_processors": only([], (), advice="give logit_bias or json_schema"),
    "truncate_prompt_tokens": refused("cut the prompt's token ids yourself"),
    "skip_special_tokens": only(True, advice=_PLAIN_TEXT),
    "spaces_between_special_tokens": any_value(),
    "include_stop_str_in_output": only(
        False, advice="a stop string is in the output's stop_reason; add it to the text"
    ),
    "detokenize": only(True, advice="an LLM without a tokenizer gives token ids alone"),
    **dict.fromkeys(("output_kind", "flat_logprobs", "skip_clone", "stream_interval"), any_value()),
    **dict.fromkeys(("logprob_token_ids", "prompt_logprob_token_ids"), refused("give logprobs, of the best tokens")),
    "thinking_token_budget": refused("give max_tokens"),
    "repetition_detection": refused("give repetition_penalty or frequency_penalty"),
    "extra_args": only({}, advice="leave it out"),
    "prompt_embeds": refused("give token ids"),
    "echo": only(False, advice="the prompt is in RequestOutput.prompt, its logprobs come with prompt_logprobs"),
    # transformers
    "max_length": refused("it counts the prompt too; give max_tokens, which counts the output alone"),
    "min_length": refused("it counts the prompt too; give min_tokens, which counts the output alone"),
    "do_sample": only(True, advice="greedy decoding is temperature=0"),
    "num_beams": only(1, advice=_NO_BEAMS),
    "num_beam_groups": only(1, advice=_NO_BEAMS),
    "penalty_alpha": only(0.0, advice="octavo has no contrastive search"),
    "typical_p": only(1.0, advice="give top_p or min_p"),
    "epsilon_cutoff": only(0.0, advice="give min_p"),
    "eta_cutoff": only(0.0, advice="give min_p"),
    "no_repeat_ngram_size": only(0, advice="give repetition_penalty or frequency_penalty"),
    "encoder_repetition_penalty": only(1.0, advice="give repetition_penalty"),
    "bad_words_ids": only([], (), advice="give logit_bias: -100 for a token of theirs"),
    "suppress_tokens": only([], (), advice="give logit_bias: -100 for each of them"),
    "eos_token_id": refused("give stop_token_ids; the model's own end of sequence counts unless ignore_eos=True"),
    "output_scores": only(False, advice="give logprobs"),
    "output_logits": only(False, advice="give logprobs"),
    **dict.fromkeys(("pad_token_id", "bos_token_id", "use_cache", "return_dict_in_generate"), any_value()),
    "logits_processor": only([], (), advice="give logit_bias or json_schema"),
    "stopping_criteria": only([], (), advice="give stop or stop_token_ids"),
    "generation_config": refused("give SamplingParams' own keywords"),
    "generator": refused("give seed"),
}

GENERATE_NAMES: dict[str, Foreign] = {
    "use_tqdm": same("use_progress"),
    "inputs": same("prompts"),
    "prompt_token_ids": refused("give them as prompts, a list of lists of token ids"),
    "lora_request": refused(_NO_LORA),
    "priority": refused("requests run in the order in which they come"),
    **dict.fromkeys(("prompt_adapter_request", "guided_options_request"), refused(_SCHEMA)),
}

_HTTP_PROXY = "put a reverse proxy in front of the server"

# what `octavo serve` says where vllm serve has an option and LLM no keyword, or where the keyword's advice is of Python
SERVE_NAMES: dict[str, Foreign] = ENGINE_NAMES | {
    "model": same("model"),
    **dict.fromkeys(
        ("enable_auto_tool_choice", "tool_call_parser", "tool_parser_plugin", "tool_server"),
        refused("octavo renders no tools and parses no calls; requests may ask for JSON by response_format"),
    ),
    **dict.fromkeys(("disable_log_requests", "disable_uvicorn_access_log", "disable_fastapi_docs"), any_value()),
    "enable_prompt_tokens_details": any_value(),
    **dict.fromkeys(("uvicorn_log_level", "chat_template_content_format", "max_log_len"), any_value()),
    "enable_log_requests": only(False, advice="give --access-log for a line about each request"),
    **dict.fromkeys(("ssl_keyfile", "ssl_certfile", "ssl_ca_certs"), refused(f"for TLS {_HTTP_PROXY}")),
    **dict.fromkeys(("allowed_origins", "allowed_methods", "allowed_headers"), refused(f"for CORS {_HTTP_PROXY}")),
    "root_path": only("", advice=_HTTP_PROXY),
    "middleware": refused(_HTTP_PROXY),
    "config": refused("give the options themselves"),
    "response_role": only("assistant", advice="leave it out"),
    "generation_config": only("vllm", advice="octavo takes no sampling defaults from a checkpoint; clients send them"),
    "override_generation_config": only({}, advice="clients send temperature, top_p and the like"),
    "default_chat_template_kwargs": only({}, advice="clients send chat_template_kwargs"),
    "return_tokens_as_token_ids": only(False, advice="requests have a field of this name"),
    "async_scheduling": only(True, advice="a GPU's steps are always launched ahead"),
    "enable_sleep_mode": only(False, advice="give --admin-key, and send POST /admin/sleep"),
    "kv_cache_memory_bytes": refused("give --num-kv-pages, or --gpu-memory-utilization"),
    "compilation_config": refused("--enforce-eager captures no CUDA graphs; there is nothing else to set"),
    "enable_chunked_prefill": only(True, advice="long prompts always come in pieces of --max-num-batched-tokens"),
    "api_server_count": only(1, advice=_ONE_GPU),
}
# attributes of vLLM's LLM that octavo's lacks -> what to do instead
_NO_POOLING = "an LLM generates; prompt_logprobs of SamplingParams is what it gives about a text"
METHODS: dict[str, str] = {
    **dict.fromkeys(("encode", "embed", "classify", "score", "reward"), _NO_POOLING),
    "beam_search": _NO_BEAMS,
    "set_tokenizer": "give LLM(tokenizer=...)",
    **dict.fromkeys(("sleep", "wake_up"), "llm.engine.sleep() and llm.engine.wake() give the KV cache's memory back"),
    "reset_prefix_cache": "llm.engine.reset_prefix_cache() does it",
    **dict.fromkeys(("start_profile", "stop_profile"), "put torch.profiler around the calls"),
    **dict.fromkeys(("llm_engine", "collective_rpc", "apply_model"), "the model is llm.model, its engine llm.engine"),
    "get_metrics": "llm.stats has the counters",
    "get_default_sampling_params": "SamplingParams() has the defaults; none come from a checkpoint",
}

CHAT_NAMES: dict[str, Foreign] = {
    "use_tqdm": same("use_progress"),
    **dict.fromkeys(("conversation", "conversations"), same("messages")),
    "lora_request": refused(_NO_LORA),
    "chat_template": refused("set llm.tokenizer.chat_template"),
    "chat_template_content_format": any_value(),
    "continue_final_message": only(False, advice="render the text yourself and give it to generate"),
    "tools": only([], advice="octavo renders no tools"),
    "mm_processor_kwargs": only({}, advice=_TEXT_ONLY),
}
