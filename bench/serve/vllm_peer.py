"""vLLM over workloads of `octavo bench serve`: `python -m bench.serve.vllm_peer --tensor-parallel-size 2 --out DIR`."""

import importlib
import importlib.util
import json
import os
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from bench.program import Program
from bench.record import Record, summarize
from bench.report import THROUGHPUT
from bench.serve.shapes import SHAPES
from bench.serve.workloads import MEMORY_SHARE, WORKLOADS, Requests

_NAMES = ("8b-single", "8b-mixed", "8b-64x8192")
_MODEL, _NUM_RUNS = "Qwen3-8B", 3
_WHAT = (
    "Random weights in the model's shape, FP8 weights and activations with a scale a tensor (quantization=fp8), FP8 KV "
    "cache, temperature 1, ignore_eos, no prefix cache, all requests at once; the median of three runs after one that "
    "warms up. octavo's rows in tensor.json have the same settings, but blockwise scales. The rest is vLLM's "
    "own; multicast, DeepGEMM and FlashInfer are off or not there."
)
# multicast stays off, as it is for octavo; no kernels that are compiled or fetched at the first call
_ENVIRONMENT = {
    "NCCL_NVLS_ENABLE": "0",
    "TORCH_SYMM_MEM_DISABLE_MULTICAST": "1",
    "VLLM_ALLREDUCE_USE_SYMM_MEM": "0",
    "VLLM_USE_DEEP_GEMM": "0",
    "VLLM_USE_FLASHINFER_SAMPLER": "0",
    "VLLM_WORKER_MULTIPROC_METHOD": "spawn",
    "VLLM_NO_USAGE_STATS": "1",
    "HF_HUB_OFFLINE": "1",
}


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure the workloads, print them, write the record."""
    parser = Program("bench.serve.vllm_peer", __doc__)
    parser.add_argument("--tensor-parallel-size", type=int, default=1)
    parser.add_argument("--workload", action="append", choices=_NAMES, default=[], help="this one; repeatable")
    options = parser.parse(arguments)
    if importlib.util.find_spec("vllm") is None:
        parser.error("vLLM is not installed here, and it has an environment of its own: pip install vllm==0.26.0")
    os.environ.update(_ENVIRONMENT)
    vllm: Any = importlib.import_module("vllm")  # which reads its environment
    llm = _start(vllm, options.tensor_parallel_size)
    record = Record("vllm", f"vLLM {vllm.__version__}. {_WHAT}", device=options.device)
    for name in options.workload or _NAMES:
        workload = WORKLOADS[name]
        requests = workload.draw(SHAPES[_MODEL].vocab_size, workload.num_requests)
        _run(vllm, llm, [(ids, min(num, 8)) for ids, num in requests])  # warm
        runs = [_run(vllm, llm, requests) for _ in range(_NUM_RUNS)]
        rates = summarize([sum(num for _, num in requests) / seconds for seconds in runs])
        case = f"{workload.label}: vLLM {vllm.__version__}, {options.tensor_parallel_size} GPUs"
        record.add(case, THROUGHPUT, "tokens/s", rates.median_us, rates.p20_us, rates.p80_us)
        said = f"{case}: {rates.median_us:,.0f} output tokens/s ({rates.p20_us:,.0f} to {rates.p80_us:,.0f})"
        if len(requests) == 1:
            first = summarize([_run(vllm, llm, [(requests[0][0], 1)]) for _ in range(_NUM_RUNS)]).median_us
            ms = 1e3 * (summarize(runs).median_us - first) / (requests[0][1] - 1)
            record.add(case, "time a token after the first", "ms", ms)
            said += f", {ms:.3f} ms a token after the first"
        print(said, flush=True)
        if options.out is not None:
            record.save(options.out, options.commit)
    return 0


def _start(vllm: Any, num_gpus: int) -> Any:
    """An engine without a checkpoint: a folder that has the model's config alone."""
    began = time.perf_counter()
    folder = Path(tempfile.mkdtemp())
    (folder / "config.json").write_text(json.dumps(SHAPES[_MODEL].to_hf() | {"torch_dtype": "bfloat16"}))
    llm = vllm.LLM(
        str(folder),
        skip_tokenizer_init=True,
        load_format="dummy",
        quantization="fp8",
        kv_cache_dtype="fp8",
        tensor_parallel_size=num_gpus,
        max_num_seqs=256,
        max_model_len=max(WORKLOADS[name].max_len for name in _NAMES),
        gpu_memory_utilization=MEMORY_SHARE,
        enable_prefix_caching=False,
        disable_log_stats=True,
    )
    print(f"started after {time.perf_counter() - began:.0f} s", flush=True)
    return llm


def _run(vllm: Any, llm: Any, requests: Requests) -> float:
    """Seconds for all of them."""
    prompts = [{"prompt_token_ids": ids} for ids, _ in requests]
    common = {"temperature": 1.0, "ignore_eos": True, "detokenize": False}
    params = [vllm.SamplingParams(max_tokens=num_tokens, **common) for _, num_tokens in requests]
    began = time.perf_counter()
    outputs = llm.generate(prompts, params, use_tqdm=False)
    seconds = time.perf_counter() - began
    num_tokens = sum(len(output.outputs[0].token_ids) for output in outputs)
    assert num_tokens == sum(num for _, num in requests), f"vLLM gave {num_tokens} tokens"
    return seconds


if __name__ == "__main__":
    sys.exit(main())
