"""octavo.amp: levels, switching by schedule and by rule, what survives a switch, and Apex's loop."""

import json
import logging
import math

import pytest
import torch

from octavo import amp, nn
from octavo.errors import ConfigError, DtypeError, NonFiniteError, RecipeError
from octavo.models import Decoder, ModelConfig
from octavo.numerics import DelayedScaling, Numerics, get_recipe
from octavo.testing import assert_bitwise


def network(dtype=torch.float32):
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(64, 128), torch.nn.GELU(), torch.nn.Linear(128, 16))
    return model.to(dtype)


def make(recipe="blockwise", dtype=torch.float32, lr=0.05, **options):
    model = network(dtype)
    optimizer = torch.optim.SGD(model.parameters(), lr=lr)
    return *amp.initialize(model, optimizer, recipe=recipe, **options), amp.handle(optimizer)


def batch(step=0):
    generator = torch.Generator().manual_seed(step)
    x = torch.randn(32, 64, generator=generator)
    return x, x[:, :16].tanh() + x[:, 16:32]


def train(model, optimizer, steps, first=0):
    """Apex's loop; returns the losses."""
    losses = []
    for step in range(first, first + steps):
        x, y = batch(step)
        loss = torch.nn.functional.mse_loss(model(x), y)
        optimizer.zero_grad()
        with amp.scale_loss(loss, optimizer) as scaled_loss:
            scaled_loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def codes(model):
    return [q for m in model.modules() if isinstance(m, nn.Linear) for q in m.quantized_weight(m.recipe)]


def everything(model):
    return {**model.state_dict(), **nn.fp8_state_dict(model)}


def test_parameters_stay_the_optimizers():
    model, optimizer, handle = make()
    owned = [p for group in optimizer.param_groups for p in group["params"]]
    assert {id(p) for p in owned} == {id(p) for p in model.parameters()}
    assert all(isinstance(model[i], nn.Linear) for i in (0, 2))
    assert handle.report.fp8_names == ("0", "2")
    before = [p.detach().clone() for p in owned]
    train(model, optimizer, 1)
    assert all(not torch.equal(a, b) for a, b in zip(before, owned, strict=True))
    assert model[0].weight_version == 1


@pytest.mark.parametrize("recipe", ["blockwise", "rowwise", "tensorwise", DelayedScaling()])
def test_o1_is_the_recipe_and_o2_is_bf16(recipe):
    x, _ = batch()
    plain = network()
    nn.convert(plain, recipe)
    fp8 = plain(x).detach()
    assert_bitwise(make(recipe)[0](x).detach(), fp8)
    model, _, handle = make(recipe, opt_level="O2")
    assert handle.level == "O2"
    half = network(torch.bfloat16)
    out = half[2](half[1](half[0](x.bfloat16()).float()).bfloat16()).float()
    assert model(x).dtype == torch.float32
    torch.testing.assert_close(model(x), out, rtol=2**-7, atol=2**-8)
    assert not torch.equal(model(x), fp8)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_o2_computes_in_its_dtype_whatever_the_model(dtype):
    seen = []
    model, _ = amp.initialize(network(), torch.optim.SGD(network().parameters()), "O2", dtype=dtype)
    model[2].observer = lambda role, tensor, codes: seen.append((role, tensor.dtype))
    x, _ = batch()
    model(x).sum().backward()
    assert ("input", dtype) in seen and ("output", dtype) in seen and ("grad_output", dtype) in seen
    assert model[2].weight.grad.dtype == torch.float32


@pytest.mark.parametrize("level", ["O1", "O2"])
def test_an_input_may_be_given_by_its_name(level):
    model, x = make(opt_level=level)[0], batch()[0]
    assert_bitwise(model[0](input=x), model[0](x))


def test_a_schedule_switches_and_says_so(caplog):
    caplog.set_level(logging.INFO, "octavo.amp")
    model, optimizer, handle = make(schedule=[(3, "O2"), (6, "O1")])
    levels = []
    for step in range(8):
        levels.append(handle.level)
        train(model, optimizer, 1, step)
    assert levels == ["O1"] * 3 + ["O2"] * 3 + ["O1"] * 2
    assert [(e.step, e.kind, e.level) for e in handle.events] == [(3, "switch", "O2"), (6, "switch", "O1")]
    assert "step 3: switched to O2: the schedule has O2 from step 3" in caplog.text


def test_a_schedule_may_be_a_function():
    model, optimizer, handle = make(schedule=lambda step: "O2" if step % 2 else "O1")
    train(model, optimizer, 4)
    assert [e.level for e in handle.events] == ["O2", "O1", "O2", "O1"]


