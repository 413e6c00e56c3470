"""`octavo warm CHECKPOINT`: compiles the kernels that serving a checkpoint will need, into Triton's cache on disk."""

import functools
import time

import torch
import typer

from octavo import env
from octavo.cli import serve_options as options
from octavo.cli.checkpoint_folder import Checkpoint
from octavo.errors import BackendError
from octavo.serve.engine import EngineConfig, served_tokens
from octavo.serve.model_choice import as_dtype, check_checkpoint
from octavo.serve.tensor_workers import chosen_device

_ANY_LEN = 1 << 62  # a model's own limit is less


def command(
    model: Checkpoint,
    dtype: options.DType = "auto",
    quantization: options.Quantization = None,
    kv_cache_dtype: options.KVCacheDtype = "auto",
    attention_dtype: options.AttentionDtype = "auto",
    kv_scales: options.KVScales = "per_token_head",
    exact: options.Exact = False,
    device: options.Device = None,
    max_num_seqs: options.MaxNumSeqs = 256,
    max_num_batched_tokens: options.MaxNumBatchedTokens = None,
    max_model_len: options.MaxModelLen = None,
    enable_return_routed_experts: options.ReturnRoutedExperts = False,
    enforce_eager: options.EnforceEager = False,
) -> None:
    """Compile what `octavo serve` would compile at its first start, for an image or a fleet.

    It takes the options of serve below, which change kernels; leave out all others, such as --port. It needs a GPU of
    the kind that will serve. Of the checkpoint it reads config.json alone. A model that GPUs share compiles at its
    first start all the same.
    """
    limits = EngineConfig(
        **served_tokens(max_num_seqs, max_num_batched_tokens),
        max_num_seqs=max_num_seqs,
        max_model_len=max_model_len,
        enforce_eager=enforce_eager,
        enable_return_routed_experts=enable_return_routed_experts,
    )
    numerics = {"quantization": quantization, "kv_cache_dtype": kv_cache_dtype, "attention_dtype": attention_dtype}
    how = numerics | {"exact": exact, "device": device, "kv_scales": kv_scales}
    check_checkpoint(model, limits=limits, **how)  # type: ignore[arg-type]
    asked, place = how | {"dtype": as_dtype(dtype)}, chosen_device(device)
    if place.type != "cuda":
        raise BackendError(
            "octavo warm compiles kernels for this machine's GPU, and there is none to compile for; run it on a GPU of "
            "the kind that will serve"
        )
    from octavo.ops._runtime.kernel_cache.triton import counting_compilations, use_checked_cache
    from octavo.serve.compile_ahead import CompilerThreads, processes_for
    from octavo.serve.kernel_list import KernelList
    from octavo.serve.stand_in import build_stand_in

    use_checked_cache()
    listed = KernelList(model, asked, limits, place)
    began = time.perf_counter()
    with counting_compilations() as kernels:
        build = functools.partial(build_stand_in, model, asked, place)
        threads = CompilerThreads(build, limits, place, _ANY_LEN, processes_for(place), listed)
        threads.finish()
    if threads.error is not None:
        raise BackendError(f"not all kernels could be compiled: {threads.error}") from threads.error
    num_compiled = len(kernels.compiled) + threads.num_compiled
    num_found = max(0, kernels.num_found - threads.num_compiled)
    typer.echo(
        f"{torch.cuda.get_device_name(place)}: {num_compiled} kernels compiled and {num_found} found, "
        f"over {threads.num_done} steps in {time.perf_counter() - began:.1f} s; they are in {env.triton_cache_dir()}"
    )
