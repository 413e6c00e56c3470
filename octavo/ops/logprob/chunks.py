"""Chunks of logits between the lm_head's GEMMs: how large they may be, their memory, and the GEMMs themselves."""

import torch

# Larger chunks save nothing more: an 8B Llama's head (4096 x 128256) takes 1.5 ms for the 1024 rows that fit here.
MAX_CHUNK_BYTES = 512 << 20
# Where every chunk adds to the whole fp32 gradient of the head: of that Llama's 40,960 tokens, 2 GiB save 10 of 216 ms.
MAX_SUMMED_CHUNK_BYTES = 2 << 30
# Up to here the backward of log-probabilities takes the forward's logits: those of 8,192 tokens of that head fit.
MAX_KEPT_BYTES = 4 << 30
LOGIT_BYTES = 4  # fp32
QUANTUM = 128  # rows or columns: whole tiles of any GEMM
_PITCH = 16  # elements: 16-byte accesses in every row, whatever the vocabulary


def chunk_len(total: int, other: int, bytes_per_logit: int, max_bytes: int | None = None) -> int:
    """Length of equal chunks of `total` rows or columns, each [length, other] within the memory.

    Args:
        max_bytes: None for MAX_CHUNK_BYTES.
    Returns:
        total, or a multiple of QUANTUM; at least QUANTUM.
    """
    budget = MAX_CHUNK_BYTES if max_bytes is None else max_bytes
    fitting = budget // max(1, other * bytes_per_logit)
    fitting = max(fitting // QUANTUM, 1) * QUANTUM
    if total <= fitting:
        return max(total, 1)
    count = -(-total // fitting)
    return -(-total // (count * QUANTUM)) * QUANTUM


def loss_chunks(tokens: int, vocab: int, grad_bytes: int, needs_weight: bool) -> tuple[int, int]:
    """Tokens whose gradients of logits exist at once, and those of them whose fp32 logits do.

    Args:
        grad_bytes: of a logit's gradient; 0 where none is wanted.
        needs_weight: whether each chunk adds to the head's gradient.
    """
    if not grad_bytes:
        return (chunk_len(tokens, vocab, LOGIT_BYTES),) * 2
    max_bytes = MAX_SUMMED_CHUNK_BYTES if needs_weight else MAX_CHUNK_BYTES
    step = chunk_len(tokens, vocab, grad_bytes, max_bytes)
    return step, chunk_len(step, vocab, 2 * LOGIT_BYTES, max_bytes)  # in half the memory


def kept_bytes(tokens: int, vocab: int) -> int:
    """Memory of the fp32 logits of all tokens, as empty_chunk makes it."""
    return tokens * _pitch(vocab) * LOGIT_BYTES


def keeps_logits(device: torch.device, num_bytes: int) -> bool:
    """Whether a forward keeps so many bytes of logits for its backward: on a GPU alone, up to MAX_KEPT_BYTES."""
    return device.type == "cuda" and num_bytes <= MAX_KEPT_BYTES


def empty_chunk(rows: int, cols: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Uninitialised [rows, cols] whose rows start at multiples of 16 elements."""
    return torch.empty(rows, _pitch(cols), dtype=dtype, device=device)[:, :cols]


def _pitch(cols: int) -> int:
    return -(-cols // _PITCH) * _PITCH


def gemm_dtype(x: torch.Tensor, weight: torch.Tensor) -> torch.dtype:
    """Dtype of the GEMMs' operands: the inputs' own on a GPU, fp32 on a CPU, where 16-bit products can be very slow."""
    return torch.promote_types(x.dtype, weight.dtype) if x.is_cuda else torch.float32


def product(a: torch.Tensor, b: torch.Tensor, *, out: torch.Tensor, accumulate: bool = False) -> torch.Tensor:
    """out = a @ b, or out += a @ b where accumulate, summed in fp32.

    Args:
        a: [M, K].
        b: [K, N], a's dtype.
        out: [M, N], a's dtype or fp32; another dtype is rounded to, once.
    Returns:
        out.
    """
    if out.dtype == a.dtype:
        return torch.addmm(out, a, b, out=out) if accumulate else torch.mm(a, b, out=out)
    if out.dtype == torch.float32:  # 16-bit operands on a GPU
        if accumulate:
            return torch.addmm(out, a, b, out_dtype=torch.float32, out=out)
        return torch.mm(a, b, out_dtype=torch.float32, out=out)
    assert not accumulate, f"a sum over chunks is kept in fp32, got {out.dtype}"
    return out.copy_(torch.mm(a, b))
