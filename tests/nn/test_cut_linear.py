"""ColumnLinear and RowLinear on 2 and 4 ranks beside one Linear: bits forward, SQNR backward, what is refused."""

from typing import Any

import pytest
import torch
import torch.distributed as dist

from octavo.distributed.mesh import Mesh
from octavo.distributed.tensor_group import TensorGroup
from octavo.errors import ConfigError, OctavoError, RecipeError, ShapeError
from octavo.nn import ColumnLinear, Linear, RowLinear
from octavo.nn.cut_linear import CutLinear
from octavo.numerics import get_recipe
from octavo.numerics.analysis import sqnr
from tests.ranks import run_group

IN, OUT, TOKENS = 512, 1024, 24
RECIPES = ("bf16", "rowwise", "blockwise", "tensorwise")
LEAST_DB = 40.0  # of one linear's output and gradients against one GPU's: the promise


def whole(recipe: str, bias: bool, parts: tuple[int, ...] | None = None) -> Linear:
    generator = torch.Generator().manual_seed(0)
    linear = Linear(IN, OUT, bias, parts=parts)
    assert linear.weight is not None
    with torch.no_grad():
        linear.weight.copy_(torch.randn(OUT, IN, generator=generator) * IN**-0.5)
        if linear.bias is not None:
            linear.bias.copy_(torch.randn(OUT, generator=generator))
    if recipe != "bf16":
        linear.set_recipe(get_recipe(recipe))
    return linear


def give(cut: CutLinear, one: Linear, rows: torch.Tensor, columns: slice = slice(None)) -> None:
    """A slice of a whole linear's values."""
    assert cut.weight is not None and one.weight is not None
    with torch.no_grad():
        cut.weight.copy_(one.weight[rows, columns])
        if cut.bias is not None and one.bias is not None:
            cut.bias.copy_(one.bias[rows])
    cut.set_recipe(one.recipe)
    cut.exact = one.exact


