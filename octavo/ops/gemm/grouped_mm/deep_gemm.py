"""The block-scaled grouped GEMM through DeepGEMM, where that package is installed: the same codes, its order of sums.

Written from the package's sources (2.6.1) and tested with a stand-in; it never ran against the package itself. So its
first product on a GPU is compared with the reference, and a package that departs from it is not used.
Legend: E groups, R rows of all groups, N out, K in, P rows once every group is padded to the package's tiles.
"""

import functools
import importlib
import importlib.util
import warnings
from types import ModuleType
from typing import NamedTuple

import torch

from octavo import env
from octavo.numerics.analysis import sqnr
from octavo.numerics.quantized import QuantizedTensor, quantize_reference
from octavo.numerics.recipe import Recipe
from octavo.numerics.scaling import Scaling
from octavo.ops.gemm.grouped_mm.reference import scaled_grouped_mm_reference

PACKAGE = "deep_gemm"
MIN_MEAN_ROWS = 128  # of a group: with fewer, most of what tiles of so many rows multiply would be padding
BLOCK = 128
PRODUCT = "m_grouped_fp8_gemm_nt_contiguous"
TILE_ROWS = "get_mk_alignment_for_contiguous_layout"
_HOPPER = 9  # on later cards the package rounds scales to powers of two: another quantization
_ROWS, _WEIGHTS = Scaling.block_1x128(), Scaling.block_128x128()
_CHECKED_SIZES, _CHECKED_N, _CHECKED_K = (130, 0, 5), 256, 384
_MIN_DB = 46.0  # testing.tolerances.GEMM_FAST_ACCUMULATION_DB: two libraries, two orders of sums, an output in bf16


class Road(NamedTuple):
    """The package, or None and why not; text is for reports."""

    package: ModuleType | None
    text: str


class PaddedRows(NamedTuple):
    """Where rows stand once every group begins with a tile.

    source: [P] int64, the row that each place holds; 0 in a place without one.
    group: [P] int32, the group of each place; -1 without a row, as the package asks.
    place: [R] int64, where each row went; P for a row of no group.
    """

    source: torch.Tensor
    group: torch.Tensor
    place: torch.Tensor


def takes(a: QuantizedTensor, whole: QuantizedTensor, num_groups: int, out_dtype: torch.dtype) -> bool:
    """Whether a [R, K] and one operand [E * N, K] of all groups go through scaled_grouped_mm; in exact mode never."""
    is_wanted = fits(a, whole, num_groups) and out_dtype == torch.bfloat16
    return is_wanted and road(a.qdata.device).package is not None and _is_sound(a.qdata.device)


def fits(a: QuantizedTensor, whole: QuantizedTensor, num_groups: int) -> bool:
    """Whether the package takes these operands, and groups are large enough for its tiles."""
    is_block = (a.scaling.kind, whole.scaling.kind) == ("block_1x128", "block_128x128")
    is_fp8 = all(q.qdata.dtype == torch.float8_e4m3fn and q.scale.dtype == torch.float32 for q in (a, whole))
    num_out = whole.shape[0] // num_groups
    is_even = num_out > 0 and num_out % BLOCK == 0 and a.shape[1] > 0 and a.shape[1] % BLOCK == 0
    return is_block and is_fp8 and is_even and a.shape[0] >= MIN_MEAN_ROWS * num_groups


def road(device: torch.device) -> Road:
    """Whether block-scaled grouped GEMMs on this device may take the package, and why not."""
    if not env.use_deep_gemm():
        return Road(None, "DeepGEMM is off (OCTAVO_DEEP_GEMM=0)")
    if not is_hopper(device):
        return Road(None, f"DeepGEMM is for Hopper, not {device}")
    return _import_package()


def is_hopper(device: torch.device) -> bool:
    """Whether this is a GPU with the matrix units that the package's fp32 scales are for."""
    return device.type == "cuda" and torch.cuda.get_device_capability(device)[0] == _HOPPER


def describe(device: torch.device, recipe: Recipe, exact: bool) -> str:
    """For reports: DeepGEMM's part in the products of a GroupedLinear with this recipe; empty where it has none."""
    is_block = recipe.input == _ROWS and recipe.weight == _WEIGHTS
    found = road(device)
    if exact or not is_block or found.package is None:
        return ""
    return f"{found.text} from {MIN_MEAN_ROWS} rows a group on"


def scaled_grouped_mm(a: QuantizedTensor, whole: QuantizedTensor, offsets: torch.Tensor) -> torch.Tensor:
    """What takes accepts: [R, N] bf16, zeros in rows of no group. Nothing waits for the offsets."""
    package = road(a.qdata.device).package
    assert package is not None, "takes was asked"
    return _multiply(package, a, whole, offsets)


