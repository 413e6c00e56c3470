"""EngineHost: one model and one engine at a time, kept while the next workload can use them, freed for another."""

import dataclasses
import gc
import time

import torch

from bench.serve.check import check_exact, check_nearness
from bench.serve.shapes import SHAPES, build_model, make_toy
from bench.serve.workloads import MAX_NUM_SEQS, MEMORY_SHARE, WORKLOADS, EngineVariant, Workload
from bench.timing import synchronize
from octavo.errors import BackendError
from octavo.models import Decoder, ModelConfig
from octavo.serve import LLM

QUICK_LIMITS = {"max_num_seqs": 6, "num_kv_pages": 32, "max_model_len": 256}


@dataclasses.dataclass(frozen=True)
class EngineKey:
    """What an engine depends on."""

    config: ModelConfig
    model: str
    variant: EngineVariant
    memory_cap_bytes: int | None

    @property
    def weights(self) -> tuple[ModelConfig, bool, str | None]:
        """What the model's weights depend on."""
        return self.config, self.variant.is_fp8, self.variant.recipe


@dataclasses.dataclass(frozen=True)
class Hosted:
    """An engine that is up, and how it came up.

    Attributes:
        build_s: seconds to draw and quantize the weights.
        engine_s: to plan and allocate the cache on top.
        build_peak_bytes: of memory while the weights were made, 0 on a CPU.
        error: relative error of the logprobs against bf16's.
        delta: see check_exact; None without exact mode.
    """

    llm: LLM
    build_s: float
    engine_s: float
    build_peak_bytes: int
    error: float
    delta: float | None


class EngineHost:
    """Builds engines as workloads ask for them.

    Args:
        device: "cuda" or "cpu".
        recipe: of variants in FP8.
        quick: toy shapes.
    """

    def __init__(self, device: str, recipe: str, *, quick: bool) -> None:
        self.device, self.recipe, self.quick = device, recipe, quick
        self._model: Decoder | None = None
        self._weights: tuple[ModelConfig, bool, str | None] | None = None
        self._build_s, self._build_peak_bytes = 0.0, 0
        self._hosted: Hosted | None = None
        self._key: EngineKey | None = None

    def key(self, workload: Workload, variant: EngineVariant) -> EngineKey:
        """What the engine for a workload's variant depends on."""
        config = make_toy(SHAPES[workload.model]) if self.quick else SHAPES[workload.model]
        config = dataclasses.replace(config, num_layers=workload.num_layers or config.num_layers)
        return EngineKey(config, workload.model, variant, workload.memory_cap_bytes)

    def engine_for(self, workload: Workload, variant: EngineVariant) -> Hosted:
        """The engine for a workload's variant, checked; the former one is freed if it is another.

        Raises:
            AssertionError: its logprobs are off.
        """
        hosted = self._engine_for(workload, variant)
        hosted.llm.engine.scheduler.plan_known_lengths = workload.is_known
        return hosted

    def _engine_for(self, workload: Workload, variant: EngineVariant) -> Hosted:
        key = self.key(workload, variant)
        if self._hosted is not None and key == self._key:
            return self._hosted
        self._free_engine()
        if key.weights != self._weights:
            self.free()
        # before the weights and the cache take the card
        error = check_nearness(key.config, variant.numerics(self.recipe), self.device, quick=self.quick)
        self._collect()
        model = self._model_of(key)
        began = time.perf_counter()
        llm = self._make_llm(model, key)
        engine_s = time.perf_counter() - began
        delta = check_exact(llm, quick=self.quick) if variant.exact else None
        self._key = key
        self._hosted = Hosted(llm, self._build_s, engine_s, self._build_peak_bytes, error, delta)
        return self._hosted

    def free(self) -> None:
        """Give back model and engine."""
        self._free_engine()
        self._model = self._weights = None
        self._collect()

    def _model_of(self, key: EngineKey) -> Decoder:
        numerics = key.variant.numerics(self.recipe)
        if self._model is None:
            if self.device == "cuda":
                torch.cuda.reset_peak_memory_stats()
            began = time.perf_counter()
            self._model, self._weights = build_model(key.config, numerics, self.device), key.weights
            synchronize(self.device)
            self._build_s = time.perf_counter() - began
            self._build_peak_bytes = torch.cuda.max_memory_allocated() if self.device == "cuda" else 0
        if self._model.numerics != numerics:
            self._model.set_numerics(numerics)
        return self._model

    def _make_llm(self, model: Decoder, key: EngineKey) -> LLM:
        if self.quick:
            return LLM(model, enable_prefix_caching=False, **QUICK_LIMITS)  # type: ignore[arg-type]
        max_len = max(w.max_len for w in WORKLOADS.values() if w.model == key.model)
        return LLM(
            model,
            max_num_seqs=MAX_NUM_SEQS,
            max_model_len=max_len,
            gpu_memory_utilization=self._memory_share(key.memory_cap_bytes),
            enable_prefix_caching=False,
            warm_up=False,  # the requests' own comes before the clock runs
        )

    def _memory_share(self, cap_bytes: int | None) -> float:
        if cap_bytes is None or self.device != "cuda":
            return MEMORY_SHARE
        total = torch.cuda.mem_get_info()[1]
        if total < cap_bytes:
            raise BackendError(f"a cap of {cap_bytes / 1e9:.0f} GB needs a card of as much, this has {total / 1e9:.0f}")
        return cap_bytes / total

    def _free_engine(self) -> None:
        self._hosted = self._key = None
        self._collect()

    def _collect(self) -> None:
        gc.collect()
        if self.device == "cuda":
            torch.cuda.empty_cache()
