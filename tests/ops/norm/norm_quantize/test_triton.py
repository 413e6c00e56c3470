"""Fused norm + quantize equals norm, then quantizers, in every bit: in the interpreter and on a GPU."""

import pytest
import torch

from octavo.numerics import Scaling
from octavo.numerics.scaling import BLOCK_SIZES
from octavo.ops.moe.triton import combine_rows
from octavo.ops.norm import triton as norm
from octavo.ops.norm.norm_quantize import triton as kernels
from octavo.ops.quantize import reference as quantizer
from octavo.testing import assert_bitwise, generate
from octavo.testing.interpreter import is_interpreting

pytestmark = pytest.mark.usefixtures("poisoned_outputs")
DEVICE = "cpu" if is_interpreting() else "cuda"
E5M2 = torch.float8_e5m2
KINDS = pytest.mark.parametrize("kind", ["rms_norm", "layer_norm"])
# More than one stripe and tile each way, with and without alignment.
SMALL = [("rms_norm", (144, 160)), ("layer_norm", (131, 133))]
LARGE = [(1, 1), (272, 160), (303, 300), (129, 4096), (4096, 4096), (1000, 344), (2048, 5120), (257, 8192)]
ON_GPU = [(kind, shape) for shape in LARGE for kind in ("rms_norm", "layer_norm")]
CASES = SMALL if is_interpreting() else SMALL + ON_GPU
EACH_CASE = pytest.mark.parametrize(("kind", "shape"), CASES, ids=lambda v: f"T{v[0]}-K{v[1]}" if len(v) == 2 else v)
SCALINGS = {kind: Scaling.of_kind(kind) for kind in BLOCK_SIZES} | {"known": Scaling.per_tensor()}
# The pairs that recipes use, and ones whose two directions fit no common tile.
PAIRS = [
    ("block_1x128", None),
    ("per_row", None),
    ("known", None),
    ("block_1x128", "block_128x128"),
    ("block_1x128", "block_1x128"),
    ("per_row", "per_row"),
    ("known", "known"),
    ("per_tensor", "per_tensor"),
    ("mx_1x32", "mx_1x32"),
    ("block_128x128", "per_row"),
    ("per_row", "per_tensor"),
    ("per_tensor", "block_1x128"),
]


def check(
    x: torch.Tensor,
    kind: str,
    rows: str,
    columns: str | None,
    *,
    residual: torch.Tensor | None = None,
    store: Scaling | None = None,
    zero_centered_gamma: bool = False,
    dtype: torch.dtype = torch.float8_e4m3fn,
    keeps_norm: bool = False,
) -> None:
    """The fused call against the plain norm kernel and the quantizers' reference."""
    weight, bias = (generate("normal", (x.shape[1],), x.dtype, seed=s, device=DEVICE) for s in (2, 3))
    bias = bias if kind == "layer_norm" else None
    is_known = rows == "known"
    quant_scale = torch.tensor([30.0], device=DEVICE) if is_known else None
    amaxes = [torch.tensor([0.5], device=DEVICE) if is_known else None for _ in range(2)]
    scalings = [None if name is None else retyped(SCALINGS[name], dtype) for name in (rows, columns)]
    found = kernels.norm_quantize(
        x, weight, bias, residual, quant_scale, amaxes[0], 1e-5, kind, zero_centered_gamma, *scalings, store, keeps_norm
    )
    y, summed, mean, rstd = norm.norm_forward(x, weight, bias, residual, 1e-5, kind, zero_centered_gamma)
    wanted = [*quantizer.rows(y, scalings[0], quant_scale, amaxes[1])]
    wanted += [None, None] if columns is None else quantizer.columns(y, scalings[1], quant_scale)
    stored = [None, None] if store is None else quantizer.rows(x if residual is None else summed, store)
    wanted += [summed, *stored, mean, rstd, y if keeps_norm else None]
    names = ["rows", "row scale", "columns", "column scale", "sum", "stored", "stored scale", "mean", "rstd", "norm"]
    for name, ours, theirs in zip(names, found, wanted, strict=True):
        assert theirs is not None or ours.numel() == 0
        if theirs is not None:
            assert_bitwise(ours, theirs, f"{name} of {rows} and {columns}")
            # one element has no order: any stride says the same
            assert ours.stride() == theirs.stride() or theirs.numel() == 1, name
    if is_known:
        assert_bitwise(*amaxes, "amax")


def retyped(scaling: Scaling, dtype: torch.dtype) -> Scaling:
    return Scaling.of_kind(scaling.kind, dtype)


@EACH_CASE
@pytest.mark.parametrize(("rows", "columns"), PAIRS, ids=lambda p: str(p))
def test_pairs(shape: tuple[int, int], rows: str, columns: str | None, kind: str) -> None:
    check(generate("normal", shape, torch.bfloat16, device=DEVICE), kind, rows, columns)


