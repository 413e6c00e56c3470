"""Delayed scaling's state beside a state dict: for converted models, and for torch's own linears under autocast."""

import copy
import gc
import pickle
import weakref

import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import load_file, save_file

import octavo
from octavo.errors import CheckpointError
from octavo.nn.plain_linears import warn_that_it_stays
from octavo.numerics import DelayedScaling
from octavo.testing import assert_bitwise
from tests.assertions import assert_raises

RECIPE = DelayedScaling(amax_history_len=8)
KINDS = pytest.mark.parametrize("kind", ["convert", "autocast"])


def make(kind="autocast"):
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(64, 48), torch.nn.GELU(), torch.nn.Linear(48, 64))
    if kind == "convert":
        octavo.convert(model, RECIPE)
    return model


def run(model, first, num):
    """Losses [num] of plain gradient descent, which has no state of its own."""
    optimizer, losses = torch.optim.SGD(model.parameters(), lr=0.1), []
    for step in range(first, first + num):
        x = torch.randn(16, 64, generator=torch.Generator().manual_seed(step))
        with octavo.autocast(recipe=RECIPE):
            loss = (model(x) - x).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.detach())
    return torch.stack(losses)


@KINDS
def test_the_state_dict_is_the_frameworks_own(kind):
    model, plain = make(kind), make()
    run(model, 0, 3)
    assert list(model.state_dict()) == list(plain.state_dict())
    plain.load_state_dict(model.state_dict())
    model.load_state_dict(plain.state_dict())
    names = [f"{name}.{last}" for name in "02" for last in ("fp8_amax_history", "fp8_quant_scale")]
    assert list(octavo.nn.fp8_state_dict(model)) == names
    assert octavo.nn.fp8_state_dict(plain) == {}


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")  # one process
@KINDS
@pytest.mark.parametrize("how", ["safetensors", "dcp"])
def test_a_resumed_run_is_bit_equal(kind, how, tmp_path):
    model = make(kind)
    run(model, 0, 4)
    parts = {"model": model.state_dict(), "fp8": octavo.nn.fp8_state_dict(model)}
    if how == "safetensors":
        for name, part in parts.items():
            save_file(part, tmp_path / name)
    else:
        dcp.save(parts, checkpoint_id=tmp_path, no_dist=True)
    expected = run(model, 4, 3)

    again = make(kind)
    if how == "safetensors":
        parts = {name: load_file(tmp_path / name) for name in parts}
    else:
        with torch.no_grad(), octavo.autocast(recipe=RECIPE):
            again(torch.zeros(1, 64))  # makes the tensors that are read into
        parts = {"model": again.state_dict(), "fp8": octavo.nn.fp8_state_dict(again)}
        dcp.load(parts, checkpoint_id=tmp_path, no_dist=True)
    again.load_state_dict(parts["model"])
    octavo.nn.load_fp8_state_dict(again, parts["fp8"])
    assert_bitwise(run(again, 4, 3), expected)
    assert not torch.equal(run(make(kind), 4, 3), expected)


def test_autocast_equals_convert_and_hands_over_to_it():
    plain, converted = make("autocast"), make("convert")
    assert_bitwise(run(plain, 0, 4), run(converted, 0, 4))
    octavo.convert(plain, RECIPE)
    assert_bitwise(run(plain, 4, 3), run(converted, 4, 3))


@pytest.mark.parametrize("how", ["deepcopy", "pickle"])
def test_copies_under_autocast_go_on_by_themselves(how):
    model = make()
    run(model, 0, 4)
    other = copy.deepcopy(model) if how == "deepcopy" else pickle.loads(pickle.dumps(model))
    assert type(vars(other[0])["_octavo_fp8"]["weight"]) is dict, "plain tensors, for readers without octavo"
    before = {key: value.clone() for key, value in octavo.nn.fp8_state_dict(model).items()}
    expected = run(other, 4, 3)
    for key, value in octavo.nn.fp8_state_dict(model).items():
        assert_bitwise(value, before[key], key)
    assert_bitwise(run(model, 4, 3), expected)


