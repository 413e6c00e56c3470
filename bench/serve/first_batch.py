"""The first two batches of a fresh process: what compilation and capture cost after the warm-up of an engine.

`python -m bench.serve.first_batch JSON` is that process: random weights, the same requests twice.
"""

import dataclasses
import json
import math
import sys
import time
from pathlib import Path
from typing import Any

from bench.serve.cold_start import first_line_of
from bench.serve.host import QUICK_LIMITS
from bench.serve.measure import run_requests
from bench.serve.shapes import SHAPES, build_model, make_toy
from bench.serve.workloads import MAX_NUM_SEQS, MEMORY_SHARE, VARIANTS, WORKLOADS, EngineVariant, Workload, shrink
from octavo.serve import LLM


@dataclasses.dataclass(frozen=True)
class FirstBatches:
    """Seconds to make the engine with its warm-up, weights aside, and of each batch; output tokens of one batch."""

    build_s: float
    first_s: float
    second_s: float
    num_output_tokens: int


def measure_first_batches(
    workload: Workload, variant: EngineVariant, recipe: str, device: str, caches: Path, *, timeout_s: float, quick: bool
) -> FirstBatches:
    """Run both batches in a process of its own.

    Args:
        caches: folder of compiled kernels; empty for a machine that has never run the model.
    Raises:
        BackendError: it failed, or it took longer than timeout_s.
    """
    fields = {"workload": workload.name, "variant": variant.name, "recipe": recipe, "device": device, "quick": quick}
    command = [sys.executable, "-m", "bench.serve.first_batch", json.dumps(fields)]
    return FirstBatches(**json.loads(first_line_of(command, caches, timeout_s)))


def main(fields: dict[str, Any]) -> None:
    """Build, generate twice, print FirstBatches as JSON."""
    workload, variant, quick = WORKLOADS[fields["workload"]], VARIANTS[fields["variant"]], bool(fields["quick"])
    config = SHAPES[workload.model]
    if quick:
        workload, config = shrink(workload), make_toy(config)
    limits: dict[str, Any] = {"max_num_seqs": MAX_NUM_SEQS, "gpu_memory_utilization": MEMORY_SHARE}
    limits |= {"max_model_len": workload.max_len}
    model = build_model(config, variant.numerics(fields["recipe"]), fields["device"])
    began = time.perf_counter()
    llm = LLM(model, enable_prefix_caching=False, plan_known_lengths=False, **(QUICK_LIMITS if quick else limits))
    build_s = time.perf_counter() - began
    requests = workload.draw(config.vocab_size, workload.num_requests)
    first, second = (run_requests(llm.engine, requests, "cpu", math.inf) for _ in range(2))
    batches = FirstBatches(build_s, first.seconds, second.seconds, second.num_output_tokens)
    print(json.dumps(dataclasses.asdict(batches)), flush=True)


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
