"""Two servers behind a router against one at half the load: `python -m bench.serve.replicas --out DIR` on two GPUs.

Qwen3-8B with random weights under blockwise with an FP8 KV cache, drawn by each process; requests of 100 to 1024 tokens
in and out, all at once, through HTTP on loopback, answered as one and streamed; a first run is not timed. --toy runs it
on a CPU.
"""

import dataclasses
import json
import math
import re
import sys
import time
import traceback
import urllib.request
from subprocess import Popen
from typing import Any

import torch

from bench.program import Program
from bench.record import Record
from bench.report import SERVED_THROUGHPUT
from bench.serve.online import Load, OnlineRun, Target, run_load
from bench.serve.server import ServerSetup, free_port, running_server
from bench.serve.workloads import MAX_NUM_SEQS, MEMORY_SHARE, WORKLOADS
from octavo.errors import BackendError
from octavo.serve.engine import served_tokens

_WORKLOAD = WORKLOADS["8b-mixed"]
_NUM_REPLICAS, _READY_S, _POLL_S, _LOOK_S = 2, 300.0, 0.2, 10.0
_LIMITS: dict[str, Any] = {
    "enable_prefix_caching": False,
    "max_model_len": _WORKLOAD.max_len,
    "max_num_seqs": MAX_NUM_SEQS,
    **served_tokens(MAX_NUM_SEQS),
    "gpu_memory_utilization": MEMORY_SHARE,
}
_KINDS = {"at-once": False, "streamed": True}  # whether tokens come as they are made
_TOY_LIMITS = {"enable_prefix_caching": False, "max_model_len": 128, "max_num_seqs": 8, "num_kv_pages": 32}


def main(arguments: list[str] | None = None) -> int:
    """Measure one server, then several; write the record; 1 where a request or a server failed."""
    parser = Program("bench.serve.replicas", __doc__)
    parser.add_argument("--toy", action="store_true", help="sizes for a CPU")
    parser.add_argument("--runs", type=int, default=3, help="timed runs of each row; the median counts")
    parser.add_argument("--only", choices=_KINDS, help="answers of this kind alone")
    options = parser.parse(arguments)
    if options.device == "cpu" and not options.toy:
        parser.error("a CPU runs toy sizes only, which claim nothing: add --toy")
    if options.device == "cuda" and torch.cuda.device_count() < _NUM_REPLICAS:
        parser.error(f"it takes {_NUM_REPLICAS} GPUs, torch sees {torch.cuda.device_count()}")
    what = (
        f"{_NUM_REPLICAS} replicas, a GPU each, behind the router of octavo serve --data-parallel-size against one "
        "server on one GPU with half as many requests, through HTTP on loopback, from one client process of this "
        "machine. Qwen3-8B with random weights, blockwise, FP8 KV cache, temperature 1, ignore_eos, no prefix cache, "
        "a made tokenizer, all requests at once."
    )
    record, found, complaints = Record("replicas", what, device=options.device), dict[str, float](), list[str]()
    for num_replicas in (1, _NUM_REPLICAS):
        try:
            complaints += _measure(record, options, num_replicas, found)
        except Exception as error:  # the other's figures are worth having; the exit code is 1
            traceback.print_exc()
            complaints.append(f"{num_replicas} replicas: {type(error).__name__}: {error}")
        if options.out is not None:
            record.save(options.out, options.commit)
    for complaint in complaints:
        print(f"COMPLAINT: {complaint}", flush=True)
    return 1 if complaints else 0


