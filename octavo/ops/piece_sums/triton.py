"""Sums of pieces as one Triton kernel: reads each element once.

R rows, L elements a row, P pieces a row. A program owns ROWS x WIDTH elements. Only two numbers are ever added at once,
so the order is the reference's whatever layout the compiler chooses.
"""

import torch
import triton
import triton.language as tl

from octavo.ops._runtime.launch.triton import launcher_of, on_device_of
from octavo.ops.piece_sums.reference import PIECE, piece_width

NUM_WARPS = 4


@triton.jit
def sum_pieces(out, x, R, L, P, SQUARED: tl.constexpr, ROWS: tl.constexpr, WIDTH: tl.constexpr, LEVELS: tl.constexpr):
    """out [R, P] of x [R, L]: ROWS rows and WIDTH = 2**LEVELS columns a program."""
    program = tl.program_id(0).to(tl.int64)
    piece = program % P
    rows = program // P * ROWS + tl.arange(0, ROWS)
    columns = piece * WIDTH + tl.arange(0, WIDTH)
    is_in = (rows < R)[:, None] & (columns < L)[None, :]
    sums = tl.load(x + rows[:, None] * L + columns[None, :], mask=is_in, other=0.0).to(tl.float32)
    if SQUARED:
        sums = sums * sums
    for level in tl.static_range(LEVELS):
        sums = tl.sum(tl.reshape(sums, (ROWS, 2, WIDTH >> (level + 1))), axis=1)
    tl.store(out + rows * P + piece, tl.reshape(sums, (ROWS,)), mask=rows < R)


def piece_sums(x: torch.Tensor, is_squared: bool) -> torch.Tensor:
    """Sums of x's pieces; arguments and result as reference.piece_sums, x contiguous on a GPU."""
    num_rows, length = x.shape
    width = piece_width(length)
    rows, num_pieces = PIECE // width, triton.cdiv(length, width)
    out = torch.empty((num_rows, num_pieces), dtype=torch.float32, device=x.device)
    if num_rows == 0:
        return out
    with on_device_of(x):
        launch = launcher_of(
            sum_pieces, SQUARED=is_squared, ROWS=rows, WIDTH=width, LEVELS=width.bit_length() - 1,
            num_warps=NUM_WARPS, enable_fp_fusion=False,
        )  # fmt: skip
        launch((triton.cdiv(num_rows, rows) * num_pieces,), out, x, num_rows, length, num_pieces)
    return out
