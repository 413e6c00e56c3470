"""update_every="step": scales change once an optimizer step, of all linears of a model, whatever ran in between."""

import copy
import pickle

import pytest
import torch
from torch.utils.checkpoint import checkpoint

import octavo
from octavo import nn
from octavo.errors import RecipeError
from octavo.models import Decoder, ModelConfig
from octavo.nn.amax_watch import MAX_WAITING, warn_of_no_step
from octavo.numerics import DelayedScaling, Numerics, get_recipe
from octavo.rl.config import RLConfig
from octavo.run.optimizer import MasterAdamW
from octavo.run.sections import OptimizerSection
from octavo.run.trainer_state import restore, trainer_state
from octavo.testing import assert_bitwise
from octavo.train.config import PrecisionSection
from octavo.train.data import make_batch
from octavo.train.step import train_step
from tests.assertions import assert_all_bitwise

FIELDS = {"amax_history_len": 4}
STEP = DelayedScaling(update_every="step", **FIELDS)


def make(recipe=STEP):
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(64, 48), torch.nn.Linear(48, 32))
    nn.convert(model, recipe)
    return model


def batch(index):
    return (1 + index % 3) * torch.randn(8, 64, generator=torch.Generator().manual_seed(index))


def scales(model):
    return [layer.fp8_quant_scale.clone() for layer in model]


def train(model, steps, micro_batches=1, lr=0.01):
    """Outputs, gradients and scales of each step."""
    optimizer, found = torch.optim.SGD(model.parameters(), lr=lr), []
    for step in range(steps):
        for index in range(micro_batches):
            out = model(batch(step * micro_batches + index))
            out.square().mean().backward()
            found.append(out.detach())
        found += [p.grad.clone() for p in model.parameters() if p.grad is not None]
        optimizer.step()
        optimizer.zero_grad()
    return found


def test_a_forward_a_step_has_the_bits_of_updates_every_forward():
    by_step, by_forward = make(), make(DelayedScaling(**FIELDS))
    assert_all_bitwise(train(by_step, 6), train(by_forward, 6))
    by_forward(batch(0))  # takes over the last step
    assert_all_bitwise(scales(by_step), scales(by_forward))


def test_micro_batches_of_a_step_are_one_update():
    model = make()
    train(model, 3, micro_batches=4)
    amaxes = [max(float(batch(4 * step + i).abs().max()) for i in range(4)) for step in range(3)]
    assert_bitwise(model[0].fp8_amax_history[:, 0], torch.tensor([0.0, *amaxes]))
    assert_bitwise(model[0].fp8_quant_scale[0], torch.tensor(448.0) / max(amaxes))
    before = scales(model)
    for index in range(3):
        model(10 * batch(index)).sum().backward()
    assert_all_bitwise(scales(model), before)  # no step, no update


@pytest.mark.parametrize("who", ["other", "in_backward"])
def test_a_step_that_is_not_the_models_changes_no_scale(who):
    model, other = make(), torch.nn.Linear(4, 4)
    watched = other if who == "other" else model
    optimizer = torch.optim.SGD(watched.parameters(), lr=0.01)
    if who == "in_backward":
        model[0].weight.register_post_accumulate_grad_hook(lambda _: optimizer.step())
    model(batch(0)).sum().backward()
    other(torch.ones(1, 4)).sum().backward()
    if who == "other":
        optimizer.step()
    assert_all_bitwise(scales(model), [torch.ones(3)] * 2)
    nn.update_scales(model)
    found = scales(model)
    assert all((scale != 1.0).all() for scale in found)
    nn.update_scales(model)  # nothing was staged since
    assert_all_bitwise(scales(model), found)


def test_adapters_of_a_frozen_linear_are_the_models():
    model = make()
    model[0].requires_grad_(False)
    train(model, 1)
    assert model[0].fp8_quant_scale[0] != 1.0


@pytest.mark.parametrize("how", ["deepcopy", "pickle"])
def test_a_copy_follows_its_own_optimizers(how):
    model = make()
    train(model, 2)
    other = copy.deepcopy(model) if how == "deepcopy" else pickle.loads(pickle.dumps(model))
    before = scales(model)
    train(other, 1, lr=0.0)
    assert_all_bitwise(scales(model), before)
    newest = [each[0].fp8_amax_history[-1] for each in (model, other)]
    assert not torch.equal(*newest) and not other[0].fp8_amax_history[0].any()
    part = copy.deepcopy(model[0])
    assert not any(isinstance(value, torch.nn.Sequential) for value in vars(part).values())


def test_a_part_converted_before_the_whole_is_updated_once():
    model = make()
    nn.convert(model[0], STEP)
    nn.convert(model, STEP)
    train(model, 1)
    assert [name for name in vars(model[0]) if "scale_updates" in name] == []
    assert (model[0].fp8_quant_scale != 1.0).all()


