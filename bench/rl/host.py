"""RolloutHost: engines with the limits that a rollout needs, over weights that stay for the next variant."""

import dataclasses
from typing import Any

import torch

from bench.rl.workloads import ENGINE_VARIANTS, Rollout
from bench.serve.floor import Counts, kv_token_bytes
from bench.serve.host import EngineHost, EngineKey
from bench.serve.workloads import MEMORY_SHARE, EngineVariant, Workload
from octavo.errors import BackendError
from octavo.models import Decoder, ModelConfig
from octavo.ops.attention import PAGE_SIZE
from octavo.serve import LLM

_RESERVE_BYTES = 8e9  # for a step's activations, where a batch is to fit beside the weights
_ROUND_TO = 8  # sequences
_SPARE = 1.02  # of the tight cache: FP8 fits with a little to spare


@dataclasses.dataclass(frozen=True)
class LimitedKey(EngineKey):
    """What an engine depends on, its limits (LLM's arguments) included."""

    limits: tuple[tuple[str, Any], ...] = ()


class RolloutHost(EngineHost):
    """Builds engines as rollouts ask for them; see EngineHost."""

    def key(self, workload: Workload, variant: EngineVariant) -> LimitedKey:
        """What the engine for a rollout's variant depends on."""
        assert isinstance(workload, Rollout), f"{workload.name} is no rollout"
        plain = super().key(workload, variant)
        limits = tuple(_limits(workload, variant, plain.config).items())
        return LimitedKey(plain.config, plain.model, plain.variant, plain.memory_cap_bytes, limits)

    def num_requests(self, workload: Rollout) -> int:
        """The workload's, or as many as fit into a bf16 cache beside bf16 weights on this card.

        Raises:
            BackendError: none fits.
        """
        if workload.num_requests or self.device != "cuda":
            return workload.num_requests or workload.most_requests
        config = super().key(workload, ENGINE_VARIANTS["bf16"]).config
        counts = Counts.of(config)
        weights = 2 * (counts.dense + counts.experts + 2 * counts.head)
        left = MEMORY_SHARE * torch.cuda.mem_get_info()[1] - weights - _RESERVE_BYTES
        most = int(left // (_pages_of(workload) * PAGE_SIZE * kv_token_bytes(config, "bf16")))
        fitting = min(workload.most_requests, most // _ROUND_TO * _ROUND_TO or most)
        if fitting < 1:
            raise BackendError(f"not one sequence of {workload.max_len} tokens fits beside the weights in bf16")
        return fitting

    def _make_llm(self, model: Decoder, key: EngineKey) -> LLM:
        assert isinstance(key, LimitedKey), "made by key"
        return LLM(model, gpu_memory_utilization=MEMORY_SHARE, warm_up=False, **dict(key.limits))


def _pages_of(workload: Workload) -> int:
    return -(-workload.max_len // PAGE_SIZE)


def _limits(workload: Rollout, variant: EngineVariant, config: ModelConfig) -> dict[str, Any]:
    limits: dict[str, Any] = {
        "max_num_seqs": workload.num_requests,
        "max_model_len": workload.max_len,
        "enable_prefix_caching": workload.samples_per_prompt > 1 or workload.is_decode,
    }
    if workload.is_tight:
        limits["num_kv_pages"] = tight_num_pages(workload, variant.kv_cache_dtype, config)
    return limits


def tight_num_pages(workload: Rollout, kv_cache_dtype: str, config: ModelConfig) -> int:
    """Pages of a cache whose bytes, the same in both formats, just hold all sequences to their end in FP8."""
    budget = _SPARE * workload.num_requests * _pages_of(workload) * kv_token_bytes(config, "fp8")
    return int(budget // kv_token_bytes(config, kv_cache_dtype))
