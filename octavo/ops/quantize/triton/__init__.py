"""Triton quantizers: rows, columns or both of a matrix to FP8 in one read, bit-equal to reference.py.

This package's host side: `Emission` for every kernel that ends with `emit` or `emit_tile` (device.py), and in matrix.py
the quantizers themselves. A program owns one BLOCK_M x BLOCK_K tile, or one whole row; plan.py says which.
"""

from typing import Any, NamedTuple

import torch

from octavo.numerics.quantized import QuantizedTensor
from octavo.numerics.scaling import Scaling
from octavo.ops._runtime.launch.triton import is_current_gpu
from octavo.ops.quantize.triton.matrix import prepared_quantizers, quantize_matrix
from octavo.ops.quantize.triton.plan import (
    NONE,
    OFFSET_LIMIT,
    PLANS,
    TilePlan,
    fill_empty_scales,
    options_of,
    plan_emission,
)

__all__ = ["NONE", "PLANS", "Emission", "Step", "TilePlan", "clear_plans", "quantize_matrix"]


class Step(NamedTuple):
    """One launch of a producer's kernel: what it passes on to emit or emit_tile, its tile and its grid."""

    out: tuple[torch.Tensor | None, ...]
    rule: tuple[Any, ...]
    block_m: int
    block_k: int
    num_warps: int
    grid: tuple[int]
    registers: int | None

    @property
    def options(self) -> dict[str, int]:
        """num_warps and, where there is one, the cap on registers, as triton names them."""
        return options_of(self.num_warps, self.registers)


class Emission:
    """The host side of emit and emit_tile: outputs of both directions, and the launches that fill them.

    Every kernel is launched once for each of `steps`, with step.out, step.rule, its tile, its grid and its options.

    Args:
        M: rows of the matrix that is quantized.
        K: columns of the matrix that is quantized.
        dtype: of the values it is quantized from: fp32, bf16 or fp16.
        scaling: of the rows, or None for no rows.
        column_scaling: of the columns, or None for no columns.
        quant_scale: one fp32 number that both directions use, per tensor only; None: from the values' own amax.
        amax_out: one fp32 number >= 0 into which the values' amax is folded; with quant_scale only.
        longest_stride: between rows of what the producer reads, where it takes its offsets' type from RULE[16].
        aligned: whether the producer's own loads and sizes are multiples of 16 bytes; else, and for fp32, the two
            directions are two launches.
        tile: BLOCK_M, BLOCK_K, num_warps of a producer that ends with `emit_tile`, for rows alone in groups or with a
            known scale; BLOCK_K a multiple of the group, and the whole row where a row shares one scale.
    """

    def __init__(
        self,
        M: int,
        K: int,
        dtype: torch.dtype,
        device: torch.device,
        scaling: Scaling | None,
        column_scaling: Scaling | None = None,
        *,
        quant_scale: torch.Tensor | None = None,
        amax_out: torch.Tensor | None = None,
        aligned: bool = True,
        longest_stride: int = 0,
        tile: tuple[int, int, int] | None = None,
    ) -> None:
        is_long = max(M, K, longest_stride) > OFFSET_LIMIT
        wishes = (quant_scale is not None, amax_out is not None, aligned, is_long, tile)
        plan = plan_emission(M, K, dtype, scaling, column_scaling, *wishes)
        self.rows, self.columns, out = plan.allocate(device, is_current_gpu(device), quant_scale, amax_out)
        self.steps = [Step(step.take(out), *step[1:-1]) for step in plan.steps]
        if not plan.steps:
            fill_empty_scales(self.rows, self.columns, quant_scale)

    @property
    def row_codes(self) -> QuantizedTensor:
        """The rows' codes and scale."""
        assert self.rows is not None, "no rows were asked for"
        return self.rows

    @property
    def column_codes(self) -> QuantizedTensor:
        """The columns' codes and scale."""
        assert self.columns is not None, "no columns were asked for"
        return self.columns


def clear_plans() -> None:
    """Forget what follows from PLANS, for who changes them."""
    plan_emission.cache_clear()
    prepared_quantizers.clear()