@pytest.mark.parametrize("store", [Scaling(), Scaling.per_row(E5M2), Scaling.of_kind("mx_1x32")], ids=lambda s: s.kind)
def test_residual_and_saved_input(store: Scaling) -> None:
    pairs = [("block_1x128", "block_128x128"), ("per_row", "per_row"), ("known", "known")]
    for (kind, shape), (rows, columns) in zip([SMALL[0], SMALL[1], SMALL[0]], pairs, strict=True):
        x, residual = (generate("heavy_tailed", shape, torch.bfloat16, seed=s, device=DEVICE) for s in (0, 1))
        check(x, kind, rows, columns, residual=residual, store=store, zero_centered_gamma=True)


@KINDS
@pytest.mark.parametrize("rows", ["block_1x128", "per_row", "known", "per_tensor"])
def test_the_norm_beside_its_codes(rows: str, kind: str) -> None:
    for shape in ((37, 160), (3, 133)):
        x, residual = (generate("heavy_tailed", shape, torch.bfloat16, seed=s, device=DEVICE) for s in (0, 1))
        check(x, kind, rows, None, residual=residual, keeps_norm=True)


@KINDS
@pytest.mark.parametrize("source_dtype", [torch.bfloat16, torch.float32], ids=["bf16", "fp32"])
@pytest.mark.parametrize("rows", ["block_1x128", "per_row", "known", "per_tensor"])
def test_rows_of_experts_are_added_up_first(rows, source_dtype, kind, monkeypatch) -> None:  # type: ignore[no-untyped-def]
    """As combine_rows does, whatever their number; also where a row is too long for one program."""
    T, K, slots = 21, 160, 3
    x = generate("normal", (T, K), source_dtype, seed=0, device=DEVICE)
    weight, bias = (generate("normal", (K,), source_dtype, seed=s, device=DEVICE) for s in (2, 3))
    of_experts = generate("heavy_tailed", (T * slots + 5, 2 * K), source_dtype, seed=1, device=DEVICE)[:, :K]
    order = torch.randperm(T * slots + 5, generator=torch.Generator().manual_seed(0))[: T * slots]
    rows_of = order.view(T, slots).to(DEVICE)
    row_weights = torch.rand(T, slots, generator=torch.Generator().manual_seed(1)).to(DEVICE)
    scale = torch.tensor([30.0], device=DEVICE) if rows == "known" else None
    rest = (scale, None, 1e-5, kind, False, SCALINGS[rows], None, None, True)
    operands = (x, weight, bias if kind == "layer_norm" else None)
    added = combine_rows(of_experts, rows_of, row_weights)
    for longest in (kernels.LONGEST_ROW, 128):
        monkeypatch.setattr(kernels, "LONGEST_ROW", longest)
        monkeypatch.setattr(norm, "LONGEST_ROW", longest)
        wanted = kernels.norm_quantize(*operands, added, *rest)
        found = kernels.norm_quantize(*operands, of_experts, *rest, rows_of, row_weights)
        assert_bitwise(found[4], x + added)
        for ours, theirs in zip(found, wanted, strict=True):
            assert_bitwise(ours, theirs)


@KINDS
@pytest.mark.parametrize("source", [torch.float32, torch.float16], ids=["fp32", "fp16"])
def test_other_sources(source: torch.dtype, kind: str) -> None:
    for rows, columns in PAIRS[:8]:
        check(generate("normal", (20, 160), source, device=DEVICE), kind, rows, columns, dtype=E5M2)


@KINDS
@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # numpy's, in the interpreter: sums overflow and meet NaN
@pytest.mark.parametrize("name", ["zeros", "with_inf_nan", "near_tiny", "format_max", "half_zero"])
def test_inputs(name: str, kind: str) -> None:
    for rows, columns in [("block_1x128", "block_128x128"), ("per_row", "per_row"), ("per_tensor", "per_tensor")]:
        check(generate(name, (10, 144), torch.bfloat16, device=DEVICE), kind, rows, columns)


@KINDS
def test_strides(kind: str) -> None:
    wide = generate("normal", (40, 400), torch.bfloat16, device=DEVICE)
    for x in (wide[:20, 3:150], wide.t()[5:25], wide[::2, ::3]):
        check(x, kind, "block_1x128", "block_128x128", residual=x)


def test_rows_too_long_for_one_program(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (kernels, norm):
        monkeypatch.setattr(module, "LONGEST_ROW", 128)
    monkeypatch.setattr(norm, "CHUNK", 128)
    x, residual = (generate("normal", (4, 300), torch.bfloat16, seed=s, device=DEVICE) for s in (0, 1))
    for rows, columns in [("block_1x128", "block_128x128"), ("per_row", None), ("known", "known")]:
        check(x, "layer_norm", rows, columns, residual=residual, store=Scaling(), keeps_norm=True)


@pytest.mark.skipif(is_interpreting(), reason="too large for the interpreter")
def test_many_tokens() -> None:
    x, residual = (generate("normal", (16384, 4096), torch.bfloat16, seed=s, device=DEVICE) for s in (0, 1))
    check(x, "rms_norm", "block_1x128", "block_128x128", residual=residual, store=Scaling())
