"""transformers' fused experts under a recipe: codes of each expert alone, gradients, and what stays theirs."""

import copy
import pickle
from typing import Any

import pytest
import torch

import octavo
from octavo import amp
from octavo.nn.fused_experts import set_experts_recipe, stacked_weight
from octavo.nn.weights.plan import LinearPlan
from octavo.testing import assert_bitwise, assert_sqnr
from octavo.testing.tolerances import FFN_DB

transformers = pytest.importorskip("transformers")
HIDDEN, INNER, TOKENS = 64, 96, 40
SIZES = {
    "hidden_size": HIDDEN, "intermediate_size": INNER, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 16, "vocab_size": 64,
}  # fmt: skip
CONFIGS = {
    "Mixtral": {"num_local_experts": 8, "num_experts_per_tok": 2},
    "Qwen3Moe": {"num_experts": 8, "num_experts_per_tok": 4, "moe_intermediate_size": INNER},
    "GptOss": {"num_local_experts": 8, "num_experts_per_tok": 4, "layer_types": ["full_attention"] * 2},
}


def make(family: str) -> Any:
    torch.manual_seed(0)
    model = getattr(transformers, f"{family}ForCausalLM")(
        getattr(transformers, f"{family}Config")(**SIZES, **CONFIGS[family])
    )
    for experts in blocks(model):
        for parameter in experts.parameters():
            torch.nn.init.normal_(parameter, std=0.1)
    return model


def blocks(model: Any) -> list[Any]:
    return [module for module in model.modules() if type(module).__name__.endswith("Experts")]


def routed(num_used: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Hidden states, experts and weights of each token; the last expert gets none."""
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(TOKENS, HIDDEN, generator=generator).requires_grad_()
    experts = torch.stack([torch.randperm(7, generator=generator)[:num_used] for _ in range(TOKENS)])
    return x, experts, torch.rand(TOKENS, num_used, generator=generator).requires_grad_()


def gradients(experts: Any, num_used: int) -> list[torch.Tensor]:
    """Output and gradients of the hidden states, the weights and the parameters."""
    x, chosen, weights = routed(num_used)
    out = experts(x, chosen, weights)
    out.backward(torch.randn(out.shape, generator=torch.Generator().manual_seed(2)))
    return [out.detach(), x.grad, weights.grad, *(parameter.grad for parameter in experts.parameters())]  # type: ignore[list-item]


@pytest.mark.parametrize("family", list(CONFIGS))
@pytest.mark.parametrize("recipe", ["blockwise", "rowwise", "tensorwise"])
def test_outputs_and_gradients_are_the_experts(family: str, recipe: str) -> None:
    plain = make(family)
    plain.set_experts_implementation("eager")
    model = copy.deepcopy(plain)
    report = octavo.convert(model, recipe)
    assert sum(row.kind == "experts" for row in report.rows if row.recipe) == 4
    ours, theirs = (gradients(blocks(each)[1], 2) for each in (model, plain))
    for actual, expected in zip(ours, theirs, strict=True):
        assert_sqnr(actual, expected, FFN_DB)
    assert not any(torch.equal(actual, expected) for actual, expected in zip(ours[:-1], theirs[:-1], strict=True))


@pytest.mark.parametrize("family", list(CONFIGS))
def test_an_expert_is_quantized_as_it_would_be_alone(family: str) -> None:
    experts, recipe = blocks(make(family))[0], octavo.get_recipe("blockwise")
    for name in ("gate_up_proj", "down_proj"):
        set_experts_recipe(experts, name, recipe)
        source = vars(experts)["_octavo_experts"][name].source
        operands = source.forward(stacked_weight(experts, name), LinearPlan(recipe))
        alone = []
        for weight in getattr(experts, name).detach().bfloat16():
            weight = weight.t().contiguous() if experts.is_transposed else weight
            is_pair = name == "gate_up_proj" and experts.is_concatenated
            alone += [octavo.quantize(part, recipe.weight) for part in (weight.chunk(2) if is_pair else [weight])]
        assert_bitwise(torch.cat([q.qdata for _, q in operands]), torch.cat([q.qdata for q in alone]))
        assert_bitwise(torch.cat([q.scale for _, q in operands]), torch.cat([q.scale for q in alone]))


@pytest.mark.parametrize("family", list(CONFIGS))
def test_a_model_trains_and_stays_transformers_own(family: str) -> None:
    model = make(family)
    keys, classes = list(model.state_dict()), [type(experts) for experts in blocks(model)]
    octavo.convert(model, "blockwise")
    assert list(model.state_dict()) == keys
    assert all(isinstance(experts, kind) for experts, kind in zip(blocks(model), classes, strict=True))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, fused=True)
    ids = torch.arange(32).view(2, 16)
    losses = []
    for _ in range(4):
        loss = model(input_ids=ids, labels=ids).loss
        loss.backward()
        assert all(p.grad is not None for experts in blocks(model) for p in experts.parameters())
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    assert losses[-1] < losses[0] - 0.5
    model.eval()
    with torch.no_grad():
        logits = model(input_ids=ids).logits
        for copied in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
            assert_bitwise(copied(input_ids=ids).logits, logits)
    make(family).load_state_dict(model.state_dict())  # the way back


def test_other_recipes_and_amp_reach_the_experts() -> None:
    model = make("Mixtral").eval()
    plain = copy.deepcopy(model)
    ids = torch.arange(16).view(1, 16)
    ignore = ("lm_head", "q_proj", "k_proj", "v_proj")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    with torch.no_grad():
        high = plain(input_ids=ids).logits
        octavo.convert(model, "blockwise", ignore=(*ignore, "o_proj"))
        low = model(input_ids=ids).logits
        assert not torch.equal(low, high)
        with octavo.autocast(enabled=False):
            assert_bitwise(model(input_ids=ids).logits, high)
        octavo.convert(model, "bf16")
        assert_bitwise(model(input_ids=ids).logits, high)
    _, optimizer = amp.initialize(
        model,
        torch.optim.SGD(model.parameters(), lr=0.0),
        "O1",
        recipe="blockwise",
        dtype=torch.bfloat16,
        ignore=ignore,
    )
    with torch.no_grad():
        first = model(input_ids=ids).logits
        amp.handle(optimizer).switch("O2")
        assert not torch.equal(model(input_ids=ids).logits, first)
        assert all(not part.recipe for experts in blocks(model) for part in vars(experts)["_octavo_experts"].values())
        amp.handle(optimizer).switch("O1")
        assert_bitwise(model(input_ids=ids).logits, first)
