"""Checkpoints of b14d6df, where delayed scaling's state was inside the model's state dict, still load.

Files in tests/golden/delayed were written by that commit: five steps of each model below, and the losses of the next
three. The program that wrote them stands in this file up to 04128c5.
"""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

import octavo
from octavo import amp
from octavo.models import Decoder, ModelConfig, load_model
from octavo.nn import PackedContext
from octavo.numerics import DelayedScaling, Numerics
from octavo.run.optimizer import MasterAdamW
from octavo.run.sections import OptimizerSection
from octavo.run.trainer_state import restore, trainer_state
from octavo.testing import assert_bitwise

GOLDEN = Path(__file__).parent.parent / "golden" / "delayed"
RECIPE = DelayedScaling(amax_history_len=4)
STATE = ("fp8_amax_history", "fp8_quant_scale")


def network():
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(16, 24), torch.nn.GELU(), torch.nn.Linear(24, 16))


def steps(model, first, num):
    """Losses [num] of plain gradient descent, which has no state of its own."""
    losses = []
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(first, first + num):
        x = torch.randn(8, 16, generator=torch.Generator().manual_seed(step))
        optimizer.zero_grad()
        loss = (model(x) - x).square().mean()
        loss.backward()
        optimizer.step()
        losses.append(loss.detach())
    return torch.stack(losses)


def decoder():
    config = ModelConfig("llama", 16, 8, 16, num_layers=1, num_heads=1, num_kv_heads=1, head_dim=8)
    model = Decoder(config, dtype=torch.bfloat16)
    model.set_numerics(Numerics(RECIPE))
    return model, MasterAdamW(model, OptimizerSection())


def decoder_steps(model, optimizer, first, num):
    losses = []
    for step in range(first, first + num):
        ids = torch.randint(0, 16, (24,), generator=torch.Generator().manual_seed(step))
        logits = model.logits(model(ids, PackedContext(torch.tensor([0, 24]))))
        loss = torch.nn.functional.cross_entropy(logits.float()[:-1], ids[1:])
        loss.backward()
        optimizer.accumulate_gradients()
        optimizer.step(lr=1e-2)
        losses.append(loss.detach())
    return torch.stack(losses)


def llama_config(transformers):
    return transformers.LlamaConfig(
        vocab_size=16, hidden_size=8, intermediate_size=16, num_hidden_layers=1, num_attention_heads=1, head_dim=8
    )


def assert_goes_on(losses, expected):
    """As the older code went on, up to what another CPU's exp and sums change."""
    torch.testing.assert_close(losses, expected, rtol=1e-4, atol=0.0)


def assert_has(model, state, prefix=""):
    """The very state that was saved."""
    held = octavo.nn.fp8_state_dict(model)
    assert {f"{prefix}{key}" for key in held} == {key for key in state if key.endswith(STATE)}
    for key, tensor in held.items():
        assert_bitwise(tensor, state[f"{prefix}{key}"], key)


@pytest.fixture(scope="module")
def expected():
    return load_file(GOLDEN / "expected.safetensors")


@pytest.mark.parametrize("first", ["convert", "load"])
def test_a_state_dict_with_the_state_inside(expected, first):
    state = load_file(GOLDEN / "converted.safetensors")
    assert sum(key.endswith(STATE) for key in state) == 4
    model = network()
    octavo.convert(model, RECIPE)
    if first == "load":  # before any recipe is known
        for linear in (model[0], model[2]):
            linear.recipe = None
            del linear.fp8_amax_history, linear.fp8_quant_scale
    model.load_state_dict(state)
    octavo.convert(model, RECIPE)
    assert_has(model, state)
    assert_goes_on(steps(model, 5, 3), expected["converted"])
    assert not any(key.endswith(STATE) for key in model.state_dict())


def test_a_state_dict_whose_state_goes_to_torchs_linears(expected):
    state = load_file(GOLDEN / "converted.safetensors")
    model = network()
    model.load_state_dict({key: value for key, value in state.items() if not key.endswith(octavo.nn.DELAYED_BUFFERS)})
    octavo.nn.load_fp8_state_dict(model, {k: v for k, v in state.items() if k.endswith(octavo.nn.DELAYED_BUFFERS)})
    assert_has(model, state)
    with octavo.autocast(recipe=RECIPE):
        assert_goes_on(steps(model, 5, 3), expected["converted"])


def test_another_history_is_refused_as_torch_refuses_sizes():
    model = network()
    octavo.convert(model, DelayedScaling(amax_history_len=8))
    with pytest.raises(RuntimeError, match=r"0: the saved amax history has 4 rows, this linear's 8"):
        model.load_state_dict(load_file(GOLDEN / "converted.safetensors"))


def test_amp(expected):
    model = network()
    model, optimizer = amp.initialize(model, torch.optim.SGD(model.parameters(), lr=0.1), recipe=RECIPE)
    model.load_state_dict(load_file(GOLDEN / "amp.safetensors"))
    amp.handle(optimizer).load_state_dict(json.loads((GOLDEN / "amp.json").read_text()))
    assert amp.handle(optimizer).num_steps == 1
    assert_has(model, load_file(GOLDEN / "amp.safetensors"))
    assert_goes_on(steps(model, 5, 3), expected["amp"])


def test_train_and_rl(expected):
    """Both keep octavo.train's trainer.safetensors, whose names are what they were."""
    model, optimizer = decoder()
    state = load_file(GOLDEN / "trainer.safetensors")
    assert restore(model, optimizer, state, 5) == []
    assert_has(model, state, "buffer.")
    assert {key: tensor.dtype for key, tensor in trainer_state(model, optimizer).items() if "rng" not in key} == {
        key: tensor.dtype for key, tensor in state.items() if "rng" not in key
    }
    assert_goes_on(decoder_steps(model, optimizer, 5, 3), expected["decoder"])


def test_load_model_takes_the_state_along():
    model = load_model(GOLDEN / "model", recipe=RECIPE)
    assert_has(model, load_file(GOLDEN / "trainer.safetensors"), "buffer.")


def test_load_model_of_a_converted_transformers_model():
    """b14d6df refused the folder that it had written."""
    with pytest.warns(UserWarning, match=r"14 tensors of delayed scaling's state are left out"):
        model = load_model(GOLDEN / "transformers")
    assert model.config.hidden_size == 8


def test_load_model_of_what_transformers_saves_now(tmp_path):
    transformers = pytest.importorskip("transformers", reason="an optional dependency")
    model = transformers.LlamaForCausalLM(llama_config(transformers))
    plain = set(model.state_dict())
    octavo.convert(model, RECIPE)
    ids = torch.arange(16)[None]
    model(ids, labels=ids).loss.backward()
    assert set(model.state_dict()) == plain
    model.save_pretrained(tmp_path / "m")
    ours = load_model(tmp_path / "m", recipe=RECIPE)
    theirs = model.model.layers[0].mlp.down_proj.weight.detach()
    assert_bitwise(ours.layers[0].mlp.down_proj.weight.detach(), theirs)
