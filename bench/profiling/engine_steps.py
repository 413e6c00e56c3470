"""Profiles of the engine: decode steps of sequences that are all in the cache, and prompts from first to last step."""

import dataclasses
import math
import statistics
import time
from collections.abc import Iterator

from bench.clocks import sample_clocks
from bench.profiling.kernels import watch
from bench.profiling.layer import average_layer, layer_floors
from bench.profiling.settings import Settings
from bench.profiling.step_profile import Profile
from bench.serve.floor import Counts, floor_s
from bench.serve.measure import TEMPERATURE, run_requests
from bench.serve.workloads import VARIANTS, EngineVariant, Workload
from bench.timing import synchronize
from octavo.errors import BackendError
from octavo.serve import SamplingParams
from octavo.serve.engine import Engine

_SETTLING_STEPS, _PLAIN_STEPS, _NUM_BURSTS, _PROFILED_STEPS = 6, 24, 2, 6
_TOKENS = (256, 256)  # to generate: more than the steps until the last prompt is in, and those that are measured
_DECODE = ("fp8-kv",)
DECODES = {
    w.name: w
    for w in (
        Workload("decode-8b", "Qwen3-8B", 512, (1450, 1450), _TOKENS, _DECODE),
        Workload("mixed-8b", "Qwen3-8B", 160, (800, 800), _TOKENS, _DECODE),  # a typical step of serve's 8b-mixed
        Workload("decode-30b", "Qwen3-30B-A3B", 256, (980, 980), _TOKENS, _DECODE),
        Workload("single", "Qwen3-8B", 1, (360, 360), _TOKENS, _DECODE),
    )
}
PREFILLS = (
    Workload("prefill", "Qwen3-8B", 8, (1000, 1000), (1, 1), ("fp8-kv",)),
    Workload("prefill", "Qwen3-8B", 1, (8192, 8192), (1, 1), ("fp8-kv", "exact")),
    Workload("prefill", "Qwen3-30B-A3B", 8, (1000, 1000), (1, 1), ("fp8-kv",)),
)
_ANCHORS = {"cuda": "qkv_rows", "cpu": "aten::scaled_dot_product_attention"}  # what each layer launches once


def profile_decode(settings: Settings, name: str, variant_name: str) -> Iterator[Profile]:
    """Steps in which each of a workload's sequences gets a token.

    Raises:
        BackendError: a sequence got none, or ended.
    """
    workload, variant = _sized(settings, DECODES[name], 32), VARIANTS[variant_name]
    engine = settings.host.engine_for(workload, variant).llm.engine
    num_seqs, device, config = workload.num_requests, settings.options.device, engine.model.config
    engine.warm_up(num_seqs, workload.max_len, num_seqs)
    params = SamplingParams(temperature=TEMPERATURE, max_tokens=workload.output_len[1], ignore_eos=True)
    requests = [engine.add_request(ids, params) for ids, _ in workload.draw(config.vocab_size, num_seqs)]
    sequences = [request.sequences[0] for request in requests]
    while any(sequence.num_computed_tokens < workload.prompt_len[1] for sequence in sequences):
        engine.step()
    for _ in range(_SETTLING_STEPS):
        engine.step()
    with sample_clocks(device) as clocks:
        plain_ms = min(_time_steps(engine, settings.few(_PLAIN_STEPS), num_seqs, device) for _ in range(_NUM_BURSTS))
    length = statistics.fmean(sequence.num_tokens for sequence in sequences)
    num_steps = settings.options.passes or settings.few(_PROFILED_STEPS)
    with watch(device) as watched:
        _step(engine, num_steps, num_seqs)
    engine.abort_all()
    numerics, head = engine.model.numerics, Counts.of(config).head
    by_bytes = settings.ceilings.moving_s(2.0 * head) * 1e6
    by_operations = settings.ceilings.product_s(2.0 * num_seqs * head, fp8=False) * 1e6
    figures = {"without the profiler, ms a step": plain_ms, "tokens/s": num_seqs / plain_ms * 1e3} | clocks.figures()
    figures |= {"head's floor, us by bytes": by_bytes, "head's floor, us by operations": by_operations}
    yield Profile(
        f"{_title(settings, workload, variant)}, decode of {num_seqs} x {length:.0f} tokens",
        watched,
        num_steps,
        figures,
        average_layer(watched.kernels, _ANCHORS[device]),
        layer_floors(config, numerics, num_seqs, length, settings.ceilings),
    )


def profile_prefill(settings: Settings, _name: str, variant_name: str) -> Iterator[Profile]:
    """Prompts alone, each with one token, as one step."""
    for known in (w for w in PREFILLS if settings.options.serve.variants or variant_name in w.variants):
        workload, variant = _sized(settings, known, 1), VARIANTS[variant_name]
        engine = settings.host.engine_for(workload, variant).llm.engine
        num_seqs, device, config = workload.num_requests, settings.options.device, engine.model.config
        requests = workload.draw(config.vocab_size, num_seqs)
        for _ in range(2):  # kernels are compiled, a plan is made
            run_requests(engine, requests, "cpu", math.inf)
        with sample_clocks(device) as clocks:
            seconds = [run_requests(engine, requests, "cpu", math.inf).seconds for _ in range(settings.few(3))]
        lengths = [(len(ids), 1) for ids, _ in requests]
        floor = floor_s(config, engine.model.numerics, lengths, num_seqs, settings.ceilings)
        figures = {"without the profiler, ms": statistics.median(seconds) * 1e3, "floor, ms": floor * 1e3}
        figures |= clocks.figures()
        with watch(device) as watched:
            run_requests(engine, requests, "cpu", math.inf)
        layer = average_layer(watched.kernels, _ANCHORS[device])
        title = f"{_title(settings, workload, variant)}, prompts of {num_seqs} x {workload.prompt_len[1]} tokens"
        del engine  # or the next one finds no memory
        yield Profile(title, watched, 1, figures, layer)


def _title(settings: Settings, workload: Workload, variant: EngineVariant) -> str:
    layers = settings.host.key(workload, variant).config.num_layers
    toy = "toy of " if workload.is_toy else ""
    return f"{workload.name}, {toy}{workload.model} ({layers} layers): {variant.label(settings.host.recipe)}"


def _sized(settings: Settings, workload: Workload, toy_output: int) -> Workload:
    options = settings.options
    num_seqs = options.serve.num_requests or workload.num_requests
    sized = dataclasses.replace(workload, num_layers=options.layers, num_requests=num_seqs)
    if not options.quick:
        return sized
    toy = {"prompt_len": (24, 24), "output_len": (toy_output, toy_output)}
    return dataclasses.replace(sized, **toy, num_requests=min(num_seqs, 4), is_toy=True)  # type: ignore[arg-type]


def _step(engine: Engine, num_steps: int, num_seqs: int) -> None:
    for _ in range(num_steps):
        num_advanced = len(engine.step())
        if num_advanced != num_seqs or not engine.has_unfinished:
            raise BackendError(
                f"a steady step gives each of {num_seqs} sequences a token, this one gave {num_advanced}; "
                "the KV cache holds too few of them, or --passes asks for more steps than there are tokens"
            )


def _time_steps(engine: Engine, num_steps: int, num_seqs: int, device: str) -> float:
    """Milliseconds a step."""
    synchronize(device)
    began = time.perf_counter()
    _step(engine, num_steps, num_seqs)
    synchronize(device)
    return (time.perf_counter() - began) / num_steps * 1e3
