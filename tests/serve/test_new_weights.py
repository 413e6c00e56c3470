"""New weights of a model that an LLM shares: no token comes from pages or codes of older ones."""

import pytest
import torch

from octavo import LLM, SamplingParams, sequence_logprobs
from octavo.errors import RequestError
from octavo.nn import mark_weights_updated
from tests.serve.random_models import make_model


class Silent(torch.optim.Optimizer):
    """Moves no version of a tensor, as torch's fused optimizers on a GPU."""

    def step(self) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for parameter in group["params"]:
                parameter.data.mul_(0.9)


def test_new_weights_make_a_new_version_and_salt_the_cache() -> None:
    model = make_model("llama", "rowwise")
    llm = LLM(model)
    prompt = list(range(1, 90))
    params = SamplingParams(temperature=0, max_tokens=3, logprobs=0, ignore_eos=True)
    old = llm.generate([prompt], params)[0].outputs[0]
    assert old.weight_versions == [model.weight_version] * 3
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(1.5)
    model.mark_weights_updated()
    assert llm.refit() == model.weight_version == old.weight_versions[0] + 1
    new = llm.generate([prompt], params)[0].outputs[0]
    assert llm.stats.num_prefix_hit_tokens == 0
    assert new.weight_versions == [model.weight_version] * 3
    fresh = LLM(model).generate([prompt], params)[0].outputs[0]
    assert new.logprobs == fresh.logprobs != old.logprobs
    model.mark_weights_updated()  # without refit: generate sees it by itself
    assert llm.generate([prompt], params)[0].outputs[0].weight_versions == [model.weight_version] * 3
    assert llm.stats.num_prefix_hit_tokens == 0


@pytest.mark.parametrize("way", ["foreach", "fused", "silent", "data"])
@pytest.mark.parametrize("recipe", ["bf16", "blockwise"])
def test_an_optimizer_of_ones_own_needs_no_call(recipe: str, way: str, device: torch.device) -> None:
    """Pages of weights before a step of torch's own optimizer, or a write into .data that was told of, are not used."""
    model = make_model("llama", recipe, device=device)
    llm, prompt = LLM(model), list(range(1, 80))
    params = SamplingParams(max_tokens=3, logprobs=0, ignore_eos=True)
    for number in range(2):
        output = llm.generate([prompt], params)[0]
        sampled = output.outputs[0]
        (scored,) = sequence_logprobs(model, [prompt + sampled.token_ids], prompt_lens=[len(prompt)])
        assert scored.tolist() == sampled.logprobs.sampled and output.num_cached_tokens == 0, number
        model.zero_grad()
        scored.sum().neg().backward()
        if way == "silent":
            Silent(model.parameters(), {}).step()
        elif way != "data":  # the optimizer is gone when the engine looks
            torch.optim.AdamW(model.parameters(), lr=1e-2, fused=way == "fused").step()
        else:
            model.norm.weight.data.mul_(0.5)
            mark_weights_updated(model)
    llm.generate([prompt], params)
    other = torch.nn.Parameter(torch.ones(1, device=device))
    other.grad = torch.ones_like(other)
    torch.optim.SGD([other], lr=1.0).step()  # of another model
    assert llm.generate([prompt], params)[0].num_cached_tokens == 64


def test_weights_must_not_change_under_a_running_sequence() -> None:
    model = make_model("llama", "rowwise")
    llm = LLM(model)
    stream = llm.stream([1, 2, 3], SamplingParams(ignore_eos=True))
    next(stream)
    model.mark_weights_updated()
    with pytest.raises(RequestError, match="weights changed"):
        llm.refit()
    with pytest.raises(RequestError, match="weights changed"):
        next(stream)
    assert not llm.engine.has_unfinished
    assert llm.refit() == model.weight_version
