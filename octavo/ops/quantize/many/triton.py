"""Many matrices quantized by one launch: programs look up in a table whose tile theirs is.

n matrices [M, K], each in tiles of BLOCK_M x BLOCK_K, numbered one matrix after the other. table [n, WORDS] int64 holds
what a program needs of its matrix, owners [tiles] int32 the matrix of each tile. What is done to a tile is device.py's.
"""

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

import torch
import triton
import triton.language as tl

from octavo.numerics.infinity import infinity_flag
from octavo.ops._runtime.launch.triton import Launcher, launcher_of, let_next_begin, on_device_of
from octavo.ops.quantize.triton.casts import round_to
from octavo.ops.quantize.triton.device import emit, load_values
from octavo.ops.quantize.triton.plan import OFFSET_LIMIT, SOURCE_TYPES, options_of, plan_emission

if TYPE_CHECKING:
    from octavo.ops.quantize.many import MatrixBatch

# address of x, M, K, first tile, where codes and where scales begin in `out` (bytes), address of the amax
WORDS = 7


@triton.jit
def load_as_bf16(inputs, first_m, first_k, m, k, is_in):
    """The PRODUCE of a matrix of another dtype whose bf16 values are quantized; inputs as of load_values."""
    x, stride_xm = inputs
    places = x + (first_m * stride_xm + first_k) + (m * stride_xm + k)
    return round_to(tl.load(places, mask=is_in, other=0.0).to(tl.float32), tl.bfloat16)


