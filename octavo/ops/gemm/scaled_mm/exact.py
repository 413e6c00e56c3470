"""The scaled GEMM in exact mode on a GPU: the library's, with M padded to a few sizes, and a check that this suffices.

cuBLASLt chooses a kernel by M. On an H200 a row's bits were the same at every size that M is padded to, for the shapes
that were tried but one; no document promises it. So no product runs at a size that was not compared first, for its
shape, in this process: the sizes up to 4,096 with the first product, each larger one when it first comes. Where one
differs, products are padded to the next that does not.
Legend: M tokens, N out, K in.
"""

import logging
from collections.abc import Callable, Iterable
from typing import NamedTuple

import torch

from octavo.errors import BackendError
from octavo.numerics.quantized import QuantizedTensor
from octavo.numerics.scaling import Scaling
from octavo.ops._runtime.kernel_requests import leaves_out_launches
from octavo.ops.gemm.scaled_mm import library
from octavo.ops.gemm.scaled_mm.reference import scaled_mm_reference

BUCKETS = (64, 128, 256, 512)  # and every multiple of the last
ROW_LOCAL = ("per_row", "block_1x128")
CHECKED_ROWS = (*BUCKETS, *range(2 * BUCKETS[-1], 4097, BUCKETS[-1]))  # with a shape's first product
_SEED = 20_26

logger = logging.getLogger(__name__)


class GemmProblem(NamedTuple):
    """What decides which kernel the library takes, but for M."""

    a_scaling: Scaling
    b_scaling: Scaling
    N: int
    K: int
    out_dtype: torch.dtype
    bias_dtype: torch.dtype | None
    device: torch.device


