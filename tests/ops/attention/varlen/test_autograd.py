"""Gradients through the kernel for ragged sequences: FlashAttention's, of our forward."""

import pytest
import torch

from octavo.ops.attention import PackedLengths, attention_packed
from octavo.ops.attention.varlen import attend_varlen
from octavo.testing import assert_bitwise, assert_sqnr
from tests.ops.attention.softmax import softmax_fp64
from tests.ops.attention.varlen.spans import draw

LENGTHS = [300, 64, 1, 129, 700, 4]


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=["bf16", "fp16"])
@pytest.mark.parametrize("heads", [(4, 2, 64), (8, 1, 128)], ids=str)
def test_gradients_are_those_of_attention(heads: tuple[int, int, int], dtype: torch.dtype) -> None:
    device = torch.device("cuda")
    lengths, spans = PackedLengths.from_lengths(LENGTHS, device), [(0, n) for n in LENGTHS]
    leaves = [x.requires_grad_() for x in draw(spans, heads, dtype, device)]
    wide = [x.detach().double().requires_grad_() for x in leaves]
    grad = torch.randn(leaves[0].shape, generator=torch.Generator().manual_seed(0)).to(device, dtype)
    scale = heads[2] ** -0.5
    out = attention_packed(*leaves, lengths, softmax_scale=scale)[0]
    assert out.grad_fn is not None and "VarlenAttention" in out.grad_fn.name()
    expected = softmax_fp64(*wide, LENGTHS)
    out.backward(grad)
    expected.backward(grad.double())
    assert_sqnr(out, expected, 48.0)
    for found, wanted in zip(leaves, wide, strict=True):
        assert found.grad is not None and wanted.grad is not None
        assert_sqnr(found.grad, wanted.grad, 42.0)
    with torch.no_grad():
        assert_bitwise(attend_varlen(*leaves, lengths.varlen, scale), out)
