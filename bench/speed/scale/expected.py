"""What N GPUs are expected to do, from the records of one and two: `python -m bench.speed.scale.expected`.

Written before any machine of four or eight GPUs was seen; records of four (scale_4_gpus and its like) stand beside it.
A figure is a formula here over bench/records, so that anyone can make it again; `why` says it in a line. The command
writes the table of docs/distributed.md; `octavo bench scale --gpus N` prints the figures beside what it measured.
"""

import dataclasses
import functools
import itertools
import statistics
import sys
from pathlib import Path

from bench.charts import curves_over_gpus
from bench.figures import Figures, fill_marks, markdown
from bench.options import RECORDS
from bench.processes import ROOT
from bench.report import THROUGHPUT
from bench.rl.workloads import LOOPS
from bench.serve.floor import Counts
from bench.serve.shapes import LLAMA_3_70B, QWEN3_8B
from bench.serve.workloads import WORKLOADS, Requests, Workload
from bench.speed.comm import SIZES
from bench.speed.scale import ordered, restart, whole
from bench.speed.scale.layers import model_section
from bench.speed.tensor import bits
from bench.speed.tensor.large import BYTES_PER_S, MANY, MIXED, SINGLE, decode_limits, limit_s
from octavo.models import ModelConfig
from octavo.models.checkpoint.names import parameter_names
from octavo.train.config import TrainConfig
from octavo.train.memory_plan import plan_memory

PAGE = ROOT / "docs" / "distributed.md"
NUM_GPUS = (4, 8)  # of the page
MAX_MISS = 0.15
_BANDWIDTH = BYTES_PER_S["H200"]
_GRACE_S = 30.0  # after which torchrun kills ranks that wait for a dead one and do not end
_VARIANTS = {whole.BF16: "bf16, compiled", whole.BEST: "octavo.convert delayed"}  # cases of fsdp.json
_CALLS = {  # of comm.json, with what a rank computes itself: (call, how often)
    "all_reduce bf16": (), "all_gather bf16": (), "reduce_scatter bf16": (), "all_gather FP8 bytes": (),
    "all_reduce_q": ("quantize", "sum and quantize", "decode"),
}  # fmt: skip


@dataclasses.dataclass(frozen=True)
class Expected:
    """A row that a record of N GPUs is expected to have.

    Args:
        record: its name.
        why: how the value follows from the records of one and two GPUs.
        in_page: the page's table has it too, under this name.
    """

    record: str
    case: str
    metric: str
    unit: str
    value: float
    why: str
    in_page: str = ""


def expect(num_gpus: int) -> list[Expected]:
    """All rows of so many GPUs."""
    of_parts = (_exactness, _comm, _whole, _layers18, _large, _grpo)
    return [row for of_part in of_parts for row in of_part(num_gpus)]


def compare(records: Path, num_gpus: int) -> list[str]:
    """A line for each row that was expected and measured, or why it was not; misses are marked."""
    lines, loaded = [], {path.stem: Figures.load(path) for path in records.glob("*.json")}
    for row in expect(num_gpus):
        figures = loaded.get(row.record)
        if figures is None or row.case not in figures.cases:
            continue
        said = f"{row.case}: {row.metric}: expected {row.value:,.4g} {row.unit}".rstrip()
        found = figures.value(row.case, row.metric)
        if found is None:
            lines.append(f"NONE {said}, measured none")
        elif abs(found - row.value) > MAX_MISS * row.value:
            lines.append(f"MISS {said}, measured {found:,.4g}; expected: {row.why}")
        else:
            lines.append(f"ok   {said}, measured {found:,.4g}")
    return lines


@functools.cache
def _figures(record: str) -> Figures:
    return Figures.load(ROOT / RECORDS / f"{record}.json")


def _value(record: str, case: str, metric: str) -> float:
    value = _figures(record).value(case, metric)
    assert value is not None, f"{record}.json has {metric!r} of {case!r}"
    return value


