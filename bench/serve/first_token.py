"""`python -m bench.serve.first_token JSON`: a process that loads a checkpoint, makes one token and says so."""

import json
import sys
import time
from pathlib import Path
from typing import Any

import torch

from octavo.models import load_model
from octavo.serve import LLM, SamplingParams


def main(fields: dict[str, Any]) -> None:
    """Load as LLM does, generate, print seconds of each stage and the load's peak of the GPU's memory as JSON.

    Args:
        fields: path, recipe, kv_cache_dtype, exact, device, prompt_ids and limits of the LLM.
    """
    began, path, device = time.perf_counter(), Path(fields["path"]), str(fields["device"])
    numerics = {name: fields[name] for name in ("recipe", "kv_cache_dtype", "exact")}
    model = load_model(path, device=device, keep_codes_only=True, **numerics)
    peak_bytes = torch.cuda.max_memory_allocated() if model.device.type == "cuda" else 0  # the engine resets it
    llm = LLM(model, path if (path / "tokenizer.json").is_file() else None, **fields["limits"])
    loaded = time.perf_counter()
    [output] = llm.generate([fields["prompt_ids"]], SamplingParams(max_tokens=1, ignore_eos=True))
    done = time.perf_counter()
    stages = {"load_s": loaded - began, "request_s": done - loaded}
    stages |= {"load_peak_bytes": peak_bytes, "bf16_bytes": 2 * model.num_params}
    print(json.dumps(stages | {"num_tokens": len(output.outputs[0].token_ids)}), flush=True)


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
