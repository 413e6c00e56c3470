"""The gradient of exact attention by its kernel: the reference's, and the same bits in any batch."""

import pytest
import torch

from octavo.ops import attention
from octavo.ops.attention import PackedLengths, attention_packed, attention_packed_backward, quantize_kv
from octavo.ops.attention.triton.backward import attend_backward
from octavo.testing import assert_bitwise, assert_sqnr
from octavo.testing.interpreter import is_interpreting
from tests.assertions import assert_all_bitwise

DEVICE = "cpu" if is_interpreting() else "cuda"
# lengths, query heads, kv heads, head_dim
CASES = [((70, 1, 33), 4, 2, 32), ((65,), 2, 2, 64), ((40, 3), 3, 1, 256)]
if not is_interpreting():
    CASES += [((1500, 2049, 1, 515), 32, 8, 128), ((700, 64), 16, 16, 256)]
EACH_CASE = pytest.mark.parametrize(("lengths", "heads", "kv_heads", "dim"), CASES, ids=str)
# Probabilities and slopes are rounded to bf16 for the products, which the reference does in fp32.
FLOOR_DB = 44.0

Gradients = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


class Case:
    """Operands of a forward pass, what came of it, and a gradient of that."""

    def __init__(
        self, lengths: tuple[int, ...], heads: int, kv_heads: int, dim: int, kv: str, generator: torch.Generator
    ) -> None:
        tokens = sum(lengths)
        self.lengths, self.scale = PackedLengths.from_lengths([*lengths], DEVICE), dim**-0.5
        self.q, k, v, self.grad = (
            torch.randn(tokens, n, dim, generator=generator).to(DEVICE, torch.bfloat16)
            for n in (heads, kv_heads, kv_heads, heads)
        )
        out, lse = attention_packed(self.q, k, v, self.lengths, softmax_scale=self.scale, kv_cache_dtype=kv, exact=True)
        assert lse is not None
        self.out, self.lse = out, lse
        self.k_scale = self.v_scale = None
        self.k, self.v = k, v
        if kv == "fp8":
            (self.k, self.k_scale), (self.v, self.v_scale) = quantize_kv(k), quantize_kv(v)

    @property
    def kv(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None, torch.Tensor | None]:
        return self.k, self.v, self.k_scale, self.v_scale

    def by_kernel(self) -> Gradients:
        return attend_backward(self.grad, self.q, self.kv, self.out, self.lse, self.lengths, self.scale)

    def by_reference(self) -> Gradients:
        return attention_packed_backward(
            *(self.grad, self.q, self.k, self.v, self.k_scale, self.v_scale, self.out, self.lse, self.lengths),
            softmax_scale=self.scale,
        )

    def only(self, tokens: slice, length: int) -> "Case":
        """One sequence alone."""
        alone = object.__new__(Case)
        alone.lengths, alone.scale = PackedLengths.from_lengths([length], DEVICE), self.scale
        for name in ("q", "k", "v", "k_scale", "v_scale", "grad", "out", "lse"):
            x = getattr(self, name)
            setattr(alone, name, None if x is None else x[tokens])
        return alone


@EACH_CASE
@pytest.mark.parametrize("kv", ["fp8", "bf16"])
def test_it_is_the_references_gradient(lengths, heads, kv_heads, dim, kv, generator):
    case = Case(lengths, heads, kv_heads, dim, kv, generator)
    for name, found, wanted in zip(("q", "k", "v"), case.by_kernel(), case.by_reference(), strict=True):
        assert found.shape == wanted.shape and found.dtype == wanted.dtype == torch.bfloat16
        assert_sqnr(found, wanted, FLOOR_DB, name)


def test_a_sequence_has_its_bits_in_any_batch_and_always(generator: torch.Generator) -> None:
    case = Case((70, 1, 33), 4, 2, 32, "fp8", generator)
    together = case.by_kernel()
    assert_all_bitwise(case.by_kernel(), together)
    end = 0
    for length in (70, 1, 33):
        mine = slice(end, end + length)
        for alone, whole in zip(case.only(mine, length).by_kernel(), together, strict=True):
            assert_bitwise(alone, whole[mine])
        end += length


@pytest.mark.gpu
@pytest.mark.skipif(is_interpreting(), reason="a GPU's path")
@pytest.mark.parametrize("attention_dtype", ["bf16", "fp8"])
def test_it_is_the_references(attention_dtype, generator, monkeypatch):
    case = Case((130, 40), 4, 2, 64, "fp8", generator)
    q, q_scale = (case.q, None) if attention_dtype == "bf16" else quantize_kv(case.q)
    found = []
    for has_kernel in (False, True):
        monkeypatch.setattr(attention, "_has_kernel", lambda _, has_kernel=has_kernel: has_kernel)
        found.append(
            attention_packed_backward(
                *(case.grad, q, case.k, case.v, case.k_scale, case.v_scale, case.out, case.lse, case.lengths),
                softmax_scale=case.scale,
                q_scale=q_scale,
            )
        )
    for wanted, got in zip(*found, strict=True):
        assert not torch.equal(wanted, got)
        assert_sqnr(got, wanted, FLOOR_DB)