def _received(num_gpus: int) -> float:
    """The share of a tensor that a rank receives of the others, over that of two ranks."""
    return 2 * (num_gpus - 1) / num_gpus


def _exactness(num_gpus: int) -> list[Expected]:
    none, killed = "bits do not depend on the number of ranks", restart.case_label(num_gpus)
    cold_start = "Qwen3-8B cold start: octavo blockwise + FP8 KV"
    start, first = (_value("serve", cold_start, f"{part}, of that") for part in ("start and imports", "request"))
    replicas = (1, 2) if num_gpus >= 4 else (1,)
    cases = [
        *(("scale", ordered.case_label(r, num_gpus, n), ordered.DIFFERING) for r in ordered.RECIPES for n in replicas),
        *(("tensor", bits.case_label(r, num_gpus), bits.DIFFERING) for r in bits.RECIPES),
        ("restart", killed, restart.DIFFERING),
    ]
    seconds = _GRACE_S + start + first
    why = f"torchrun's {_GRACE_S:.0f} s for ranks that wait for a dead one + start and first request of a cold start"
    return [
        *(Expected(*case, "", 0, none) for case in cases),
        Expected("restart", killed, restart.SECONDS, "s", seconds, why, "a rank killed: s to the end of the next step"),
    ]


def _comm(num_gpus: int) -> list[Expected]:
    why = "a start as at 1 MiB of two ranks; what a size adds there, but for own kernels, x 2 (N - 1) / N"
    return [
        Expected(
            *("comm", f"{call}, {size:g} MiB", "time", "us", _call_us(call, size, num_gpus), why),
            f"{call}, 1 GiB: us" if size == SIZES[-1] else "",
        )
        for call in _CALLS
        for size in SIZES
    ]


def _call_us(call: str, size: float, num_gpus: int) -> float:
    """Microseconds of a collective; sizes between those of the record are interpolated."""
    start = _value("comm", f"{call}, 1 MiB", "time")
    if size not in SIZES:
        low, high = max(s for s in SIZES if s < size), min(s for s in SIZES if s > size)
        ends = [_call_us(call, s, num_gpus) for s in (low, high)]
        return ends[0] + (ends[1] - ends[0]) * (size - low) / (high - low)
    own, own_start = (sum(_value("comm", f"{k}, {s:g} MiB", "time") for k in _CALLS[call]) for s in (size, 1.0))
    grown = _value("comm", f"{call}, {size:g} MiB", "time") - start - (own - own_start)
    return start + own - own_start + grown * _received(num_gpus)


def _num_params(config: ModelConfig) -> float:
    return float(sum(functools.reduce(int.__mul__, p.shape) for p in parameter_names(config)))


def _layers(num_layers: int) -> ModelConfig:
    return dataclasses.replace(QWEN3_8B, num_layers=num_layers)


_OF_18 = "Qwen3-8B (18 layers), 2 x 8192 tokens a GPU, blockwise: "


def _one_ms(recipe: str) -> tuple[float, float]:
    """(head, 18 layers) of a step of 16k tokens on one GPU."""
    ms, tokens = _value("scale", f"{_OF_18}one GPU alone", "step time"), whole.TOKENS["whole"]
    counts = Counts.of(_layers(18))
    attention = 6 * 18 * QWEN3_8B.q_dim * whole.MAX_SEQ_LEN * tokens  # causal, forward and twice that backward
    head, layers = 6 * counts.head * tokens, 6 * counts.dense * tokens + attention
    of_head = ms * head / (head + layers)
    ratio = _value("fsdp", _VARIANTS[recipe], "time") / _value("fsdp", "octavo.convert blockwise", "time")
    return of_head, (ms - of_head) * ratio


