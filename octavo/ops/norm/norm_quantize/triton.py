"""Triton norm + quantize: rows in the pass that makes the statistics, columns from a second read of the same rows.

The kernels are in norm/triton.py. The row part owns whole rows: residual add, statistics, codes of whatever has its
scale in one row, the FP8 copy for backward, and amaxes of whatever has not. The tile part owns a BLOCK_M x BLOCK_K
tile: it computes the norm again and ends with emit. Two ways for it to find the rows in the L2 cache were tried at
32768 x 4096 on an H200, and slower: one launch whose tiles wait for their rows on a counter (216 to 489 us against 211
to 353 for the two), and a launch for every 1024 to 8192 tokens, of their rows beside the tiles of those before (288 to
366 us against 227; the shorter, the slower): instructions hold it back, not the memory.
"""

from typing import Any, NamedTuple

import torch
import triton

from octavo.numerics.infinity import infinity_flag
from octavo.numerics.quantized import QuantizedTensor
from octavo.numerics.scaling import Scaling
from octavo.ops._runtime.launch.triton import EARLY_ROWS, can_begin_early, launcher_of, on_device_of
from octavo.ops.moe.triton import combine_rows
from octavo.ops.norm.triton import (
    LONGEST_ROW,
    NormLaunch,
    norm_forward,
    norm_quantize_rows,
    norm_quantize_tiles,
    row_tile,
)
from octavo.ops.one_shot import Places
from octavo.ops.one_shot.triton import FEW, MOST, PACKETS, REGION_BYTES
from octavo.ops.quantize.triton import Emission, Step, quantize_matrix

# Tiles of rows whose amaxes a program folds before it folds them into memory: of the columns, of the whole tensor; and
# how many times the warps of a program without amaxes it has, and the stages of that loop's loads.
COLUMN_AMAX_LOOP = (32, 1, 1)
TENSOR_AMAX_LOOP = (4, 1, 1)

# And how many times those warps where ranks exchange: a message waits for no other.
EXCHANGE_WARPS = 2

# And where experts' rows are added up: the fewer of a row's elements a thread has, the sooner it asks for all rows.
EXPERT_WARPS = 2

ROW_LOCAL_KINDS = ("per_row", "block_1x128", "mx_1x32")


def norm_quantize(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    residual: torch.Tensor | None,
    quant_scale: torch.Tensor | None,
    amax_out: torch.Tensor | None,
    eps: float,
    kind: str,
    zero_centered_gamma: bool,
    scaling: Scaling,
    column_scaling: Scaling | None,
    store_scaling: Scaling | None,
    keeps_norm: bool = False,
    rows_of: torch.Tensor | None = None,
    row_weights: torch.Tensor | None = None,
) -> tuple[torch.Tensor, ...]:
    """As reference.norm_quantize, on a GPU; x has elements."""
    experts = None
    if residual is not None and rows_of is not None and row_weights is not None:
        if x.shape[1] > LONGEST_ROW:
            residual = combine_rows(residual, rows_of, row_weights)
        else:  # what is put together is the kernel's x
            x, residual, experts = residual, x, ExpertSum(rows_of, row_weights)
    if x.shape[1] > LONGEST_ROW:  # too long for one program: the norm, then the quantizers
        y, summed, mean, rstd = norm_forward(x, weight, bias, residual, eps, kind, zero_centered_gamma)
        rows, columns = quantize_matrix(y, scaling, column_scaling, quant_scale, amax_out)
        stored = None
        if store_scaling is not None:
            stored, _ = quantize_matrix(x if residual is None else summed, store_scaling, None)
    else:
        norm = NormLaunch.of(x, weight, bias, residual, kind)
        y = torch.empty((len(norm.outputs[2]), x.shape[1]) if keeps_norm else 0, dtype=x.dtype, device=x.device)
        # of experts' rows a product is rounded before it is added
        options = {"ZERO_CENTERED": zero_centered_gamma, "enable_fp_fusion": norm.fuses and experts is None}
        call = _Call(norm, y if keeps_norm else None, options, experts)
        with on_device_of(x):
            rows, columns, stored = call.run(eps, scaling, column_scaling, store_scaling, quant_scale, amax_out)
        summed, mean, rstd = norm.results
    assert rows is not None, "rows are always made"
    nothing = (x.new_empty(0), rstd.new_empty(0))
    pairs = [nothing if q is None else (q.qdata, q.scale) for q in (columns, stored)]
    return (rows.qdata, rows.scale, *pairs[0], summed, *pairs[1], mean, rstd, y if keeps_norm else x.new_empty(0))


