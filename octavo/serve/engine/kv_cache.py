"""The KV cache of all layers: how many pages fit, and their tensors."""

import torch

from octavo.errors import BackendError
from octavo.models import Decoder
from octavo.nn import PackedContext
from octavo.ops.attention import PAGE_SIZE, PagedKVLayer, allocate_kv_layer
from octavo.serve.engine.config import EngineConfig
from octavo.serve.engine.paged_context import READ_BYTES

# a machine without a GPU shares its memory with everything else; one sequence of full length always fits
CPU_CACHE_BYTES = 256 << 20


def page_bytes(model: Decoder) -> int:
    """Bytes of one page over all layers."""
    config = model.config
    is_fp8 = model.numerics.kv_cache_dtype == "fp8"
    row_bytes = config.head_dim + 4 if is_fp8 else config.head_dim * model.dtype.itemsize
    return 2 * config.num_layers * config.num_kv_heads * PAGE_SIZE * row_bytes


def plan_num_pages(model: Decoder, config: EngineConfig) -> int:
    """Pages that fit: no more than max_num_seqs of the longest sequences can use, no more than the memory holds.

    Raises:
        BackendError: if not even one page fits.
    """
    if config.num_kv_pages is not None:
        return config.num_kv_pages
    longest = -(-config.resolve_max_model_len(model.config.max_position_embeddings, None) // PAGE_SIZE)
    if model.device.type == "cuda":
        available = _cuda_bytes(model, config)
    else:
        available = max(CPU_CACHE_BYTES, longest * page_bytes(model))
    num_pages = min(config.max_num_seqs * longest, available // page_bytes(model))
    if num_pages < 1:
        raise BackendError(
            f"no memory is left for the KV cache: a page takes {page_bytes(model)} bytes, {available} are available; "
            "raise gpu_memory_utilization, lower max_num_batched_tokens, or use kv_cache_dtype='fp8'"
        )
    return num_pages


def allocate_kv_cache(model: Decoder, num_pages: int) -> list[PagedKVLayer]:
    """One PagedKVLayer a layer, in the format of the model's numerics."""
    config = model.config
    return [
        allocate_kv_layer(
            num_pages,
            config.num_kv_heads,
            config.head_dim,
            model.numerics.kv_cache_dtype,
            model.dtype,
            model.device,
            model.numerics.attention_dtype,
        )
        for _ in range(config.num_layers)
    ]


def release_memory(model: Decoder) -> None:
    """Give what the process no longer holds back to the GPU's other users."""
    if model.device.type == "cuda":
        torch.cuda.empty_cache()


@torch.no_grad()
def _cuda_bytes(model: Decoder, config: EngineConfig) -> int:
    """The share of the GPU's memory asked for, less what is taken and what one full step needs on top."""
    device = model.device
    num_tokens = config.max_num_batched_tokens
    lengths = [min(PAGE_SIZE, num_tokens - start) for start in range(0, num_tokens, PAGE_SIZE)]
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats(device)
    before = torch.cuda.memory_allocated(device)
    token_ids = torch.zeros(num_tokens, dtype=torch.int64, device=device)
    hidden = model(token_ids, PackedContext.from_lengths(lengths, model.numerics, device))
    model.logits(hidden[: config.max_num_seqs]).softmax(dim=-1)
    step_bytes = torch.cuda.max_memory_allocated(device) - before
    del hidden, token_ids
    torch.cuda.empty_cache()
    free, total = torch.cuda.mem_get_info(device)
    return int(total * config.gpu_memory_utilization) - (total - free) - step_bytes - READ_BYTES