def _wire_ms(layout: str, num_gpus: int) -> float:
    """What the wire adds to a step of all 36 layers."""
    alone, two = (_value("scale", _OF_18 + case, "step time") for case in ("one GPU alone", "2 GPUs, bf16 all-gather"))
    per_param = (two - alone) / (3 * _received(2) * _num_params(_layers(18)))  # two gathers and a scatter
    replicas = 2 if layout.startswith(whole.HSDP) else num_gpus if layout == whole.DDP else 1
    shards = num_gpus // replicas
    copies = 3 * _received(shards) + 2 * _received(replicas) / shards  # an all-reduce is a scatter and a gather
    return per_param * copies * _num_params(QWEN3_8B)


def _whole(num_gpus: int) -> list[Expected]:
    why = "one GPU's 18 layers twice, recipes as in fsdp.json, + what the wire adds at two GPUs, by bytes received"
    host = "6 layers of fsdp_2048_tokens.json six times + the head: launches hide the wire at any N"
    rows, tokens, few = [], whole.TOKENS["whole"], whole.TOKENS["whole_2k"]
    base = 0.0
    for recipe in whole.RECIPES:
        head, layers = _one_ms(recipe)
        for layout in whole.layouts(num_gpus):
            case, case_2k = (whole.case_label(36, n, recipe, layout, num_gpus) for n in (tokens, few))
            one = head + 2 * layers
            ms = one + _wire_ms(layout, num_gpus)
            ms_2k = 6 * _value("fsdp_2048_tokens", _VARIANTS[recipe], "time") + head * few / tokens
            rate, rate_2k, gib = tokens / ms * 1e3, few / ms_2k * 1e3, _plan_gib(recipe, layout, num_gpus)
            if recipe == whole.BF16 and layout == whole.FSDP2:
                base = ms
            short = "HSDP 2 x N/2" if layout.startswith(whole.HSDP) else layout
            name = f"{recipe}, {short}: tokens/s a GPU; of one GPU; GiB"
            rows += [
                Expected("scale", case, whole.RATE, "tokens/s", rate, why, name),
                Expected("scale", case, whole.EFFICIENCY, "x", one / ms, why, name),
                Expected("scale", case, whole.SPEEDUP, "x", base / ms, why),
                Expected("scale", case, "peak memory", "GiB", gib, "octavo train --plan", name),
                Expected("scale", case_2k, whole.RATE, "tokens/s", rate_2k, host),
            ]
    return rows


def _plan_gib(recipe: str, layout: str, num_gpus: int) -> float:
    """As `octavo train --plan`; DDP keeps what one process does."""
    replicas = 2 if layout.startswith(whole.HSDP) else 1
    shards = 1 if layout == whole.DDP else num_gpus // replicas
    num_seqs = whole.TOKENS["whole"] // whole.MAX_SEQ_LEN
    sections: dict[str, dict[str, object]] = {
        "model": model_section(QWEN3_8B),
        "data": {"vocab_size": QWEN3_8B.vocab_size, "seq_len": whole.MAX_SEQ_LEN, "micro_batch_size": num_seqs},
        "optimizer": {"state_dtype": "bf16", "master_weights": "none"},
        "parallel": {"data_parallel_shard_degree": shards, "data_parallel_replicate_degree": replicas},
        "precision": {"recipe": recipe},
        "run": {"device": "cpu"},
    }
    sections["data"]["batch_size"] = num_seqs * shards * replicas
    return plan_memory(TrainConfig.model_validate(sections)).peak_bytes / 2**30


def _layers18(num_gpus: int) -> list[Expected]:
    alone, rows = _value("scale", f"{_OF_18}one GPU alone", "step time"), []
    for kind in ("bf16", "FP8"):
        added = _value("scale", f"{_OF_18}2 GPUs, {kind} all-gather", "step time") - alone
        share, why = alone / (alone + added * _received(num_gpus)), "what two GPUs add to a step x 2 (N - 1) / N"
        case, metric = f"{_OF_18}{num_gpus} GPUs, {kind} all-gather", f"tokens/s over {num_gpus} x one GPU"
        name = f"18 layers, blockwise, {kind} all-gather: of one GPU"
        rows.append(Expected("scale", case, metric, "x", share, why, name))
    return rows