@pytest.mark.parametrize("recipe", ["blockwise", "rowwise", "tensorwise", DelayedScaling(amax_history_len=4)])
def test_codes_are_equal_after_o1_o2_o1(recipe):
    model, optimizer, handle = make(recipe)
    train(model, optimizer, 3)
    x, _ = batch()
    with torch.no_grad():
        before, before_codes = model(x), codes(model)
    state = {name: value.clone() for name, value in everything(model).items()}
    handle.switch("O2")
    with torch.no_grad():
        model(x)
    model(x).sum().backward()  # a training step of O2 leaves O1's state alone
    optimizer.zero_grad()
    handle.switch("O1")
    with torch.no_grad():
        assert_bitwise(model(x), before)
    for a, b in zip(before_codes, codes(model), strict=True):
        assert_bitwise(a.qdata.view(torch.uint8), b.qdata.view(torch.uint8))
        assert_bitwise(a.scale, b.scale)
    for name, value in everything(model).items():
        assert_bitwise(value, state[name], name)


def test_weights_that_o2_trained_are_quantized_again():
    model, optimizer, handle = make()
    train(model, optimizer, 2)
    handle.switch("O2")
    train(model, optimizer, 2)
    handle.switch("O1")
    fresh = network()
    fresh.load_state_dict(model.state_dict())
    nn.convert(fresh, "blockwise")
    for a, b in zip(codes(model), codes(fresh), strict=True):
        assert_bitwise(a.qdata.view(torch.uint8), b.qdata.view(torch.uint8))


def test_delayed_scaling_goes_on_where_it_was():
    """Steps under O2 are as if they had not been for the histories: the next O1 step rolls what the last one staged."""
    recipe = DelayedScaling(amax_history_len=4)
    switched, optimizer, handle = make(recipe, lr=0.0)
    train(switched, optimizer, 3)
    handle.switch("O2")
    train(switched, optimizer, 5, first=50)
    handle.switch("O1")
    train(switched, optimizer, 2, first=3)
    straight, optimizer, _ = make(recipe, lr=0.0)
    train(straight, optimizer, 5)
    for name, value in everything(straight).items():
        assert_bitwise(value, everything(switched)[name], name)


def test_the_curve_goes_on_over_switches():
    plain = train(*make(lr=0.5)[:2], 60)
    switched = train(*make(lr=0.5, schedule=[(20, "O2"), (40, "O1")])[:2], 60)
    assert switched[:20] == plain[:20]
    for a, b in zip(plain, switched, strict=True):
        assert b == pytest.approx(a, rel=0.05)
    assert plain[-1] < 0.7 * plain[0]


def test_a_loss_spike_falls_back_and_returns():
    model, optimizer, handle = make(fallback=amp.Fallback(steps=4, window=16, min_losses=8, num_std=5), lr=0.01)
    train(model, optimizer, 12)
    assert handle.level == "O1"
    x, y = batch()
    with amp.scale_loss(torch.nn.functional.mse_loss(model(x), y) + 100.0, optimizer) as loss:
        loss.backward()
    optimizer.step()
    assert handle.level == "O2"
    assert "> mean" in handle.events[-1].reason and "5 * std" in handle.events[-1].reason
    levels = []
    for step in range(6):
        levels.append(handle.level)
        train(model, optimizer, 1, step)
    assert levels == ["O2"] * 4 + ["O1"] * 2
    assert str(handle.events[-1]) == "step 17: switched to O1: back after 4 steps in O2"


def test_the_loss_of_a_micro_batch_that_raised_has_no_say():
    model, optimizer, handle = make(fallback=amp.Fallback(steps=4, window=16, min_losses=8, num_std=5), lr=0.01)
    train(model, optimizer, 12)
    with pytest.raises(MemoryError), amp.scale_loss(torch.tensor(100.0), optimizer):
        raise MemoryError
    train(model, optimizer, 1)
    assert handle.level == "O1" and not handle.events


def test_bad_gradients_are_skipped_named_counted_and_fall_back():
    model, optimizer, handle = make(fallback=amp.Fallback(steps=3, nonfinite_window=10, max_nonfinite_share=0.1))
    train(model, optimizer, 3)
    before = [p.detach().clone() for p in model.parameters()]
    for _ in range(2):
        model(batch()[0]).sum().backward()
        model[2].weight.grad[3, 5] = math.nan
        model[0].bias.grad[7] = math.inf
        assert not handle.step(1.0)
    assert all(torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))
    assert handle.num_skipped == 2 and handle.num_steps == 5
    skips = [e for e in handle.events if e.kind == "skip"]
    assert skips[0].reason == "gradients that are not finite, of 0.bias, 2.weight"
    assert handle.level == "O2"
    assert "2 of the last 10 steps had a loss or gradients that are not finite" in handle.events[-1].reason
    train(model, optimizer, 3)
    assert handle.level == "O1"


