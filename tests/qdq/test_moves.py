"""Each move of a pair alone: it happens, it changes no bit, and it does not happen where it must not."""

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F

from octavo.errors import RecipeError
from octavo.qdq import dequantize, fuse, quantize
from octavo.qdq.graph import DEQUANTIZE, QUANTIZE, QUANTIZE_DYNAMIC, Rewriter
from octavo.qdq.moves import (
    cancel_pairs,
    check_scales,
    fold_constants,
    hoist_quantizes,
    move_pairs,
    share_quantizes,
    sink_dequantizes,
)
from octavo.qdq.spelling import drop_no_ops
from tests.assertions import assert_raises
from tests.qdq.graphs import (
    SCALE,
    Body,
    Model,
    count,
    dynamic_pair,
    export,
    num_pairs,
    pair,
    randn,
    rewriter_of,
    rewritten,
    run,
)

X = randn(2, 6, 8)
OTHER = 3 * SCALE


def test_constants_are_folded() -> None:
    buffers = {"weight": randn(8, 8, seed=1), "scale": torch.tensor(0.03)}
    rewriter = rewritten(lambda m, x: x[0, :1] * pair(m.weight.t(), m.scale), X, fold_constants, **buffers)
    assert num_pairs(rewriter) == (0, 1)
    assert not any(node.target == "weight" for node in rewriter.graph.nodes)