def pad_groups(offsets: torch.Tensor, num_rows: int, tile_rows: int) -> PaddedRows:
    """Where R rows with groups that end at offsets [E] stand in tiles; P is the most that any such groups need."""
    num_groups = offsets.shape[0]
    ends = offsets.long()
    starts = torch.cat([ends.new_zeros(1), ends[:-1]])
    padded_ends = ((ends - starts + tile_rows - 1) // tile_rows * tile_rows).cumsum(0)
    shifts = torch.cat([padded_ends.new_zeros(1), padded_ends[:-1]]) - starts  # [E], of each group's rows
    num_places = (num_rows + num_groups * (tile_rows - 1)) // tile_rows * tile_rows
    places = torch.arange(num_places, device=offsets.device)
    group = torch.searchsorted(padded_ends, places, right=True)  # E past the last one
    known = group.clamp(max=num_groups - 1)
    row = places - shifts[known]
    has_row = (group < num_groups) & (row < ends[known])
    rows = torch.arange(num_rows, device=offsets.device)
    own = torch.searchsorted(ends, rows, right=True)
    place = torch.where(own < num_groups, rows + shifts[own.clamp(max=num_groups - 1)], num_places)
    return PaddedRows(row.where(has_row, 0), group.where(has_row, -1).int(), place)


def _multiply(package: ModuleType, a: QuantizedTensor, whole: QuantizedTensor, offsets: torch.Tensor) -> torch.Tensor:
    (R, K), E = a.shape, offsets.shape[0]
    N = whole.shape[0] // E
    padded = pad_groups(offsets, R, getattr(package, TILE_ROWS)())
    P = padded.source.shape[0]
    codes = a.qdata.view(torch.uint8).index_select(0, padded.source).view(a.qdata.dtype)  # [P, K]
    scales = a.scale.t().index_select(1, padded.source).t()  # [P, K / 128], strides (1, P): what its TMA reads
    weights = (whole.qdata.view(E, N, K), whole.scale.contiguous().view(E, N // BLOCK, K // BLOCK))
    out = torch.empty(P + 1, N, dtype=torch.bfloat16, device=codes.device)  # [P + 1, N]: the last for rows of no group
    out[P].zero_()
    with torch.cuda.device_of(codes):
        getattr(package, PRODUCT)((codes, scales), weights, out[:P], padded.group, disable_ue8m0_cast=True)
    return out.index_select(0, padded.place)


@functools.lru_cache(maxsize=1)
def _import_package() -> Road:
    if importlib.util.find_spec(PACKAGE) is None:
        return Road(None, "DeepGEMM is not installed")
    try:
        package = importlib.import_module(PACKAGE)
    except Exception as error:  # its import looks for a compiler, and asserts
        return _refuse(f"DeepGEMM cannot be imported ({type(error).__name__}: {error})")
    version = getattr(package, "__version__", "of unknown version")
    if missing := [name for name in (PRODUCT, TILE_ROWS) if not callable(getattr(package, name, None))]:
        return _refuse(f"DeepGEMM {version} has no {' and no '.join(missing)}")
    return Road(package, f"DeepGEMM {version}")


_verdicts: dict[torch.device, bool] = {}


def _is_sound(device: torch.device) -> bool:
    """Whether the package's first product here was that of the reference; never while a CUDA graph is captured."""
    if torch.cuda.is_available() and torch.cuda.is_current_stream_capturing():
        return (
            False  # it compiles a kernel at a shape's first product, and the check reads results: no graph holds that
        )
    if device not in _verdicts:
        _verdicts[device] = _check(device)
    return _verdicts[device]


def _check(device: torch.device) -> bool:
    """One small product against the reference."""
    generator = torch.Generator().manual_seed(0)
    shapes = (sum(_CHECKED_SIZES), _CHECKED_K), (len(_CHECKED_SIZES) * _CHECKED_N, _CHECKED_K)
    values = [torch.randn(shape, generator=generator).to(device, torch.bfloat16) for shape in shapes]
    a, whole = quantize_reference(values[0], _ROWS), quantize_reference(values[1], _WEIGHTS)
    offsets = torch.tensor(_CHECKED_SIZES, device=device).cumsum(0).int()
    expected = scaled_grouped_mm_reference(a, [whole], offsets, torch.bfloat16, False, False)
    try:
        db = sqnr(expected, scaled_grouped_mm(a, whole, offsets))
    except Exception as error:  # whatever its compiler or its checks of arguments raise
        _refuse(f"DeepGEMM's first product failed ({type(error).__name__}: {error})")
        return False
    if db < _MIN_DB:
        _refuse(f"DeepGEMM's first product is {db:.0f} dB from the reference, at least {_MIN_DB:.0f} are due")
    return db >= _MIN_DB


def _refuse(reason: str) -> Road:
    """Say once that the package is there and not used."""
    warnings.warn(f"{reason}; grouped GEMMs take octavo's own kernel. OCTAVO_DEEP_GEMM=0 silences this", stacklevel=3)
    return Road(None, reason)
