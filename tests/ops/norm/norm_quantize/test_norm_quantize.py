"""norm_quantize against its parts through their public functions, on the CPU and, marked gpu, on the card."""

import pytest
import torch

from octavo.errors import RecipeError, ShapeError
from octavo.numerics import Scaling
from octavo.ops.moe import ExpertRows, combine_rows, moe_routing
from octavo.ops.norm.layer_norm import layer_norm
from octavo.ops.norm.norm_quantize import norm_quantize
from octavo.ops.norm.rms_norm import rms_norm
from octavo.ops.quantize import quantize, quantize_columns
from octavo.testing import assert_bitwise
from tests.assertions import assert_all_bitwise, assert_codes

KINDS = pytest.mark.parametrize("kind", ["rms_norm", "layer_norm"])
ROW, BLOCK, SQUARE, TENSOR = Scaling.per_row(), Scaling(), Scaling.block_128x128(), Scaling.per_tensor()
PAIRS = pytest.mark.parametrize(
    ("scaling", "column_scaling"),
    [(BLOCK, None), (BLOCK, SQUARE), (BLOCK, BLOCK), (ROW, ROW), (TENSOR, TENSOR), (SQUARE, SQUARE)],
    ids=lambda s: "none" if s is None else s.kind,
)


def sample(shape, generator, device, dtype=torch.bfloat16):
    return torch.randn(shape, generator=generator).to(device, dtype)


def check(quantized, wanted, what):
    assert_codes(quantized, wanted, what)
    assert quantized.scaling == wanted.scaling


@KINDS
@PAIRS
@pytest.mark.parametrize("shape", [(150, 344), (256, 256), (0, 128)], ids=lambda s: f"T{s[0]}-K{s[1]}")
def test_it_equals_its_parts(shape, scaling, column_scaling, kind, generator, device):
    x, residual = sample(shape, generator, device), sample(shape, generator, device)
    weight, bias = sample(shape[1:], generator, device), sample(shape[1:], generator, device)
    bias = bias if kind == "layer_norm" else None
    fields = {"bias": bias, "eps": 1e-6, "kind": kind, "scaling": scaling, "column_scaling": column_scaling}
    for added, store in [(None, None), (residual, BLOCK)]:
        is_kept = added is not None
        found = norm_quantize(x, weight, residual=added, store_scaling=store, keeps_norm=is_kept, **fields)
        stream = x if added is None else x + residual
        y = rms_norm(stream, weight, 1e-6) if kind == "rms_norm" else layer_norm(stream, weight, bias, 1e-6)
        check(found.rows, quantize(y, scaling), "row")
        assert (found.columns is None) == (column_scaling is None)
        if column_scaling is not None:
            check(found.columns, quantize_columns(y, column_scaling), "column")
        assert (found.summed is None, found.stored is None) == (added is None, store is None)
        if added is not None:
            assert_bitwise(found.summed, stream)
            check(found.stored, quantize(stream, store), "stored")
            assert_bitwise(found.normed, y)
        assert (found.normed is not None) == is_kept
        assert found.rstd.shape == shape[:1] and (found.mean is None) == (kind == "rms_norm")


@pytest.mark.parametrize("scaling", [BLOCK, ROW, TENSOR], ids=lambda s: s.kind)
@pytest.mark.parametrize("tokens", [0, 1, 37])
def test_rows_of_experts_are_added_up_first(tokens, scaling, generator, device):
    x, weight, logits = (sample(shape, generator, device) for shape in ((tokens, 256), (256,), (tokens, 8)))
    routing = moe_routing(logits, 3, normalize=True, alignment=16)
    rows = ExpertRows(sample((routing.slots.numel(), 256), generator, device), routing)
    added = combine_rows(*rows)
    assert rows.shape == added.shape and rows.dtype == added.dtype
    options = {"eps": 1e-6, "kind": "rms_norm", "scaling": scaling, "keeps_norm": True}
    found, wanted = (norm_quantize(x, weight, residual=each, **options) for each in (rows, added))
    check(found.rows, wanted.rows, "row")
    assert_all_bitwise((found.summed, found.normed, found.rstd), (x + added, wanted.normed, wanted.rstd))
    with pytest.raises(ShapeError, match="residual must have x's shape"):
        norm_quantize(x[:, :128], weight[:128], residual=rows, **options)


@KINDS
def test_a_known_scale_and_its_amax(kind, generator, device):
    x, weight = sample((40, 344), generator, device), sample((344,), generator, device)
    quant_scale, amax = torch.tensor([20.0], device=device), torch.tensor([0.25], device=device)
    found = norm_quantize(
        x, weight, eps=1e-6, kind=kind, scaling=TENSOR, column_scaling=TENSOR, quant_scale=quant_scale, amax_out=amax
    )
    y = rms_norm(x, weight, 1e-6) if kind == "rms_norm" else layer_norm(x, weight, None, 1e-6)
    check(found.rows, quantize(y, TENSOR, quant_scale=quant_scale), "row")
    check(found.columns, quantize_columns(y, TENSOR, quant_scale=quant_scale), "column")
    assert amax.item() == y.float().abs().max().item()


@KINDS
def test_gamma_around_zero(kind, generator, device):
    x, weight = sample((20, 256), generator, device), sample((256,), generator, device)
    found = norm_quantize(x, weight - 1, eps=1e-6, kind=kind, scaling=BLOCK, zero_centered_gamma=True)
    plain, bias = (rms_norm, ()) if kind == "rms_norm" else (layer_norm, (None,))
    y = plain(x, weight - 1, *bias, 1e-6, zero_centered_gamma=True)
    check(found.rows, quantize(y, BLOCK), "row")


def test_a_bad_row_stays_alone(generator, device):
    x, weight = sample((8, 256), generator, device), sample((256,), generator, device)
    clean = norm_quantize(x, weight, eps=1e-6, kind="rms_norm", scaling=BLOCK).rows
    x[3, 5] = float("nan")
    found = norm_quantize(x, weight, eps=1e-6, kind="rms_norm", scaling=BLOCK).rows
    assert found.qdata[3].view(torch.uint8).eq(0x7F).all()
    others = [0, 1, 2, 4, 5, 6, 7]
    assert_bitwise(found.qdata[others], clean.qdata[others])


def test_the_compiler_sees_one_op(generator, device):
    x, weight = sample((32, 256), generator, device), sample((256,), generator, device)

    def run(x, weight):
        found = norm_quantize(
            x, weight, eps=1e-6, kind="rms_norm", scaling=BLOCK, column_scaling=SQUARE, residual=x, store_scaling=ROW,
            keeps_norm=True,
        )  # fmt: skip
        return found.rows.qdata, found.columns.scale, found.summed, found.stored.qdata, found.rstd, found.normed

    compiled = torch.compile(run, fullgraph=True, backend="aot_eager")
    assert_all_bitwise(compiled(x, weight), run(x, weight))


def test_bad_operands_are_refused():
    x, weight = torch.ones(4, 128), torch.ones(128)
    with pytest.raises(RecipeError, match="saved in FP8 with one of"):
        norm_quantize(x, weight, eps=1e-6, kind="rms_norm", scaling=BLOCK, store_scaling=SQUARE)
    with pytest.raises(ShapeError, match="goes with per_tensor"):
        norm_quantize(x, weight, eps=1e-6, kind="rms_norm", scaling=BLOCK, quant_scale=torch.ones(1))
    with pytest.raises(ShapeError, match="must be a matrix"):
        norm_quantize(x[None], weight, eps=1e-6, kind="rms_norm", scaling=BLOCK)
