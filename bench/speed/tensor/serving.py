"""`single`, `mixed`, `long`: the workloads of `octavo bench serve` on one GPU and on all of them together."""

import functools
import math

from bench.profiling.kernels import watch
from bench.profiling.step_profile import Profile
from bench.report import THROUGHPUT
from bench.serve.host import QUICK_LIMITS
from bench.serve.measure import EngineRun, median_run, percentile, run_requests, warm_up
from bench.serve.rows import add_runs
from bench.serve.workloads import MAX_NUM_SEQS, MEMORY_SHARE, WORKLOADS, Requests, Workload, shrink
from bench.speed.scale.session import Session
from bench.speed.tensor.models import LAYOUTS, ONE_GPU, REDUCE, Layout, build, config_of, wanted
from octavo.models import Decoder
from octavo.serve import LLM
from octavo.serve.engine import Engine

_NUM_RUNS, _NUM_LONG_RUNS = 3, 2
_PROFILED_PROMPT_LEN, _PROFILED_TOKENS, _TOP_KERNELS = 64, 40, 24


def single(session: Session) -> None:
    """One request."""
    _measure(session, WORKLOADS["8b-single"])


def mixed(session: Session) -> None:
    """256 requests of 100 to 1024 tokens in and out."""
    _measure(session, WORKLOADS["8b-mixed"])


def long(session: Session) -> None:
    """64 requests of 8192 tokens in and 512 out."""
    _measure(session, WORKLOADS["8b-64x8192"], _NUM_LONG_RUNS)


def _measure(session: Session, workload: Workload, num_runs: int = _NUM_RUNS) -> None:
    workload = shrink(workload) if session.is_toy else workload
    requests = workload.draw(config_of(session).vocab_size, workload.num_requests)
    found: dict[str, EngineRun] = {}
    for layout in wanted(session, LAYOUTS.values()):
        run = functools.partial(_run, session, workload, requests, layout, found, num_runs)
        session.attempt(f"{workload.name} {layout.label}", run)


def _run(
    session: Session,
    workload: Workload,
    requests: Requests,
    layout: Layout,
    found: dict[str, EngineRun],
    num_runs: int,
) -> None:
    engine, runs = time_runs(session, build(session, config_of(session), layout), workload, requests, num_runs)
    run = median_run(runs)
    case = f"{workload.label}: {layout.case(session)}"
    base = found.get(ONE_GPU.label)
    peer = (f"{workload.label}: one GPU alone", base.output_tokens_per_s) if base else (None, None)
    add_runs(session.record, case, runs, peer=peer[0], peer_value=peer[1])
    said = f"{case}: {run.output_tokens_per_s:,.0f} output tokens/s"
    if len(requests) == 1:
        ms = [percentile(each.gaps_s, 50) * 1e3 for each in runs]
        said += f", {sorted(ms)[len(ms) // 2]:.3f} ms a token ({min(ms):.3f} to {max(ms):.3f})"
    if base:
        ratio = run.output_tokens_per_s / base.output_tokens_per_s
        session.record.add_ratio(case, f"{THROUGHPUT} over one GPU", ratio, peer[0])
        said += f", {ratio:.3f} of one GPU"
    if layout.exact and REDUCE.label in found:
        ratio = run.output_tokens_per_s / found[REDUCE.label].output_tokens_per_s
        session.record.add_ratio(case, f"{THROUGHPUT}, exact over reduce", ratio, f"{workload.label}: reduce")
        said += f", {ratio:.3f} of reduce"
    found[layout.label] = run
    session.say(said)
    if session.profiles:
        profile_steps(session, engine, requests, case)


def time_runs(
    session: Session, model: Decoder, workload: Workload, requests: Requests, num_runs: int
) -> tuple[Engine, list[EngineRun]]:
    """Warm an engine up, then let it answer the requests so often; all ranks begin each run together."""
    limits: dict[str, float] = {"max_num_seqs": min(MAX_NUM_SEQS, len(requests)), "max_model_len": workload.max_len}
    limits |= {"gpu_memory_utilization": MEMORY_SHARE}
    llm = LLM(model, enable_prefix_caching=False, warm_up=False, **(QUICK_LIMITS if session.is_toy else limits))  # type: ignore[arg-type]
    warm_up(llm.engine, requests, math.inf)
    runs = []
    for _ in range(1 if session.is_toy else num_runs):
        session.mesh.barrier()
        runs.append(run_requests(llm.engine, requests, "cpu", math.inf))
    return llm.engine, runs


def profile_steps(session: Session, engine: Engine, requests: Requests, case: str) -> None:
    """Print what decode steps take without the profiler, and their kernels; prompts are short."""
    short = [(ids[:_PROFILED_PROMPT_LEN], _PROFILED_TOKENS) for ids, _ in requests]
    plain = run_requests(engine, short, "cpu", math.inf)
    with watch(session.device.type) as watched:
        run_requests(engine, short, "cpu", math.inf)
    figures = {"without the profiler, ms a decode step": 1e3 * percentile(plain.gaps_s, 50)}
    figures["the same, prompts included"] = 1e3 * plain.seconds / _PROFILED_TOKENS
    session.say(Profile(case, watched, _PROFILED_TOKENS, figures).format(_TOP_KERNELS))
