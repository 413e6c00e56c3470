"""The workloads and variants of `octavo bench serve`, and what vLLM made of them on a card of the same kind."""

import dataclasses
import random
from collections.abc import Mapping
from typing import NamedTuple

from octavo.errors import ConfigError
from octavo.numerics import Numerics, get_recipe

MAX_NUM_SEQS = 512  # sequences that run at a time, in octavo as in the peer's runs
MEMORY_SHARE = 0.88  # of the card, as in the peer's runs

Requests = list[tuple[list[int], int]]  # (token ids of the prompt, tokens to generate)


class Peer(NamedTuple):
    """Output tokens a second of another engine on a card of the same kind, and what it was, how and when it ran."""

    name: str
    tokens_per_s: float


_VLLM = "vLLM 0.26.0 (FlashAttention-3, CUTLASS FP8; without FlashInfer and DeepGEMM)"
VLLM = f"{_VLLM}, beside octavo b14d6df in one visit to one H200"


@dataclasses.dataclass(frozen=True)
class EngineVariant:
    """One way to run a model: its linears in FP8 or bf16, its KV cache, exact or not.

    Args:
        recipe: of its FP8 linears; None for the command's.
    """

    name: str
    is_fp8: bool
    kv_cache_dtype: str
    exact: bool = False
    recipe: str | None = None

    def recipe_name(self, recipe: str) -> str:
        """What its linears run under, given the command's recipe."""
        return self.recipe or recipe if self.is_fp8 else "bf16"

    def numerics(self, recipe: str) -> Numerics:
        """Of a model of this variant, given the command's recipe."""
        return Numerics(get_recipe(self.recipe_name(recipe)), self.kv_cache_dtype, self.exact)

    def label(self, recipe: str) -> str:
        """As tables name it."""
        kv = " + FP8 KV" if self.kv_cache_dtype == "fp8" else ""
        return f"octavo {self.recipe_name(recipe)}{kv}{', exact' if self.exact else ''}"


VARIANTS = {
    variant.name: variant
    for variant in (
        EngineVariant("bf16", False, "bf16"),
        EngineVariant("fp8", True, "bf16"),
        EngineVariant("fp8-kv", True, "fp8"),
        EngineVariant("rowwise-kv", True, "fp8", recipe="rowwise"),
        EngineVariant("exact", True, "fp8", exact=True),
    )
}


@dataclasses.dataclass(frozen=True)
class Workload:
    """Requests that are all there at the start.

    Args:
        name: as the command line knows it.
        model: one of shapes.SHAPES.
        variants: names in VARIANTS.
        num_requests: 0 for the most of which prompt and output fit into the KV cache at a time.
        prompt_len: tokens, from and to; drawn evenly between them with a fixed seed.
        output_len: the same.
        memory_cap_bytes: what weights, cache and activations may take together; None for MEMORY_SHARE of the card.
        peers: variant -> what another engine made of it.
        known_variants: those that run once more with lengths that the scheduler knows and plans for.
        is_known: this is such a run. A server knows no lengths, so all other figures are without.
        num_layers: of the model; None for all that it has.
        is_toy: of the shape only the family is left.
    """

    name: str
    model: str
    num_requests: int
    prompt_len: tuple[int, int]
    output_len: tuple[int, int]
    variants: tuple[str, ...]
    memory_cap_bytes: int | None = None
    peers: Mapping[str, Peer] = dataclasses.field(default_factory=dict)
    known_variants: tuple[str, ...] = ()
    is_known: bool = False
    num_layers: int | None = None
    is_toy: bool = False

    @property
    def label(self) -> str:
        """As tables name it; another number of requests or layers has another label."""
        if not self.num_requests:
            count = "largest batch"
        else:
            count = "one request" if self.num_requests == 1 else f"{self.num_requests} requests"
        cap = "" if self.memory_cap_bytes is None else f", {self.memory_cap_bytes / 1e9:.0f} GB"
        layers = "" if self.num_layers is None else f", only the first {self.num_layers} layers"
        known = ", lengths known" if self.is_known else ""
        model = f"toy of {self.name}," if self.is_toy else self.model
        return f"{model} {count}, {_span(self.prompt_len)} in, {_span(self.output_len)} out{cap}{layers}{known}"

    @property
    def max_len(self) -> int:
        """Tokens of the longest sequence."""
        return self.prompt_len[1] + self.output_len[1]

    def draw(self, vocab_size: int, num_requests: int, seed: int = 0) -> Requests:
        """Random prompts and how many tokens each is to get; the first requests of a seed are always the same."""
        rng = random.Random(seed)
        return [
            (rng.choices(range(vocab_size), k=rng.randint(*self.prompt_len)), rng.randint(*self.output_len))
            for _ in range(num_requests)
        ]


