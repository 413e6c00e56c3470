"""`large`, `large_mixed`: 70B parameters, of which no GPU has room for all in bf16, served by all ranks together."""

import dataclasses
import functools

import torch

from bench.serve.floor import Counts, kv_token_bytes
from bench.serve.measure import median_run, percentile
from bench.serve.rows import add_runs
from bench.serve.shapes import LLAMA_3_70B, build_model
from bench.serve.workloads import Requests, Workload, shrink
from bench.speed.check import MIN_FP8_DB
from bench.speed.scale.session import GIB, Session
from bench.speed.tensor.models import GATHER, REDUCE, Layout, config_of, wanted
from bench.speed.tensor.serving import profile_steps, time_runs
from octavo.models import Decoder, ModelConfig
from octavo.nn import PackedContext
from octavo.numerics import Numerics, get_recipe
from octavo.testing.assertions import assert_bitwise, assert_sqnr

MANY = Workload("70b-64x1000", "Llama-3-70B", 64, (1000, 1000), (500, 500), ("fp8-kv",))
SINGLE = Workload("70b-single", "Llama-3-70B", 1, (128, 128), (512, 512), ("fp8-kv",))
MIXED = Workload("70b-mixed", "Llama-3-70B", 256, (100, 1024), (100, 1024), ("fp8-kv",))
_NUM_RUNS, _CHECKED_LAYERS, _CHECKED_TOKENS = 2, 2, 300
FLOPS_PER_S = 1.979e15  # FP8, dense: H100 and H200, as NVIDIA states them
BYTES_PER_S = {"H100": 3.35e12, "H200": 4.8e12}  # of memory; of other devices the second is taken
LIMIT = (
    "limit: for each decode step the larger of (FP8 codes of the linears + head in bf16 + FP8 keys and values of all "
    "sequences) / GPUs / {:.3g} B/s and (2 x weights x sequences + attention) / GPUs / 1.979e15 FLOP/s, summed; + "
    "the prompts' operations / GPUs / 1.979e15 FLOP/s"
)


def large(session: Session) -> None:
    """64 requests."""
    _measure_layouts(session, (MANY,))


def large_mixed(session: Session) -> None:
    """One request, and 256 of 100 to 1024 tokens in and out."""
    _measure_layouts(session, (SINGLE, MIXED))


def _measure_layouts(session: Session, workloads: tuple[Workload, ...]) -> None:
    """Reduce and gather; the first layers are compared with one GPU's before."""
    for layout in wanted(session, (REDUCE, GATHER)):
        session.attempt(f"large {layout.label}", functools.partial(_measure_all, session, layout, workloads))


def _measure_all(session: Session, layout: Layout, workloads: tuple[Workload, ...]) -> None:
    if layout.mode == "gather":  # what is refused or differs leaves the timed one, which is not exact
        exact = dataclasses.replace(layout, exact=True)
        session.attempt(f"large {exact.label}, bits", functools.partial(_check, session, exact))
    _check(session, layout)
    session.free()
    if session.device.type == "cuda":
        torch.cuda.reset_peak_memory_stats()
    model = _build(session, config_of(session, full=LLAMA_3_70B), layout)
    session.say(f"  built; {_peak_gib(session):.1f} GiB at most")
    for workload in workloads:
        session.attempt(
            f"{workload.name} {layout.label}",
            functools.partial(_measure, session, layout, model, shrink(workload) if session.is_toy else workload),
        )


