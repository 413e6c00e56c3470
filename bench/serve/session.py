"""Goes through the workloads: builds each model once for all that need it, checks, times, frees it for the next."""

import dataclasses
import math
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from bench.options import BenchOptions
from bench.record import Record
from bench.serve import cold_start, online, server
from bench.serve.attention import measure_attention
from bench.serve.checked_models import NAMES as CHECKED_MODELS
from bench.serve.checked_models import CheckedModel, build_checked
from bench.serve.exactness import measure_exactness
from bench.serve.exactness_plan import exact_variants
from bench.serve.first_batch import measure_first_batches
from bench.serve.floor import FORMULA
from bench.serve.host import EngineHost
from bench.serve.measure import OutOfTimeError
from bench.serve.offline import measure_workload
from bench.serve.rows import add_cold_start, add_first_batches, add_online, add_served
from bench.serve.shapes import SHAPES, make_toy
from bench.serve.workloads import (
    ATTENTION,
    COLD_START,
    EXACTNESS,
    FIRST_BATCH,
    MAX_NUM_SEQS,
    MEMORY_SHARE,
    ONLINE,
    SERVER,
    WORKLOADS,
    EngineVariant,
    Workload,
    check_names,
    find_variants,
    shrink,
)
from bench.session import Session
from bench.speed.ceilings import Ceilings
from octavo.errors import BackendError
from octavo.models import ModelConfig
from octavo.serve.engine import served_tokens

_COLD_VARIANTS, _ONLINE_VARIANTS, _FIRST_BATCH_VARIANTS = ("fp8-kv",), ("fp8-kv",), ("fp8-kv",)
_FIRST_BATCHES = ("8b-512x1000", "30b-a3b-256x512")
_SERVED = "8b-512x1000"  # the workload that also goes through the server
_NUM_RUNS = 3  # of a load on a server that is started here, and of a process's start
_ONLINE_SECONDS = 20.0  # of arrivals of each
_ENGINE_LEN = 2048  # of a sequence behind the server
_COLD_LIMIT_S = 400.0
_TOY_IDS = 256
_TOY_ENGINE_LEN = 128


