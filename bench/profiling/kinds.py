"""Which kind of work a kernel does, by its name; tests hold the names of octavo's own to what octavo.ops has."""

import functools
import re

OTHER = "other"
# Of octavo's Triton kernels, by their whole names: a library's may hold one of them.
OURS = {
    "attention": "attend_tiles varlen_tiles",
    "attention, backward": "delta_rows key_gradients query_gradients varlen_key_gradients varlen_query_gradients",
    "attention, cache read": "kv_rows",
    "QK-norm, RoPE, cache write": "qkv_rows",
    "QK-norm, RoPE, rounded K and V": "qkv_head_rows qkv_head_gradients",
    "norm, with quantization": (
        "norm_rows norm_long_rows norm_quantize_rows norm_quantize_tiles norm_backward_rows norm_backward_long_rows "
        "norm_backward_columns sum_partials"
    ),
    "activation, with quantization": (
        "forward_tiles forward_both whole_rows swiglu_tiles swiglu_backward_tiles swiglu_backward_both gelu_tiles "
        "gelu_backward_tiles"
    ),
    "quantization": (
        "quantize_tiles quantize_whole_rows quantize_matrices transpose_tiles update_history update_histories "
        "fake_quantize_tiles hadamard_blocks scan_all"
    ),
    "GEMM, few tokens": "narrow_tiles token_tiles",
    "GEMM, experts": "row_tiles gated_row_tiles row_pairs hp_row_tiles gradient_tiles clear_rows",
    "GEMM, exact 16-bit": "mm_tiles",
    "GEMM, bias": "bias_tiles",
    "experts' routing": "choose_experts place_few_rows place_rows gather_rows add_rows",
    "logprobs and loss": (
        "logit_rows_kernel logit_grads_kernel cross_entropy_rows_kernel block_maxima add_block_units"
    ),
    "sampling": "best_of_blocks sample_rows",
    "optimizer": "adamw_blocks accumulate_chunks sum_pieces",
    "between GPUs": (
        "add_parts gather_columns push_rows sum_parts quantize_blocks round_blocks requantize_blocks decode_blocks"
    ),
}
_OURS = {name: kind for kind, names in OURS.items() for name in names.split()}
# Of libraries' kernels, the first whose pattern is in the name.
_LIBRARY = (
    ("between GPUs", r"nccl|Memcpy PtoP"),
    ("attention, library", r"flash|fmha|sdpa|mha_|attention|cudnn::fusion"),
    ("torch.compile", r"^triton_"),
    ("optimizer", r"adam|multi_tensor|foreach"),
    ("GEMM, library", r"nvjet|gemm|cutlass|xmma|splitK|cublas|wgmma|scaled_mm|aten::mm"),
    ("copy, fill", r"Memcpy|Memset|copy_|fill|CatArray|aten::cat"),
    (
        "elementwise, reduction, index",
        r"elementwise|vectorized|reduce_kernel|softmax|index|scatter|gather|scan|arange|where|embedding|sort|compute_cuda",
    ),
)


@functools.cache
def kind_of(name: str) -> str:
    """A kernel's kind, "other" where its name tells none."""
    found = (kind for kind, pattern in _LIBRARY if re.search(pattern, name, re.IGNORECASE))
    return _OURS.get(name) or next(found, OTHER)