def _measure(session: Session, layout: Layout, model: Decoder, workload: Workload) -> None:
    config = model.config
    requests = workload.draw(config.vocab_size, workload.num_requests)
    engine, runs = time_runs(session, model, workload, requests, _NUM_RUNS)
    run, case = median_run(runs), f"{workload.label}: {layout.case(session)}"
    bandwidth = _bandwidth()
    share = limit_s(config, requests, session.mesh.world_size, bandwidth) / run.seconds
    add_runs(session.record, case, runs, peer=None, peer_value=None)
    session.record.add_roofline(case, share, LIMIT.format(bandwidth))
    session.record.add(case, "peak memory", "GiB", _peak_gib(session))
    session.say(
        f"{case}: {run.output_tokens_per_s:,.0f} output tokens/s in {run.seconds:.2f} s, {share:.3f} of the limit, "
        f"first token p50 {percentile(run.ttft_s, 50):.2f} s, then {percentile(run.gaps_s, 50) * 1e3:.2f} ms a token"
    )
    if session.profiles:
        profile_steps(session, engine, requests, case)


def _build(session: Session, config: ModelConfig, layout: Layout) -> Decoder:
    """This rank's slices alone; each whole weight is drawn for a moment."""
    numerics = Numerics(get_recipe("blockwise"), "fp8", layout.exact)
    return build_model(config, numerics, session.device.type, cut=functools.partial(layout.cut, session))


@torch.no_grad()
def _check(session: Session, layout: Layout) -> None:
    """Hidden states after the first layers: one GPU's, of an exact layout in bits."""
    config, is_exact = config_of(session, _CHECKED_LAYERS, LLAMA_3_70B), layout.exact
    generator = torch.Generator().manual_seed(1)
    tokens = torch.randint(config.vocab_size, (_CHECKED_TOKENS,), generator=generator).to(session.device)
    found = []
    for each in (Layout(None, is_exact), Layout(layout.mode, is_exact)):
        model = _build(session, config, each)
        context = PackedContext.from_lengths([_CHECKED_TOKENS], model.numerics, model.device)
        found.append(model(tokens, context))
        del model
    one, cut = found
    what = f"{layout.label}: hidden states against one GPU's"
    session.check(lambda: assert_bitwise(cut, one, what) if is_exact else assert_sqnr(cut, one, MIN_FP8_DB, what))
    session.say(f"  {what}: {'equal in bits' if is_exact else f'at least {MIN_FP8_DB:g} dB'}")


def limit_s(config: ModelConfig, requests: Requests, num_gpus: int, bytes_per_s: float) -> float:
    """Seconds that the requests take at least, all of them at once; see LIMIT."""
    counts = Counts.of(config)
    attention = 4 * config.num_layers * config.q_dim  # operations for a query token and a key token
    lengths = [(len(ids), n) for ids, n in requests]
    flops = 2.0 * counts.dense * sum(prompt for prompt, _ in lengths) + 2 * counts.head * len(lengths)
    flops += attention * sum(prompt * prompt / 2 for prompt, _ in lengths)
    seconds = flops / FLOPS_PER_S + sum(each for _, each in decode_limits(config, requests, bytes_per_s))
    return seconds / num_gpus


def decode_limits(config: ModelConfig, requests: Requests, bytes_per_s: float) -> list[tuple[int, float]]:
    """(sequences, seconds at least on one GPU) of each decode step; see LIMIT."""
    counts, kv_bytes = Counts.of(config), kv_token_bytes(config, "fp8")
    attention = 4 * config.num_layers * config.q_dim
    lengths, found = [(len(ids), n) for ids, n in requests], []
    for step in range(1, max(n for _, n in lengths)):  # the first token comes with the prompt
        keys = [prompt + step for prompt, n in lengths if n > step]
        moved = counts.dense + 2 * counts.head + kv_bytes * sum(keys)
        flops = 2 * (counts.dense + counts.head) * len(keys) + attention * sum(keys)
        found.append((len(keys), max(moved / bytes_per_s, flops / FLOPS_PER_S)))
    return found


def _bandwidth() -> float:
    name = torch.cuda.get_device_name() if torch.cuda.is_available() else ""
    return next((rate for card, rate in BYTES_PER_S.items() if card in name), BYTES_PER_S["H200"])


def _peak_gib(session: Session) -> float:
    """Of this rank's GPU; 0 on a CPU."""
    return torch.cuda.max_memory_allocated() / GIB if session.device.type == "cuda" else 0.0