class ServeSession(Session):
    """The workloads of `octavo bench serve`: models and engines are kept for all that can use them."""

    def __init__(self, options: BenchOptions) -> None:
        super().__init__(options, "serve", EngineHost)
        self.names = check_names(self.asked.workloads)
        self.asked_variants = find_variants(self.asked.variants)

    def go_through(self, ceilings: Ceilings | None) -> None:
        if ceilings is not None:
            self._run_offline(ceilings)
            self.host.free()
            if ATTENTION in self.names:
                self.measure("attention", measure_attention, ceilings, self.options.device, quick=self.options.quick)
            for name in CHECKED_MODELS if EXACTNESS in self.names else ():
                self._run_exactness(name)
        for variant in self._variants(_COLD_VARIANTS) if COLD_START in self.names else ():
            self.measure(f"cold start, {variant.name}", self._measure_cold_start, variant)
        for model in _FIRST_BATCHES if FIRST_BATCH in self.names else ():
            for variant in self._variants(_FIRST_BATCH_VARIANTS):
                self.attempt(f"first batch, {model}, {variant.name}", self._measure_first_batches, model, variant)
        for variant in self._variants(_ONLINE_VARIANTS) if ONLINE in self.names else ():
            self.measure(f"online, {variant.name}", self._measure_online, variant)
        for variant in self._variants(_ONLINE_VARIANTS) if SERVER in self.names else ():
            self.measure(f"server, {variant.name}", self._measure_server, variant)

    def describe(self, ceilings: Ceilings | None) -> str:
        if ceilings is None:
            return "Requests that arrive by chance at a server that was given, streamed; latency as the client sees it."
        return (
            f"Serving on random weights in real shapes, temperature 1, ignore_eos, no prefix cache, {MAX_NUM_SEQS} "
            f"sequences at most, {MEMORY_SHARE:.2f} of the card; offline all requests at once, latency from then on, "
            "lengths unknown to the scheduler where a case does not say known; the median of three runs. "
            f"Logprobs are checked before a variant is timed. {FORMULA} "
            f"The {ceilings}."
        )

    def _run_offline(self, ceilings: Ceilings) -> None:
        """All lists of requests, those of one engine together, those of one model's weights after each other."""
        chosen = [WORKLOADS[name] for name in self.names if name in WORKLOADS]
        jobs = [job for workload in map(self._adapt, chosen) for job in self._jobs(workload)]
        keys = [self.host.key(w, variant) for w, variant in jobs]
        order = {weights: i for i, weights in enumerate(dict.fromkeys(key.weights for key in keys))}
        engines = {key: i for i, key in enumerate(dict.fromkeys(keys))}
        pairs = sorted(zip(keys, jobs, strict=True), key=lambda pair: (order[pair[0].weights], engines[pair[0]]))
        for _, (workload, variant) in pairs:
            case = f"{workload.label}: {variant.label(self.recipe)}"
            given = (case, workload, variant, self.host, ceilings, self.deadline)
            self.measure(case, measure_workload, *given)

    def _jobs(self, workload: Workload) -> Iterator[tuple[Workload, EngineVariant]]:
        """Its variants, and those of them that run with known lengths, too."""
        variants = self._variants(workload.variants)
        yield from ((workload, variant) for variant in variants)
        known = dataclasses.replace(workload, is_known=True, peers={})
        yield from ((known, variant) for variant in variants if variant.name in workload.known_variants)

    def _run_exactness(self, name: str) -> None:
        options, built = self.options, list[CheckedModel]()

        def measure(record: Record, variant: EngineVariant) -> str:
            if not built:
                built.append(build_checked(name, options.device, num_layers=options.layers, quick=options.quick))
            case = f"exactness, {built[0].name}: {variant.label(self.recipe)}"
            given = (record, case, built[0], variant, self.recipe, self.deadline)
            ending, complaints = measure_exactness(*given, quick=options.quick)
            self.complaints += complaints
            return ending

        for variant in exact_variants(name, quick=options.quick):
            self.measure(f"exactness, {name}, {variant.label(self.recipe)}", measure, variant)
            self.host.free()

    def _measure_cold_start(self, record: Record, variant: EngineVariant) -> str:
        """Processes without compiled kernels, then as many that find those of the last on the disk."""
        config, device, given = self._config("Qwen3-8B"), self.options.device, self.asked.checkpoint
        name, said = self._name("Qwen3-8B") if given is None else given.name, []
        with cold_start.checkpoint_of(config, device, given) as path, tempfile.TemporaryDirectory() as folder:
            self.host.free()
            runs = range(1 if self.options.quick else _NUM_RUNS)
            caches = [Path(tempfile.mkdtemp(dir=folder)) for _ in runs]  # of a cold start each
            for what, folders in (("cold start", caches), ("second start", caches[-1:] * len(runs))):
                case = f"{name} {what}: {variant.label(self.recipe)}"
                starts = [self._cold_start(path, variant, each) for each in folders]
                add_cold_start(record, case, starts)
                self.complaints += [f"{case}: {start.complaint}" for start in starts if start.complaint][:1]
                said.append(f"{what} " + ", ".join(f"{start.seconds:.1f}" for start in starts) + " s")
        return "; ".join(said)

    def _cold_start(self, path: Path, variant: EngineVariant, caches: Path) -> cold_start.ColdStart:
        left_s = max(0.0, min(_COLD_LIMIT_S, self.deadline - time.perf_counter()))
        how: dict[str, Any] = {"timeout_s": left_s, "quick": self.options.quick}
        try:
            return cold_start.measure_cold_start(path, variant, self.recipe, self.options.device, caches, **how)
        except BackendError:
            if time.perf_counter() >= self.deadline:
                raise OutOfTimeError from None
            raise

    def _measure_online(self, record: Record, variant: EngineVariant) -> str:
        load = self._load()
        lengths = f"{load.prompt_len} in, {load.output_len} out"
        if self.asked.url is not None:
            case = f"{self.asked.url} online {load.rate:g}/s, {lengths}: server given"
            target = online.Target(self.asked.url, self.asked.api_key, self.asked.ready_timeout_s)
            runs = [online.run_load(target, load, self.deadline)]
        else:
            case = f"{self._name('Qwen3-8B')} online {load.rate:g}/s, {lengths}: {variant.label(self.recipe)}"
            runs = self._serve_and_load(variant, load)
        add_online(record, case, runs)
        self._complain(case, runs)
        run = runs[-1]
        return f"{len(run.done)} of {load.num_requests} requests, goodput {run.goodput:.2f}/s, {run.seconds:.1f} s"

    def _serve_and_load(
        self, variant: EngineVariant, load: online.Load, *, has_tokenizer: bool = False
    ) -> list[online.OnlineRun]:
        quick, device, port = self.options.quick, self.options.device, server.free_port()
        max_len = max(_TOY_ENGINE_LEN if quick else _ENGINE_LEN, load.prompt_len + load.output_len)
        limits: dict[str, Any] = {"enable_prefix_caching": False, "max_model_len": max_len}
        if quick:
            limits |= {"max_num_seqs": 8, "num_kv_pages": 32}
        else:
            limits |= {"max_num_seqs": MAX_NUM_SEQS, "gpu_memory_utilization": MEMORY_SHARE}
            limits |= served_tokens(MAX_NUM_SEQS)
        setup = server.ServerSetup(
            *("Qwen3-8B", variant.name, self.recipe, device, port, limits),
            has_tokenizer=has_tokenizer,
            num_layers=self.options.layers,
            is_toy=quick,
        )
        with server.running_server(setup) as process:
            up_to_s, url = self.asked.ready_timeout_s, f"http://127.0.0.1:{port}"
            target = online.Target(url, ready_timeout_s=up_to_s, is_up=lambda: process.poll() is None)
            return [online.run_load(target, load, self.deadline, device) for _ in range(1 if quick else _NUM_RUNS)]

    def _complain(self, case: str, runs: list[online.OnlineRun]) -> None:
        self.complaints += [f"{case}: {error}" for error in [error for run in runs for error in run.errors][:3]]

    def _measure_first_batches(self, name: str, variant: EngineVariant) -> str:
        """A process without compiled kernels, then one that finds those of the first on the disk."""
        workload, quick = WORKLOADS[name], self.options.quick
        label = (shrink(workload) if quick else workload).label
        self.host.free()
        said = []
        with tempfile.TemporaryDirectory() as folder:
            for caches in ("no compiled kernels", "kernels on disk"):
                fresh = self.fresh()
                left_s = max(0.0, min(_COLD_LIMIT_S, self.deadline - time.perf_counter()))
                given = (workload, variant, self.recipe, self.options.device, Path(folder))
                first = measure_first_batches(*given, timeout_s=left_s, quick=quick)
                add_first_batches(fresh, f"{label}, fresh process, {caches}: {variant.label(self.recipe)}", first)
                self.take(fresh)
                said.append(f"{caches}: {first.first_s:.1f} s, then {first.second_s:.1f} s")
        return "; ".join(said)

    def _measure_server(self, record: Record, variant: EngineVariant) -> str:
        """An offline workload sent to the server at once, with a tokenizer whose text is streamed."""
        workload = WORKLOADS[_SERVED]
        load = online.Load(math.inf, workload.num_requests, workload.prompt_len[1], workload.output_len[1])
        if self.options.quick:
            load = dataclasses.replace(load, num_requests=6, prompt_len=16, output_len=4, vocab_size=_TOY_IDS)
        lengths = f"{load.num_requests} requests, {load.prompt_len} in, {load.output_len} out"
        case = f"{self._name('Qwen3-8B')} {lengths}, streamed as text by the server: {variant.label(self.recipe)}"
        runs = self._serve_and_load(variant, load, has_tokenizer=True)
        add_served(record, case, runs)
        self._complain(case, runs)
        rates = ", ".join(f"{run.output_tokens_per_s:,.0f}" for run in runs)
        return f"{rates} output tokens/s, {sum(len(run.errors) for run in runs)} errors"

    def _load(self) -> online.Load:
        num_requests = self.asked.num_requests or max(1, round(self.asked.rate * _ONLINE_SECONDS * self.asked.scale))
        own = online.Load(self.asked.rate, num_requests)
        if self.options.quick:
            own = online.Load(self.asked.rate, min(num_requests, 6), 16, 4, vocab_size=_TOY_IDS)
        lengths: dict[str, Any] = {"prompt_len": self.asked.prompt_len, "output_len": self.asked.output_len}
        return dataclasses.replace(own, **{name: value for name, value in lengths.items() if value is not None})

    # What was asked for

    def _variants(self, own: tuple[str, ...]) -> list[EngineVariant]:
        return self.asked_variants or find_variants(own)

    def _adapt(self, workload: Workload) -> Workload:
        """The workload at the size that was asked for; its label then says so, and no peer stands beside it."""
        own = shrink(workload) if self.options.quick else workload
        num_requests = own.num_requests
        if num_requests:
            num_requests = self.asked.num_requests or math.ceil(num_requests * self.asked.scale)
        changed = dataclasses.replace(own, num_requests=num_requests, num_layers=self.options.layers)
        return changed if changed == workload else dataclasses.replace(changed, peers={})

    def _config(self, model: str) -> ModelConfig:
        config = make_toy(SHAPES[model]) if self.options.quick else SHAPES[model]
        return dataclasses.replace(config, num_layers=self.options.layers or config.num_layers)

    def _name(self, model: str) -> str:
        layers = f", only the first {self.options.layers} layers," if self.options.layers else ""
        return f"{'toy of ' if self.options.quick else ''}{model}{layers}"
