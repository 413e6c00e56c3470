"""The in-place step of delayed scaling: the kernel equals numerics.delayed, and compiles for Hopper.

tests/testing/test_interpreter.py runs this file in the interpreter too.
"""

import pytest
import torch

from octavo.errors import ShapeError
from octavo.numerics import get_recipe
from octavo.numerics.delayed import update_delayed
from octavo.ops.quantize.delayed import Histories, update_delayed_
from octavo.testing import assert_bitwise
from octavo.testing.interpreter import is_interpreting
from tests.assertions import assert_raises

CASES = {
    "normal": lambda h: h,
    "skipped": lambda h: h.index_fill_(0, torch.tensor([0]), 0.0),
    "nan staged": lambda h: h.index_put_((torch.tensor([0]), torch.tensor([2])), torch.tensor(float("nan"))),
    "inf in the past": lambda h: h.index_put_((torch.tensor([-1]), torch.tensor([0])), torch.tensor(float("inf"))),
    "one slot zero": lambda h: h.index_fill_(1, torch.tensor([1]), 0.0),
    "tiny": lambda h: h.mul_(1e-42),
}


def expected(history: torch.Tensor, scale: torch.Tensor, recipe: object) -> tuple[torch.Tensor, torch.Tensor]:
    fp8_max = torch.full_like(scale, recipe.input.fp8_max)
    fp8_max[1] = recipe.grad_output.fp8_max
    return update_delayed(history, scale, fp8_max, recipe)


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("length", [1, 5, 1024])
@pytest.mark.parametrize("overrides", [{}, {"amax_compute_algo": "most_recent", "margin": 2}], ids=str)
def test_in_place_step(case, length, overrides, generator, device):
    if is_interpreting() and device.type == "cpu":
        from octavo.ops.quantize.delayed import triton
        from octavo.testing.interpreter import correct_interpreter

        correct_interpreter()
    recipe = get_recipe("delayed", **overrides)
    history = CASES[case](torch.rand(length, 4, generator=generator))
    scale = torch.rand(4, generator=generator) + 0.5
    want_history, want_scale = expected(history, scale, recipe)
    got_history, got_scale = history.to(device), scale.to(device)
    if is_interpreting() and device.type == "cpu":
        limits = (recipe.input.fp8_max, recipe.grad_output.fp8_max)
        algo = recipe.delayed.amax_compute_algo == "most_recent"
        triton.update(got_history, got_scale, *limits, recipe.delayed.margin, algo)
    else:
        update_delayed_(got_history, got_scale, recipe)
    assert_bitwise(got_history.cpu(), want_history)
    assert_bitwise(got_scale.cpu(), want_scale)


@pytest.mark.parametrize("rows", ["own", "of all ranks"])
def test_many_linears_in_one_launch(rows, generator, device):
    recipe = get_recipe("delayed")
    histories = [
        case(torch.rand(length, num, generator=generator))
        for case in CASES.values()
        for length, num in ((3, 3), (16, 4), (9, 5))
    ]
    scales = [torch.rand(h.shape[1], generator=generator) + 0.5 for h in histories]
    staged = [h[0].clone() if rows == "own" else h[0] * 2 for h in histories]
    want = [
        expected(torch.cat([row[None], h[1:]]), s, recipe) for h, s, row in zip(histories, scales, staged, strict=True)
    ]
    histories, scales = [h.to(device) for h in histories], [s.to(device) for s in scales]
    staged = (
        [h[0] for h in histories] if rows == "own" else list(torch.cat(staged).to(device).split([*map(len, staged)]))
    )
    if is_interpreting() and device.type == "cpu":
        from octavo.ops.quantize.delayed import triton
        from octavo.testing.interpreter import correct_interpreter

        correct_interpreter()
        limits = (recipe.input.fp8_max, recipe.grad_output.fp8_max)
        triton.update_many(triton.Table(histories, scales, staged), *limits, 0, False)
    else:
        Histories(recipe, histories, scales, staged).update_()
    for history, scale, (want_history, want_scale) in zip(histories, scales, want, strict=True):
        assert_bitwise(scale.cpu(), want_scale)
        assert_bitwise(history.cpu(), want_history)


def test_callables_run_as_torch_code(generator, device):
    recipe = get_recipe("delayed", amax_compute_algo=lambda history: history.mean(dim=0))
    history, scale = torch.rand(6, 3, generator=generator), torch.ones(3)
    want = expected(history, scale, recipe)
    history, scale = history.to(device), scale.to(device)
    update_delayed_(history, scale, recipe)
    assert torch.allclose(scale.cpu(), want[1]) and float(scale[0]) != 1.0


def test_shapes_are_checked():
    assert_raises(ShapeError, "one a column", update_delayed_, torch.zeros(4, 3), torch.ones(2), get_recipe("delayed"))


@pytest.mark.skipif(is_interpreting(), reason="the interpreter compiles nothing")
@pytest.mark.parametrize("slots", [3, 5])
def test_compiles_for_hopper_without_spills(slots):
    pytest.importorskip("triton", reason="triton is only packaged for Linux")
    from octavo.ops.quantize.delayed import triton
    from octavo.testing.compile import record_launches

    with record_launches() as found:
        history, scale = torch.zeros(1024, slots), torch.ones(slots)
        triton.update(history, scale, 448.0, 57344.0, 0, False)
        triton.update_many(triton.Table([history], [scale], [history[0]]), 448.0, 57344.0, 0, False)
    for report in (launch.compile() for launch in found):
        assert report.spill_bytes == 0 and report.stack_bytes == 0
