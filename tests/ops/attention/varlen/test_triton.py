"""The kernel for ragged prompts against attention in fp64: in the interpreter and on a GPU."""

import pytest
import torch

from octavo.numerics import QuantizedTensor, Scaling, quantize_reference
from octavo.ops.attention.varlen import VarlenBatch, empty_codes, rows_of
from octavo.ops.attention.varlen import triton as kernels
from octavo.testing import assert_bitwise, assert_sqnr
from octavo.testing.interpreter import is_interpreting
from tests.ops.attention.varlen.spans import MIXED, NEW, draw, expected

DEVICE = torch.device("cpu" if is_interpreting() else "cuda")
DTYPES = [torch.bfloat16] + ([] if is_interpreting() else [torch.float16])  # the same code; CI takes long enough
LONG = [(0, 5000), (4000, 8300), (0, 900), (8191, 8192)]


def attend(spans: list[tuple[int, int]], q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    out = torch.full_like(q, float("nan"))
    kernels.attention_varlen(q, k, v, VarlenBatch.of(spans, DEVICE), q.shape[2] ** -0.5, out)
    return out


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("heads", [(4, 2, 64), (3, 1, 128)], ids=str)
@pytest.mark.parametrize("spans", [MIXED, NEW] + ([] if is_interpreting() else [LONG]), ids=len)
def test_it_is_attention(spans: list[tuple[int, int]], heads: tuple[int, int, int], dtype: torch.dtype) -> None:
    q, k, v = draw(spans, heads, dtype, DEVICE)
    found = attend(spans, q, k, v)
    # probabilities are rounded to the dtype of the values, as FlashAttention does
    assert_sqnr(found, expected(q, k, v, spans), 48.0 if dtype == torch.bfloat16 else 62.0)
    assert_bitwise(attend(spans, q, k, v), found)


def test_logs_of_sums() -> None:
    q, k, v = draw(MIXED, (2, 1, 64), torch.bfloat16, DEVICE)
    out, lse = torch.empty_like(q), torch.full(q.shape[:2], float("nan"), device=DEVICE)
    kernels.attention_varlen(q, k, v, VarlenBatch.of(MIXED, DEVICE), 0.125, out, lse)
    assert_bitwise(out, attend(MIXED, q, k, v))
    keys, first = k.double().split([end for _, end in MIXED]), 0
    for (start, end), own in zip(MIXED, keys, strict=True):
        rows = q[first : first + end - start].double()
        first += end - start
        scores = torch.einsum("qhd,kd->qhk", rows, own[:, 0]) * 0.125
        seen = torch.arange(end, device=DEVICE) <= torch.arange(start, end, device=DEVICE)[:, None]
        wanted = scores.masked_fill(~seen[:, None], -torch.inf).logsumexp(-1)
        torch.testing.assert_close(lse[first - len(rows) : first].double(), wanted, rtol=0.0, atol=1e-5)


@pytest.mark.parametrize("spans", [MIXED, NEW], ids=len)
def test_codes_are_those_of_the_result(spans: list[tuple[int, int]]) -> None:
    scaling = Scaling.block_1x128()
    q, k, v = draw(spans, (2, 1, 128), torch.bfloat16, DEVICE)
    assert kernels.can_quantize(scaling, 128) and not kernels.can_quantize(scaling, 64)
    assert not kernels.can_quantize(Scaling.per_row(), 128)
    whole = empty_codes(len(q) + 5, 2 * 128, scaling, DEVICE)
    codes = rows_of(whole, 3, len(q) + 3)
    assert isinstance(codes, QuantizedTensor)
    kernels.attention_varlen(q, k, v, VarlenBatch.of(spans, DEVICE), 128**-0.5, codes)
    expected = quantize_reference(attend(spans, q, k, v).flatten(1), scaling)
    assert_bitwise(codes.qdata, expected.qdata)
    assert_bitwise(codes.scale, expected.scale)


@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # numpy, in the interpreter
def test_another_sequences_nan_stays_there() -> None:
    spans = [(0, 30), (10, 90), (0, 70)]
    q, k, v = draw(spans, (2, 1, 64), torch.bfloat16, DEVICE)
    alone = attend(spans, q, k, v)
    for x in (k, v):
        x[30:120] = float("nan")
    q[30:110] = float("inf")
    found = attend(spans, q, k, v)
    assert_bitwise(found[:30], alone[:30])
    assert_bitwise(found[110:], alone[110:])
    assert found[30:110].isnan().all()


def test_large_scores() -> None:
    q, k, v = draw(NEW, (2, 1, 64), torch.bfloat16, DEVICE)
    q, k = q * 300, k * 300
    assert_sqnr(attend(NEW, q, k, v), expected(q, k, v, NEW), 48.0)
