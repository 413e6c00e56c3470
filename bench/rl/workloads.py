"""The workloads and variants of `octavo bench rl`: lists of requests for the engine, and sizes of what trains."""

import dataclasses

from bench.serve import workloads as serve_workloads
from bench.serve.workloads import VARIANTS, EngineVariant, Requests, Workload
from octavo.errors import ConfigError
from octavo.rl.precision import Precision

ENGINE_VARIANTS = VARIANTS | {"kv-only": EngineVariant("kv-only", False, "fp8")}


@dataclasses.dataclass(frozen=True)
class LoopVariant:
    """One way to run the loop.

    Args:
        name: as --variant knows it.
        precision: of RLConfig.
        exact: of RLConfig; what is not exact and in FP8 is corrected by TIS.
    """

    name: str
    precision: Precision
    exact: bool = False

    @property
    def is_fp8(self) -> bool:
        """Whether the trainer's linears are."""
        return self.precision != "bf16"

    def label(self, recipe: str) -> str:
        """As tables name it."""
        what = f"{recipe}, end to end" if self.is_fp8 else "bf16"
        return f"octavo {what}{', exact' if self.exact else ''}"


LOOP_VARIANTS = {
    variant.name: variant
    for variant in (
        LoopVariant("bf16", "bf16"),
        LoopVariant("fp8", "end_to_end"),
        LoopVariant("exact", "end_to_end", True),
    )
}