class RankExchange(NamedTuple):
    """How the ranks of a tensor-parallel group put x together.

    Attributes:
        places: what they share.
        is_sum: their parts [T, K] are added; else their columns [T, K / ranks] stand side by side.
    """

    places: Places
    is_sum: bool


class ExpertSum(NamedTuple):
    """How the rows of experts [R, K], in the place of x, become tokens'.

    Attributes:
        rows: [T, S] int64, those of each token.
        weights: [T, S] fp32, what each is multiplied by.
    """

    rows: torch.Tensor
    weights: torch.Tensor


def can_exchange(part: torch.Tensor, K: int, scaling: Scaling) -> bool:
    """Whether exchange_norm_quantize takes this rank's part of [T, K]."""
    if part.dim() != 2 or not part.shape[0] or K > LONGEST_ROW or scaling.kind not in ROW_LOCAL_KINDS:
        return False
    rows, block_k, num_warps = row_tile(K)
    most = MOST if num_warps * EXCHANGE_WARPS <= 8 else MOST // 2  # programs, all of which must run at once
    return rows * block_k * part.itemsize <= REGION_BYTES and triton.cdiv(part.shape[0], rows) <= most


def exchange_norm_quantize(
    norm: NormLaunch, exchange: RankExchange, eps: float, zero_centered_gamma: bool, scaling: Scaling
) -> tuple[QuantizedTensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """(codes, x + residual, mean, rstd) of an x of which each rank has a part, where can_exchange allows."""
    options = {"ZERO_CENTERED": zero_centered_gamma, "enable_fp_fusion": norm.fuses}
    with on_device_of(norm.sources[0]):
        rows, _, _ = _Call(norm, None, options, exchange).run(eps, scaling, None, None, None, None)
    assert rows is not None, "rows are always made"
    return rows, *norm.results


class _Call:
    """One call's operands and outputs, and the launches that turn the ones into the others."""

    def __init__(
        self,
        norm: NormLaunch,
        y: torch.Tensor | None,
        options: dict[str, bool],
        exchange: RankExchange | ExpertSum | None = None,
    ) -> None:
        self.norm, self.y, self.options, self.exchange = norm, y, options, exchange
        self.x, self.T, self.K = norm.sources[0], len(norm.outputs[2]), norm.sources[2].numel()

    def run(
        self,
        eps: float,
        scaling: Scaling,
        column_scaling: Scaling | None,
        store_scaling: Scaling | None,
        quant_scale: torch.Tensor | None,
        amax_out: torch.Tensor | None,
    ) -> tuple[QuantizedTensor | None, ...]:
        """(rows, columns, stored)."""
        is_row_local = scaling.kind in ROW_LOCAL_KINDS or quant_scale is not None
        rows, row_rule, row_out = self._rows(scaling if is_row_local else None, quant_scale)
        stored, stored_rule, stored_out = self._rows(store_scaling, None)
        tiles = self._tiles(None if is_row_local else scaling, column_scaling, quant_scale)
        steps = [] if tiles is None else tiles.steps
        amax: tuple[torch.Tensor | None, torch.Tensor | None] = (None, None)
        if amax_out is not None:
            amax = (None, amax_out.view(torch.int32))
        if steps and _is_amax(steps[0]):
            amax, steps = _amax_buffers(steps[0]), steps[1:]
        self._launch_rows((row_out, stored_out, *amax), {"ROW_RULE": row_rule, "STORED_RULE": stored_rule}, eps)
        for step in steps:
            self._launch_tiles(step)
        columns = tiles.columns if tiles is not None else None
        return rows if is_row_local or tiles is None else tiles.rows, columns, stored

    def _rows(self, scaling: Scaling | None, quant_scale: torch.Tensor | None) -> tuple[Any, ...]:
        """(codes, rule, OUT) of what the row part emits."""
        if scaling is None:
            return None, None, (None,) * 9
        tile = row_tile(self.K)
        emission = Emission(
            self.T, self.K, self.x.dtype, self.x.device, scaling, None, quant_scale=quant_scale, tile=tile
        )
        (step,) = emission.steps
        rule = step.rule
        if scaling.kind == "per_row":  # the group is the whole row of the tile
            rule = (*rule[:6], tile[1], *rule[7:])
        return emission.row_codes, rule, step.out

    @property
    def _stream(self) -> torch.Tensor:
        """x, or x + residual."""
        summed = self.norm.outputs[0]
        return self.x if summed is None else summed

    def _tiles(
        self, scaling: Scaling | None, column_scaling: Scaling | None, quant_scale: torch.Tensor | None
    ) -> Emission | None:
        if scaling is None and column_scaling is None:
            return None
        stream = self._stream
        is_aligned = stream.data_ptr() % 16 == 0 and stream.stride(0) % 16 == 0
        return Emission(
            self.T, self.K, self.x.dtype, self.x.device, scaling, column_scaling,
            quant_scale=quant_scale, aligned=is_aligned, longest_stride=stream.stride(0),
        )  # fmt: skip

    def _launch_rows(self, outs: tuple[Any, ...], rules: dict[str, Any], eps: float) -> None:
        rows, block_k, num_warps = row_tile(self.K)
        loop = COLUMN_AMAX_LOOP if outs[2] is not None else TENSOR_AMAX_LOOP if outs[3] is not None else (1, 1, 1)
        row_tiles, more_warps, stages = loop
        early = self.T <= EARLY_ROWS and can_begin_early(self.x.device)
        way: tuple[Any, ...] | None = None
        shared: tuple[Any, ...] | None = None
        if isinstance(self.exchange, ExpertSum):
            more_warps *= EXPERT_WARPS
            way, shared = (0, self.exchange.rows.shape[1]), tuple(self.exchange)
        elif self.exchange is not None:
            more_warps = EXCHANGE_WARPS
            places, is_sum = self.exchange
            way = (places.world, is_sum, self._is_few(rows, block_k))
            shared = (*places[:5], self.x.shape[1])
        launch = launcher_of(
            norm_quantize_rows, **rules, ROWS=rows, BLOCK_K=block_k, ROW_TILES=row_tiles, STAGES=stages, WAY=way,
            EARLY=early, launch_pdl=early, num_warps=num_warps * more_warps, **self.options,
        )  # fmt: skip
        infinite = None if outs[3] is None else infinity_flag(self.x.device)
        operands = (*outs, infinite, self.y, *self.norm.outputs, *self.norm.sources, shared, *self.norm.strides)
        launch((triton.cdiv(self.T, rows * row_tiles),), *operands, self.T, self.K, eps)

    def _is_few(self, rows: int, block_k: int) -> bool:
        """Whether the ranks' parts travel in packets, of two numbers each."""
        is_paired = self.x.dtype == torch.bfloat16 and self.x.shape[1] % 2 == self.x.stride(0) % 2 == 0
        return is_paired and rows * block_k // 2 <= PACKETS and triton.cdiv(self.T, rows) <= FEW

    def _launch_tiles(self, step: Step) -> None:
        launch = launcher_of(
            norm_quantize_tiles, RULE=step.rule, BLOCK_M=step.block_m, BLOCK_K=step.block_k,
            **step.options, **self.options,
        )  # fmt: skip
        operands = (self._stream, *self.norm.outputs[1:], *self.norm.sources[2:], self._stream.stride(0))
        # of columns alone the row part has seen all values
        out = (*step.out[:8], None) if step.rule[0] == "none" else step.out
        launch(step.grid, out, *operands, self.T, self.K)


def _is_amax(step: Step) -> bool:
    return any(scales in ("amax_line", "amax_tensor") for scales in (step.rule[0], step.rule[7]))


def _amax_buffers(step: Step) -> tuple[torch.Tensor | None, torch.Tensor | None]:
    """The buffers that an amax pass fills: of the columns, of the whole tensor."""
    row_kind, col_kind = step.rule[0], step.rule[7]
    whole = step.out[4] if row_kind == "amax_tensor" else step.out[5] if col_kind == "amax_tensor" else None
    return step.out[5] if col_kind == "amax_line" else None, whole
