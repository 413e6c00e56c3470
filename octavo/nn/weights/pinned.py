"""PinnedCodes: the place of codes that are read by their addresses (by a CUDA graph), into which new ones go."""

import torch

from octavo.nn.weights.operands import Operands, row_ranges
from octavo.numerics.quantized import QuantizedTensor
from octavo.numerics.scaling import Scaling


class PinnedCodes:
    """The last codes of a pinned weight, between their release and the codes that are written over them."""

    def __init__(self) -> None:
        self._held: tuple[Operands, QuantizedTensor | None] | None = None

    def hold(self, operands: Operands, whole: QuantizedTensor | None) -> None:
        """Keep the storage of codes that are released."""
        self._held = operands, whole

    def out_buffer_for(self, weight: torch.Tensor, parts: tuple[int, ...], scaling: Scaling) -> Operands | None:
        """The operands that quantizers of this weight are to overwrite, None for new ones; then comes store."""
        if self._held is None:
            return None
        held, ranges = self._held[0], row_ranges(parts, scaling)
        if [rows for rows, _ in held] != ranges or held[0][1].device != weight.device:
            return None
        fits = all(q.shape[1] == weight.shape[1] and q.scaling == scaling for _, q in held)
        return held if fits else None

    def store(self, operands: Operands) -> tuple[Operands, QuantizedTensor | None]:
        """New codes as they are held from now on: those that were written over older ones as these."""
        last, self._held = self._held, None
        if last is None or operands[0][1] is not last[0][0][1]:
            return operands, None
        held, whole = last
        if whole is not None and len(held) > 1:  # a scale a row, equal within a range
            for rows, q in held:
                whole.scale[rows].copy_(q.scale)
        return last