def _large(num_gpus: int) -> list[Expected]:
    rows = []
    why = "limit / N + 80 x what a layer of Qwen3-8B takes beside its limit at two GPUs, larger messages by comm.json"
    why_mixed = f"{why}; prompts: 70B's rate on two GPUs, by N"
    num_tokens = sum(n for _, n in _draw(MIXED, LLAMA_3_70B))
    for mode in ("reduce", "gather"):
        single, mixed = (f"{w.label}: {num_gpus} GPUs, {mode}" for w in (SINGLE, MIXED))
        ms, rate = (
            1e3 * serve_s(SINGLE, mode, num_gpus)[1] / (SINGLE.output_len[1] - 1),
            num_tokens / sum(serve_s(MIXED, mode, num_gpus)),
        )
        names = (f"70B {mode}, one request: ms a token", f"70B {mode}, 256 requests: tokens/s")
        rows += [
            Expected("tensor", single, "inter-token latency, p50", "ms", ms, why, names[0]),
            Expected("tensor", mixed, THROUGHPUT, "tokens/s", rate, why_mixed, names[1]),
        ]
    return rows


def _draw(workload: Workload, config: ModelConfig) -> Requests:
    return workload.draw(config.vocab_size, workload.num_requests)


def serve_s(workload: Workload, mode: str, num_gpus: int) -> tuple[float, float]:
    """Seconds of 70B's (prompts, decode steps)."""
    many, requests = _draw(MANY, LLAMA_3_70B), _draw(workload, LLAMA_3_70B)
    # prompts: all first tokens of the record's workload, over the time at the peak of as many operations
    slowness = _value("tensor", f"{MANY.label}: 2 GPUs, reduce", "time to first token, p90") / _prompt_limit_s(many, 2)
    of_8b = WORKLOADS["8b-single" if len(requests) == 1 else "8b-mixed"]
    # of many requests only exact gather has a record
    kind = "gather, exact" if mode == "gather" and len(requests) > 1 else mode
    gap = _value("tensor", f"{of_8b.label}: 2 GPUs, {kind}", "inter-token latency, p50") * 1e-3
    limits = decode_limits(QWEN3_8B, _draw(of_8b, QWEN3_8B), _BANDWIDTH)
    a_layer = (gap - statistics.median(s for n, s in limits for _ in range(n)) / 2) / QWEN3_8B.num_layers
    message = len(requests) * LLAMA_3_70B.hidden_size * 2 / 2**20  # MiB, of the sums after attention and MLP
    if message >= 1:
        of_8b_message = of_8b.num_requests * QWEN3_8B.hidden_size * 2 / 2**20
        ends = ((message, num_gpus), (of_8b_message, 2))
        larger, recorded = (_call_us("all_reduce bf16", mib, n) for mib, n in ends)
        a_layer += 2e-6 * (larger - recorded)
    steps = decode_limits(LLAMA_3_70B, requests, _BANDWIDTH)
    decode = sum(s for _, s in steps) / num_gpus + len(steps) * LLAMA_3_70B.num_layers * a_layer
    return slowness * _prompt_limit_s(requests, num_gpus), decode


def _prompt_limit_s(requests: Requests, num_gpus: int) -> float:
    return limit_s(LLAMA_3_70B, [(ids, 1) for ids, _ in requests], num_gpus, _BANDWIDTH)


