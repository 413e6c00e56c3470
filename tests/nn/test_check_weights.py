"""A write through .data leaves FP8 codes stale: it is noticed at the next use, or on demand, and named."""

import copy
import subprocess
import sys

import pytest
import torch

import octavo
from octavo import nn
from octavo.errors import StaleCodesError
from octavo.nn.live_weights import stop_watching
from octavo.nn.weights.write_watch import WriteWatch
from tests.assertions import assert_raises
from tests.recipes import FP8_RECIPES as RECIPES

ALL_RECIPES = pytest.mark.parametrize("recipe", RECIPES)


def make(recipe: str, dtype: torch.dtype = torch.float32) -> torch.nn.Sequential:
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(128, 256), torch.nn.ReLU(), torch.nn.Linear(256, 128)).to(dtype)
    octavo.convert(model, recipe)
    return model


def step(model: torch.nn.Module) -> None:
    dtype = next(model.parameters()).dtype
    model(torch.randn(32, 128, dtype=dtype).requires_grad_()).float().sum().backward()


@ALL_RECIPES
def test_an_optimizer_that_writes_through_data(recipe: str) -> None:
    model = make(recipe)
    step(model)
    for param in model.parameters():
        param.data.sub_(param.grad, alpha=0.01)
    assert_raises(StaleCodesError, r"0 changed without notice .*mark_weights_updated\(model\)", step, model)
    nn.mark_weights_updated(model)
    nn.check_weights(model)  # no caller takes the old codes
    step(model)
    nn.check_weights(model)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_an_average_of_weights_written_through_data(dtype: torch.dtype) -> None:
    model = make("blockwise", dtype)
    average = copy.deepcopy(model).requires_grad_(False)
    x = torch.randn(32, 128, dtype=dtype)
    with torch.no_grad():
        for _ in range(WriteWatch.MOST_USES + 50):  # a long evaluation
            average(x)
        for mine, theirs in zip(average.parameters(), model.parameters(), strict=True):
            mine.data.copy_(0.9 * mine + 0.1 * torch.randn_like(theirs))
        with pytest.raises(StaleCodesError, match="0 changed"):
            [average(x) for _ in range(WriteWatch.MOST_USES)]
        nn.mark_weights_updated(average)
        average(x)


def train(model: torch.nn.Module, steps: int, uses: int = 2) -> None:
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    for _ in range(steps):
        for _ in range(uses):  # gradient accumulation
            step(model)
        optimizer.step()
        optimizer.zero_grad()


@pytest.mark.parametrize(
    ("steps", "uses"), [pytest.param(60, 2, marks=pytest.mark.largest), (WriteWatch.MOST_STEPS - 1, 2), (3, 70)]
)
def test_a_write_in_the_first_hundred_steps(steps: int, uses: int) -> None:
    """Whatever number of uses they had, and though the codes were made long after the first ones."""
    assert WriteWatch.MOST_STEPS == 100
    model = make("rowwise")
    train(model, steps, uses)
    step(model)
    model[2].weight.data.mul_(2.0)
    with pytest.raises(StaleCodesError, match="2 changed without notice"):
        step(model)


@pytest.mark.parametrize("is_frozen", [False, True])
def test_later_steps_cost_nothing(monkeypatch: pytest.MonkeyPatch, is_frozen: bool) -> None:
    """A write is then found on demand alone."""
    model = make("rowwise")
    model[0].weight.requires_grad_(not is_frozen)  # whose codes are made once
    train(model, WriteWatch.MOST_STEPS, uses=1)
    step(model)

    def look(*_: object) -> torch.Tensor:
        raise AssertionError("a sum was taken")

    monkeypatch.setattr(WriteWatch, "_sum", look)
    train(model, 3)
    step(model)
    model[0].weight.data.mul_(2.0)
    step(model)
    with pytest.raises(StaleCodesError, match=r"; 0\.weight changed"):
        nn.check_weights(model)


def test_a_trainer_of_its_own_weights_pays_for_no_sums(monkeypatch: pytest.MonkeyPatch) -> None:
    model = make("rowwise")
    step(model)
    stop_watching(model)
    monkeypatch.setattr(WriteWatch, "_sum", lambda *_: pytest.fail("a sum was taken"))
    step(model)
    train(model, 3)
    step(model)
    model[2].weight.data.mul_(2.0)
    with pytest.raises(StaleCodesError, match=r"; 2\.weight changed"):  # which is still found on demand
        nn.check_weights(model)


