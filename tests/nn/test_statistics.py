"""TensorStatistics: every number against its definition, planted faults seen where they are, nothing when off."""

import json
import math

import pytest
import torch

from octavo import nn
from octavo.errors import RecipeError
from octavo.nn.statistics import FP8_STATS, STATS, TENSORS, TensorStatistics
from octavo.numerics import get_recipe
from octavo.numerics.analysis import analyze
from tests.assertions import assert_raises


def two_layers(recipe="blockwise", dtype=torch.float32):
    torch.manual_seed(0)
    model = torch.nn.Sequential()
    model.add_module("up", torch.nn.Linear(96, 160, dtype=dtype))
    model.add_module("down", torch.nn.Linear(160, 96, bias=False, dtype=dtype))
    nn.convert(model, recipe)
    return model


def run_step(model, x, grad=None):
    """A forward and a backward; returns what the first layer's operands are."""
    x = x.clone().requires_grad_()
    hidden = model.up(x)
    hidden.retain_grad()
    out = model.down(hidden)
    out.backward(torch.ones_like(out) if grad is None else grad)
    return {
        "activation": x.detach(),
        "weight": model.up.weight.detach().bfloat16().float(),
        "output": hidden.detach(),
        "gradient": hidden.grad,
        "dgrad": x.grad,
        "wgrad": model.up.weight.grad,
    }


def by_tensor(rows, layer):
    return {row.tensor: row.values for row in rows if row.layer == layer}


@pytest.mark.parametrize("recipe", ["tensorwise", "rowwise", "blockwise"])
def test_numbers_follow_their_definitions(recipe, device, generator):
    model = two_layers(recipe).to(device)
    statistics = TensorStatistics(model)
    x = torch.exp(4 * torch.randn(40, 96, generator=generator)) * torch.randn(40, 96, generator=generator)
    seen = run_step(model, x.to(device), torch.randn(40, 96, generator=generator).to(device))
    statistics.step()
    rows = by_tensor(statistics.rows(), "up")
    assert set(rows) == set(TENSORS)
    recipe = get_recipe(recipe)
    scalings = {"activation": recipe.input, "weight": recipe.weight, "gradient": recipe.grad_output}
    for tensor, t in seen.items():
        values, t = rows[tensor], t.double()
        expected = {name: getattr(t, name)() for name in ("min", "max", "mean", "std")}
        expected |= {"cur_amax": t.abs().max(), "l1_norm": t.abs().sum(), "l2_norm": t.square().sum().sqrt()}
        expected["dynamic_range"] = torch.log2(t.abs().max() / t[t != 0].abs().min())
        if tensor in scalings:
            source = seen[tensor].bfloat16() if tensor == "weight" else seen[tensor]
            expected |= analyze(source, scalings[tensor]).te_stats
        assert set(values) == set(expected), tensor
        for stat, value in expected.items():
            assert values[stat] == pytest.approx(float(value), rel=1e-5, abs=1e-9), (tensor, stat)


def test_a_planted_underflow_is_seen_in_its_layer_and_operand(generator):
    model = two_layers("tensorwise")
    with torch.no_grad():
        model.down.weight[0, 0] = 1e6  # one outlier: every other element of this weight becomes code zero
    statistics = TensorStatistics(model, stats=("underflows%",))
    run_step(model, torch.randn(32, 96, generator=generator))
    statistics.step()
    lost = {(row.layer, row.tensor): row.values["underflows%"] for row in statistics.rows() if row.values}
    assert lost.pop(("down", "weight")) > 99.9
    assert max(value for key, value in lost.items() if key != ("up", "gradient")) < 1.0


def test_a_planted_overflow_is_seen_in_its_layer_and_operand(generator):
    """Delayed scaling clips what is larger than its history: only there can a tensor overflow."""
    model = two_layers(get_recipe("delayed", amax_history_len=4))
    statistics = TensorStatistics(model, stats=("overflows%", "scale_inv_max"), first_step=10)
    x = torch.randn(32, 96, generator=generator)
    for scale in (1.0, 1.0, 8.0):
        run_step(model, x * scale)
        statistics.step()
        nn.mark_weights_updated(model)
    rows = statistics.rows()
    assert {row.step for row in rows} == {10, 11, 12}
    last = {(row.layer, row.tensor): row.values for row in rows if row.step == 12 and row.values}
    scale = 448.0 / float(x.abs().max())
    clipped = 100.0 * float((8 * x.abs() * scale > 464.0).float().mean())
    assert clipped > 1.0
    assert last["up", "activation"]["overflows%"] == pytest.approx(clipped, rel=1e-4)
    assert last["up", "activation"]["scale_inv_max"] == pytest.approx(1 / scale, rel=1e-6)
    assert last["up", "weight"]["overflows%"] == last["down", "weight"]["overflows%"] == 0.0