def share(num: int, group: TensorGroup) -> slice:
    return slice(group.rank * num // group.size, (group.rank + 1) * num // group.size)


def compare(one: Linear, cut: CutLinear, group: TensorGroup, x: torch.Tensor, grad: torch.Tensor) -> dict[str, Any]:
    """Output without and with gradients, and gradients, against those of the whole linear, this rank's part of each."""
    is_row = isinstance(cut, RowLinear)
    columns = share(IN, group) if is_row else slice(None)
    with torch.no_grad():
        quiet = cut(x[:, columns]), one(x)
    of_cut, of_one = x[:, columns].clone().requires_grad_(), x.clone().requires_grad_()
    loud = cut(of_cut), one(of_one)
    rows = (
        slice(None)
        if is_row
        else torch.cat([torch.arange(OUT // 2)[share(OUT // 2, group)] + h for h in (0, OUT // 2)])
    )
    loud[0].backward(grad if is_row else grad[:, rows])
    loud[1].backward(grad)
    assert cut.weight is not None and one.weight is not None
    assert of_cut.grad is not None and of_one.grad is not None
    assert cut.weight.grad is not None and one.weight.grad is not None
    own = (
        (slice(None), columns)
        if is_row and cut.mode == "reduce"
        else (share(OUT, group) if is_row else rows, slice(None))
    )
    pairs = {
        "inference": (quiet[0], quiet[1] if is_row else quiet[1][:, rows]),
        "forward": (loud[0], loud[1] if is_row else loud[1][:, rows]),
        "grad_input": (of_cut.grad, of_one.grad[:, columns]),
        "grad_weight": (cut.weight.grad, one.weight.grad[own]),
    }
    if cut.bias is not None and cut.bias.grad is not None and one.bias is not None and one.bias.grad is not None:
        pairs["grad_bias"] = (
            cut.bias.grad,
            one.bias.grad if is_row and cut.mode == "reduce" else one.bias.grad[own[0]],
        )
    return {name: (bool(torch.equal(a, b)), sqnr(b.float(), a.float())) for name, (a, b) in pairs.items()}


def job(rank: int, world: int) -> dict[str, Any]:
    group, found = TensorGroup.of(), dict[str, Any]()
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(TOKENS, IN, generator=generator).to(torch.bfloat16)
    grad = torch.randn(TOKENS, OUT, generator=generator).to(torch.bfloat16)
    for recipe in RECIPES:
        for bias in (False, True):
            one = whole(recipe, bias, (OUT // 2, OUT // 2))
            rows = torch.cat([torch.arange(OUT // 2)[share(OUT // 2, group)] + half for half in (0, OUT // 2)])
            column = ColumnLinear(IN, OUT, bias, group=group, parts=(OUT // 2, OUT // 2))
            give(column, one, rows)
            found[f"column {recipe} {bias}"] = compare(one, column, group, x, grad)
            one = whole(recipe, bias)
            for mode in ("gather", "reduce"):
                row = RowLinear(IN, OUT, bias, group=group, mode=mode)  # type: ignore[arg-type]
                if mode == "gather":
                    give(row, one, torch.arange(OUT)[share(OUT, group)])
                else:
                    give(row, one, torch.arange(OUT), share(IN, group))
                one.zero_grad()
                found[f"row {mode} {recipe} {bias}"] = compare(one, row, group, x, grad)
    one = whole("blockwise", False)
    joined = ColumnLinear(IN, OUT, group=group, gather_output=True)
    give(joined, one, torch.arange(OUT)[share(OUT, group)])
    found["gather_output"] = bool(torch.equal(joined(x), one(x)))
    found["refused"] = [refusal(make) for make in refused(group, x)]
    return found


def refused(group: TensorGroup, x: torch.Tensor) -> list[Any]:
    def per_tensor() -> None:
        linear = ColumnLinear(IN, OUT, group=group)
        linear.set_recipe(get_recipe("delayed"))
        linear(x)

    def exact() -> None:
        linear = RowLinear(IN, OUT, group=group, mode="reduce")
        linear.exact = True
        linear(x[:, share(IN, group)])

    return [
        lambda: ColumnLinear(IN, OUT + 1, group=group),
        lambda: RowLinear(IN + 1, OUT, group=group),
        lambda: RowLinear(IN, OUT, group=group, mode="both"),  # type: ignore[arg-type]
        lambda: ColumnLinear(IN, OUT, group=group, parts=(OUT // 2, OUT // 2), gather_output=True),
        lambda: RowLinear(IN, OUT, group=group)(x),
        per_tensor,
        exact,
        lambda: ColumnLinear(IN, OUT, group=Mesh.of_process_group(1, 1, "cpu", group.size)),  # type: ignore[arg-type]
        lambda: RowLinear(IN, OUT, group=dist.group.WORLD),  # type: ignore[arg-type]
        lambda: RowLinear(IN, OUT, group=Mesh.single().tensor_group),  # type: ignore[arg-type]
    ]


def refusal(make: Any) -> str:
    try:
        make()
    except OctavoError as error:
        return f"{type(error).__name__}: {error}"
    return "not refused"


@pytest.fixture(scope="module", params=[2, pytest.param(4, marks=pytest.mark.largest)])
def ranks(request: pytest.FixtureRequest) -> list[dict[str, Any]]:
    return run_group(job, request.param)


@pytest.mark.parametrize("bias", [False, True], ids=["plain", "bias"])
@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("kind", ["column", "row gather"])
def test_each_sum_is_made_on_one_rank(ranks: list[dict[str, Any]], kind: str, recipe: str, bias: bool) -> None:
    for found in ranks:
        of_kind = found[f"{kind} {recipe} {bias}"]
        assert of_kind["inference"][0] and of_kind["forward"][0]  # the bits of one process
        assert min(db for _, db in of_kind.values()) > LEAST_DB


@pytest.mark.parametrize("recipe", RECIPES)
def test_partial_sums_are_close(ranks: list[dict[str, Any]], recipe: str) -> None:
    for found in ranks:
        for bias in (False, True):
            of_kind = found[f"row reduce {recipe} {bias}"]
            assert not of_kind["forward"][0]  # of another order of sums
            assert min(db for _, db in of_kind.values()) > LEAST_DB


def test_gather_output_gives_all_columns(ranks: list[dict[str, Any]]) -> None:
    assert all(found["gather_output"] for found in ranks)


def test_what_has_no_bits_or_no_share_is_refused(ranks: list[dict[str, Any]]) -> None:
    expected = [
        (ShapeError, "a part of out_features must be a multiple of the"),
        (ShapeError, "in_features must be a multiple of the"),
        (ConfigError, "mode must be one of"),
        (ShapeError, "gather_output would put the columns"),
        (ShapeError, "must be this rank's"),
        (RecipeError, "one scale for a whole weight"),
        (RecipeError, "adds partial sums of several ranks, so it cannot be exact"),
        (ConfigError, "must be a TensorGroup, got a Mesh; give mesh.tensor_group"),
        (ConfigError, "must be a TensorGroup, got a ProcessGroup"),
        (ConfigError, "must be a TensorGroup, got None; give mesh.tensor_group (None where tensor_parallel_degree is"),
    ]
    for found in ranks:
        for text, (kind, words) in zip(found["refused"], expected, strict=True):
            assert text.startswith(kind.__name__) and words in text
