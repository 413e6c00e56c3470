"""A stand-in for DeepSpeed's ZeRO-3, which is not installed here (tests/ecosystem/test_deepspeed.py has the real one):
as DeepSpeed does, hooks gather a module's parameters before its forward and backward and empty them after. One rank
holds the whole "partition".
"""

import copy

import pytest
import torch

import octavo
from octavo import nn
from octavo.errors import ConfigError
from octavo.testing import assert_bitwise
from tests.recipes import FP8_RECIPES


class FakeZero3:
    """Partitions the parameters of a model: as DeepSpeed, each has ds_id, ds_shape and ds_tensor, and no values between
    two uses."""

    def __init__(self, model: torch.nn.Module) -> None:
        for i, parameter in enumerate(model.parameters()):
            parameter.ds_id, parameter.ds_shape = i, parameter.shape
            parameter.ds_tensor = parameter.detach().clone().flatten()
            self._free(parameter)
        for module in model.modules():
            if list(module.parameters(recurse=False)):
                module.register_forward_pre_hook(lambda module, _: self._gather(module))
                module.register_forward_hook(lambda module, *_: self._partition(module))
                module.register_full_backward_pre_hook(lambda module, _: self._gather(module))
                module.register_full_backward_hook(lambda module, *_: self._partition(module))
        nn.plan_fusion(model)

    def _gather(self, module: torch.nn.Module) -> None:
        for parameter in module.parameters(recurse=False):
            parameter.data = parameter.ds_tensor.clone().view(parameter.ds_shape)

    def _partition(self, module: torch.nn.Module) -> None:
        for parameter in module.parameters(recurse=False):
            self._free(parameter)

    def _free(self, parameter: torch.nn.Parameter) -> None:
        parameter.data = torch.empty(0, dtype=parameter.dtype)


def build(recipe: str) -> torch.nn.Module:
    torch.manual_seed(0)
    model = torch.nn.Sequential(nn.LayerNormLinear(128, 128), nn.LayerNormMLP(128, 256))
    nn.convert(model, recipe, ignore=())
    for parameter in model.parameters():
        if parameter.dim() == 1:  # biases that are not zero
            torch.nn.init.normal_(parameter, 0.5, 0.2)
    return model


def step(model: torch.nn.Module) -> tuple[torch.Tensor, list[torch.Tensor]]:
    model.zero_grad()
    x = torch.randn(32, 128, generator=torch.Generator().manual_seed(3)).bfloat16().requires_grad_()
    out = model(x)
    held = held_bytes(model)
    out.float().square().mean().backward()
    assert x.grad is not None
    return out, [x.grad, *(p.grad for p in model.parameters()), torch.tensor([held, held_bytes(model)])]


def held_bytes(model: torch.nn.Module) -> int:
    return sum(m.source.held_bytes() for m in model.modules() if isinstance(m, nn.Linear))


@pytest.mark.parametrize("recipe", FP8_RECIPES)
def test_a_partitioned_weight_leaves_no_codes_and_is_always_quantized_again(recipe: str) -> None:
    """New values come without a word: into the partition, which the next gather copies to whatever address."""
    partitioned, whole = build(recipe), build(recipe)
    nn.set_fusion(whole, False)
    FakeZero3(partitioned)
    assert all(p.numel() == 0 for p in partitioned.parameters())
    for _ in range(2):
        (out, (*grads, held)), (wanted, (*others, _)) = step(partitioned), step(whole)
        assert held.tolist() == [0, 0]
        assert all(p.numel() == 0 for p in partitioned.parameters())
        assert_bitwise(out, wanted)
        for mine, theirs in zip(grads, others, strict=True):
            assert_bitwise(mine, theirs)
        for parameter, other in zip(partitioned.parameters(), whole.parameters(), strict=True):
            parameter.ds_tensor.mul_(0.5)
            other.data.mul_(0.5)
        nn.mark_weights_updated(whole)


def test_convert_comes_before_the_engine() -> None:
    model = torch.nn.Sequential(torch.nn.Linear(128, 128))
    model[0].ds_id = 0  # as DeepSpeed's engine numbers the modules that its hooks follow
    with pytest.raises(ConfigError, match=r"ZeRO-3 follows 0 already; call octavo.convert first"):
        octavo.convert(model, "rowwise")
    assert type(model[0]) is torch.nn.Linear


def test_codes_from_before_the_partition_go() -> None:
    model = build("rowwise")
    x = torch.ones(16, 128, dtype=torch.bfloat16)
    with torch.no_grad():
        wanted = copy.deepcopy(model)(x)
        model(x)
        assert held_bytes(model) > 0
        FakeZero3(model)
        assert_bitwise(model(x), wanted)
    assert held_bytes(model) == 0
