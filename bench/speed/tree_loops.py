"""Two trees of octavo end to end, in turns on one machine: `python -m bench.speed.tree_loops OTHER --out FOLDER`.

OTHER is another tree's folder, as for `bench.speed.trees`. "server": both trees serve Qwen3-8B (FP8, FP8 KV cache) at
the same time, and this tree's client sends its load to one after the other: client, arrivals and prompts are equal.
"rl": each tree runs its own `octavo bench rl --workload whole-step` in exact mode, other, this, this, other.
"""

import argparse
import contextlib
import json
import math
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from bench.program import Program, keeps
from bench.record import Record, summarize
from bench.report import STEP_TIME
from bench.serve.measure import percentile
from bench.serve.online import Load, OnlineRun, Target, run_load
from bench.serve.server import free_port
from bench.speed.trees import ROOT, Tree, environment_of, started

WHAT = (
    "Two trees in turns on one machine. Server: Qwen3-8B, blockwise FP8 linears, FP8 KV cache, random weights, "
    "requests of 1000 tokens in and 200 out that arrive by chance, one client, the median of the rounds and their "
    "fifths. RL step: exact mode, 18 layers of Qwen3-8B, by each tree's own benchmark, the median of its runs."
)
_SERVER, _RL = "server", "rl"
_LATENCIES = (("time to first token", "s", 1.0), ("inter-token latency", "ms", 1e3))
_READY_S = 300.0
Samples = dict[tuple[str, str, str], list[list[float]]]  # (case, metric, unit) -> the other tree's and this one's


def main(arguments: list[str] | None = None) -> int:
    """Measure, print a table, write the record."""
    parser = Program("bench.speed.tree_loops", __doc__)
    parser.add_argument("other", type=Path, help="folder of the other tree, the one before")
    parser.add_argument("--name", default="before", help="what tables and records call the other tree: its commit")
    parser.add_argument("--variant-option", default="--variant", help="the other tree's name of that option")
    parser.add_argument("--rounds", type=int, default=3, help="loads that each server gets")
    parser.add_argument("--seconds", type=float, default=30.0, help="of arrivals in each")
    parser.add_argument("--passes", type=int, default=2, help="timed RL steps a run")
    parser.add_filter(f"{_SERVER} or {_RL},")
    options = parser.parse(arguments)
    samples: Samples = {}
    ways: dict[str, Callable[[argparse.Namespace, Samples], None]] = {_SERVER: measure_servers, _RL: measure_rl}
    for name, measure in ways.items():
        if keeps(options, name):
            measure(options, samples)
            if options.out is not None:  # a run that is stopped keeps what it has
                make_record(samples, options).save(options.out, options.commit)
    return 0


def measure_servers(options: argparse.Namespace, samples: Samples) -> None:
    """Latencies under load, a sample a round."""
    is_toy, ports = options.device == "cpu", (free_port(), free_port())
    rate = 8.0
    load = Load(rate, 6, 16, 4, vocab_size=256) if is_toy else Load(rate, math.ceil(rate * options.seconds))
    case = f"server, {load.rate:g} requests/s of {load.prompt_len} in, {load.output_len} out"
    with started([options.other, ROOT], options.device) as trees:
        for tree, port in zip(trees, ports, strict=True):
            tree.ask("serve", str(port))
        for tree, port in zip(trees, ports, strict=True):
            _wait_for(tree, port)
        for number in range(1 + options.rounds):
            for place in (0, 1) if number % 2 == 0 else (1, 0):
                target = Target(f"http://127.0.0.1:{ports[place]}", ready_timeout_s=_READY_S)
                run = run_load(target, load, time.perf_counter() + _READY_S + 10 * options.seconds)
                if run.errors:
                    raise RuntimeError(f"tree {place}: {run.errors[0]}")
                if number:  # the first one warms up
                    _add_latencies(samples, case, place, run)
            _show(samples, case)


def _wait_for(tree: Tree, port: int) -> None:
    """Return when the tree's server listens."""
    while not tree.has_ended:
        with contextlib.suppress(ConnectionRefusedError), socket.create_connection(("127.0.0.1", port)):
            return
        time.sleep(0.2)
    raise RuntimeError("a tree's server has ended; its log is above")


def _add_latencies(samples: Samples, case: str, place: int, run: OnlineRun) -> None:
    firsts, gaps = [a.ttft_s for a in run.done], [gap for a in run.done for gap in a.gaps_s]
    for (what, unit, scale), values in zip(_LATENCIES, (firsts, gaps), strict=True):
        for percent in (50, 99):
            found = samples.setdefault((case, f"{what}, p{percent}", unit), [[], []])
            found[place].append(percentile(values, percent) * scale)


def measure_rl(options: argparse.Namespace, samples: Samples) -> None:
    """Seconds of an exact step, a sample a run of the benchmark."""
    for place in (0, 1, 1, 0):
        folder, option = ((options.other, options.variant_option), (ROOT, "--variant"))[place]
        with tempfile.TemporaryDirectory() as out:
            command = [sys.executable, "-m", "octavo", "bench", "rl", "--workload", "whole-step", option, "exact"]
            command += ["--passes", str(options.passes), "--out", out]
            command += ["--device", "cpu", "--quick"] if options.device == "cpu" else []
            subprocess.run(command, cwd=folder, env=environment_of(folder), check=True)
            (path,) = Path(out).glob("*.json")
            rows = json.loads(path.read_text())["rows"]
        row = next(row for row in rows if row["metric"] == STEP_TIME)
        samples.setdefault((row["case"], STEP_TIME, "s"), [[], []])[place].append(row["value"])
    _show(samples, row["case"])


def make_record(samples: Samples, options: argparse.Namespace) -> Record:
    """Rows of every metric: the median of this tree's samples beside the other's, and their ratio."""
    record, peer = Record("tree_loops", WHAT, device=options.device), f"octavo at {options.name}"
    for (case, metric, unit), (others, ours) in samples.items():
        before, after = summarize(others), summarize(ours)
        record.add_times(case, metric, unit, after, peer=peer, peer_value=before.median_us)
        record.add_ratio(case, f"{metric}, over the other tree's", after.median_us / before.median_us, peer)
    return record


def _show(samples: Samples, case: str) -> None:
    for (of, metric, unit), (others, ours) in samples.items():
        if of == case and others and ours:
            before, after = summarize(others).median_us, summarize(ours).median_us
            text = f"{before:8.3f} {unit} before {after:8.3f} {unit} now  x{after / before:.4f} of {len(ours)}"
            print(f"{metric:<28} {text}", flush=True)


if __name__ == "__main__":
    sys.exit(main())