def bucket_of(rows: int) -> int:
    """The size that M is padded to."""
    for size in BUCKETS:
        if rows <= size:
            return size
    return -(-rows // BUCKETS[-1]) * BUCKETS[-1]


def scaled_mm_exact(
    a: QuantizedTensor, b: QuantizedTensor, bias: torch.Tensor | None, out_dtype: torch.dtype
) -> torch.Tensor:
    """scaled_mm of which a row's bits depend on that row alone, on a GPU.

    What the library does not take, and operands whose rows share a scale, go to the reference.

    Returns:
        [M, N] of out_dtype.
    Raises:
        BackendError: at a product whose rows depend on their neighbours at every size, or where that cannot be checked
            because a CUDA graph is being captured.
    """
    layout = library.layout_of(a.qdata.shape, a.scaling, b.qdata.shape, b.scaling)
    if layout.is_decoded or a.scaling.kind not in ROW_LOCAL:
        return scaled_mm_reference(a, b, bias, out_dtype)
    bias_dtype = None if bias is None else bias.dtype
    N, K = b.shape
    rows = a.shape[0]
    padded = padded_rows(GemmProblem(a.scaling, b.scaling, N, K, out_dtype, bias_dtype, a.device), rows)
    return library.scaled_mm_cuda(pad_rows(a, padded), b, bias, out_dtype)[:rows]


def pad_rows(a: QuantizedTensor, rows: int) -> QuantizedTensor:
    """a with rows of anything up to so many."""
    if a.shape[0] == rows:
        return a
    codes, scale = library.pad(a.qdata, a.scale, rows, a.shape[1])
    assert scale is not None, "there is one to pad"
    return QuantizedTensor(codes, scale, a.scaling)


_checked: dict[GemmProblem, dict[int, bool]] = {}  # whether rows have their bits at a value of M


def padded_rows(product: GemmProblem, rows: int) -> int:
    """What so many rows are padded to: the first size, from their bucket on, at which rows have the product's bits.

    Rows of random operands, at random places of a product of that size, are compared with the same among 4,096: with a
    shape's first product at all of CHECKED_ROWS, at a larger size when it first comes.

    Raises:
        BackendError: naming the product and the sizes that differ; or a CUDA graph is being captured.
    """
    first, most = bucket_of(rows), CHECKED_ROWS[-1]
    if leaves_out_launches():  # the product is made of zeros, and so would a comparison be
        return first
    further = [size for size in CHECKED_ROWS if size > first] or range(first + BUCKETS[-1], first + most, BUCKETS[-1])
    known, tried = _checked.get(product), []
    for size in (first, *further):
        if known is None or size not in known:
            known = _check(product, size)
        if known[size]:
            return size
        tried.append(size)
    raise BackendError(
        f"exact mode needs a GEMM whose rows do not depend on their neighbours, and this library's does for "
        f"{describe(product)}: bits differ at M = {', '.join(map(str, tried))} from those at M = {most}; use "
        "exact=False, another recipe, or OCTAVO_FORCE_REFERENCE=1 (slow)"
    )


def _check(product: GemmProblem, rows: int) -> dict[int, bool]:
    if torch.cuda.is_available() and torch.cuda.is_current_stream_capturing():
        raise BackendError(
            f"the first exact product of a shape, and of a number of rows beyond {CHECKED_ROWS[-1]}, is checked, which "
            f"a CUDA graph cannot hold; run {describe(product)} with M = {rows} once before the capture"
        )
    known = _checked.setdefault(product, {})
    sizes = sorted({rows} if known else {*CHECKED_ROWS, rows})
    differing = find_dependent_rows(product, sizes)
    if 0 < len(differing) < len(sizes):
        text = "exact mode: %s has other bits at M = %s; products of these sizes are padded further"
        logger.warning(text, describe(product), ", ".join(map(str, differing)))
    known.update({size: size not in differing for size in sizes})
    return known


def find_dependent_rows(
    product: GemmProblem, sizes: Iterable[int], multiply: Callable[..., torch.Tensor] | None = None
) -> list[int]:
    """The sizes of M at which a row's bits are not those that it has in the library's product of CHECKED_ROWS[-1] rows.

    Every place of every size holds one of these rows, drawn at random; a larger size has each of them at several.

    Args:
        multiply: what makes the products of these sizes, with the library's arguments; None for the library.
    """
    multiply = multiply or library.scaled_mm_cuda
    generator, most = torch.Generator(product.device).manual_seed(_SEED), CHECKED_ROWS[-1]
    a = _random_operand(most, product.K, product.a_scaling, generator)
    b = _random_operand(product.N, product.K, product.b_scaling, generator)
    bias = None
    if product.bias_dtype is not None:
        bias = torch.randn(product.N, generator=generator, device=product.device).to(product.bias_dtype)
    whole = library.scaled_mm_cuda(a, b, bias, product.out_dtype)
    differing = []
    for size in sizes:
        draws = [torch.randperm(most, generator=generator, device=product.device) for _ in range(0, size, most)]
        rows = torch.cat(draws)[:size]
        part = QuantizedTensor(
            a.qdata.view(torch.uint8)[rows].view(a.qdata.dtype), _lay_out(a.scale[rows], a.scaling), a.scaling
        )
        found = multiply(part, b, bias, product.out_dtype)
        pieces = zip(found.split(most), rows.split(most), strict=True)  # as much memory as the product, not twice
        if not all(torch.equal(_bits(piece), _bits(whole[places])) for piece, places in pieces):
            differing.append(size)
    return differing


def _random_operand(rows: int, cols: int, scaling: Scaling, generator: torch.Generator) -> QuantizedTensor:
    """Finite codes of every size, and scales over three powers of two."""
    device = generator.device
    values = torch.randn(rows, cols, generator=generator, device=device) * (scaling.fp8_max / 4)
    codes = values.clamp(-scaling.fp8_max, scaling.fp8_max).to(scaling.dtype)
    shape = scaling.scale_shape(rows, cols)
    scale = torch.exp2(4.0 * torch.rand(shape, generator=generator, device=device) - 8.0)
    return QuantizedTensor(codes, _lay_out(scale, scaling), scaling)


def _lay_out(scale: torch.Tensor, scaling: Scaling) -> torch.Tensor:
    """In the strides of quantize: groups one after the other."""
    return scale.t().contiguous().t() if scaling.kind == "block_1x128" else scale.contiguous()


def _bits(x: torch.Tensor) -> torch.Tensor:
    return x.contiguous().view(torch.int32 if x.element_size() == 4 else torch.int16)


def describe(product: GemmProblem) -> str:
    """As messages name it."""
    kinds = f"{product.a_scaling.kind} x {product.b_scaling.kind}"
    bias = "" if product.bias_dtype is None else " with a bias"
    return f"{kinds} of N = {product.N}, K = {product.K} to {product.out_dtype}{bias}"
