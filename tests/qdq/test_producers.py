"""Norms and activations before a Q become fused ops, equal in bits to octavo's parts, however they are written."""

import math

import pytest
import torch
import torch.nn.functional as F

from octavo.numerics.analysis import sqnr
from octavo.ops.activation import activation
from octavo.ops.norm import norm_forward
from octavo.qdq import dequantize, fuse, quantize
from octavo.qdq.fused import activation_to_fp8, norm_to_fp8, to_fp8
from octavo.qdq.graph import QUANTIZE
from octavo.qdq.moves import move_pairs
from octavo.qdq.producers import fuse_producers
from octavo.qdq.spelling import normalize_spelling
from tests.qdq.graphs import SCALE, Body, K, N, W, X, count, export, pair, randn, rewriter_of, run

GAMMA, BETA = 1 + 0.1 * randn(K, seed=5), randn(K, seed=6)


def norm_parts(kind: str, x: torch.Tensor, residual: torch.Tensor | None, gamma: torch.Tensor, eps: float):  # type: ignore[no-untyped-def]
    matrix = [None if t is None else t.flatten(0, 1) for t in (x, residual)]
    bias = BETA.to(x.dtype) if kind == "layer_norm" else None
    y = norm_forward(matrix[0], gamma, bias=bias, eps=eps, kind=kind, residual=matrix[1]).y  # type: ignore[arg-type]
    return dequantize(quantize(y.reshape(x.shape), SCALE), SCALE, dtype=x.dtype)


def hand_written(m, x: torch.Tensor) -> torch.Tensor:  # type: ignore[no-untyped-def]
    wide = x.float()
    return m.gamma * (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-6)).to(x.dtype)


