"""The least time that a workload can take: bytes at the rate of a copy, products at the rate of a large square one.

A decode step reads every weight that it meets once and the keys and values of every running sequence; prompts are
bound by their products. What a floor leaves out (activations, norms, sampling, the head over prompts) makes it smaller.
"""

import dataclasses
import math

from bench.speed.ceilings import Ceilings
from octavo.models import ModelConfig
from octavo.models.checkpoint.names import parameter_names
from octavo.numerics import Numerics

FORMULA = (
    "Share of the roofline: the floor over the time. Floor = linear and attention operations of the prompts at the "
    "ceilings of their formats + the larger of (a) the decode steps' bytes over the copy's bandwidth: in the fewest "
    "steps possible all weights met (FP8 one byte, the head two) and each sequence's keys and values (FP8 with its "
    "scales), (b) the decode steps' operations at the ceilings."
)
_SCALE_BYTES = 4  # fp32, one a token and kv head for K and for V


@dataclasses.dataclass(frozen=True)
class Counts:
    """Weights of a model by what meets them: every token, a few experts' tokens, and every sampled token (the head)."""

    dense: int
    experts: int
    head: int
    active_share: float

    @classmethod
    def of(cls, config: ModelConfig) -> "Counts":
        linears = [p for p in parameter_names(config) if p.is_linear_weight]
        experts = sum(math.prod(p.shape) for p in linears if ".experts." in p.name)
        total = sum(math.prod(p.shape) for p in linears)
        share = config.num_experts_per_tok / config.num_experts if config.num_experts else 1.0
        return cls(total - experts, experts, config.vocab_size * config.hidden_size, share)

    @property
    def per_token(self) -> float:
        """Weights of the linears that a token meets; the head is not among them."""
        return self.dense + self.experts * self.active_share

    def step_bytes(self, batch: float, weight_bytes: int) -> float:
        """Bytes of the weights that a step over so many tokens meets, each choosing its experts by chance."""
        met = 1 - (1 - self.active_share) ** batch
        return weight_bytes * (self.dense + self.experts * met) + 2 * self.head


def kv_token_bytes(config: ModelConfig, kv_cache_dtype: str) -> int:
    """Bytes of one token's keys and values over all layers."""
    head_bytes = config.head_dim + _SCALE_BYTES if kv_cache_dtype == "fp8" else 2 * config.head_dim
    return 2 * config.num_layers * config.num_kv_heads * head_bytes


def floor_s(
    config: ModelConfig, numerics: Numerics, lengths: list[tuple[int, int]], max_num_seqs: int, ceilings: Ceilings
) -> float:
    """Seconds of a workload at the ceilings; see FORMULA.

    Args:
        lengths: (prompt, output) tokens of each request.
        max_num_seqs: that run at a time at most.
    """
    is_fp8 = numerics.recipe.is_fp8
    counts = Counts.of(config)
    attention_flops = 4 * config.num_layers * config.q_dim  # a query token and a key token
    prompt_s = ceilings.product_s(2 * counts.per_token * sum(p for p, _ in lengths), fp8=is_fp8)
    prompt_s += ceilings.product_s(attention_flops * sum(p * p / 2 for p, _ in lengths), fp8=False)
    decoded = [(prompt, output - 1) for prompt, output in lengths]  # the first token comes with the prompt
    num_tokens = sum(n for _, n in decoded)
    if not num_tokens:
        return prompt_s
    num_steps = max(max(n for _, n in decoded), math.ceil(num_tokens / max_num_seqs))
    kv_tokens = sum(n * prompt + n * (n + 1) / 2 for prompt, n in decoded)  # read, over all steps
    num_bytes = num_steps * counts.step_bytes(num_tokens / num_steps, 1 if is_fp8 else 2)
    num_bytes += kv_tokens * kv_token_bytes(config, numerics.kv_cache_dtype)
    products_s = ceilings.product_s(2 * counts.per_token * num_tokens, fp8=is_fp8)
    products_s += ceilings.product_s(2 * counts.head * num_tokens + attention_flops * kv_tokens, fp8=False)
    return prompt_s + max(ceilings.moving_s(num_bytes), products_s)
