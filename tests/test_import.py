"""What importing octavo costs: under a second past torch, no CUDA context, no kernel library."""

import json
import subprocess
import sys
from typing import Any

LIMIT_S = 1.0

# CPU seconds of a fresh process, so that a busy machine does not fail the test. One that is too slow gets
# a second run, which then counts: the first may have been writing bytecode.
PAST_TORCH = """
import json, sys, time
import torch
before, started = set(sys.modules), time.process_time()
import octavo
from importlib.util import find_spec
for name, home in octavo._HOMES.items():
    if (spec := find_spec(home)) and spec.origin:
        getattr(octavo, name)
print(json.dumps({
    "seconds": time.process_time() - started,
    "new": sorted({module.split(".")[0] for module in set(sys.modules) - before}),
    "cuda": torch.cuda.is_initialized(),
}))
"""

BARE = """
import json, sys, time
started = time.process_time()
import octavo, octavo.cli
print(json.dumps({"seconds": time.process_time() - started, "torch": "torch" in sys.modules}))
"""


def measure(code: str) -> dict[str, Any]:
    for _ in range(2):
        done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
        assert done.returncode == 0, done.stderr
        measured: dict[str, Any] = json.loads(done.stdout)
        if measured["seconds"] < LIMIT_S:
            break
    return measured


def test_import_is_quick_and_leaves_torch_out() -> None:
    measured = measure(BARE)
    assert measured["seconds"] < LIMIT_S
    assert not measured["torch"]


def test_using_every_public_name_is_quick_and_starts_nothing() -> None:
    measured = measure(PAST_TORCH)
    assert measured["seconds"] < LIMIT_S, measured
    assert not measured["cuda"]
    heavy = {"triton", "transformers", "accelerate", "trl", "deepspeed", "fastapi", "matplotlib"}
    assert not heavy & set(measured["new"]), measured["new"]


BUILD = """
import json, sys, time
from octavo.models import ModelConfig, load_model
started = time.process_time()
sizes = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 128}
load_model(ModelConfig("qwen3_moe", 96, 128, 256, 2, 4, 4, 32, qk_norm=True, **sizes))
print(json.dumps({"seconds": time.process_time() - started, "compiler": "torch._dynamo" in sys.modules}))
"""


def test_building_a_model_leaves_the_compiler_out() -> None:
    """Drawing values on the meta device would import it, of which embeddings and routers have none."""
    assert not measure(BUILD)["compiler"]


TRY_OUT = """
import json, sys, time
import torch
from bench.serve.shapes import QWEN3_30B_A3B, build_model, make_toy
from octavo import LLM
from octavo.numerics import Numerics, get_recipe
from octavo.serve.engine.waiting import try_out
model = build_model(make_toy(QWEN3_30B_A3B), Numerics(get_recipe("blockwise"), "fp8"), "cpu")
runner = LLM(model, max_num_seqs=2, max_num_batched_tokens=64, num_kv_pages=2).engine.model_runner
started = time.process_time()
with torch.no_grad():
    try_out(lambda: runner.warm_up_steps[0].run(model, runner.layers, runner.slots, 64))
found = {"torch._dynamo", "torch._inductor", "sympy"} & set(sys.modules)
print(json.dumps({"seconds": time.process_time() - started, "compilers": sorted(found)}))
"""


def test_what_comes_before_a_capture_leaves_compilers_out() -> None:
    """A dispatch mode of torch's would import them at its first operation, and so would its matmul in Python."""
    assert not measure(TRY_OUT)["compilers"]


COMPILE_AHEAD = """
import json, sys, time
import torch
started = time.process_time()
import octavo.serve.compile_ahead, octavo.serve.llm
try:
    import octavo.serve.kernel_processes
except ImportError as error:
    assert error.name == "triton", error
found = {"fastapi", "pydantic", "rich", "torch._dynamo"} & set(sys.modules)
print(json.dumps({"seconds": time.process_time() - started, "found": sorted(found)}))
"""


def test_compile_processes_load_neither_a_server_nor_a_compiler() -> None:
    """An LLM needs neither FastAPI nor what reads configs."""
    assert not measure(COMPILE_AHEAD)["found"]


START = """
import contextlib, json, sys, tempfile, time
from pathlib import Path
import torch
from octavo.models import save_model
from octavo.serve.compile_ahead import jobs_of
from octavo.serve.engine import EngineConfig
from octavo.serve.model_choice import load_for_inference
from octavo.serve.stand_in import build_stand_in
from tests.serve.random_models import make_model
try:
    from octavo.ops._runtime.kernel_requests.triton import requesting_kernels
except ImportError as error:
    assert error.name == "triton", error
    requesting_kernels = contextlib.nullcontext
asked = {"quantization": "blockwise", "kv_cache_dtype": "fp8", "exact": None, "device": "cpu"}
asked |= {"attention_dtype": "auto", "dtype": None, "kv_scales": "auto"}
started = time.process_time()
with tempfile.TemporaryDirectory() as folder:
    path = Path(folder, "m")
    save_model(make_model("qwen3", "bf16", "bf16", exact=False), path)
    load_for_inference(path, **asked)
    with requesting_kernels(print), torch.no_grad():
        model = build_stand_in(path, asked, torch.device("cpu"))
        for job in jobs_of(model, EngineConfig(max_num_seqs=4, max_num_batched_tokens=64), 2048):
            job.run()
found = {"torch._dynamo", "torch._inductor", "sympy"} & set(sys.modules)
print(json.dumps({"seconds": time.process_time() - started, "compilers": sorted(found)}))
"""


def test_a_start_leaves_compilers_out() -> None:
    """A stand-in, its steps without kernels, and the checkpoint's loading beside them."""
    assert not measure(START)["compilers"]
