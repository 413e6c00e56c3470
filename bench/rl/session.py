"""Goes through the workloads: each variant on its own, its rows written as they come, its memory given back."""

import dataclasses
import math

from bench.options import BenchOptions
from bench.record import Record
from bench.rl import exactness
from bench.rl.host import RolloutHost
from bench.rl.learning import measure_learner
from bench.rl.refit import measure_refit
from bench.rl.rollouts import measure_rollout
from bench.rl.whole_step import measure_whole_step
from bench.rl.workloads import (
    ENGINE_VARIANTS,
    LOOP_VARIANTS,
    LOOPS,
    ROLLOUTS,
    LoopSizes,
    LoopVariant,
    Rollout,
    check_names,
    check_variants,
    shrink,
)
from bench.serve.workloads import MEMORY_SHARE
from bench.session import Session
from bench.speed.ceilings import Ceilings
from octavo.errors import ConfigError

_WHAT = {
    "refit": "refit",
    "learner-step": "learner's step",
    "whole-step": "whole step",
    "exact-moe": "exact mode",
}


class RLSession(Session):
    """The workloads of `octavo bench rl`: each variant gives its memory back."""

    host: RolloutHost

    def __init__(self, options: BenchOptions) -> None:
        super().__init__(options, "rl", RolloutHost)
        if self.asked.url is not None:
            raise ConfigError("rl measures the engine in this process; leave --url out")
        self.names = check_names(self.asked.workloads)
        self.asked_variants = check_variants(self.asked.variants)

    def go_through(self, ceilings: Ceilings | None) -> None:
        assert ceilings is not None, "there is no url"
        for name in self.names:
            if name in ROLLOUTS:
                self.attempt(name, self._run_rollouts, name, ceilings)
            else:
                self._run_loop(name, ceilings)
            self.host.free()

    def describe(self, ceilings: Ceilings | None) -> str:
        return (
            "The reinforcement loop on random weights in real shapes, temperature 1, no end of sequence. Rollouts: the "
            "engine as the loop uses it, with the sampled tokens' logprobs, the prefix cache where samples share a "
            f"prompt, {MEMORY_SHARE:.2f} of the card. Decode alone: each sample's prompt has pages of its own and is "
            "in the cache before the clock starts; a batch smaller than 128 is what bf16's cache holds, the same in "
            "all variants. Tight KV cache: the same bytes in every variant, such that FP8 KV just holds all sequences. "
            "Refit: quantize all linears in both layouts and publish to the engine in this process. Learner's step: "
            "octavo.rl's learner on random tokens. Whole step: one step to warm up, then those timed. Logprobs and "
            f"gradients are checked before a variant is timed. The {ceilings}."
        )

    def _run_rollouts(self, name: str, ceilings: Ceilings) -> str:
        jobs = [
            (workload, ENGINE_VARIANTS[variant])
            for workload in map(self._adapt, ROLLOUTS[name])
            for variant in self._choose(workload.variants, workload.optional_variants)
        ]
        jobs.sort(key=lambda job: (job[1].is_fp8, job[1].kv_cache_dtype, job[1].exact))
        for workload, variant in jobs:
            case = f"{workload.label}: {variant.label(self.recipe)}"
            given = (case, workload, variant, self.host, ceilings, self.deadline)
            self.measure(case, measure_rollout, *given)
        return f"{len(jobs)} variants"

    def _run_loop(self, name: str, ceilings: Ceilings) -> None:
        sizes = self._sizes(name)
        for variant in (LOOP_VARIANTS[chosen] for chosen in self._choose(sizes.variants, sizes.optional_variants)):
            batch = sizes.shape_label if name == "refit" else sizes.label
            case = f"{_WHAT[name]}, {batch}: {variant.label(self.recipe)}"
            self.measure(case, self._measure_part, name, case, sizes, variant, ceilings)
            self.host.free()  # of the part, too: it collects garbage

    def _measure_part(
        self, record: Record, name: str, case: str, sizes: LoopSizes, variant: LoopVariant, ceilings: Ceilings
    ) -> str:
        what, deadline = (record, case, sizes, variant, self.recipe, self.options.device), self.deadline
        if name == "refit":
            return measure_refit(*what, ceilings, deadline)
        if name == "learner-step":
            return measure_learner(*what, deadline)
        if name == "whole-step":
            return measure_whole_step(*what, deadline)
        ending = exactness.measure_exactness(*what)
        if (wrong := exactness.complaint(record)) is not None:
            self.complaints.append(f"{case}: {wrong}")
        return ending

    # What was asked for

    def _choose(self, own: tuple[str, ...], optional: tuple[str, ...]) -> list[str]:
        """Names of a workload's variants: its own, or those that were asked for as far as it knows them."""
        return [name for name in (*own, *optional) if name in self.asked_variants] if self.asked_variants else list(own)

    def _adapt(self, workload: Rollout) -> Rollout:
        """The workload at the size that was asked for; its label then says so."""
        own = shrink(workload) if self.options.quick else workload
        own = dataclasses.replace(own, num_layers=self.options.layers or own.num_layers)
        own = dataclasses.replace(own, num_requests=self.asked.num_requests or self.host.num_requests(own))
        return dataclasses.replace(own, num_requests=math.ceil(own.num_requests * self.asked.scale))

    def _sizes(self, name: str) -> LoopSizes:
        own = LOOPS[name].shrunk() if self.options.quick else LOOPS[name]
        given = {"num_layers": self.options.layers, "passes": self.options.passes}
        return dataclasses.replace(own, **{key: value for key, value in given.items() if value is not None})  # type: ignore[arg-type]
