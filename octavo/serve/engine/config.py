"""EngineConfig: the limits of an engine, checked once. Pure Python."""

import dataclasses
from typing import Any

from octavo.errors import ConfigError

# tokens a step behind a server: a step with a prompt keeps the answers under way waiting, here for some 20 ms of an 8B
# model on an H200, or half of that while few prompts wait; offline, longer steps are a little more efficient
SERVED_BATCHED_TOKENS = 1024
# tokens of the sequences that an engine prepares for before it takes requests: bounds on the length of 512, 1024, 2048
READY_LEN = 2048


@dataclasses.dataclass(frozen=True)
class EngineConfig:
    """Limits of the engine; LLM's arguments of the same names.

    Args:
        max_num_seqs: sequences that run at a time.
        max_num_batched_tokens: tokens a step, over all sequences; at least max_num_seqs.
        max_num_mixed_tokens: of a step that decodes beside prompts, while few prompts wait: these get what the decodes
            leave, a quarter of it at least, and a quarter of all that waits where that is more. Fewer let answers under
            way come more evenly. None for max_num_batched_tokens. It changes no token in exact mode.
        max_model_len: tokens of a sequence, prompt and output; None for what model and cache allow.
        num_kv_pages: pages of the KV cache; None for what the memory allows.
        gpu_memory_utilization: share of the GPU's memory that weights, cache and activations may take together.
        enable_prefix_caching: share pages between sequences with the same beginning.
        seed: of all requests that bring none of their own.
        enforce_eager: capture no CUDA graphs.
        async_scheduling: launch a step before the one before it is read; None for on a GPU, where the scheduling then
            costs no time. Neither changes a token.
        plan_known_lengths: begin no sequence whose known length (ignore_eos, nothing that stops it) would make others
            lose their pages later, as far as theirs are known, too. It changes no token.
        enable_return_routed_experts: record the experts that each token was sent to, for CompletionOutput.
        warm_up: compile kernels and capture CUDA graphs before the first request.

    Raises:
        ConfigError: for a value out of range.
    """

    max_num_seqs: int = 256
    max_num_batched_tokens: int = 8192
    max_model_len: int | None = None
    num_kv_pages: int | None = None
    gpu_memory_utilization: float = 0.9
    enable_prefix_caching: bool = True
    seed: int = 0
    enforce_eager: bool = False
    async_scheduling: bool | None = None
    enable_return_routed_experts: bool = False
    plan_known_lengths: bool = True
    max_num_mixed_tokens: int | None = None
    warm_up: bool = True

    def __post_init__(self) -> None:
        for name, low in (
            ("max_num_seqs", 1),
            ("max_num_batched_tokens", 1),
            ("max_model_len", 2),
            ("num_kv_pages", 1),
            ("max_num_mixed_tokens", 1),
        ):
            value = getattr(self, name)
            if value is None and name not in ("max_num_seqs", "max_num_batched_tokens"):
                continue
            if isinstance(value, bool) or not isinstance(value, int) or value < low:
                raise ConfigError(f"{name} must be an integer of at least {low}, got {value!r}")
        if self.max_num_batched_tokens < self.max_num_seqs:
            raise ConfigError(
                f"max_num_batched_tokens={self.max_num_batched_tokens} must be at least "
                f"max_num_seqs={self.max_num_seqs}: each running sequence needs a token a step"
            )
        if not 0 < self.gpu_memory_utilization <= 1:
            raise ConfigError(f"gpu_memory_utilization must be in (0, 1], got {self.gpu_memory_utilization}")
        if isinstance(self.seed, bool) or not isinstance(self.seed, int):
            raise ConfigError(f"seed must be an integer, got {self.seed!r}")

    def resolve_max_model_len(self, model_len: int, cache_len: int | None) -> int:
        """The longest sequence that model and cache allow.

        Args:
            model_len: the model's own limit.
            cache_len: tokens of the whole cache; None while it is not known.
        Raises:
            ConfigError: if a larger max_model_len was asked for.
        """
        asked = self.max_model_len
        if asked is not None and asked > model_len:
            raise ConfigError(f"max_model_len={asked} is more than the model's max_position_embeddings={model_len}")
        if asked is not None and cache_len is not None and asked > cache_len:
            raise ConfigError(
                f"max_model_len={asked} is more than the {cache_len} tokens of the KV cache; "
                "raise num_kv_pages or lower max_model_len"
            )
        return min(asked or model_len, model_len if cache_len is None else cache_len)


def served_tokens(max_num_seqs: int, max_num_batched_tokens: int | None = None) -> dict[str, Any]:
    """The two budgets of a step behind a server, by EngineConfig's names.

    Args:
        max_num_seqs: the engine's.
        max_num_batched_tokens: what was asked for; None where no number was given.
    """
    most = max(SERVED_BATCHED_TOKENS, max_num_seqs) if max_num_batched_tokens is None else max_num_batched_tokens
    return {"max_num_batched_tokens": most, "max_num_mixed_tokens": max(1, most // 2)}
