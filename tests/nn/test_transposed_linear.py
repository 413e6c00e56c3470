"""transformers' Conv1D under a recipe: the bits of a Linear over the transposed weight, and its own keys and shapes."""

import copy
import pickle
from typing import Any

import pytest
import torch

import octavo
from octavo.testing import assert_bitwise

transformers = pytest.importorskip("transformers")
HIDDEN, VOCAB, STEPS = 64, 100, 4
IDS = torch.arange(32).view(2, 16)


@pytest.fixture(scope="module")
def gpt2() -> Any:
    torch.manual_seed(0)
    ids = {"bos_token_id": 0, "eos_token_id": 0, "loss_type": "ForCausalLM"}
    off = dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), 0.0)
    return transformers.GPT2LMHeadModel(
        transformers.GPT2Config(n_embd=HIDDEN, n_layer=2, n_head=4, vocab_size=VOCAB, **ids, **off)
    )


def with_linears(model: Any) -> Any:
    """The same model of torch.nn.Linear."""
    model = copy.deepcopy(model)
    for name, module in list(model.named_modules()):
        if type(module).__name__ == "Conv1D":
            linear = torch.nn.Linear(module.nx, module.nf)
            linear.weight = torch.nn.Parameter(module.weight.detach().t().contiguous())
            linear.bias = torch.nn.Parameter(module.bias.detach().clone())
            parent, _, last = name.rpartition(".")
            setattr(model.get_submodule(parent), last, linear)
    return model


def train(model: Any) -> torch.Tensor:
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, fused=True)
    losses = []
    for _ in range(STEPS):
        loss = model(input_ids=IDS, labels=IDS).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.detach())
    return torch.stack(losses)


def test_inputs_are_named_as_the_layers_that_were_replaced_name_them(gpt2: Any) -> None:
    ours, linears, x = copy.deepcopy(gpt2), with_linears(gpt2), torch.randn(4, HIDDEN)
    for model in (ours, linears):
        octavo.convert(model, "blockwise")
    assert_bitwise(ours.transformer.h[0].attn.c_attn(x=x), linears.transformer.h[0].attn.c_attn(input=x))


@pytest.mark.parametrize("recipe", ["blockwise", "rowwise", "tensorwise", "delayed"])
def test_gpt2_has_the_bits_of_linears(recipe: str, gpt2: Any) -> None:
    ours, linears = copy.deepcopy(gpt2), with_linears(gpt2)
    report, _ = octavo.convert(ours, recipe), octavo.convert(linears, recipe)
    assert len(report.fp8_names) == 8 and report.fp8_flop_share == 1.0
    row = report.rows[0]
    assert (row.name, row.in_features, row.out_features) == ("transformer.h.0.attn.c_attn", HIDDEN, 3 * HIDDEN)
    assert row.reason == "replaced Conv1D"
    assert [(k, t.shape) for k, t in ours.state_dict().items()] == [(k, t.shape) for k, t in gpt2.state_dict().items()]
    assert_bitwise(train(ours), train(linears))
    stored = ours.state_dict()["transformer.h.1.mlp.c_fc.weight"]
    assert_bitwise(stored, linears.transformer.h[1].mlp.c_fc.weight.detach().t())
    octavo.nn.check_weights(ours)
    gpt2.load_state_dict(ours.state_dict())  # the way back
    ours.eval()
    for copied in (copy.deepcopy(ours), pickle.loads(pickle.dumps(ours))):
        assert_bitwise(copied(input_ids=IDS).logits.detach(), ours(input_ids=IDS).logits.detach())


def test_codes_follow_a_weight_that_is_loaded_frozen_or_given_up(gpt2: Any) -> None:
    model = copy.deepcopy(gpt2).bfloat16()
    octavo.convert(model, "blockwise", ignore=("lm_head", "c_attn"))
    assert type(model.transformer.h[0].attn.c_attn).__name__ == "Conv1D"
    model.eval().requires_grad_(False)
    before = model(input_ids=IDS).logits
    model.load_state_dict({name: tensor * 1.5 for name, tensor in model.state_dict().items()})
    after = model(input_ids=IDS).logits
    assert not torch.equal(before, after)
    octavo.nn.keep_codes_only(model)
    assert model.transformer.h[0].mlp.c_fc.weight is None
    assert_bitwise(model(input_ids=IDS).logits, after)