def test_micro_batches_are_one_tensor(generator):
    model, x = two_layers("rowwise"), torch.randn(48, 96, generator=generator)
    statistics = TensorStatistics(model, tensors=("activation",), layers=("up",))
    run_step(model, x)
    statistics.step()
    run_step(model, x[:16])
    run_step(model, x[16:])
    statistics.step()
    whole, cut = statistics.rows()
    assert (whole.step, cut.step) == (0, 1)
    assert cut.values == pytest.approx(whole.values)


def test_only_chosen_layers_steps_and_stats():
    model = two_layers()
    chosen = {"layers": ("down",), "tensors": ("weight",), "stats": ("mse", "max")}
    statistics = TensorStatistics(model, **chosen, freq=2, start_step=1, end_step=5)
    for _ in range(8):
        run_step(model, torch.ones(2, 96))
        statistics.step()
    rows = statistics.rows()
    assert [(row.step, row.layer, row.tensor) for row in rows] == [(2, "down", "weight"), (4, "down", "weight")]
    assert list(rows[0].values) == ["mse", "max"]
    assert statistics.layers == ("down",)
    assert statistics.rows() == []


def test_off_means_no_observer_and_the_same_bits(generator):
    model, x = two_layers(), torch.randn(8, 96, generator=generator)
    plain = run_step(model, x)
    model.zero_grad()
    statistics = TensorStatistics(model, freq=2)
    assert model.up.observer is not None
    observed = run_step(model, x)
    assert all(torch.equal(plain[key], observed[key]) for key in plain)
    statistics.step()
    assert model.up.observer is None
    statistics.step()
    assert model.up.observer is not None
    statistics.close()
    assert model.up.observer is None
    TensorStatistics(model).close()


def test_evaluation_is_not_looked_at():
    model = two_layers()
    statistics = TensorStatistics(model)
    model.eval()
    model(torch.ones(2, 96))
    model.train()
    with torch.no_grad():
        model(torch.ones(2, 96))
    model(torch.ones(0, 96))
    statistics.step()
    assert [row for row in statistics.rows() if row.tensor != "weight"] == []


def test_bf16_layers_have_no_fp8_statistics():
    model = two_layers("bf16")
    assert_raises(RecipeError, r"octavo.convert makes them", TensorStatistics, model)
    model = two_layers("blockwise")
    nn.convert(model, "bf16")
    statistics = TensorStatistics(model)
    run_step(model, torch.ones(2, 96))
    statistics.step()
    assert all(not set(FP8_STATS) & set(row.values) for row in statistics.rows())


def test_fused_projections_with_ragged_parts_have_codes(generator):
    model = torch.nn.Sequential(nn.Linear(96, 160, parts=(100, 60), dtype=torch.float32))
    nn.convert(model, "blockwise")
    statistics = TensorStatistics(model, tensors=("weight",))
    model(torch.randn(4, 96, generator=generator))
    statistics.step()
    (row,) = statistics.rows()
    codes = model[0].quantized_weight()
    assert len(codes) == 2
    error = torch.cat([q.dequantize() for q in codes]) - model[0].weight.detach().bfloat16().float()
    assert row.values["mse"] == pytest.approx(float(error.double().square().mean()))
    assert row.values["scale_inv_max"] == max(float(q.scale.max()) for q in codes)


def test_nan_and_inf_are_shown_and_written_as_json(generator):
    model, x = two_layers("rowwise"), torch.randn(8, 96, generator=generator)
    x[0, 0], x[1, 1] = math.nan, math.inf
    statistics = TensorStatistics(model, tensors=("activation",), layers=("up",))
    model(x)
    statistics.step()
    (row,) = statistics.rows()
    assert math.isnan(row.values["mean"]) and row.values["cur_amax"] == math.inf
    assert row.values["dynamic_range"] < 40
    text = json.dumps(row.as_dict(), allow_nan=False)
    assert json.loads(text)["mean"] is None
    assert dict(row.scalars()).keys() == {f"up_activation_{stat}" for stat in STATS}


def test_a_checkpoints_replay_is_not_counted_twice(generator):
    x = torch.randn(8, 96, generator=generator)
    found = []
    for replayed in (False, True):
        model = two_layers("rowwise")
        statistics = TensorStatistics(model, stats=("l1_norm", "mse"), layers=("up",))
        source = x.clone().requires_grad_()
        out = nn.checkpoint(model, source) if replayed else model(source)
        out.sum().backward()
        statistics.step()
        found.append({row.tensor: row.values for row in statistics.rows()})
    assert found[0] == found[1]


def test_names_that_mean_nothing_are_errors():
    model = two_layers()
    for name, value in {"layers": ("u",), "stats": ("underflow",), "tensors": ("input",), "freq": 0}.items():
        assert_raises(RecipeError, f"^{name} ", TensorStatistics, model, **{name: value})
    TensorStatistics(model)
    assert_raises(RecipeError, "has an observer already", TensorStatistics, model)