def decoder(recipe):
    config = ModelConfig("llama", 32, 32, 64, 1, 2, 1, 16, max_position_embeddings=64)
    model = Decoder(config, seed=0)
    model.set_numerics(Numerics(recipe))
    return model, MasterAdamW(model, OptimizerSection(lr=0.01))


def decoder_losses(model, optimizer, steps):
    found = []
    for step in steps:
        ids = torch.randint(0, 32, (17,), generator=torch.Generator().manual_seed(step)).numpy()
        found.append(train_step(model, optimizer, [make_batch([ids], None)], lr=0.01, max_grad_norm=1.0, step=step))
    return found


def test_an_older_checkpoint_goes_on():
    """Which holds its last step's amaxes as they were staged."""
    model, optimizer = decoder(DelayedScaling(**FIELDS))
    decoder_losses(model, optimizer, range(3))
    saved = {name: tensor.clone() for name, tensor in trainer_state(model, optimizer).items()}
    resumed, its_optimizer = decoder(STEP)
    assert restore(resumed, its_optimizer, saved, model.weight_version) == []
    assert decoder_losses(resumed, its_optimizer, range(3, 6)) == decoder_losses(model, optimizer, range(3, 6))


def test_octavos_loops_update_once_a_step():
    train_config = PrecisionSection(recipe="delayed", modules={"down_proj": "delayed"})
    assert train_config.make_recipe().updates_at_steps
    assert train_config.module_recipes()["down_proj"].updates_at_steps
    assert not PrecisionSection(recipe="delayed", update_every="forward").make_recipe().updates_at_steps
    rl_config = RLConfig(exact=False, trainer={"recipe": "delayed"}, rollout={"recipe": "tensorwise"})
    assert rl_config.trainer_numerics.recipe.updates_at_steps


def test_a_saved_state_is_whole_between_micro_batches():
    model, other = make(), make()
    train(model, 2)
    model(batch(7)).sum().backward()
    other.load_state_dict(model.state_dict())
    nn.load_fp8_state_dict(other, nn.fp8_state_dict(model))
    for each in (model, other):
        each(batch(8)).sum().backward()
        nn.update_scales(each)
    assert_all_bitwise(nn.fp8_state_dict(other).values(), nn.fp8_state_dict(model).values())


@pytest.mark.parametrize("use_reentrant", [True, False])
def test_recomputation_stages_nothing_new(use_reentrant):
    plain, again = make(), make()
    train(plain, 2)
    optimizer = torch.optim.SGD(again.parameters(), lr=0.01)
    for step in range(2):
        optimizer.zero_grad()
        checkpoint(again, batch(step).requires_grad_(), use_reentrant=use_reentrant).square().mean().backward()
        optimizer.step()
    assert_all_bitwise(nn.fp8_state_dict(again).values(), nn.fp8_state_dict(plain).values())


def test_compiled_code_stages_for_the_step():
    plain, model = make(), make()
    train(plain, 3, micro_batches=2)
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    for step in range(3):
        for index in range(2):
            compiled(batch(2 * step + index)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    assert_all_bitwise(nn.fp8_state_dict(model).values(), nn.fp8_state_dict(plain).values())


def test_steps_that_are_never_seen_are_said():
    warn_of_no_step.cache_clear()
    model = make()
    for _ in range(MAX_WAITING - 1):
        model(batch(0))
    with pytest.warns(UserWarning, match=r"no optimizer step.*update_scales\(model\)"):
        model(batch(0))
    model(batch(0))  # once
    warn_of_no_step.cache_clear()


def test_a_reset_makes_the_scales_of_the_last_step():
    model = make()
    for x in (1e6 * batch(0), batch(1)):
        model(x).sum().backward()
        nn.update_scales(model)
    model(batch(2)).sum().backward()  # of the step that comes
    staged = model[0].fp8_amax_history[0].clone()
    nn.reset_amax_history(model)
    assert_bitwise(model[0].fp8_quant_scale[0], torch.tensor(448.0) / batch(1).abs().max())
    assert_bitwise(model[0].fp8_amax_history[0], staged)


def test_autocast_has_no_model_to_follow():
    with pytest.raises(RecipeError, match=r"knows of none.*octavo\.convert"), octavo.autocast(recipe=STEP):
        pass


def test_a_group_of_autocast_is_refused():
    model = make()
    with (
        octavo.autocast(recipe="blockwise", amax_reduction_group="group"),
        pytest.raises(RecipeError, match="set_amax_reduction_group"),
    ):
        model(batch(0))


def test_the_recipe_is_asked_by_name():
    assert get_recipe("delayed", update_every="step") == DelayedScaling(update_every="step")
    with pytest.raises(RecipeError, match="update_every must be 'forward' or 'step', got 'epoch'"):
        DelayedScaling(update_every="epoch")
    assert "update_every" not in get_recipe("delayed").as_dict()["delayed"]  # older fingerprints stay true
    prints = {Numerics(get_recipe("delayed", update_every=every)).fingerprint() for every in ("forward", "step")}
    assert len(prints) == 2