def test_a_written_buffer_is_no_constant() -> None:
    class Counting(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("state", torch.ones(4))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.state.add_(1.0)
            return x + pair(self.state)

    rewriter = Rewriter(torch.export.export(Counting(), (torch.zeros(4),)).module(check_guards=False))
    assert not fold_constants(rewriter)
    assert run(rewriter, torch.zeros(4)).tolist() == [2.0] * 4
    assert run(rewriter, torch.zeros(4)).tolist() == [3.0] * 4


def test_what_is_written_through_a_view_is_no_constant() -> None:
    def body(m: torch.nn.Module, x: torch.Tensor) -> torch.Tensor:
        m.state[0].add_(1.0)
        return x + pair(m.state)

    rewriter = rewriter_of(body, torch.zeros(4), state=torch.ones(4))
    assert not fold_constants(rewriter)
    assert [run(rewriter, torch.zeros(4))[0].item() for _ in range(2)] == [2.0, 3.0]


@pytest.mark.parametrize("view", [lambda x: x, lambda x: x.t()], ids=["straight", "transposed"])
def test_a_scale_that_the_graph_writes_is_read_where_it_was(view: Callable[[torch.Tensor], torch.Tensor]) -> None:
    def body(m: torch.nn.Module, x: torch.Tensor) -> torch.Tensor:
        decoded = pair(x, m.scale)
        m.scale.copy_(x.abs().amax() / 448)
        both = view(decoded) + view(pair(x, m.scale))
        return both + torch.nn.functional.linear(decoded, pair(m.weight))

    x, buffers = randn(8, 8), {"scale": torch.tensor(0.001), "weight": randn(8, 8, seed=1)}
    with torch.no_grad():
        wanted = Model(body, **{name: tensor.clone() for name, tensor in buffers.items()})(x)
        torch.testing.assert_close(fuse(export(body, x, **buffers))[0](x), wanted)


def test_equal_quantizes_are_shared() -> None:
    rewriter = rewritten(lambda m, x: pair(x) + pair(x).sin() + pair(x, OTHER), X, share_quantizes)
    assert count(rewriter, QUANTIZE) == 2


def test_equal_dynamic_quantizes_are_shared() -> None:
    body: Body = lambda m, x: sum(dynamic_pair(x, "per_row") for _ in range(3))  # type: ignore[return-value] # noqa: E731
    assert count(rewritten(body, X, share_quantizes), QUANTIZE_DYNAMIC) == 1


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("scale", [2.0**-7, 0.0123, 3.1e-20, 7.7e20])
def test_a_pair_of_one_scale_cancels(dtype: torch.dtype, scale: float) -> None:
    """All 256 codes but the two NaNs, whose sign is lost either way, come back."""
    codes = torch.arange(256).to(torch.uint8).view(torch.float8_e4m3fn)
    rewriter = rewriter_of(lambda m, c: quantize(dequantize(c, scale, dtype=dtype), scale), codes)
    wanted = run(rewriter, codes)
    assert cancel_pairs(rewriter)
    assert num_pairs(rewriter) == (0, 0)
    found = run(rewriter, codes).view(torch.uint8)
    is_number = ~torch.isnan(codes.float())
    assert torch.equal(found[is_number], wanted.view(torch.uint8)[is_number])


@pytest.mark.parametrize(
    "again",
    [
        lambda x: quantize(x, OTHER),
        lambda x: quantize(x, SCALE, dtype=torch.float8_e5m2),
        lambda x: quantize(x.half(), SCALE),
        lambda x: quantize(x, torch.full((12, 1), SCALE), kind="per_row"),
    ],
    ids=["another scale", "another format", "fp16 between", "another kind"],
)
def test_other_pairs_do_not_cancel(again) -> None:  # type: ignore[no-untyped-def]
    rewriter = rewriter_of(lambda m, x: again(pair(x)), X)
    assert not cancel_pairs(rewriter)
    assert num_pairs(rewriter) == (2, 1)


REARRANGE = {
    "reshape": lambda x: x.reshape(12, 8),
    "transpose": lambda x: x.transpose(0, 2),
    "permute": lambda x: x.permute(2, 0, 1),
    "unsqueeze": lambda x: x[None],
    "flatten": lambda x: x.flatten(1),
    "expand": lambda x: x[:, None].expand(2, 3, 6, 8),
    "slice": lambda x: x[..., 2:6],
    "split": lambda x: torch.cat([part.sin() for part in x.split([3, 5], -1)], -1),
}


@pytest.mark.parametrize("name", REARRANGE)
def test_dequantizes_sink(name: str) -> None:
    rewriter = rewritten(lambda m, x: REARRANGE[name](pair(x)) * 2, X, sink_dequantizes)
    wanted = run(rewriter, X)
    while sink_dequantizes(rewriter):
        pass
    for node in rewriter.nodes(DEQUANTIZE):
        assert {str(user.target) for user in node.users} <= {"aten.mul.Tensor", "aten.sin.default"}
    assert torch.equal(run(rewriter, X), wanted)


@pytest.mark.parametrize("name", [name for name in REARRANGE if name not in ("slice", "split")])
def test_quantizes_rise_to_what_absorbs_them(name: str) -> None:
    body: Body = lambda m, x: pair(REARRANGE[name](torch.nn.functional.rms_norm(x, (8,))))  # noqa: E731
    rewriter = rewritten(body, X, hoist_quantizes)
    wanted = run(rewriter, X)
    while hoist_quantizes(rewriter):
        pass
    assert [str(q.source.target) for q in rewriter.quantizes()] == ["aten.rms_norm.default"]
    assert torch.equal(run(rewriter, X), wanted)


def cut(x: torch.Tensor) -> torch.Tensor:
    return torch.nn.functional.gelu(x, approximate="tanh")


@pytest.mark.parametrize(
    ("body", "rises"),
    [
        (lambda m, x: torch.cat([pair(part) for part in cut(x).split([3, 5], -1)], -1), True),
        (lambda m, x: torch.cat([pair(part, s) for part, s in zip(cut(x).chunk(2, -1), (SCALE, OTHER))], -1), False),  # noqa: B905
        (lambda m, x: pair((y := cut(x))[..., :3]).sum() + pair(y[..., 3:]).sum(), True),
        (lambda m, x: pair((y := cut(x)).clone()[..., :3]).sum() + pair(y[..., 3:]).sum(), True),
        (lambda m, x: pair((y := cut(x))[..., :3]).sum() + y.sum(), False),
        (lambda m, x: pair((y := cut(x)).flatten(1)) + y.flatten(1), True),
        (lambda m, x: pair(x.transpose(0, 1)), False),
    ],
    ids=[
        "split",
        "split, two scales",
        "slices",
        "the later one first",
        "slice beside another reader",
        "reader above",
        "an input",
    ],
)
def test_quantizes_rise_over_cuts_that_all_quantize(body: Body, rises: bool) -> None:
    rewriter = rewriter_of(body, X)
    wanted = run(rewriter, X)
    drop_no_ops(rewriter)
    assert hoist_quantizes(rewriter) is rises
    share_quantizes(rewriter)
    assert torch.equal(run(rewriter, X), wanted)


def test_all_moves_together_reach_an_end() -> None:
    body: Body = lambda m, x: pair(pair(cut(x)).transpose(1, 2).reshape(2, 48)).unflatten(1, (8, 6))  # noqa: E731
    rewriter = rewriter_of(body, X)
    wanted = run(rewriter, X)
    move_pairs(rewriter)
    assert num_pairs(rewriter) == (1, 1)
    assert torch.equal(run(rewriter, X), wanted)


@pytest.mark.parametrize("scale", [0.0, -1.0, float("inf"), float("nan")])
def test_a_bad_scale_is_refused(scale: float) -> None:
    rewriter = rewriter_of(lambda m, x: pair(x, m.scale), X, scale=torch.tensor(scale))
    assert_raises(RecipeError, "positive and finite", check_scales, rewriter)


def added(x: torch.Tensor, to: torch.Tensor) -> torch.Tensor:
    """x, behind a write through a view of it or of what it is a view of."""
    to.add_(1.0)
    return x


WRITTEN: dict[str, Body] = {
    "a DQ": lambda m, x: added(y := pair(x), y[:1]) * 2,
    "a norm": lambda m, x: pair(added((y := F.rms_norm(x, (8,))).reshape(2, 48), y[:1])),
    "a residual": lambda m, x: pair(F.rms_norm(added(y := x + x, y[:1]), (8,), m.g)) + y,
    "the input of GeLU's bias": lambda m, x: pair(F.gelu(added((y := x * 1) + m.g, y[:1]), approximate="tanh")),
    "SwiGLU's input": lambda m, x: pair(added(F.silu((y := x * 1)[..., :4]), y[:1]) * y[..., 4:]),
    "a spelled-out SiLU": lambda m, x: added(torch.sigmoid(y := x * 1), y[:1]) * y,
}


@pytest.mark.parametrize("name", WRITTEN)
def test_what_is_written_through_a_view_is_read_where_it_was(name: str) -> None:
    program = export(WRITTEN[name], X, g=torch.ones(8))
    assert torch.equal(fuse(program)[0](X), program.module()(X))


def test_infinite_codes_that_a_graph_is_given_are_saturated() -> None:
    codes = torch.tensor([[float("inf"), 1.0]]).to(torch.float8_e5m2)
    program = export(lambda m, c: quantize(dequantize(c, SCALE), SCALE, dtype=c.dtype).float(), codes)
    assert fuse(program)[0](codes).tolist() == program.module()(codes).tolist() == [[57344.0, 1.0]]
