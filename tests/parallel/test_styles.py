"""torch's parallelize_module over octavo's linears: octavo's styles cut them, torch's own refuse them."""

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate
from torch.distributed.tensor import parallel as torch_styles

import octavo
from octavo.errors import OctavoError
from octavo.nn import ColumnLinear, RowLinear
from octavo.numerics.analysis import sqnr
from octavo.parallel import parallelize
from octavo.parallel.styles import ColwiseParallel, RowwiseParallel
from tests.ranks import run_group, run_ranks

WIDTH, INNER, TOKENS = 256, 512, 24
CASES = [("tensorwise", False), ("rowwise", False), ("rowwise", True), ("blockwise", False), ("blockwise", True)]
PAGE = (Path(__file__).parents[2] / "docs" / "distributed.md").read_text(encoding="utf-8")
BLOCKS = [
    code
    for code in re.findall(r"^```python no-run\n(.*?)^```", PAGE, re.MULTILINE | re.DOTALL)
    if "ColumnLinear" in code or "ColwiseParallel" in code
]
PLAN = {
    "first.up": ColwiseParallel(),
    "second.up": ColwiseParallel(),
    "[fs]*.down": RowwiseParallel(),
    "head": ColwiseParallel(output_layouts=Replicate()),
}


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, INNER), nn.Linear(INNER, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(nn.functional.silu(self.up(x)))  # type: ignore[no-any-return]


def make(recipe: str, *, exact: bool = False) -> nn.Sequential:
    torch.manual_seed(0)
    model = nn.Sequential()
    model.add_module("first", Block())
    model.add_module("second", Block())
    model.add_module("head", nn.Linear(WIDTH, 64))  # stays torch's own
    octavo.convert(model.bfloat16(), recipe, ignore=("head",))
    for module in model.modules():
        if isinstance(module, octavo.nn.Linear):
            module.exact = exact
    return model


def run(model: nn.Module) -> tuple[torch.Tensor, torch.Tensor, dict[str, torch.Tensor]]:
    x = torch.randn(TOKENS, WIDTH, generator=torch.Generator().manual_seed(1)).bfloat16().requires_grad_()
    out = model(x)
    out.float().square().mean().backward()
    assert x.grad is not None
    grads = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    return out.detach(), x.grad, grads


def own(name: str, whole: torch.Tensor, rank: int, world: int, exact: bool) -> torch.Tensor:
    """What a rank has of a parameter's gradient."""
    if "down" in name and not exact:
        return whole.chunk(world, 1)[rank] if whole.dim() == 2 else whole
    return whole.chunk(world)[rank]


def job(rank: int, world: int) -> dict[str, Any]:
    mesh, found = init_device_mesh("cpu", (world,)), dict[str, Any]()
    for recipe, exact in CASES:
        one, cut = make(recipe, exact=exact), make(recipe, exact=exact)
        before, seen = cut.first.up, list[Any]()  # type: ignore[union-attr]
        cut.first.up.register_forward_hook(lambda *_, seen=seen: seen.append(1))  # type: ignore[union-attr]
        torch_styles.parallelize_module(cut, mesh, PLAN)
        assert cut.first.up is before  # type: ignore[union-attr]
        (out, grad, grads), (out_one, grad_one, grads_one) = run(cut), run(one)
        head = grads.pop("head.weight")
        db = {name: sqnr(own(name, grads_one[name], rank, world, exact), each) for name, each in grads.items()
              if "head" not in name}  # fmt: skip
        found[f"{recipe} {exact}"] = {
            "kinds": [type(getattr(cut.second, name)) for name in ("up", "down")],
            "bits": torch.equal(out, out_one),
            "db": min(sqnr(out_one, out), sqnr(grad_one, grad), *db.values()),
            "num_grads": len(db),
            "head": type(head).__name__,
            "hook": len(seen),
        }
    one, cut = (make("rowwise", exact=True).requires_grad_(False) for _ in range(2))
    octavo.nn.keep_codes_only(cut)
    torch_styles.parallelize_module(cut, mesh, PLAN)
    x = torch.randn(TOKENS, WIDTH, generator=torch.Generator().manual_seed(2)).bfloat16()
    found["codes alone"] = isinstance(cut.first.up, ColumnLinear) and torch.equal(cut(x), one(x))  # type: ignore[union-attr]
    found["refused"] = [refusal(case, mesh) for case in REFUSED]
    return found


def refusal(case: Any, mesh: Any) -> str:
    try:
        case(mesh)
    except (OctavoError, NotImplementedError) as error:
        return f"{type(error).__name__}: {error}"
    return "not refused"


def _twice(mesh: Any) -> None:
    model = make("rowwise")
    for _ in range(2):
        torch_styles.parallelize_module(model, mesh, {"first.up": ColwiseParallel()})


def _other_values(mesh: Any) -> None:
    model = make("rowwise")
    with torch.no_grad():
        model.first.up.weight.add_(mesh.get_rank())  # type: ignore[union-attr,operator]
    torch_styles.parallelize_module(model, mesh, PLAN)


def _optimizer_before(mesh: Any) -> None:
    model = make("rowwise")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    torch_styles.parallelize_module(model, mesh, PLAN)
    optimizer.step()


def _odd_blocks(mesh: Any) -> None:
    model = nn.Sequential(nn.Linear(256, 192)).bfloat16()
    octavo.convert(model, "blockwise")
    torch_styles.parallelize_module(model, mesh, {"0": ColwiseParallel()})


REFUSED = (
    lambda mesh: torch_styles.parallelize_module(make("rowwise"), mesh, {"first.up": torch_styles.ColwiseParallel()}),
    lambda mesh: torch_styles.parallelize_module(
        make("rowwise"), mesh, {"first.up": ColwiseParallel(output_layouts=Replicate())}
    ),
    lambda mesh: torch_styles.parallelize_module(
        make("rowwise"), mesh, {"first.down": RowwiseParallel(use_local_output=False)}
    ),
    _twice,
    _other_values,
    _optimizer_before,
    _odd_blocks,
    lambda mesh: parallelize(make("rowwise"), mesh),  # type: ignore[arg-type]
)
REFUSALS = (
    "NotImplementedError: ColwiseParallel currently only support nn.Linear and nn.Embedding!",  # torch's, as docs say
    "ConfigError: ColwiseParallel of an octavo.nn.Linear takes plain tensors",
    "ConfigError: RowwiseParallel of an octavo.nn.Linear takes plain tensors",
    "ConfigError: ColwiseParallel cuts an octavo.nn.Linear that is whole, got a ColumnLinear",
    "ConfigError: all ranks must run the same; the sum of the bits of weight",
    "ConfigError: this SGD was made before the model was sharded or cut",
    "ShapeError: 'blockwise' has blocks of 128",
    "ConfigError: the ranks of a cut must be a TensorGroup, got a DeviceMesh",
)


@pytest.fixture(scope="module")
def ranks() -> list[dict[str, Any]]:
    return run_group(job, 2)


@pytest.mark.parametrize(("recipe", "exact"), CASES)
def test_a_plan_with_octavos_styles_cuts_octavos_linears(ranks: list[dict[str, Any]], recipe: str, exact: bool) -> None:
    for found in ranks:
        of_model = found[f"{recipe} {exact}"]
        assert of_model["kinds"] == [ColumnLinear, RowLinear] and of_model["num_grads"] == 8
        assert of_model["head"] == "DTensor"  # torch's own linear is torch's to cut
        assert of_model["hook"] == 1
        assert of_model["bits"] or not exact
        assert of_model["db"] > 20  # of two blocks in FP8, not of one linear


def test_a_linear_of_codes_alone_is_cut_too(ranks: list[dict[str, Any]]) -> None:
    assert all(found["codes alone"] for found in ranks)


def documented(rank: int) -> list[torch.Tensor]:
    """What the blocks of docs/distributed.md make on two ranks."""
    torch.set_num_threads(1)
    made = []
    for code in BLOCKS:
        made.append(space := dict[str, Any]())
        exec(code, space)
    one, other = made
    whole = torch.relu(one["x"] @ one["whole_up"].t()) @ one["whole_down"].t()
    torch.testing.assert_close(one["out"].detach(), whole)
    assert isinstance(other["model"][2], RowLinear)
    other["mesh"].close()
    return [one["out"].detach(), other["out"].detach()]


def test_the_documented_blocks_run_on_two_ranks() -> None:
    assert len(BLOCKS) == 2
    first, second = run_ranks(documented, 2)
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


def test_what_a_style_cannot_do_is_refused(ranks: list[dict[str, Any]]) -> None:
    for found in ranks:
        for text, expected in zip(found["refused"], REFUSALS, strict=True):
            assert text.startswith(expected)
