"""The fused kernels give, bit for bit, what the separate ops do, forward and backward."""

import pytest
import torch

from octavo.numerics.infinity import take_infinity
from octavo.ops.attention import KVRounding
from octavo.ops.attention.qkv_cache import HeadNorms, Rotation
from octavo.ops.attention.qkv_heads import qkv_heads, qkv_heads_backward_reference, qkv_heads_reference, reference
from octavo.ops.attention.qkv_heads import triton as kernels
from octavo.ops.attention.rope import rope_tables
from octavo.ops.norm import Normed
from octavo.ops.norm import triton as norm
from octavo.testing import assert_bitwise, assert_sqnr, generate
from octavo.testing.interpreter import is_interpreting

DEVICE = "cpu" if is_interpreting() else "cuda"
BF16, FP32 = torch.bfloat16, torch.float32
# tokens, heads, kv heads, dim, and how many elements of a head turn as neighbours; None where all do, by halves
CASES = [(5, 4, 2, 32, None), (67, 6, 1, 64, None), (3, 2, 2, 256, 64), (9, 4, 4, 16, None), (5, 3, 3, 32, 32)]
CASES += [] if is_interpreting() else [(777, 32, 8, 128, None), (6145, 32, 4, 128, None), (777, 16, 16, 256, 64)]
KNOWN = (torch.tensor([0.002, 3000.0]), 1 / torch.tensor([0.002, 3000.0]))  # K's clips, V's flushes


@pytest.fixture(autouse=True)
def norms_of_the_same_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    """In the interpreter the separate norm is the Triton one too, as it is on a GPU."""
    if is_interpreting():
        monkeypatch.setattr(reference, "norm_forward", triton_norm)
        monkeypatch.setattr(reference, "norm_backward", triton_norm_backward)


def triton_norm(x: torch.Tensor, weight: torch.Tensor, *, eps: float, kind: str) -> Normed:
    y, _, _, rstd = norm.norm_forward(x, weight, None, None, eps, kind, False)
    return Normed(y, None, None, rstd)


def triton_norm_backward(grad, x, weight, mean, rstd, *, kind):  # type: ignore[no-untyped-def]
    return norm.norm_backward(grad, x, None, weight, mean, rstd, None, False, [])


def make(case: tuple[int, int, int, int, int | None], name: str = "normal", dtype: torch.dtype = BF16):
    tokens, heads, kv_heads, dim, turned = case
    qkv = generate(name, (tokens, (heads + 2 * kv_heads) * dim), dtype, device=DEVICE)
    cos, sin = (t.to(DEVICE) for t in rope_tables(turned or dim, 2048, 10_000.0))
    positions = (torch.arange(tokens, device=DEVICE) * 37) % 2048
    weights = [1.0 + 0.1 * generate("normal", (dim,), dtype, seed=s, device=DEVICE) for s in (3, 4)]
    return qkv, Rotation(positions, cos, sin, turned is not None), HeadNorms(*weights, 1e-6)


def run(qkv: torch.Tensor, case, rotation: Rotation, norms: HeadNorms | None, rounding: KVRounding | None):
    """The kernel, past what chooses it."""
    given = norms or (None, None, 0.0, False)
    has_v, scales = norms is None or rounding is not None, rounding or (None, None)
    q, k, v, rstd = kernels.qkv_heads(qkv, *case[2:4], *rotation, *given, has_v, rounding is not None, *scales)
    assert has_v or not v.numel()
    return q, k, v if has_v else qkv[:, -k[0].numel() :].view(k.shape), rstd


@pytest.mark.parametrize("dtype", [BF16, FP32], ids=["bf16", "fp32"])
@pytest.mark.parametrize("has_norms", [True, False], ids=["norms", "plain"])
@pytest.mark.parametrize("rounding", ["none", "own scales", "known scales"])
@pytest.mark.parametrize("case", CASES, ids=str)
def test_forward(case, rounding: str, has_norms: bool, dtype: torch.dtype, poisoned_outputs) -> None:
    qkv, rotation, norms = make(case, dtype=dtype)
    rounds = {"none": None, "own scales": KVRounding(), "known scales": KVRounding(*(t.to(DEVICE) for t in KNOWN))}
    some = norms if has_norms else None
    found = run(qkv, case, rotation, some, rounds[rounding])
    wanted = qkv_heads_reference(qkv, *case[2:4], rotation, some, rounds[rounding])
    for name, one, other in zip(("q", "k", "v", "rstd"), found, wanted, strict=True):
        assert_bitwise(one, other, name)
    assert all(x.float().abs().sum() > 0 for x in wanted[:2])