def _grpo(num_gpus: int) -> list[Expected]:
    label = f"exact GRPO step, {LOOPS['whole-step'].label}: "
    one, two = (_value("scale", label + case, "step time") for case in ("one GPU alone", "2 GPUs"))
    fixed = 2 * two - one
    ms, why = fixed + (one - fixed) / num_gpus, "a part that stays and one that is divided by N, from one and two GPUs"
    name = "exact GRPO step, 18 layers, the same global batch: ms"
    return [Expected("scale", f"{label}{num_gpus} GPUs", "step time", "ms", ms, why, name)]


def table(_: str = "") -> str:
    """The page's rows, as Markdown, beside what records of so many GPUs have; figures of one name share a cell."""
    cells: dict[str, dict[str, list[str]]] = {}
    headings: list[str] = []
    for num_gpus in NUM_GPUS:
        found = {path.stem.partition("_")[0]: Figures.load(path) for path in measured_on(num_gpus)}
        columns = [f"{num_gpus} GPUs, expected", *([f"{num_gpus} GPUs, measured"] if found else [])]
        headings += columns
        for row in expect(num_gpus):
            if row.in_page:
                figures = found.get(row.record)
                values = (row.value, None if figures is None else figures.value(row.case, row.metric))
                for column, value in zip(columns, values, strict=False):
                    cells.setdefault(row.in_page, {}).setdefault(column, []).append(_cell(value))
    rows = [
        [name, *("; ".join(columns.get(heading, ["-"])) for heading in headings)] for name, columns in cells.items()
    ]
    return markdown(["", *headings], rows)


def measured_on(num_gpus: int) -> list[Path]:
    """The records of so many GPUs."""
    return sorted((ROOT / RECORDS).glob(f"*_{num_gpus}_gpus.json"))


def _cell(value: float | None) -> str:
    return "-" if value is None else f"{value:.3g}" if value < 1000 else f"{value:,.0f}"


def draw(path: Path) -> None:
    """Step time and memory of the whole model against the number of GPUs, measured and expected."""
    found: dict[str, dict[str, list[tuple[int, float]]]] = {"ms a step": {}, "GiB a GPU at the peak": {}}
    forecast: dict[str, dict[str, list[tuple[int, float]]]] = {label: {} for label in found}
    metrics, tokens = dict(zip(found, ("step time", "peak memory"), strict=True)), whole.TOKENS["whole"]
    records = {n: Figures.load(p) for n in NUM_GPUS for p in measured_on(n) if p.stem.startswith("scale_")}
    all_rows = {n: expect(n) for n in NUM_GPUS}
    for (recipe, short), (label, metric) in itertools.product(
        itertools.product(whole.RECIPES, (whole.FSDP2, whole.HSDP, whole.DDP)), metrics.items()
    ):
        name, alone = f"{recipe}, {short}", whole.case_label(36, tokens, recipe, whole.ONE, 1)
        first = [(1, v) for figures in records.values() if (v := figures.value(alone, metric)) is not None]
        for num_gpus in NUM_GPUS:
            layout = next(each for each in whole.layouts(num_gpus) if each.startswith(short))
            case = whole.case_label(36, tokens, recipe, layout, num_gpus)
            rows = {row.metric: row.value for row in all_rows[num_gpus] if row.case == case}
            wanted = rows["peak memory"] if metric == "peak memory" else 1e3 * tokens / rows[whole.RATE]
            forecast[label].setdefault(name, []).append((num_gpus, wanted))
            figures = records.get(num_gpus)
            value = None if figures is None else figures.value(case, metric)
            if value is not None:
                found[label].setdefault(name, first[:1]).append((num_gpus, value))
    curves_over_gpus(path, found, forecast, title="Qwen3-8B whole, 16k tokens a GPU: measured; dotted: expected")


def main() -> int:
    """Write the page's table and draw its picture."""
    page = PAGE.read_text(encoding="utf-8")
    PAGE.write_text(fill_marks(page, "expected", ("gpus",), table), encoding="utf-8")
    draw(PAGE.parent / "distributed" / "gpus.svg")
    return 0


if __name__ == "__main__":
    sys.exit(main())
