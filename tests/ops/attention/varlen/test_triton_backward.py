"""The gradient of ragged packs against fp64's, in the interpreter and on a GPU; the same bits each time."""

import pytest
import torch

from octavo.ops.attention import PackedLengths, attention_packed
from octavo.ops.attention.varlen import attend_varlen
from octavo.ops.attention.varlen import triton as kernels
from octavo.ops.attention.varlen.triton.backward import attend_backward
from octavo.testing import assert_bitwise, assert_sqnr
from octavo.testing.interpreter import is_interpreting
from tests.assertions import assert_all_bitwise
from tests.ops.attention.softmax import softmax_fp64
from tests.ops.attention.varlen.spans import draw

DEVICE = torch.device("cpu" if is_interpreting() else "cuda")
DTYPES = [torch.bfloat16] + ([] if is_interpreting() else [torch.float16])
LENGTHS = [[130, 64, 1, 4], [63, 65, 192]] + ([] if is_interpreting() else [[300, 64, 1, 1029, 700, 4], [5000, 900]])


def gradients(lengths: list[int], operands: tuple[torch.Tensor, ...], grad: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """The forward's output, then the gradients of q, k and v."""
    q, k, v = operands
    batch, scale = PackedLengths.from_lengths(lengths, DEVICE).varlen, q.shape[2] ** -0.5
    out, lse = torch.empty_like(q), torch.empty(q.shape[:2], device=DEVICE)
    kernels.attention_varlen(q, k, v, batch, scale, out, lse)
    return out, *attend_backward(grad, q, k, v, out, lse, batch, scale)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("heads", [(4, 2, 64), (3, 1, 128)], ids=str)
@pytest.mark.parametrize("lengths", LENGTHS, ids=str)
def test_it_is_the_gradient(lengths: list[int], heads: tuple[int, int, int], dtype: torch.dtype) -> None:
    operands = draw([(0, n) for n in lengths], heads, dtype, DEVICE)
    grad = draw([(0, sum(lengths))], heads, dtype, DEVICE)[0].flip(0).contiguous()
    wide = [x.double().requires_grad_() for x in operands]
    (softmax_fp64(*wide, lengths) * grad).sum().backward()
    found = gradients(lengths, operands, grad)
    for ours, leaf in zip(found[1:], wide, strict=True):
        assert leaf.grad is not None
        assert_sqnr(ours, leaf.grad, 42.0)
    assert_all_bitwise(gradients(lengths, operands, grad), found)


@pytest.mark.filterwarnings("ignore:All-NaN slice encountered:RuntimeWarning")  # of NumPy, in the interpreter
@pytest.mark.parametrize("poisoned", range(4), ids=["q", "k", "v", "grad"])
def test_a_sequence_with_nan_leaves_the_others_their_bits(poisoned: int) -> None:
    lengths = [70, 65, 30]
    tensors = [*draw([(0, n) for n in lengths], (2, 1, 64), torch.bfloat16, DEVICE)]
    tensors.append(tensors[0].flip(0).contiguous())
    clean = gradients(lengths, tuple(tensors[:3]), tensors[3])
    tensors[poisoned][70:135] = float("nan")
    found = gradients(lengths, tuple(tensors[:3]), tensors[3])
    assert any(x[70:135].isnan().any() for x in found)
    for part in (slice(70), slice(135, None)):
        assert_all_bitwise(tuple(x[part] for x in found), tuple(x[part] for x in clean))


@pytest.mark.skipif(is_interpreting(), reason="autograd asks whether there is a GPU")
def test_autograd_takes_what_no_tensor_map_does() -> None:
    lengths = [70, 65]
    packed = PackedLengths.from_lengths(lengths, DEVICE)
    aligned = draw([(0, n) for n in lengths], (2, 1, 64), torch.bfloat16, DEVICE)
    grad = aligned[0].flip(0).contiguous()
    found = []
    for shift in (0, 1):
        leaves = [x.flatten().requires_grad_() for x in aligned]
        before = grad.new_zeros(shift)
        views = [torch.cat([before, x])[shift:].view(y.shape) for x, y in zip(leaves, aligned, strict=True)]
        out = attention_packed(*views, packed, softmax_scale=0.125)[0]
        torch.cat([before, out.flatten()])[shift:].backward(grad.flatten())
        found.append((out, *(x.grad for x in leaves)))
    assert_all_bitwise(*found)


@pytest.mark.skipif(is_interpreting(), reason="autograd asks whether there is a GPU")
def test_autograd_takes_it() -> None:
    lengths = [300, 64, 1, 129, 700, 4]
    packed = PackedLengths.from_lengths(lengths, DEVICE)
    leaves = [x.requires_grad_() for x in draw([(0, n) for n in lengths], (8, 2, 128), torch.bfloat16, DEVICE)]
    out = attention_packed(*leaves, packed, softmax_scale=128**-0.5)[0]
    grad = torch.randn(out.shape, generator=torch.Generator().manual_seed(0)).to(out)
    out.backward(grad)
    expected = gradients(lengths, tuple(x.detach() for x in leaves), grad)
    assert_all_bitwise((out.detach(), *(x.grad for x in leaves)), expected)
    with torch.no_grad():
        assert_bitwise(attend_varlen(*leaves, packed, 128**-0.5), out)
