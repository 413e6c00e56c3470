"""What a measurement of exactness runs: its variants, and how many sequences of which length."""

import dataclasses
import math

from bench.serve.checked_models import NAMES
from bench.serve.workloads import VARIANTS, EngineVariant
from octavo.models import ModelConfig
from octavo.ops.gemm.scaled_mm.exact import BUCKETS, bucket_of
from octavo.serve.engine import EngineConfig

# Beside the variant in question: the same under another cache, and with nothing in FP8.
EXACT_VARIANTS = (
    VARIANTS["exact"],
    EngineVariant("exact-bf16-kv", True, "bf16", exact=True),
    EngineVariant("exact-bf16", False, "bf16", exact=True),
)


@dataclasses.dataclass(frozen=True)
class ExactnessPlan:
    """Sizes of a run.

    Attributes:
        batches: sequences at a time.
        few_batches: of the other variants.
        repeated: those whose prompts come twice.
        num_tokens: sampled of each.
        short: tokens of the longest prompt.
        long: tokens of the longest prompt of every other batch.
        buckets: sizes that GEMMs pad M to, each met by prompts that fill one step.
        budget: tokens a step.
        expert_rows: rows that one expert must get in a pass.
        num_tight: sequences in a cache too small for them.
        tight_seqs: how many of them run at a time.
        tight_pages: of the longest prompt.
        tight_tokens: sampled of each.
        tight_budget: tokens a step, less than that prompt.
    """

    batches: tuple[int, ...]
    few_batches: tuple[int, ...]
    repeated: tuple[int, ...]
    num_tokens: int
    short: int
    long: int
    buckets: tuple[int, ...]
    budget: int
    expert_rows: int
    num_tight: int
    tight_seqs: int
    tight_pages: int
    tight_tokens: int
    tight_budget: int

    def for_variant(self, variant: EngineVariant, config: ModelConfig) -> "ExactnessPlan":
        """Of the first variant all of it, of the others less; a step so large that an expert gets its rows."""
        is_first = variant == EXACT_VARIANTS[0]
        buckets, budget = self.buckets if is_first else (), self.budget
        if config.num_experts:  # 1.1: how many tokens an expert gets is left to the router
            tokens = self.expert_rows * config.num_experts / config.num_experts_per_tok
            largest = bucket_of(math.ceil(1.1 * tokens))
            buckets, budget = tuple(sorted({*buckets, largest})), max(budget, largest)
        batches = self.batches if is_first else self.few_batches
        return dataclasses.replace(self, buckets=buckets, budget=budget, batches=batches)


# All sizes up to what an engine takes a step unless it is told otherwise.
_STEP = EngineConfig().max_num_batched_tokens
FULL = ExactnessPlan(
    batches=(1, 2, 3, 8, 17, 64, 65, 128, 200, 256),
    few_batches=(1, 17, 65, 256),
    repeated=(2, 8, 17, 128),
    num_tokens=16,
    short=300,
    long=1100,
    buckets=(*BUCKETS, *range(2 * BUCKETS[-1], _STEP + 1, BUCKETS[-1])),
    budget=_STEP,
    expert_rows=2048,
    num_tight=64,
    tight_seqs=48,
    tight_pages=6,
    tight_tokens=140,
    tight_budget=256,
)
TOY = ExactnessPlan(
    batches=(1, 8, 65),
    few_batches=(1, 2, 65),
    repeated=(8,),
    num_tokens=4,
    short=24,
    long=150,
    buckets=BUCKETS,
    budget=BUCKETS[-1],
    expert_rows=128,
    num_tight=5,
    tight_seqs=4,
    tight_pages=2,
    tight_tokens=12,
    tight_budget=64,
)


def exact_variants(model_name: str, *, quick: bool) -> tuple[EngineVariant, ...]:
    """Of a model: all; as toys all of the first model, of the others the first alone."""
    return EXACT_VARIANTS if not quick or model_name == NAMES[0] else EXACT_VARIANTS[:1]
