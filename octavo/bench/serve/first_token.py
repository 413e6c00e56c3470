"""`python -m octavo.bench.serve.first_token JSON`: a process that loads a checkpoint, makes one token and says so."""

import json
import sys
import time

from octavo.serve import LLM, SamplingParams


def main(fields: dict[str, object]) -> None:
    """Load, generate, print seconds of each stage as JSON.

    Args:
        fields: path, recipe, kv_cache_dtype, exact, device, prompt_ids and limits of the LLM.
    """
    began = time.perf_counter()
    llm = LLM(
        str(fields["path"]),
        quantization=str(fields["recipe"]),
        kv_cache_dtype=str(fields["kv_cache_dtype"]),
        exact=bool(fields["exact"]),
        device=str(fields["device"]),
        **fields["limits"],  # type: ignore[arg-type]
    )
    loaded = time.perf_counter()
    [output] = llm.generate([fields["prompt_ids"]], SamplingParams(max_tokens=1, ignore_eos=True))  # type: ignore[list-item]
    done = time.perf_counter()
    stages = {"load_s": loaded - began, "request_s": done - loaded}
    print(json.dumps(stages | {"num_tokens": len(output.outputs[0].token_ids)}), flush=True)


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
