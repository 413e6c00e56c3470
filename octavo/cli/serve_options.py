"""The options of `octavo serve`, each with its help; `octavo.cli.serve` gives the defaults."""

from pathlib import Path
from typing import Annotated

import typer

from octavo.numerics.contract import named_kv_scales
from octavo.serve.model_choice import named_kv_cache_dtype

# The model

TokenizerFile = Annotated[Path | None, typer.Option(help="tokenizer.json; the checkpoint's by default.")]
ChatTemplate = Annotated[
    Path | None, typer.Option(help="File with a Jinja chat template; the checkpoint's own by default.")
]
ServedModelName = Annotated[
    list[str] | None,
    typer.Option(
        help="Name that clients ask for; several are fine. The directory's by default; RUN-step-N for the model of a "
        "training run's checkpoint."
    ),
]
DType = Annotated[
    str, typer.Option(help="Of weights in high precision and activations: bfloat16 or float32; auto is the model's.")
]
Quantization = Annotated[
    str | None,
    typer.Option(
        help="fp8 (rowwise, or what an FP8 checkpoint is) or a recipe's name; the checkpoint's own by default."
    ),
]
KVCacheDtype = Annotated[
    str, typer.Option(callback=named_kv_cache_dtype, help="bf16 (auto is that), or fp8: half the memory.")
]
AttentionDtype = Annotated[
    str, typer.Option(help="What attention multiplies in: bf16, or fp8, which needs an FP8 cache.")
]
KVScales = Annotated[
    str,
    typer.Option(
        callback=named_kv_scales,
        help="Of an FP8 cache: per_token_head, or one of K and of V a layer: engine (made by each update's first "
        "batch) or trainer (handed over with each update).",
    ),
]
KVScaleMargin = Annotated[float, typer.Option(min=1.0, help="Factor by which --kv-scales engine raises an amax.")]
Exact = Annotated[bool, typer.Option("--exact", help="Bits that depend on neither batch nor chunking.")]
Device = Annotated[str | None, typer.Option(help="cpu or cuda; the GPU if there is one by default.")]

TensorParallelSize = Annotated[
    int, typer.Option(min=1, help="GPUs among which each linear is cut; their processes are started here.")
]
TensorParallelMode = Annotated[
    str | None, typer.Option(help="gather (one GPU's bits) or reduce; gather by default with --exact.")
]
DataParallelSize = Annotated[
    int, typer.Option(min=1, help="Replicas of the server behind this port, each a process with GPUs of its own.")
]

# The engine

MaxNumSeqs = Annotated[int, typer.Option(help="Sequences that run at a time.")]
MaxNumBatchedTokens = Annotated[
    int | None,
    typer.Option(
        help="Tokens a step; 1024 by default. A step with prompts beside answers under way has half, while few prompts "
        "wait. More: prompts sooner, answers less evenly."
    ),
]
MaxModelLen = Annotated[int | None, typer.Option(help="Tokens of a sequence, prompt and output.")]
NumKVPages = Annotated[
    int | None,
    typer.Option("--num-kv-pages", "--num-gpu-blocks-override", help="Pages of 64 tokens; what fits by default."),
]
GpuMemoryUtilization = Annotated[float, typer.Option(help="Share of the GPU's memory to take.")]
EnablePrefixCaching = Annotated[bool, typer.Option(help="Share pages between prompts that begin alike.")]
Seed = Annotated[int, typer.Option(help="Seed of requests that bring none.")]
ReturnRoutedExperts = Annotated[
    bool,
    typer.Option(
        "--enable-return-routed-experts",
        help="Record the experts of each token, for completions that ask for return_routed_experts.",
    ),
]
EnforceEager = Annotated[bool, typer.Option("--enforce-eager", help="Capture no CUDA graphs.")]
WarmUp = Annotated[
    bool,
    typer.Option(help="Compile kernels and capture CUDA graphs before the server is ready; else when first needed."),
]

# The server

Host = Annotated[str, typer.Option(help="Address to listen at; 0.0.0.0 for every one.")]
Port = Annotated[int, typer.Option(min=0, max=65535, help="0 for any that is free.")]
ApiKeys = Annotated[
    list[str] | None, typer.Option(help="Key that clients must send; several are fine. Also OCTAVO_API_KEY.")
]
AdminKey = Annotated[
    str | None, typer.Option(help="Key of the /admin routes, absent without it. Also OCTAVO_ADMIN_KEY.")
]
MaxNumWaiting = Annotated[int, typer.Option(help="Sequences that may wait; more are refused with 429.")]
MaxBodyBytes = Annotated[int, typer.Option(help="Largest body of a request, in bytes.")]
MaxN = Annotated[int, typer.Option(help="Samples (n) of a prompt, at most.")]
WeightsDir = Annotated[
    Path | None, typer.Option(help="Folder of checkpoints that /admin/update_weights may take over; none by default.")
]
MaxBucketBytes = Annotated[int, typer.Option(help="Largest body of a request that uploads weights.")]
UpdateTimeout = Annotated[float, typer.Option(help="Seconds after which a stale weight upload is dropped.")]
StepTimeout = Annotated[
    float, typer.Option(help="Age of a step, in s, that makes /health say 503 and ends ranks that hang.")
]
DrainTimeout = Annotated[float, typer.Option(help="Seconds that requests have to finish after SIGTERM.")]
AccessLog = Annotated[bool, typer.Option(help="A line of JSON for every request that ended.")]
