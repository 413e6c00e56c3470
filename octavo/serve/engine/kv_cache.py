"""The KV cache of all layers: how many pages fit, and their tensors."""

import os

import torch

from octavo.errors import BackendError
from octavo.models import Decoder, ModelConfig
from octavo.nn import PackedContext
from octavo.ops.attention import PAGE_SIZE, PagedKVLayer, allocate_kv_layer
from octavo.serve.engine.config import EngineConfig
from octavo.serve.engine.decode_graphs import reserve_logits
from octavo.serve.engine.expert_choices import choice_page_bytes
from octavo.serve.engine.mixed_graphs import can_mix, mixed_sizes
from octavo.serve.engine.prompt_graphs import sizes_for
from octavo.serve.engine.varlen_prefill import READ_BYTES

# a machine without a GPU shares its memory with everything else; one sequence of full length always fits
CPU_CACHE_BYTES = 256 << 20


def page_bytes(model: Decoder) -> int:
    """Bytes of one page over all layers."""
    config = model.config
    row_bytes = {"fp8": config.head_dim + 4, "bf16": config.head_dim * model.dtype.itemsize}
    return 2 * model.num_local_heads[1] * PAGE_SIZE * sum(row_bytes[kind] for kind in _layer_dtypes(model))


def plan_num_pages(model: Decoder, config: EngineConfig) -> int:
    """Pages that fit: no more than max_num_seqs of the longest sequences can use, no more than the memory holds.

    Raises:
        BackendError: if not even one page fits, or fewer than config.num_kv_pages.
    """
    if config.num_kv_pages is not None:
        check_pages_fit(config.num_kv_pages, page_bytes(model), _free_bytes(model.device))
        return config.num_kv_pages
    num_pages = _fitting_pages(model, config)
    # ranks that compute together schedule alike, so that none may have more room than another
    return num_pages if model.tensor_group is None else model.tensor_group.smallest(num_pages)


def _fitting_pages(model: Decoder, config: EngineConfig) -> int:
    longest = -(-config.resolve_max_model_len(model.config.max_position_embeddings, None) // PAGE_SIZE)
    per_page = page_bytes(model) + (choice_page_bytes(model) if config.enable_return_routed_experts else 0)
    if model.device.type == "cuda":
        available = _cuda_bytes(model, config)
    else:
        available = max(CPU_CACHE_BYTES, longest * per_page)
    num_pages = min(config.max_num_seqs * longest, available // per_page)
    if num_pages < 1:
        raise BackendError(
            f"no memory is left for the KV cache: a page takes {per_page} bytes, {available} are available; "
            "raise gpu_memory_utilization, lower max_num_batched_tokens, or use kv_cache_dtype='fp8'"
        )
    return num_pages


def check_pages_fit(num_pages: int, bytes_per_page: int, available: int) -> None:
    """Refuse a cache that is larger than the memory.

    Raises:
        BackendError: it says how many pages fit.
    """
    if num_pages * bytes_per_page > available:
        raise BackendError(
            f"num_kv_pages={num_pages} takes {num_pages * bytes_per_page / 2**30:.1f} GiB, and "
            f"{available / 2**30:.1f} GiB are free, in which {available // bytes_per_page} pages fit; lower it"
        )


def check_pages_exist(
    num_pages: int, config: ModelConfig, kv_cache_dtype: str, device: torch.device | str | None
) -> None:
    """Refuse by a model's sizes alone what is larger than all the memory of its device. Errors as check_pages_fit."""
    chosen = torch.device(device or ("cuda" if torch.cuda.is_available() else "cpu"))
    least = config.head_dim + 4 if kv_cache_dtype == "fp8" else 2 * config.head_dim
    per_page = 2 * config.num_kv_heads * PAGE_SIZE * config.num_layers * least
    check_pages_fit(num_pages, per_page, _free_bytes(chosen))


def _free_bytes(device: torch.device) -> int:
    if device.type == "cuda":
        torch.cuda.empty_cache()
        return int(torch.cuda.mem_get_info(device)[0])
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")  # of a CPU's the free part changes all the time


def allocate_kv_cache(model: Decoder, num_pages: int) -> list[PagedKVLayer]:
    """One PagedKVLayer a layer, in the format of the model's numerics, or in high precision where it fell back."""
    config, table = model.config, model.kv_table
    return [
        allocate_kv_layer(
            num_pages,
            model.num_local_heads[1],
            config.head_dim,
            kind,
            model.dtype,
            model.device,
            model.numerics.attention_dtype if kind == "fp8" else "bf16",
            None if table is None else table.layer(i),
        )
        for i, kind in enumerate(_layer_dtypes(model))
    ]


def _layer_dtypes(model: Decoder) -> list[str]:
    """Each layer's cache: "fp8" or "bf16"."""
    fallen = set[int]() if model.kv_table is None else model.kv_table.high_precision
    return ["bf16" if i in fallen else model.numerics.kv_cache_dtype for i in range(model.config.num_layers)]


def release_memory(model: Decoder) -> None:
    """Give what the process no longer holds back to the GPU's other users."""
    if model.device.type == "cuda":
        torch.cuda.empty_cache()


@torch.no_grad()
def run_full_step(model: Decoder, config: EngineConfig) -> None:
    """What takes the most memory: a step of as many tokens as one may have, without a cache."""
    num_tokens = config.max_num_batched_tokens
    longest = min(PAGE_SIZE, model.config.max_position_embeddings)
    lengths = [min(longest, num_tokens - start) for start in range(0, num_tokens, longest)]
    token_ids = torch.zeros(num_tokens, dtype=torch.int64, device=model.device)
    hidden = model(token_ids, PackedContext.from_lengths(lengths, model.numerics, model.device, model.kv_table))
    model.logits(hidden[: config.max_num_seqs]).softmax(dim=-1)


@torch.no_grad()
def _cuda_bytes(model: Decoder, config: EngineConfig) -> int:
    """The share of the GPU's memory asked for, less what is taken and what steps need on top.

    That is what a full step takes, and beside it a step by pieces and one as a graph, which keep their memory. What
    ranks share to deal logits out, which torch's allocator does not count, is taken already.
    """
    device = model.device
    num_tokens = config.max_num_batched_tokens
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats(device)
    before = torch.cuda.memory_allocated(device)
    run_full_step(model, config)
    reserve_logits(model, config)
    step_bytes = torch.cuda.max_memory_allocated(device) - before
    torch.cuda.empty_cache()
    free, total = torch.cuda.mem_get_info(device)
    sizes = sizes_for(model, num_tokens)[-1], mixed_sizes(model, num_tokens)[-1] if can_mix(model) else 0
    captured = sum(min(size, num_tokens) for size in sizes)
    graph_bytes = 0 if config.enforce_eager else step_bytes * captured // num_tokens
    return int(total * config.gpu_memory_utilization) - (total - free) - step_bytes - graph_bytes - READ_BYTES
