"""One variant of one rollout: the engine, requests with logprobs as the loop makes them, the timed run, its rows."""

import dataclasses
import itertools
import time

from bench.record import Record
from bench.report import RECOMPUTED, THROUGHPUT
from bench.rl.host import RolloutHost
from bench.rl.workloads import Rollout
from bench.serve.floor import floor_s
from bench.serve.host import Hosted
from bench.serve.measure import EngineRun, OutOfTimeError, run_requests, warm_up
from bench.serve.rows import add_runs
from bench.serve.workloads import EngineVariant, Requests
from bench.speed.ceilings import Ceilings
from octavo.errors import BackendError
from octavo.ops.attention import PAGE_SIZE

# what a run takes at least, guessed before it starts: so many times its floor, and its build and warm-up
_SLACK, _OVERHEAD_S = 1.5, 10.0
_PROBE_LEN, _PROBE_TOKENS = 16, 4


def measure_rollout(
    record: Record,
    case: str,
    workload: Rollout,
    variant: EngineVariant,
    host: RolloutHost,
    ceilings: Ceilings,
    deadline: float,
) -> str:
    """Build, check, warm up and time one variant; add its rows.

    Returns:
        What to print.
    Raises:
        OutOfTimeError: it does not fit before the deadline.
        AssertionError: its logprobs or token counts are off.
        BackendError: sequences that were to fit were preempted, or prompts that were cached were computed again.
    """
    key = host.key(workload, variant)
    requests = workload.draw(key.config.vocab_size, workload.num_requests)
    lengths = [(len(ids), n) for ids, n in requests]
    numerics = variant.numerics(host.recipe)
    floor = floor_s(key.config, numerics, lengths, len(lengths), ceilings)
    if time.perf_counter() + (_OVERHEAD_S + _SLACK * floor if host.device == "cuda" else 0.0) > deadline:
        raise OutOfTimeError
    hosted = host.engine_for(workload, variant)
    # of prompts that differ: cached ones would leave the kernels of whole prompts cold
    _warm_up(hosted, dataclasses.replace(workload, samples_per_prompt=1), len(requests), deadline)
    if workload.is_decode:
        prompts_s = floor_s(key.config, numerics, [(n, 1) for n, _ in lengths], len(lengths), ceilings)
        ending = _measure_decode(record, case, hosted, requests, floor - prompts_s, host.device, deadline)
    else:
        own_floor = floor if workload.samples_per_prompt == 1 else None  # shared prompts are computed once
        ending = _measure_whole(record, case, hosted, requests, own_floor, host.device, deadline)
    _add_engine(record, case, hosted)
    return ending


def _warm_up(hosted: Hosted, workload: Rollout, num_requests: int, deadline: float) -> None:
    """Graphs and kernels of the sizes to come, those that report logprobs included; then an empty prefix cache."""
    engine = hosted.llm.engine
    requests = workload.draw(engine.model.config.vocab_size, num_requests, seed=1)
    warm_up(engine, requests, deadline)
    probe = [(ids[:_PROBE_LEN], _PROBE_TOKENS) for ids, _ in requests]
    run_requests(engine, probe, "cpu", deadline, logprobs=0)
    engine.reset_prefix_cache()


def _measure_whole(
    record: Record,
    case: str,
    hosted: Hosted,
    requests: Requests,
    floor: float | None,
    device: str,
    deadline: float,
) -> str:
    stats = hosted.llm.stats
    before = stats.num_prefix_hit_tokens, stats.num_recomputed_tokens
    run = run_requests(hosted.llm.engine, requests, device, deadline, logprobs=0)
    add_runs(record, case, [run], peer=None, peer_value=None)
    num_hits, num_recomputed = stats.num_prefix_hit_tokens - before[0], stats.num_recomputed_tokens - before[1]
    record.add(case, "seconds of the rollout", "s", run.seconds)
    record.add(case, "prompt tokens found in the prefix cache", "tokens", num_hits)
    record.add(case, RECOMPUTED, "tokens", num_recomputed)
    if floor is not None:
        record.add_roofline(case, floor / run.seconds)
    return (
        f"{run.output_tokens_per_s:,.0f} output tokens/s in {run.seconds:.1f} s, {run.num_steps} steps, "
        f"{run.num_preemptions} preemptions, {num_hits} prompt tokens from the prefix cache"
    )


def _measure_decode(
    record: Record, case: str, hosted: Hosted, requests: Requests, floor: float, device: str, deadline: float
) -> str:
    """The steps after every prompt has its first token: prompts first, alone, then the same from their cached pages.

    Each sequence reads pages of its own: no two prompts begin alike.
    """
    engine, stats = hosted.llm.engine, hosted.llm.stats
    room, needed = stats.num_kv_pages, sum(-(-(len(ids) + n) // PAGE_SIZE) for ids, n in requests)
    if room < needed:
        raise BackendError(f"{len(requests)} samples need {needed} pages of the KV cache, it has {room}; fewer fit")
    prompts = run_requests(engine, [(ids, 1) for ids, _ in requests], "cpu", deadline, logprobs=0)
    hits_before = stats.num_prefix_hit_tokens
    run = run_requests(engine, requests, device, deadline, logprobs=0)
    expected = sum((len(ids) - 1) // PAGE_SIZE * PAGE_SIZE for ids, _ in requests)
    num_hits = stats.num_prefix_hit_tokens - hits_before
    if run.num_preemptions or num_hits != expected:
        raise BackendError(
            f"{run.num_preemptions} sequences were preempted and {num_hits} of {expected} prompt tokens came from the "
            "cache, so the steps were not decoding alone"
        )
    seconds, num_tokens = decoding(run, requests)
    record.add(case, THROUGHPUT, "tokens/s", num_tokens / seconds)
    record.add(case, "time a step", "ms", seconds / num_tokens * len(requests) * 1e3)
    record.add(case, "samples", "sequences", len(requests))
    record.add(case, "seconds of decoding", "s", seconds)
    record.add(case, "seconds of the prompts before", "s", prompts.seconds)
    record.add_roofline(case, floor / seconds)
    return (
        f"{num_tokens / seconds:,.0f} output tokens/s over {seconds:.2f} s of decoding {len(requests)} samples, "
        f"{floor / seconds:.2f} of the roofline; prompts took {prompts.seconds:.1f} s"
    )


def decoding(run: EngineRun, requests: Requests) -> tuple[float, int]:
    """(seconds from the moment at which the last sequence has its first token, tokens that came after it)."""
    began, gaps, num_tokens = max(run.ttft_s), iter(run.gaps_s), 0
    for first_s, (_, n) in zip(run.ttft_s, requests, strict=True):
        times = itertools.accumulate(itertools.islice(gaps, n - 1), initial=first_s)
        num_tokens += sum(at > began for at in times)
    return run.seconds - began, num_tokens


def _add_engine(record: Record, case: str, hosted: Hosted) -> None:
    record.add(case, "KV cache", "tokens", hosted.llm.stats.num_kv_pages * PAGE_SIZE)
    record.add(case, "weights built", "s", hosted.build_s)
    record.add(case, "logprobs' error against bf16's", "share of their spread", hosted.error)
    if hosted.delta is not None:
        record.add(case, "largest difference to sequence_logprobs", "nats", hosted.delta)
