"""`octavo bench`: speed, memory and energy beside peers in the same run, correctness checked first.

Each benchmark is a module with `run(options) -> Outcome`; `run_benchmark` runs one by name and writes its record.
"""

from importlib import import_module

from bench.options import BenchOptions
from bench.outcome import Outcome, finish

__all__ = ["BENCHMARKS", "BenchOptions", "Outcome", "run_benchmark"]

# Name -> what it measures; the module bench.NAME or bench.speed.NAME runs it.
BENCHMARKS = {
    "gemm": "products of quantized operands beside bf16's",
    "quant": "quantizers and fused norm or activation with quantization, against a copy",
    "linear": "forward and backward of one linear, quantization included",
    "layer": "forward and backward of one transformer layer",
    "step": "a training step of six Llama-3-8B layers, and of a whole model of eight with head and loss",
    "sizes": "the step's speedup in the layer shapes of 1B to 30B models",
    "capacity": "how much of a Llama-3-8B-wide model and batch one GPU holds, with its head and loss",
    "qdq": "Llama's and GPT-J's blocks with explicit Q/DQ pairs, as they stand and fused",
    "serve": "the engine offline and behind its server, on random weights in the shapes of 8B and 30B models",
    "rl": "rollouts, refit, the learner's step and whole steps of the reinforcement loop, on random weights",
}


def run_benchmark(name: str, options: BenchOptions) -> bool:
    """Run a benchmark of BENCHMARKS; whether all went well."""
    module = f"bench.{name}" if name in ("serve", "rl") else f"bench.speed.{name}"
    outcome = import_module(module).run(options)
    return finish(outcome, options)