def test_a_weight_that_is_seldom_used_is_watched_for_as_many_of_its_steps() -> None:
    """An average of weights, evaluated once in 150 steps of the optimizer."""
    model = make("rowwise")
    average = copy.deepcopy(model).requires_grad_(False)
    x = torch.randn(32, 128)
    average(x)
    train(model, WriteWatch.MOST_STEPS + 50, uses=1)
    average[0].weight.data.mul_(0.9)
    with pytest.raises(StaleCodesError, match="0 changed"):
        average(x)


@ALL_RECIPES
def test_what_is_noticed_anyway_is_no_error(recipe: str) -> None:
    model = make(recipe)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    for _ in range(3):
        step(model)
        step(model)  # gradient accumulation
        optimizer.step()
    with torch.no_grad():
        model[0].weight.add_(1.0)
    step(model)
    doubled = {name: 2 * value for name, value in model.state_dict().items() if "fp8" not in name}
    model.load_state_dict(doubled, strict=False)
    step(model)
    nn.check_weights(model)


@ALL_RECIPES
def test_one_element_is_found_on_demand(recipe: str) -> None:
    model = make(recipe)
    nn.check_weights(model)  # no codes yet
    for _ in range(3):
        step(model)
        nn.check_weights(model)
        nn.mark_weights_updated(model)
    step(model)
    model[2].weight.data[5, 7] *= -1.0
    assert_raises(StaleCodesError, r"; 2\.weight changed", nn.check_weights, model)


def test_parts_with_blocks_of_their_own_are_looked_at() -> None:
    layer = nn.Linear(128, 100, parts=(60, 40))
    octavo.convert(layer, "blockwise")
    layer(torch.randn(16, 128).bfloat16())
    nn.check_weights(layer)
    layer.weight.data[80] += 1.0
    assert_raises(StaleCodesError, "; weight changed", nn.check_weights, layer)


def test_linears_of_torch_under_autocast() -> None:
    layer, x = torch.nn.Linear(128, 128), torch.randn(16, 128)
    with octavo.autocast(recipe="rowwise"):
        layer(x).sum().backward()
        nn.check_weights(layer)
        layer.weight.data.mul_(2.0)
        assert_raises(StaleCodesError, "; weight changed", nn.check_weights, layer)
        assert_raises(StaleCodesError, r"a weight of shape \(128, 128\) changed", layer, x)


def test_compiled_code_keeps_no_codes() -> None:
    layer, x = make("blockwise")[0], torch.randn(16, 128)
    run = torch.compile(layer, fullgraph=True, backend="aot_eager")
    before = run(x)
    layer.weight.data.mul_(2.0)
    assert not torch.equal(run(x), before)


def test_the_doctor_runs_it() -> None:
    from octavo.doctor import find_departure

    model, x = make("blockwise"), torch.randn(16, 128)
    model(x)
    model[0].weight.data.mul_(2.0)
    with pytest.raises(StaleCodesError, match=r"0\.weight changed"):
        find_departure(model, lambda model: model(x).float().sum(), "blockwise")


@pytest.mark.gpu
def test_a_gpu_answers_one_use_later() -> None:
    model, x = make("blockwise", torch.bfloat16).cuda(), torch.randn(32, 128).cuda().bfloat16()
    model(x)
    model[0].weight.data.mul_(2.0)
    model(x)  # asks, and waits for nothing
    torch.cuda.synchronize()
    assert_raises(StaleCodesError, "0 changed", model, x)
    nn.mark_weights_updated(model)
    for _ in range(3):
        model(x)
        torch.cuda.synchronize()
    nn.check_weights(model)


def test_importing_octavo_registers_no_optimizer_hook():
    """The count of steps begins with the first FP8 weight."""
    code = """
import torch, octavo, octavo.nn
from torch.optim import optimizer
hooks = optimizer._global_optimizer_post_hooks
linear = octavo.nn.Linear(16, 16)
linear(torch.ones(1, 16, dtype=torch.bfloat16))
before = len(hooks)
linear.set_recipe(octavo.get_recipe("rowwise"))
linear(torch.ones(1, 16, dtype=torch.bfloat16))
print(before, len(hooks))"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["0", "1"]