@pytest.mark.parametrize("name", ["near_tiny", "zeros", "heavy_tailed"])
def test_inputs(name: str) -> None:
    """Tiny numbers, zeros, rows of a wider matrix, and columns that are contiguous."""
    case = CASES[0]
    qkv, rotation, norms = make(case, name)
    wanted = qkv_heads_reference(qkv, *case[2:4], rotation, norms, KVRounding())
    for laid_out in (torch.cat([qkv, qkv], dim=1)[:, : qkv.shape[1]], qkv.t().contiguous().t()):
        found = run(laid_out, case, rotation, norms, KVRounding())
        for one, other in zip(found, wanted, strict=True):
            assert_bitwise(one, other)
        weights = (norms.q_weight, norms.k_weight)
        of_source = [kernels.qkv_heads_backward(*found[:3], x, found[3], *weights, *rotation) for x in (laid_out, qkv)]
        for one, other in zip(*of_source, strict=True):
            assert_bitwise(one, other)


@pytest.mark.parametrize("has_known_scales", [False, True])
def test_an_infinite_key_is_noted_as_by_the_quantizer(has_known_scales: bool) -> None:
    case = CASES[0]
    qkv, rotation, _ = make(case)
    qkv[3, 4 * 32 + 5] = float("inf")
    rounding = KVRounding(*(t.to(DEVICE) for t in KNOWN)) if has_known_scales else KVRounding()
    noted = []
    for call in (run, lambda x, case, *rest: qkv_heads_reference(x, *case[2:4], *rest)):
        take_infinity(torch.device(DEVICE))
        call(qkv, case, rotation, None, rounding)
        noted.append(float(take_infinity(torch.device(DEVICE))))
    assert noted == [float(not has_known_scales)] * 2


@pytest.mark.parametrize("dtype", [BF16, FP32], ids=["bf16", "fp32"])
@pytest.mark.parametrize("has_norms", [True, False], ids=["norms", "plain"])
@pytest.mark.parametrize("case", CASES, ids=str)
def test_backward(case, has_norms: bool, dtype: torch.dtype, poisoned_outputs, monkeypatch) -> None:
    """The gradient's bits; the weights' sums, over programs of several tiles too, by SQNR and twice the same."""
    monkeypatch.setattr(kernels, "BACKWARD_PROGRAMS", 3 if is_interpreting() else kernels.BACKWARD_PROGRAMS)
    tokens, heads, kv_heads, dim, _ = case
    qkv, rotation, norms = make(case, dtype=dtype)
    grads = [
        generate("normal", (tokens, n, dim), dtype, seed=s, device=DEVICE)
        for s, n in enumerate((heads, kv_heads, kv_heads), 7)
    ]
    grads[1] = grads[1].transpose(0, 1).contiguous().transpose(0, 1)  # as some attention kernels leave it
    rstd = qkv_heads_reference(qkv, kv_heads, dim, rotation, norms if has_norms else None, None)[3]
    weights = (norms.q_weight, norms.k_weight) if has_norms else None
    found, again = (kernels.qkv_heads_backward(*grads, qkv, rstd, *(weights or (None, None)), *rotation) for _ in "ab")
    wanted = qkv_heads_backward_reference(*grads, qkv, rstd, weights, rotation)
    assert_bitwise(found[0], wanted[0], "grad_qkv")
    for one, same, other in zip(found[1:], again[1:], wanted[1:], strict=True):
        assert_bitwise(one, same)
        assert one.shape == other.shape
        if has_norms:
            assert_sqnr(one, other, 45.0 if dtype == BF16 else 120.0)


def test_the_weights_gradients_have_their_stated_order() -> None:
    """A program's tiles in rising order, rows then by halves, programs' sums last; here one tile a program, of ones."""
    case = (64, 2, 1, 32, None)
    _, rotation, norms = make(case)
    x = generate("normal", (64, 4 * 32), FP32, device=DEVICE)
    grads = [torch.ones(64, n, 32, device=DEVICE) for n in (2, 1, 1)]
    rstd, weights = torch.ones(64 * 3, device=DEVICE), (norms.q_weight.float(), norms.k_weight.float())
    still = Rotation(torch.zeros_like(rotation.positions), rotation.cos, rotation.sin)
    _, found, _ = kernels.qkv_heads_backward(*grads, x, rstd, *weights, *still)
    sums = x[:, :64].reshape(-1, kernels.ELEMENTS // 32, 32)  # [programs, rows, D]
    while sums.shape[1] > 1:
        sums = sums[:, : sums.shape[1] // 2] + sums[:, sums.shape[1] // 2 :]
    assert sums.shape[0] == 2
    assert_bitwise(found, sums[0, 0] + sums[1, 0])


@pytest.mark.skipif(is_interpreting(), reason="the op on a CPU is its reference")
def test_heads_that_the_kernel_does_not_take_have_the_separate_ops() -> None:
    """A part of a head that turns by halves, and a width that is no power of two."""
    for dim, turned in ((64, 32), (80, 80)):
        case = (5, 4, 2, dim, None)
        qkv, rotation, norms = make(case)
        rotation = Rotation(rotation.positions, *(t.to(DEVICE) for t in rope_tables(turned, 2048, 1e4)))
        found = qkv_heads(qkv, 2, dim, rotation, norms, KVRounding())
        for one, other in zip(found, qkv_heads_reference(qkv, 2, dim, rotation, norms, KVRounding()), strict=True):
            assert_bitwise(one, other)