def test_clipped_operands_of_delayed_scaling_fall_back():
    rule = amp.Fallback(steps=2, max_overflow_share=0.1)
    model, optimizer, handle = make(DelayedScaling(), fallback=rule, lr=1e-3)
    train(model, optimizer, 4)
    assert handle.level == "O1"
    x, y = batch()
    loss = torch.nn.functional.mse_loss(model(50 * x), y)
    with amp.scale_loss(loss / loss.detach(), optimizer) as scaled_loss:
        scaled_loss.backward()
    optimizer.step()
    assert handle.level == "O2"
    assert "of delayed scaling's operands were clipped (more than 10%)" in handle.events[-1].reason


def test_skips_without_end_are_an_error():
    model, _, handle = make(max_skips=3)

    def bad_step():
        model(batch()[0]).sum().backward()
        model[2].bias.grad.fill_(math.nan)
        handle.step()

    bad_step()
    bad_step()
    with pytest.raises(NonFiniteError, match=r"3 updates in a row were skipped.*2\.bias"):
        bad_step()
    assert handle.num_skipped == 3


def test_the_machine_alone_serves_other_loops():
    """A loop whose optimizer is not torch's tells the handle what it saw."""
    model = network()
    handle = amp.Handle(amp.Levels(model, "rowwise"), model, fallback=amp.Fallback(steps=2, min_losses=2, window=4))
    for loss in (1.0, 1.1, 1.0, 9.0):
        handle.update(loss)
    assert handle.level == "O2"
    handle.update(torch.tensor(1.0), gradients_are_finite=False)
    handle.update(math.nan)
    assert handle.level == "O1" and handle.num_skipped == 1
    with pytest.raises(ConfigError, match="no optimizer"):
        handle.step()


def test_state_travels():
    rule = amp.Fallback(steps=5, window=8, min_losses=4)
    model, optimizer, handle = make(fallback=rule, grad_scaler=amp.GradScaler(growth_interval=4))
    train(model, optimizer, 6)
    handle.update(1e9)
    state = handle.state_dict()
    assert state["level"] == "O2" and state["scaler"]["scale"] == 2.0**17
    other_model, other_optimizer, other = make(fallback=rule, grad_scaler="dynamic")
    other_model.load_state_dict(model.state_dict())
    other.load_state_dict(state)
    assert (other.level, other.num_steps) == ("O2", 7)
    assert train(model, optimizer, 8, 7) == train(other_model, other_optimizer, 8, 7)
    assert handle.level == other.level == "O1"
    assert handle.num_steps == other.num_steps == 15
    with pytest.raises(ConfigError, match="amp's scaler"):
        make(fallback=rule)[2].load_state_dict(state)


def test_delayed_scalings_state_travels_as_plain_values():
    model, optimizer, handle = make(DelayedScaling(amax_history_len=8))
    train(model, optimizer, 4)
    assert set(model.state_dict()) == set(network().state_dict())
    state = json.loads(json.dumps(handle.state_dict()))
    other_model, other_optimizer, other = make(DelayedScaling(amax_history_len=8))
    other_model.load_state_dict(model.state_dict())
    other.load_state_dict(state)
    assert train(model, optimizer, 4, 4) == train(other_model, other_optimizer, 4, 4)
    for name, value in nn.fp8_state_dict(model).items():
        assert_bitwise(nn.fp8_state_dict(other_model)[name], value, name)


def decoder(dtype):
    return Decoder(ModelConfig("llama", 64, 64, 128, 1, 2, 1, 32, max_position_embeddings=64), dtype=dtype)


def test_a_decoders_numerics_follow():
    model = decoder(torch.float32)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    amp.initialize(model, optimizer, "O2", recipe="rowwise")
    assert model.numerics.recipe.name == "bf16"
    amp.handle(optimizer).update(1.0)
    amp.handle(optimizer).switch("O1")
    assert model.numerics.recipe == get_recipe("rowwise")
    assert len(model.conversion_report.fp8_names) == 4
    version = model.weight_version
    next(model.parameters()).grad = torch.zeros_like(next(model.parameters()))
    optimizer.step()
    assert model.weight_version == version + 1
    exact = decoder(torch.bfloat16)
    exact.set_numerics(Numerics(get_recipe("rowwise"), exact=True))
    with pytest.raises(RecipeError, match="exact, which fixes its recipe"):
        amp.initialize(exact, torch.optim.SGD(exact.parameters()))


