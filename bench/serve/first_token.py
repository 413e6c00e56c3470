"""`python -m bench.serve.first_token JSON`: a process that loads a checkpoint, makes one token and says so."""

import json
import sys
import time
from pathlib import Path
from typing import Any

import torch

from octavo.serve import LLM, SamplingParams
from octavo.serve.compile_ahead import compiling_ahead
from octavo.serve.engine import EngineConfig
from octavo.serve.model_choice import load_for_inference


def main(fields: dict[str, Any]) -> None:
    """Load as LLM does, generate, print seconds of each stage and the load's peak of the GPU's memory as JSON.

    Args:
        fields: path, recipe, kv_cache_dtype, exact, device, prompt_ids and limits of the LLM; for a profile also
            process_began (time.time()), and then every Triton compilation and two more requests are told of.
    """
    details: dict[str, Any] = {"stages": {}, "compilations": []}
    if "process_began" in fields:
        _note_compilations(details["compilations"])
        details["stages"]["interpreter and imports"] = time.time() - fields["process_began"]
    began, path, device = time.perf_counter(), Path(fields["path"]), str(fields["device"])
    asked: dict[str, Any] = {"quantization": fields["recipe"], "device": device, "dtype": None}
    asked |= {"kv_cache_dtype": fields["kv_cache_dtype"], "exact": fields["exact"]}
    asked |= {"attention_dtype": "auto", "kv_scales": "auto"}
    with compiling_ahead(path, asked, EngineConfig(**fields["limits"])):  # as LLM does for a path
        model = load_for_inference(path, **asked)
    peak_bytes = torch.cuda.max_memory_allocated() if model.device.type == "cuda" else 0  # the engine resets it
    read = time.perf_counter()
    llm = LLM(model, path if (path / "tokenizer.json").is_file() else None, **fields["limits"])
    loaded = time.perf_counter()
    [output] = llm.generate([fields["prompt_ids"]], SamplingParams(max_tokens=1, ignore_eos=True))
    done = time.perf_counter()
    stages: dict[str, Any] = {"load_s": loaded - began, "request_s": done - loaded}
    stages |= {"load_peak_bytes": peak_bytes, "bf16_bytes": 2 * model.num_params}
    stages["num_tokens"] = len(output.outputs[0].token_ids)
    if "process_began" in fields:
        details["stages"] |= {"checkpoint": read - began, "engine": loaded - read, "first token": done - loaded}
        for name, num_tokens in (("first token again", 1), ("a request of four tokens", 4)):
            began = time.perf_counter()
            llm.generate([fields["prompt_ids"]], SamplingParams(max_tokens=num_tokens, ignore_eos=True))
            details["stages"][name] = time.perf_counter() - began
        stages["details"] = details
    print(json.dumps(stages), flush=True)


def _note_compilations(found: list[tuple[str, float]]) -> None:
    """Add each Triton kernel that is compiled from now on, and its seconds."""
    try:
        from triton import knobs
    except ImportError:  # a machine without a GPU may have no triton, and compiles nothing
        return

    def note(*, metadata: dict[str, Any], times: Any, **_: Any) -> None:
        found.append((metadata["name"], times.total / 1e6))

    knobs.compilation.listener = note


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