@triton.jit
def quantize_matrices(
    out, quant_scales, amaxes, infinite, table, owners,
    RULE: tl.constexpr, DTYPE: tl.constexpr, ALIGNED: tl.constexpr, WORDS: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """Quantize one tile, or fold its amax into amaxes [n]; ALIGNED: addresses, M and K are multiples of 16."""
    let_next_begin()
    owner = tl.load(owners + tl.program_id(0))
    row = table + owner * WORDS
    x = tl.load(row).to(tl.pointer_type(DTYPE))
    M = tl.load(row + 1).to(tl.int32)
    K = tl.load(row + 2).to(tl.int32)
    tile = tl.program_id(0) - tl.load(row + 3).to(tl.int32)
    if ALIGNED:
        x = tl.multiple_of(x, 16)
        M = tl.multiple_of(M, 16)
        K = tl.multiple_of(K, 16)
    num_tiles_k = tl.cdiv(K, BLOCK_K)
    tile_m = tile // num_tiles_k
    tile_k = tile % num_tiles_k
    if RULE[0] == "amax_tensor":
        OUT = (None, None, None, None, amaxes + owner, None, None, None, None)
    else:
        codes = (out + tl.load(row + 4)).to(tl.pointer_type(RULE[1]))
        if ALIGNED:
            codes = tl.multiple_of(codes, 16)
        scale = (out + tl.load(row + 5)).to(tl.pointer_type(tl.float32))
        if RULE[14]:
            amax = tl.load(row + 6).to(tl.pointer_type(tl.float32))
            OUT = (codes, scale, None, None, None, None, quant_scales + owner, amax, infinite)
        elif RULE[0] == "static":
            OUT = (codes, scale, None, None, None, None, quant_scales + owner, None, infinite)
        else:
            OUT = (codes, scale, None, None, None, None, None, None, infinite)
    if tl.bfloat16 == DTYPE:
        emit(load_values, (x, K), OUT, tile_m, tile_k, M, K, RULE, BLOCK_M, BLOCK_K)
    else:
        emit(load_as_bf16, (x, K), OUT, tile_m, tile_k, M, K, RULE, BLOCK_M, BLOCK_K)


class BatchLaunch(NamedTuple):
    """A launch of a batch, and where codes and scales lie in one allocation."""

    launcher: Launcher
    grid: tuple[int]
    tables: tuple[torch.Tensor, torch.Tensor, torch.Tensor]  # the device's flag of infinities, table, owners
    amaxes: tuple[int, ...]  # addresses
    sizes: tuple[int, ...]  # bytes of each matrix' codes, what pads them, bytes of all scales
    num_scales: tuple[int, ...]

    def run(self, out: torch.Tensor, quant_scales: torch.Tensor | None, amaxes: torch.Tensor | None) -> None:
        """Launch on the current stream."""
        with on_device_of(out):
            self.launcher(self.grid, out, quant_scales, amaxes, *self.tables)


def quantize(
    batch: "MatrixBatch", quant_scales: torch.Tensor | None, amaxes: Sequence[torch.Tensor] | None
) -> tuple[Sequence[torch.Tensor], Sequence[torch.Tensor]]:
    """As MatrixBatch.quantize, on a GPU."""
    kind = "codes" if amaxes is None else "codes and amaxes"
    addresses = tuple([amax.data_ptr() for amax in amaxes or ()])
    launch: BatchLaunch | None = batch.kept.get(kind)
    if launch is None or launch.amaxes != addresses:
        launch = batch.kept[kind] = _plan_launch(batch, kind, addresses)
    out = torch.empty(sum(launch.sizes), dtype=torch.uint8, device=batch.device)
    launch.run(out, quant_scales, None)
    *codes, _, scales = out.split_with_sizes(launch.sizes)
    return codes, scales.view(torch.float32).split_with_sizes(launch.num_scales)


def fold_amaxes(batch: "MatrixBatch", amaxes: torch.Tensor) -> None:
    """As MatrixBatch.fold_amaxes, on a GPU."""
    launch: BatchLaunch | None = batch.kept.get("amaxes")
    if launch is None:
        launch = batch.kept["amaxes"] = _plan_launch(batch, "amaxes", ())
    launch.run(amaxes, None, amaxes.view(torch.int32))


def _plan_launch(batch: "MatrixBatch", kind: str, amaxes: tuple[int, ...]) -> BatchLaunch:
    """What all calls of a kind share: "codes", "codes and amaxes", or "amaxes"."""
    matrices, scaling = batch.matrices, batch.scaling
    aligned = all(x.data_ptr() % 16 == 0 and not (x.shape[0] % 16 or x.shape[1] % 16) for x in matrices)
    is_long = max(max(x.shape) for x in matrices) > OFFSET_LIMIT
    wishes = (scaling.is_per_tensor and kind != "amaxes", kind == "codes and amaxes", aligned, is_long, None)
    step = plan_emission(*matrices[0].shape, torch.bfloat16, scaling, None, *wishes).steps[0]
    rows, owners, codes, scales, num_tiles = [], [], 0, -(-sum(x.numel() for x in matrices) // 4) * 4, 0
    num_scales = [math.prod(scaling.scale_shape(*x.shape)) for x in matrices]
    for i, x in enumerate(matrices):
        rows.append([x.data_ptr(), *x.shape, num_tiles, codes, scales, amaxes[i] if amaxes else 0])
        tiles = triton.cdiv(x.shape[0], step.block_m) * triton.cdiv(x.shape[1], step.block_k)
        owners.append(torch.full((tiles,), i, dtype=torch.int32))
        codes, scales, num_tiles = codes + x.numel(), scales + 4 * num_scales[i], num_tiles + tiles
    tables = infinity_flag(batch.device), torch.tensor(rows).to(batch.device), torch.cat(owners).to(batch.device)
    sizes = (*(x.numel() for x in matrices), -codes % 4, 4 * sum(num_scales))
    constants = {"RULE": step.rule, "DTYPE": SOURCE_TYPES[batch.dtype], "ALIGNED": aligned, "WORDS": WORDS}
    tile = {"BLOCK_M": step.block_m, "BLOCK_K": step.block_k, **options_of(step.num_warps, step.registers)}
    launcher = launcher_of(quantize_matrices, **constants, **tile)
    return BatchLaunch(launcher, (num_tiles,), tables, amaxes, sizes, tuple(num_scales))
