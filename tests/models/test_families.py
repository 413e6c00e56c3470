"""What every family has in common: parameters by the table, FP8 training of the whole decoder, generation."""

import math
from typing import get_args

import pytest
import torch

from octavo import LLM, SamplingParams
from octavo.models import Decoder, sequence_logprobs
from octavo.models.checkpoint.names import parameter_names
from octavo.models.config import FAMILY_NAMES
from octavo.nn import linear_cross_entropy
from octavo.nn.attention_context import PackedContext
from octavo.numerics import Numerics, get_recipe
from octavo.run.sections import ModelSection
from octavo.testing import assert_sqnr
from tests.serve.random_models import make_config, make_model

FAMILY = pytest.mark.parametrize("family", FAMILY_NAMES)
TOKENS = torch.arange(90)


def test_a_new_model_may_be_of_any_family() -> None:
    assert set(get_args(ModelSection.model_fields["family"].annotation)) == set(FAMILY_NAMES)


@FAMILY
def test_parameters_have_the_names_and_shapes_of_the_table(family: str) -> None:
    config = make_config(family, num_layers=3, **({"mlp_only_layers": (1,)} if family == "qwen3_moe" else {}))
    model = Decoder(config)
    shapes = {name: tuple(param.shape) for name, param in model.named_parameters()}
    assert shapes == {p.name: p.shape for p in parameter_names(config)}
    assert set(model.state_dict()) == set(shapes)
    assert model.num_params == sum(math.prod(shape) for shape in shapes.values())


def gradients(model: Decoder) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    model.zero_grad()
    hidden = model(TOKENS, PackedContext.from_lengths([90], model.numerics))
    loss = linear_cross_entropy(hidden, model.head_weight, TOKENS.roll(-1), head_bias=model.head_bias)
    loss.backward()
    return loss.detach(), {name: param.grad for name, param in model.named_parameters() if param.grad is not None}


@pytest.mark.parametrize("recipe", ["delayed", "tensorwise", "rowwise", "blockwise"])
@pytest.mark.parametrize("family", ["gptj", "qwen2", "qwen3_moe"])
def test_fp8_gradients_are_those_of_high_precision(family: str, recipe: str) -> None:
    model = Decoder(make_config(family), dtype=torch.float32, seed=1)
    loss, expected = gradients(model)
    model.set_numerics(Numerics(get_recipe(recipe)))
    for _ in range(2 if recipe == "delayed" else 1):  # its first step has no scales yet
        got_loss, got = gradients(model)
    torch.testing.assert_close(got_loss, loss, rtol=2e-3, atol=0)
    assert got.keys() == expected.keys() == dict(model.named_parameters()).keys()
    assert_sqnr(
        torch.cat([g.flatten() for g in got.values()]), torch.cat([g.flatten() for g in expected.values()]), 15.0
    )
    assert_sqnr(got["embed_tokens.weight"], expected["embed_tokens.weight"], 10.0)


@FAMILY
def test_greedy_generation_follows_the_scores(family: str) -> None:
    model = make_model(family, recipe="blockwise", exact=True)
    params = SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True)
    (output,) = LLM(model).generate([[5, 6, 7]], params)
    tokens = output.outputs[0].token_ids
    context = PackedContext.from_lengths([3 + len(tokens) - 1], model.numerics)
    with torch.no_grad():
        logits = model.logits(model(torch.tensor([5, 6, 7, *tokens[:-1]]), context))
    assert logits[2:].argmax(dim=-1).tolist() == tokens
    scored = sequence_logprobs(model, [[5, 6, 7, *tokens]])[0]
    expected = torch.log_softmax(logits, dim=-1)[torch.arange(2, len(logits)), torch.tensor(tokens)]
    torch.testing.assert_close(scored[2:].detach(), expected, rtol=0, atol=1e-4)