@pytest.mark.parametrize("recipe", ["blockwise", DelayedScaling(amax_history_len=4)])
def test_a_decoders_fused_paths_come_back_to_the_same_bits(recipe):
    """Loss and every gradient of an O1 step, before and after O2; delayed scaling has one more step in its history."""

    def step(model):
        model.zero_grad()
        ids = torch.arange(40) % 64
        loss = model.logits(model(ids, nn.PackedContext(torch.tensor([0, 25, 40])))).logsumexp(-1).mean()
        loss.backward()
        return [loss.detach(), *(p.grad.clone() for p in model.parameters())]

    found = []
    for steps_in_o2 in (0, 3):
        model = decoder(torch.bfloat16)
        handle = amp.handle(amp.initialize(model, torch.optim.SGD(model.parameters()), recipe=recipe)[1])
        step(model)
        first = step(model)
        handle.switch("O2")
        in_o2 = [step(model) for _ in range(steps_in_o2)]
        assert all(not torch.equal(tensors[0], first[0]) for tensors in in_o2)
        handle.switch("O1")
        found.append([*step(model), *model.buffers()])
    for straight, switched in zip(*found, strict=True):
        assert_bitwise(switched, straight)


@pytest.mark.slow
def test_a_compiled_model_switches_and_compiles_no_more():
    model, _, handle = make("rowwise")
    plain, _, plain_handle = make("rowwise")
    compiled = torch.compile(model, backend="eager", fullgraph=True)
    counted = []
    for level in ("O1", "O2", "O1", "O2"):
        handle.switch(level)
        plain_handle.switch(level)
        assert_bitwise(compiled(batch()[0]), plain(batch()[0]))
        counted.append(torch._dynamo.utils.counters["stats"]["unique_graphs"])
    assert counted[1] == counted[3]


def test_recipe_none_keeps_what_convert_did():
    model = network()
    nn.convert(model, "rowwise", overrides={"2": "blockwise"})
    handle = amp.handle(amp.initialize(model, torch.optim.SGD(model.parameters()), recipe=None)[1])
    handle.switch("O2")
    handle.switch("O1")
    assert [model[i].recipe.name for i in (0, 2)] == ["rowwise", "blockwise"]


def test_bad_input():
    optimizer = torch.optim.SGD(network().parameters())
    for error, text, fields in (
        (RecipeError, "level", {"opt_level": "O3"}),
        (RecipeError, "recipe", {"recipe": "bf16"}),
        (RecipeError, "overrides", {"recipe": None, "overrides": {"0": "bf16"}}),
        (DtypeError, "float32", {"dtype": torch.float32}),
        (DtypeError, r"0\.weight", {"model": network(torch.float16)}),
        (ConfigError, "schedule", {"schedule": [(5, "O2"), (2, "O1")]}),
    ):
        with pytest.raises(error, match=text):
            amp.initialize(**{"model": network(), "optimizer": optimizer, **fields})
    for text, fields in (("steps=0", {"steps": 0}), ("shares", {"max_nonfinite_share": 10})):
        with pytest.raises(ConfigError, match=text):
            amp.Fallback(**fields)
    with pytest.raises(ConfigError, match="initialize"):
        amp.handle(optimizer)
    model, optimizer, _ = make()
    with pytest.raises(ConfigError, match=r"was given to octavo.amp.initialize before"):
        amp.initialize(model, optimizer)
    with pytest.raises(ConfigError, match="no closure"):
        optimizer.step(lambda: torch.zeros(()))


@pytest.mark.parametrize("recipe", ["delayed", "tensorwise", "rowwise", "blockwise"])
def test_an_infinite_operand_that_fp8_hides_skips_the_update(recipe):
    model, optimizer, handle = make(recipe)
    train(model, optimizer, 1)
    frozen = model[0].weight.requires_grad_(False)
    with torch.no_grad():
        before, frozen[1, 2] = frozen[1, 2].clone(), torch.inf
    weights = model[2].weight.clone()
    losses = train(model, optimizer, 2, first=1)
    assert all(map(math.isfinite, losses))  # nothing else shows it
    assert handle.num_skipped == 2  # the second time too, with the frozen weight's codes made again
    assert_bitwise(model[2].weight, weights)
    assert "weight, input or gradient of a linear in FP8 was infinite" in handle.events[-1].reason
    with torch.no_grad():
        frozen[1, 2] = before
    train(model, optimizer, 1, first=3)
    assert handle.num_skipped == 2