@dataclasses.dataclass(frozen=True)
class Rollout(Workload):
    """Requests as the loop makes them.

    Args:
        samples_per_prompt: requests that share a prompt, found by the prefix cache as the loop's engine finds it.
        is_decode: time the steps alone that come after all prompts are in the cache.
        most_requests: where num_requests is 0: as many as fit into a bf16 cache, but no more than these.
        optional_variants: that --variant can ask for beside its own.
        is_tight: the KV cache is so small that FP8 just holds all sequences and bf16 does not.
    """

    samples_per_prompt: int = 1
    is_decode: bool = False
    most_requests: int = 0
    is_tight: bool = False
    optional_variants: tuple[str, ...] = ("exact",)

    @property
    def label(self) -> str:
        """As tables name it."""
        toy = "toy of " if self.is_toy else ""
        layers = "" if self.num_layers is None else f" ({self.num_layers} layers)"
        prompt, output = self.prompt_len[1], self.output_len[1]
        name = f"{toy}{self.model}{layers}"
        if self.is_decode:
            return f"{name} decode alone, {self.num_requests} samples, {output} after {prompt}"
        count = f"{self.num_requests} requests"
        if self.samples_per_prompt > 1:
            count = f"{-(-self.num_requests // self.samples_per_prompt)} prompts x {self.samples_per_prompt} samples"
        tight = ", KV cache that FP8 just fits" if self.is_tight else ""
        return f"{name} {count}, {prompt} in, {output} out{tight}"

    def draw(self, vocab_size: int, num_requests: int, seed: int = 0) -> Requests:
        """Random prompts and tokens to generate, those of one prompt after each other."""
        different = super().draw(vocab_size, -(-num_requests // self.samples_per_prompt), seed)
        return [request for request in different for _ in range(self.samples_per_prompt)][:num_requests]


@dataclasses.dataclass(frozen=True)
class LoopSizes:
    """What a part of the loop is run with.

    Args:
        model: one of serve.shapes.SHAPES, of which num_layers are built.
        variants: names in LOOP_VARIANTS.
        num_prompts: of a step.
        samples_per_prompt: of a step.
        prompt_len: tokens.
        max_tokens: tokens.
        min_tokens: of the shortest response, where those are made up.
        micro_batch: sequences in a forward pass.
        minibatches: optimizer steps a step.
        passes: timed repeats, after what warms up.
        optional_variants: that --variant can ask for beside its own.
    """

    model: str
    num_layers: int
    variants: tuple[str, ...]
    num_prompts: int
    samples_per_prompt: int
    prompt_len: int
    max_tokens: int
    min_tokens: int = 0
    micro_batch: int = 4
    minibatches: int = 1
    passes: int = 2
    optional_variants: tuple[str, ...] = ()
    is_toy: bool = False

    @property
    def num_sequences(self) -> int:
        """Of a step."""
        return self.num_prompts * self.samples_per_prompt

    @property
    def max_len(self) -> int:
        """Tokens of the longest sequence."""
        return self.prompt_len + self.max_tokens

    @property
    def shape_label(self) -> str:
        """Model and depth."""
        return f"{'toy of ' if self.is_toy else ''}{self.model} ({self.num_layers} layers)"

    @property
    def label(self) -> str:
        """Shape and batch, as tables name it."""
        shortest = self.min_tokens or self.max_tokens
        output = f"{self.max_tokens}" if shortest == self.max_tokens else f"{shortest}-{self.max_tokens}"
        batch = f"{self.num_prompts} x {self.samples_per_prompt} sequences, {self.prompt_len} in, {output} out"
        return f"{self.shape_label}, {batch}"

    def shrunk(self) -> "LoopSizes":
        """The same at toy sizes."""
        few = {"num_layers": 2, "num_prompts": 2, "samples_per_prompt": 2, "prompt_len": 12, "max_tokens": 10}
        shortest = 6 if self.min_tokens else 0
        return dataclasses.replace(self, **few, min_tokens=shortest, micro_batch=2, passes=2, is_toy=True)  # type: ignore[arg-type]


_KV_VARIANTS = ("kv-only", "fp8-kv")
_LONG = {"model": "Qwen3-8B", "prompt_len": (8192, 8192), "output_len": (512, 512), "is_decode": True}
ROLLOUTS: dict[str, tuple[Rollout, ...]] = {
    "rollout-8b": (
        Rollout(
            *("rollout-8b", "Qwen3-8B", 256, (512, 512), (2048, 2048), ("bf16", "fp8", "fp8-kv")),
            samples_per_prompt=16,
        ),
    ),
    "long-answers": (
        Rollout(
            **_LONG,  # type: ignore[arg-type]
            name="long-answers",
            num_requests=0,
            variants=("bf16", "kv-only", "fp8", "fp8-kv"),
            most_requests=128,
        ),
        Rollout(**_LONG, name="long-answers", num_requests=128, variants=_KV_VARIANTS),  # type: ignore[arg-type]
    ),
    "preemptions": (
        Rollout(
            *("preemptions", "Qwen3-8B", 256, (512, 512), (1024, 1024), ("bf16", "kv-only", "fp8-kv")),
            num_layers=8,
            is_tight=True,
        ),
    ),
    "rollout-30b": (
        Rollout("rollout-30b", "Qwen3-30B-A3B", 256, (512, 512), (1024, 1024), ("bf16", "fp8-kv")),
    ),
}  # fmt: skip

LOOPS: dict[str, LoopSizes] = {
    "refit": LoopSizes("Qwen3-8B", 36, ("exact",), 2, 2, 64, 64, passes=20, optional_variants=("fp8",)),
    "learner-step": LoopSizes(
        *("Qwen3-8B", 24, ("bf16", "fp8"), 16, 2, 512, 2048),
        min_tokens=1024,
        passes=5,
        optional_variants=("exact",),
    ),
    "whole-step": LoopSizes(
        *("Qwen3-8B", 18, ("bf16", "fp8", "exact"), 16, 8, 512, 1024),
        micro_batch=4,
        minibatches=4,
        passes=5,
    ),
    "exact-moe": LoopSizes("Qwen3-30B-A3B", 2, ("exact",), 8, 8, 128, 256, micro_batch=16),
}
NAMES = (*ROLLOUTS, *LOOPS)


def check_names(names: tuple[str, ...]) -> tuple[str, ...]:
    """As serve.workloads.check_names, of these workloads."""
    return serve_workloads.check_names(names, NAMES)


def check_variants(names: tuple[str, ...]) -> tuple[str, ...]:
    """Names of variants as given.

    Raises:
        ConfigError: an unknown one.
    """
    known = tuple(dict.fromkeys((*ENGINE_VARIANTS, *LOOP_VARIANTS)))
    unknown = [name for name in names if name not in known]
    if unknown:
        raise ConfigError(f"--variant must be one of {', '.join(known)}, got {unknown[0]!r}")
    return names


def shrink(workload: Rollout) -> Rollout:
    """The same at toy sizes, as far as its meaning allows."""
    sizes = {"num_requests": 6 if workload.num_requests else 0, "most_requests": 3, "num_layers": None}
    sizes |= {"samples_per_prompt": min(workload.samples_per_prompt, 3), "is_toy": True}
    if workload.is_decode:
        return dataclasses.replace(workload, **sizes, prompt_len=(128, 128), output_len=(10, 10))  # type: ignore[arg-type]
    if workload.is_tight:
        return dataclasses.replace(workload, **sizes, prompt_len=(60, 60), output_len=(20, 20))  # type: ignore[arg-type]
    return dataclasses.replace(workload, **sizes, prompt_len=(70, 70), output_len=(12, 12))  # type: ignore[arg-type]
