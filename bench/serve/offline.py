"""One variant of one offline workload: the engine, the requests, the timed run, its rows."""

import time

import torch

from bench.record import Record
from bench.report import BATCH
from bench.serve.floor import floor_s
from bench.serve.host import EngineHost, Hosted
from bench.serve.measure import EngineRun, OutOfTimeError, median_run, percentile, run_requests, warm_up
from bench.serve.rows import add_runs
from bench.serve.workloads import EngineVariant, Workload
from bench.speed.ceilings import Ceilings
from octavo.errors import BackendError
from octavo.ops.attention import PAGE_SIZE

# what a run takes at least, guessed before it starts: so many times its floor, and its build and warm-up
_SLACK, _OVERHEAD_S = 1.5, 10.0
_NUM_RUNS = 3  # of each variant; their median counts
_PEER_CARD = "H200"


def measure_workload(
    record: Record,
    case: str,
    workload: Workload,
    variant: EngineVariant,
    host: EngineHost,
    ceilings: Ceilings,
    deadline: float,
) -> str:
    """Build, check, warm up and time one variant; add its rows.

    Returns:
        What to print.
    Raises:
        OutOfTimeError: it does not fit before the deadline.
        AssertionError: its logprobs or token counts are off.
        BackendError: more memory than the workload's cap was taken, or a batch that was to fit was preempted.
    """
    config, numerics = host.key(workload, variant).config, variant.numerics(host.recipe)
    expected_s = 0.0
    if workload.num_requests and host.device == "cuda":
        lengths = [(len(ids), n) for ids, n in workload.draw(config.vocab_size, workload.num_requests)]
        floor = floor_s(config, numerics, lengths, len(lengths), ceilings)
        expected_s = _OVERHEAD_S + _NUM_RUNS * _SLACK * floor
    if time.perf_counter() + expected_s > deadline:
        raise OutOfTimeError
    hosted = host.engine_for(workload, variant)
    engine = hosted.llm.engine
    num_requests = workload.num_requests or _largest_batch(workload, hosted)
    requests = workload.draw(config.vocab_size, num_requests)
    warm_up(engine, requests, deadline)
    if host.device == "cuda":
        torch.cuda.reset_peak_memory_stats()
    runs = [run_requests(engine, requests, host.device, deadline) for _ in range(_NUM_RUNS)]
    run = median_run(runs)
    peak_bytes = torch.cuda.max_memory_allocated() if host.device == "cuda" else 0
    for each in runs:
        _check_promises(workload, each, peak_bytes)
    lengths = [(len(ids), n) for ids, n in requests]
    share = floor_s(config, numerics, lengths, engine.config.max_num_seqs, ceilings) / run.seconds
    _add_rows(record, case, workload, variant, hosted, runs, peak_bytes, share)
    if not workload.num_requests:
        record.add(case, BATCH, "sequences", num_requests)
    return (
        f"{run.output_tokens_per_s:,.0f} output tokens/s in {run.seconds:.1f} s (median of {len(runs)} runs), "
        f"{run.num_steps} steps, first token p50 {percentile(run.ttft_s, 50):.3f} s, {share:.2f} of the roofline"
    )


def _largest_batch(workload: Workload, hosted: Hosted) -> int:
    """Sequences that are in the cache whole at a time; the last token of each never is."""
    config, num_pages = hosted.llm.engine.config, hosted.llm.stats.num_kv_pages
    return min(config.max_num_seqs, num_pages // -(-(workload.max_len - 1) // PAGE_SIZE))


def _check_promises(workload: Workload, run: EngineRun, peak_bytes: int) -> None:
    cap = workload.memory_cap_bytes
    if cap is not None and peak_bytes > cap:
        raise BackendError(f"{peak_bytes / 1e9:.1f} GB were taken, the cap is {cap / 1e9:.0f}")
    if not workload.num_requests and run.num_preemptions:
        raise BackendError(f"the largest batch was to fit, but {run.num_preemptions} sequences were preempted")


def _add_rows(
    record: Record,
    case: str,
    workload: Workload,
    variant: EngineVariant,
    hosted: Hosted,
    runs: list[EngineRun],
    peak_bytes: int,
    share: float,
) -> None:
    is_peers_card = record.device == "cuda" and _PEER_CARD in torch.cuda.get_device_name()
    peer, peer_value = (workload.peers.get(variant.name) if is_peers_card else None) or (None, None)
    add_runs(record, case, runs, peer=peer, peer_value=peer_value)
    record.add_roofline(case, share)
    if peak_bytes:
        record.add(case, "peak memory", "GiB", peak_bytes / 2**30)
        record.add(case, "peak memory of the build", "GiB", hosted.build_peak_bytes / 2**30)
    record.add(case, "weights built", "s", hosted.build_s)
    record.add(case, "engine made", "s", hosted.engine_s)
    record.add(case, "KV cache", "tokens", hosted.llm.stats.num_kv_pages * PAGE_SIZE)
    record.add(case, "logprobs' error against bf16's", "share of their spread", hosted.error)
    if hosted.delta is not None:
        record.add(case, "largest difference to sequence_logprobs", "nats", hosted.delta)