def _measure(record: Record, options: Any, num_replicas: int, found: dict[str, float]) -> list[str]:
    """Rows of a server or of several, beside what was found of one; what is wrong with them."""
    limits, port = (_TOY_LIMITS if options.toy else _LIMITS), free_port()
    setup = ServerSetup(
        *("Qwen3-8B", "fp8-kv", "blockwise", options.device, port, limits),
        has_tokenizer=True,
        is_toy=options.toy,
        num_replicas=num_replicas,
    )
    complaints, began = [], time.perf_counter()
    with running_server(setup) as process:
        target = Target(f"http://127.0.0.1:{port}", ready_timeout_s=_READY_S, is_up=lambda: process.poll() is None)
        _wait_for_replicas(target.url, num_replicas, process)
        print(f"{num_replicas} replicas ready after {time.perf_counter() - began:.1f} s", flush=True)
        run_load(target, _load(num_replicas, stream=False, is_toy=options.toy), math.inf)  # compiles what is left
        for stream in _KINDS.values() if options.only is None else [_KINDS[options.only]]:
            load = _load(num_replicas, stream=stream, is_toy=options.toy)
            runs = [run_load(target, load, math.inf) for _ in range(options.runs)]
            complaints += _add_rows(record, load, num_replicas, runs, found)
        if num_replicas > 1:
            shares = _routed(target.url)
            print(f"requests routed to each replica: {', '.join(map(str, shares))}", flush=True)
            if len(shares) != num_replicas or min(shares) == 0:
                complaints.append(f"every replica was to have requests, got {shares}")
    return complaints


def _load(num_replicas: int, *, stream: bool, is_toy: bool) -> Load:
    num_requests = _WORKLOAD.num_requests * num_replicas
    shortest, longest = _WORKLOAD.prompt_len  # its outputs have the same lengths
    load = Load(math.inf, num_requests, longest, longest, min_len=shortest, stream=stream)
    if not is_toy:
        return load
    return dataclasses.replace(
        load, num_requests=4 * num_replicas, prompt_len=16, output_len=8, min_len=4, vocab_size=256
    )


def _add_rows(
    record: Record, load: Load, num_replicas: int, runs: list[OnlineRun], found: dict[str, float]
) -> list[str]:
    lengths = f"{load.min_len}-{load.output_len} in and out"
    kind = "streamed as text" if load.stream else "answered at once"
    server = "one server" if num_replicas == 1 else f"{num_replicas} replicas behind the router"
    case = f"Qwen3-8B {load.num_requests} requests, {lengths}, {kind}: {server}"
    rates = sorted(run.output_tokens_per_s for run in runs)
    rate = rates[(len(rates) - 1) // 2]
    spread = (rates[0], rates[-1]) if len(rates) > 1 else (None, None)
    errors = [error for run in runs for error in run.errors]
    record.add(case, SERVED_THROUGHPUT, "tokens/s", rate, *spread)
    record.add(case, "errors", "requests", len(errors))
    said = f"{case}: {rate:,.0f} output tokens/s ({rates[0]:,.0f} to {rates[-1]:,.0f}), {len(errors)} errors"
    if num_replicas == 1:
        found[kind] = rate
    elif kind in found:
        record.add_ratio(case, f"{SERVED_THROUGHPUT} over one server", rate / found[kind], f"{kind}: one server")
        said += f", {rate / found[kind]:.3f} of one server"
    print(said, flush=True)
    return [f"{case}: {error}" for error in errors[:3]]


def _wait_for_replicas(url: str, num_replicas: int, process: "Popen[bytes]") -> None:
    """Until all of them serve: a router is ready with the first. One server alone is waited for by run_load.

    Raises:
        BackendError: they do not within 300 s, or their process ended.
    """
    gives_up, states = time.monotonic() + _READY_S, dict[str, str]()
    while num_replicas > 1 and [*states.values()].count("serving") < num_replicas:
        if process.poll() is not None or time.monotonic() > gives_up:
            raise BackendError(f"{num_replicas} replicas were to serve within {_READY_S:g} s, got {states}")
        time.sleep(_POLL_S)
        try:
            states = json.loads(_get(f"{url}/ready"))["replicas"]
        except (OSError, ValueError):  # not up yet, or not ready
            continue


def _routed(url: str) -> list[int]:
    """Requests that the router has sent to each replica."""
    metrics = _get(f"{url}/metrics")
    return [
        int(float(count)) for count in re.findall(r"^octavo:router_requests_routed_total\{.*\} (\S+)$", metrics, re.M)
    ]


def _get(url: str) -> str:
    with urllib.request.urlopen(url, timeout=_LOOK_S) as answer:
        text: str = answer.read().decode()
        return text


if __name__ == "__main__":
    sys.exit(main())