def test_the_state_goes_with_its_module():
    model = make()
    run(model, 0, 1)
    watched = weakref.ref(vars(model[0])["_octavo_fp8"]["weight"])
    gc.disable()
    try:
        model[0] = torch.nn.Identity()
        assert watched() is None
    finally:
        gc.enable()


def test_two_modules_with_one_weight_have_a_state_each(generator):
    first, second = torch.nn.Linear(64, 64), torch.nn.Linear(64, 64)
    second.weight = first.weight
    model = torch.nn.ModuleList([first, second])
    for _ in range(2):
        with octavo.autocast(recipe=RECIPE):
            second(100 * first(torch.randn(16, 64, generator=generator))).sum().backward()
    state = octavo.nn.fp8_state_dict(model)
    assert state["1.fp8_amax_history"][-1, 0] > 10 * state["0.fp8_amax_history"][-1, 0] > 0


def test_a_weight_of_no_running_module_stays_aloud(generator):
    warn_that_it_stays.cache_clear()
    weight, x = torch.nn.Parameter(torch.randn(16, 64)), torch.randn(8, 64, generator=generator)
    with octavo.autocast(recipe=RECIPE), pytest.warns(UserWarning, match="no module that is running owns this one"):
        found = torch.nn.functional.linear(x, weight)
    assert_bitwise(found.detach(), torch.nn.functional.linear(x, weight).detach())


class Custom(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.queries = torch.nn.Parameter(torch.randn(16, 64))

    def forward(self, x):
        return torch.nn.functional.linear(x, self.queries)


def test_weights_of_other_names(generator):
    model, other = torch.nn.Sequential(Custom()), torch.nn.Sequential(Custom())
    for _ in range(2):
        with octavo.autocast(recipe=RECIPE):
            model(torch.randn(8, 64, generator=generator)).sum().backward()
    state = octavo.nn.fp8_state_dict(model)
    assert set(state) == {"0.queries.fp8_amax_history", "0.queries.fp8_quant_scale"}
    octavo.nn.load_fp8_state_dict(other, state)
    for key, value in octavo.nn.fp8_state_dict(other).items():
        assert_bitwise(value, state[key], key)


@pytest.mark.filterwarnings("ignore:The .grad attribute")  # of torch.compile itself, at a break
def test_compiled_code_breaks_there_and_is_right():
    torch._dynamo.reset()
    model = make()
    assert_bitwise(run(torch.compile(model, backend="aot_eager"), 0, 3), run(make(), 0, 3))
    assert len(octavo.nn.fp8_state_dict(model)) == 4
    torch._dynamo.reset()
    with pytest.raises(torch._dynamo.exc.Unsupported, match=r"octavo\.convert"):
        run(torch.compile(make(), backend="aot_eager", fullgraph=True), 0, 1)
    torch._dynamo.reset()


def test_what_does_not_fit_is_refused_and_changes_nothing():
    model = make("convert")
    run(model, 0, 2)
    state = {key: value.clone() for key, value in octavo.nn.fp8_state_dict(model).items()}
    first = "0.fp8_amax_history"
    bad = {
        "left over: 7.fp8_quant_scale": {**state, "7.fp8_quant_scale": torch.ones(3)},
        "left over: 0.weight": {**state, "0.weight": torch.ones(3)},
        "missing: 2": {key: value for key, value in state.items() if key.startswith("0")},
        "0.fp8_amax_history is missing": {key: value for key, value in state.items() if key != first},
        "has 4 rows, this linear's 8": {**state, first: torch.zeros(4, 3)},
        r"an amax history \[rows, 3\]": {**state, first: torch.zeros(8, 4)},
        "must be float32": {**state, first: torch.zeros(8, 3, dtype=torch.bfloat16)},
    }
    for text, broken in bad.items():
        assert_raises(CheckpointError, text, octavo.nn.load_fp8_state_dict, model, broken)
        for key, value in octavo.nn.fp8_state_dict(model).items():
            assert_bitwise(value, state[key], key)
    part = {key: value + 1 for key, value in state.items() if key.startswith("2")}
    octavo.nn.load_fp8_state_dict(model, part, strict=False)
    for key, value in octavo.nn.fp8_state_dict(model).items():
        assert_bitwise(value, (state | part)[key], key)