def _span(ends: tuple[int, int]) -> str:
    return str(ends[0]) if ends[0] == ends[1] else f"{ends[0]}-{ends[1]}"


def _gpt_j(name: str, num_requests: int) -> Workload:
    variants = ("bf16", "fp8", "fp8-kv", "rowwise-kv")
    return Workload(name, "GPT-J-6B", num_requests, (1024, 1024), (256, 256), variants, memory_cap_bytes=80_000_000_000)


WORKLOADS = {
    w.name: w
    for w in (
        Workload(
            *("8b-512x1000", "Qwen3-8B", 512, (1000, 1000), (1000, 1000)),
            variants=("bf16", "fp8", "fp8-kv", "rowwise-kv", "exact"),
            peers={"fp8-kv": Peer(VLLM, 12_721), "rowwise-kv": Peer(VLLM, 12_721)},
            known_variants=("fp8-kv",),
        ),
        Workload(
            *("8b-mixed", "Qwen3-8B", 256, (100, 1024), (100, 1024), ("fp8-kv",)),
            known_variants=("fp8-kv",),
        ),
        Workload("8b-64x8192", "Qwen3-8B", 64, (8192, 8192), (512, 512), ("fp8-kv",)),
        Workload(
            *("8b-single", "Qwen3-8B", 1, (128, 128), (512, 512), ("fp8", "fp8-kv")),
            peers={"fp8-kv": Peer(VLLM, 260)},
        ),
        Workload(
            *("30b-a3b-256x512", "Qwen3-30B-A3B", 256, (512, 512), (1024, 1024), ("bf16", "fp8-kv", "rowwise-kv")),
            peers={"fp8-kv": Peer(VLLM, 16_617), "rowwise-kv": Peer(VLLM, 16_617)},
        ),
        _gpt_j("gptj-1", 1),
        _gpt_j("gptj-8", 8),
        _gpt_j("gptj-64", 64),
        _gpt_j("gptj-largest", 0),
    )
}
# What is no list of requests to an engine in this process.
ATTENTION, EXACTNESS, COLD_START, ONLINE = "attention", "exactness", "cold-start", "online"
FIRST_BATCH, SERVER = "first-batch", "server"
NAMES = (*WORKLOADS, ATTENTION, EXACTNESS, COLD_START, FIRST_BATCH, ONLINE, SERVER)


def find_variants(names: tuple[str, ...]) -> list[EngineVariant]:
    """Variants by name.

    Raises:
        ConfigError: an unknown one.
    """
    unknown = [name for name in names if name not in VARIANTS]
    if unknown:
        raise ConfigError(f"--variant must be one of {', '.join(VARIANTS)}, got {unknown[0]!r}")
    return [VARIANTS[name] for name in names]


def check_names(names: tuple[str, ...], known: tuple[str, ...] = NAMES) -> tuple[str, ...]:
    """Names of workloads, all of them for none, in the order of the known ones.

    Raises:
        ConfigError: an unknown one.
    """
    unknown = [name for name in names if name not in known]
    if unknown:
        raise ConfigError(f"--workload must be one of {', '.join(known)}, got {unknown[0]!r}")
    return tuple(name for name in known if not names or name in names)


def shrink(workload: Workload) -> Workload:
    """The same at toy sizes."""
    return dataclasses.replace(
        workload,
        num_requests=min(workload.num_requests, 3),
        prompt_len=(24, 48),
        output_len=(6, 12),
        memory_cap_bytes=None,
        peers={},
        is_toy=True,
    )
