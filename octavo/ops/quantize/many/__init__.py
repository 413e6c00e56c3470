"""Quantize many matrices in one launch, into one allocation: a sharded weight's rows, of all weights of an FSDP unit.

It is no op of torch.library: what it reads are addresses in a table, which a compiler could not see. octavo.nn.weights
calls it from FSDP2's hooks, which no compiler traces.
"""

import functools
from collections.abc import Sequence
from types import ModuleType
from typing import Any

import torch

from octavo import env
from octavo.errors import DtypeError, ShapeError
from octavo.numerics.scaling import INPUT_DTYPES, Scaling
from octavo.ops.quantize.many import reference

__all__ = ["MatrixBatch"]


@functools.cache
def _kernels() -> ModuleType:
    from octavo.ops.quantize.many import triton

    return triton


class MatrixBatch:
    """Matrices that are quantized together, each as `quantize` quantizes its values in bf16.

    Their values are read at every call, where they lie; a matrix at another place needs another batch.

    Args:
        matrices: [M, K] each, contiguous, of one dtype (fp32, bf16 or fp16) and device.
        scaling: of all: per_tensor, or square blocks.
    Raises:
        ShapeError: a matrix is none, empty or not contiguous, or the scaling is another.
        DtypeError: they are of several dtypes, or of another.
    Exactness: bitwise, CPU and GPU.
    """

    def __init__(self, matrices: Sequence[torch.Tensor], scaling: Scaling) -> None:
        if not scaling.is_square:
            raise ShapeError(f"matrices are quantized together in square blocks or per tensor, got {scaling}")
        for x in matrices:
            if x.dim() != 2 or not x.numel() or not x.is_contiguous():
                raise ShapeError(
                    f"matrices must be contiguous and have elements, got {tuple(x.shape)} with strides {x.stride()}"
                )
        kinds = {(x.dtype, x.device) for x in matrices}
        if len(kinds) != 1 or matrices[0].dtype not in INPUT_DTYPES:
            raise DtypeError(f"matrices must be of one dtype, fp32, bf16 or fp16, and one device, got {kinds}")
        self.matrices, self.scaling = list(matrices), scaling
        self.dtype, self.device = matrices[0].dtype, matrices[0].device
        self._is_on_gpu = self.device.type == "cuda"
        self.kept: dict[str, Any] = {}  # launches of triton.py

    def quantize(
        self, quant_scales: torch.Tensor | None = None, amaxes: Sequence[torch.Tensor] | None = None
    ) -> tuple[Sequence[torch.Tensor], Sequence[torch.Tensor]]:
        """Codes and scales of every matrix.

        Args:
            quant_scales: [matrices] fp32, known ones; per_tensor takes no others, and blocks take none.
            amaxes: for each matrix a tensor of one fp32 number >= 0, into which max|x| (NaN dropped) is folded.
        Returns:
            (codes, scales): [M * K] uint8 and, per_tensor, [1], else [blocks of M * blocks of K] fp32 of each matrix;
            on a GPU views of one new allocation.
        Raises:
            ShapeError: there is no quant_scale a matrix, or there are some for blocks.
        """
        num_known = len(self.matrices) if self.scaling.is_per_tensor else 0
        if (0 if quant_scales is None else quant_scales.numel()) != num_known:
            raise ShapeError(
                f"{self.scaling} of {len(self.matrices)} matrices takes {num_known} quant_scales, got {quant_scales}"
            )
        return self._module().quantize(self, quant_scales, amaxes)  # type: ignore[no-any-return]

    def fold_amaxes(self, amaxes: torch.Tensor) -> None:
        """Fold max|x| of every matrix, NaN dropped, into amaxes [matrices], fp32 numbers >= 0; no infinity is noted."""
        if amaxes.numel() != len(self.matrices) or amaxes.dtype != torch.float32:
            raise ShapeError(f"amaxes must be {len(self.matrices)} fp32 numbers, got {amaxes.shape} of {amaxes.dtype}")
        self._module().fold_amaxes(self, amaxes)

    def _module(self) -> ModuleType:
        return _kernels() if self._is_on_gpu and not env.force_reference() else reference