NORMS = {
    "rms_norm": ("rms_norm", 1e-5, lambda m, x, r: pair(F.rms_norm(x, (K,), m.gamma, 1e-5))),
    "rms_norm, default eps": ("rms_norm", 2.0**-23, lambda m, x, r: pair(F.rms_norm(x, (K,), m.gamma))),
    "rms_norm of a sum": ("rms_norm", 1e-5, lambda m, x, r: pair(F.rms_norm(x + r, (K,), m.gamma, 1e-5))),
    "layer_norm": ("layer_norm", 1e-5, lambda m, x, r: pair(F.layer_norm(x, (K,), m.gamma, m.beta))),
    "layer_norm of a sum": ("layer_norm", 1e-5, lambda m, x, r: pair(F.layer_norm(x + r, (K,), m.gamma, m.beta))),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", NORMS)
def test_norms_make_codes(name: str, dtype: torch.dtype) -> None:
    """Bitwise: octavo's norm is torch's on a CPU, in fp32 and in bf16, and its codes are the Q's."""
    kind, eps, body = NORMS[name]
    x, r = X.to(dtype), randn(2, 5, K, seed=7).to(dtype)
    rewriter = rewriter_of(body, x, r, gamma=GAMMA.to(dtype), beta=BETA.to(dtype))
    wanted = run(rewriter, x, r)
    move_pairs(rewriter)
    fuse_producers(rewriter)
    assert (count(rewriter, norm_to_fp8), count(rewriter, QUANTIZE, to_fp8)) == (1, 0)
    found = run(rewriter, x, r)
    assert torch.equal(found, norm_parts(kind, x, r if "sum" in name else None, GAMMA.to(dtype), eps))
    assert torch.equal(found, wanted)


def test_the_sum_goes_on() -> None:
    """The residual stream's other readers read the fused op's sum."""
    body: Body = lambda m, x, r: pair(F.rms_norm(y := x + r, (K,), m.gamma, 1e-5)) + y  # noqa: E731
    rewriter = rewriter_of(body, X, X.flip(0), gamma=GAMMA)
    wanted = run(rewriter, X, X.flip(0))
    fuse_producers(rewriter)
    assert rewriter.report.fused[0].op == "residual + norm_quantize"
    assert count(rewriter, torch.ops.aten.add.Tensor) == 1
    assert torch.equal(run(rewriter, X, X.flip(0)), wanted)


SPELLINGS: dict[str, Body] = {
    "cast and rsqrt": hand_written,
    "x / sqrt": lambda m, x: (x / torch.sqrt((x * x).mean(-1, keepdim=True) + 1e-6)) * m.gamma,
    "reciprocal": lambda m, x: m.gamma * (x * torch.sqrt(1e-6 + x.square().mean(-1, keepdim=True)).reciprocal()),
    "power": lambda m, x: m.gamma * (x * (x.pow(2).mean(-1, keepdim=True) + 1e-6).pow(-0.5)),
}


@pytest.mark.parametrize("name", SPELLINGS)
def test_spelled_out_rms_norms_are_named(name: str) -> None:
    rewriter = rewriter_of(SPELLINGS[name], X, gamma=GAMMA)
    wanted = run(rewriter, X)
    normalize_spelling(rewriter)
    assert count(rewriter, torch.ops.aten.rms_norm.default) == 1
    assert sqnr(wanted, run(rewriter, X)) >= 120.0


@pytest.mark.parametrize(
    "body",
    [
        lambda m, x: m.gamma * (x * torch.rsqrt(x.pow(2).mean(1, keepdim=True) + 1e-6)),
        lambda m, x: m.gamma * (x * torch.rsqrt(x.pow(3).mean(-1, keepdim=True).abs() + 1e-6)),
        lambda m, x: m.gamma * (x * torch.rsqrt(x.sin().pow(2).mean(-1, keepdim=True) + 1e-6)),
    ],
    ids=["another dim", "another power", "another tensor"],
)
def test_what_is_no_rms_norm_stays(body: Body) -> None:
    rewriter = rewriter_of(body, X, gamma=GAMMA)
    normalize_spelling(rewriter)
    assert count(rewriter, torch.ops.aten.rms_norm.default) == 0


C = math.sqrt(2 / math.pi)
GELUS: dict[str, Body] = {
    "gelu": lambda m, x: F.gelu(x, approximate="tanh"),
    "as Hugging Face writes it": lambda m, x: 0.5 * x * (1.0 + torch.tanh(C * (x + 0.044715 * torch.pow(x, 3.0)))),
    "factored": lambda m, x: x * (0.5 * (1 + torch.tanh(C * (x * (1 + 0.044715 * x**2))))),
    "with bias": lambda m, x: F.gelu(x + m.beta, approximate="tanh"),
}


@pytest.mark.parametrize("name", GELUS)
def test_gelu_makes_codes(name: str) -> None:
    """Bitwise equal to octavo's parts; a code apart from torch's where its own GeLU is an ulp off."""
    body: Body = lambda m, x: pair(GELUS[name](m, x))  # noqa: E731
    rewriter = rewriter_of(body, X, beta=BETA)
    wanted = run(rewriter, X)
    normalize_spelling(rewriter)
    move_pairs(rewriter)
    fuse_producers(rewriter)
    assert (count(rewriter, activation_to_fp8), count(rewriter, QUANTIZE, to_fp8)) == (1, 0)
    found = run(rewriter, X)
    y = activation(X.flatten(0, 1), kind="gelu", bias=BETA if name == "with bias" else None).reshape(X.shape)
    assert torch.equal(found, pair(y))
    assert sqnr(wanted, found) >= 45.0


GATED: dict[str, Body] = {
    "two linears": lambda m, x: F.silu(F.linear(y := pair(x), pair(m.w))) * F.linear(y, pair(m.v)),
    "up first": lambda m, x: F.linear(y := pair(x), pair(m.v)) * F.silu(F.linear(y, pair(m.w))),
    "two scales": lambda m, x: F.silu(F.linear(y := pair(x), pair(m.w))) * F.linear(y, pair(m.v, 2 * SCALE)),
    "spelled out": lambda m, x: (g := F.linear(y := pair(x), pair(m.w))) * torch.sigmoid(g) * F.linear(y, pair(m.v)),
    "a chunk": lambda m, x: F.silu((h := F.linear(pair(x), pair(m.both)).chunk(2, -1))[0]) * h[1],
    "slices": lambda m, x: F.silu((h := F.linear(pair(x), pair(m.both)))[..., :N]) * h[..., N : 2 * N],
}


@pytest.mark.parametrize("name", GATED)
def test_swiglu_makes_codes(name: str) -> None:
    body: Body = lambda m, x: F.linear(pair(GATED[name](m, x)), pair(m.out))  # noqa: E731
    v = randn(N, K, seed=3)
    program = export(body, X, w=W, v=v, both=torch.cat([W, v]), out=randn(K, N, seed=8))
    module, report = fuse(program)
    ops = [site.op for site in report.fused]
    assert ops == ["scaled_mm", "swiglu activation_quantize", "scaled_mm"]
    assert [left.reason for left in report.left_over] == ["the graph's input inputs_0 writes no FP8"]
    assert sqnr(program.module()(X), module(X)) >= 60.0


def test_a_cast_to_fp8_stays_in_a_spelled_out_formula() -> None:
    def body(m, x: torch.Tensor) -> torch.Tensor:  # type: ignore[no-untyped-def]
        rounded = x.to(torch.float8_e4m3fn).to(torch.float32)
        return rounded * torch.sigmoid(x)

    module, report = fuse(export(body, X))
    assert report.moved == []
    assert torch.equal(module(X), body(None, X))


def test_gelu_of_a_sum_that_a_bias_widens() -> None:
    body: Body = lambda m, x: pair(F.gelu(x[..., :1] + m.beta, approximate="tanh"))  # noqa: E731
    module, report = fuse(export(body, X, beta=BETA))
    assert [site.op for site in report.fused] == ["gelu activation_quantize"]
    assert torch.equal(module(X), pair(F.gelu(X[..., :1] + BETA, approximate="tanh")))
