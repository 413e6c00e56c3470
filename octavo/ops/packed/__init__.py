"""Blocks of 128 elements on their way between ranks: pieces of codes and scales, quantized, summed and decoded.

P pieces of n elements, B = ceil(n / 128) blocks each; the last block of a piece may be ragged. Codes and scales are
views into one buffer, so pieces are apart by more than their sizes. Every op writes into tensors that it is given,
whose pieces are contiguous.
"""

import importlib
from types import ModuleType

import torch

from octavo.errors import ShapeError
from octavo.ops._runtime.registry import kernel_or_reference, register
from octavo.ops.packed import reference
from octavo.ops.packed.reference import BLOCK

__all__ = ["BLOCK", "decode_pieces_", "kernels", "quantize_pieces_", "requantize_pieces_", "round_pieces_"]


def _register(name: str, schema: str) -> object:
    run = getattr(reference, name)
    cuda = kernel_or_reference(f"packed.triton.{name}", run)
    return register(f"{name}{schema} -> ()", reference=run, fake=lambda *_: None, cuda=cuda)


_quantize = _register("quantize_pieces", "(Tensor x, Tensor(a!) codes, Tensor(b!) scales, Tensor(c!)? residual)")
_round = _register("round_pieces", "(Tensor x, Tensor(a!) codes, Tensor(b!) scales, Tensor seed, int start)")
_requantize = _register(
    "requantize_pieces",
    "(Tensor codes, Tensor scales, Tensor(a!) out_codes, Tensor(b!) out_scales, bool average, Tensor(c!)? residual)",
)
_decode = _register("decode_pieces", "(Tensor codes, Tensor scales, Tensor(a!) out)")


@torch.no_grad()
def quantize_pieces_(
    x: torch.Tensor, codes: torch.Tensor, scales: torch.Tensor, residual: torch.Tensor | None = None
) -> None:
    """Quantize by the contract, block_1x128 E4M3, but a block that holds NaN or an infinity has the scale NaN.

    Args:
        x: [P, n] fp32 or bf16.
        codes: [P, B, 128] float8_e4m3fn, written.
        scales: [P, B] fp32, written.
        residual: [P, n] fp32 or bf16, added to x in fp32; then what the codes lack of the sum, 0 where that is not
            finite.
    Raises:
        ShapeError: the shapes do not fit each other.
    Exactness: bitwise, CPU and GPU.
    """
    _check(x, codes, scales)
    if residual is not None and (residual.shape != x.shape or residual.stride(-1) != 1):
        raise ShapeError(
            f"the residual must have x's shape {tuple(x.shape)} and contiguous pieces, got {tuple(residual.shape)} "
            f"with strides {residual.stride()}"
        )
    if x.numel():
        _quantize(x, codes, scales, residual)  # type: ignore[operator]


@torch.no_grad()
def round_pieces_(
    x: torch.Tensor, codes: torch.Tensor, scales: torch.Tensor, seed: torch.Tensor, start: int = 0
) -> None:
    """As quantize_pieces_, but rounded stochastically: the mean of the result is x.

    Args:
        x: as in quantize_pieces_.
        codes: as in quantize_pieces_.
        scales: as in quantize_pieces_.
        seed: int32 scalar on x's device.
        start: element i of piece p has the random bits of place start + p * n + i (numerics.stochastic.random_bits).
    Errors and exactness as quantize_pieces_.
    """
    _check(x, codes, scales)
    if x.numel():
        _round(x, codes, scales, seed, start)  # type: ignore[operator]


@torch.no_grad()
def requantize_pieces_(
    codes: torch.Tensor,
    scales: torch.Tensor,
    out_codes: torch.Tensor,
    out_scales: torch.Tensor,
    *,
    average: bool = False,
    residual: torch.Tensor | None = None,
) -> None:
    """Quantize the sum of all pieces, made in fp32 one after the other, as quantize_pieces_ does.

    Args:
        codes: [P, B, 128] float8_e4m3fn.
        scales: [P, B] fp32.
        out_codes: [1, B, 128] float8_e4m3fn, written.
        out_scales: [1, B] fp32, written.
        average: quantize the sum divided by P.
        residual: [1, n] fp32 or bf16, to which what the new codes lack of the sum is added, where that is finite.
    Errors and exactness as quantize_pieces_.
    """
    _check(codes[:1].flatten(1) if residual is None else residual, out_codes, out_scales)
    if codes.numel():
        _requantize(codes, scales, out_codes, out_scales, average, residual)  # type: ignore[operator]


@torch.no_grad()
def decode_pieces_(codes: torch.Tensor, scales: torch.Tensor, out: torch.Tensor) -> None:
    """codes * scale, or sums of as many neighbouring pieces as there are more than in `out`, one after the other.

    Args:
        codes: [P, B, 128] float8_e4m3fn.
        scales: [P, B] fp32.
        out: [Q, n] fp32 or bf16, written; P a multiple of Q. Products and sums are fp32, rounded once.
    Errors and exactness as quantize_pieces_.
    """
    num_summed = max(len(codes) // max(len(out), 1), 1)
    _check(out, codes[::num_summed], scales[::num_summed])
    if out.numel():
        _decode(codes, scales, out)  # type: ignore[operator]


def kernels() -> ModuleType:
    """The launchers, for pieces that lie apart in the memory of several GPUs: those no reference reaches."""
    return importlib.import_module("octavo.ops.packed.triton")


def _check(x: torch.Tensor, codes: torch.Tensor, scales: torch.Tensor) -> None:
    shape = (len(x), -(-x.shape[-1] // BLOCK), BLOCK)
    if x.dim() != 2 or codes.shape != shape or scales.shape != shape[:2]:
        raise ShapeError(
            f"pieces [P, n] have codes [P, ceil(n / 128), 128] and scales [P, ceil(n / 128)], got {tuple(x.shape)}, "
            f"{tuple(codes.shape)} and {tuple(scales.shape)}"
        )
