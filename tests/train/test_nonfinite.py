"""The first tensor to go bad is named: parameter, module output, loss or gradient."""

import functools

import pytest
import torch
from torch import nn

from octavo.errors import NonFiniteError
from octavo.run.optimizer import MasterAdamW
from octavo.train.build import build_model
from octavo.train.data import Batch, make_batch
from octavo.train.nonfinite import explain_nonfinite
from octavo.train.step import summed_loss, train_step
from tests.assertions import assert_raises

from .conftest import MakeConfig


class Divide(nn.Module):
    """0 / 0 where its input is exactly zero."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x / x


class SquareRoot(nn.Module):
    """Finite forward; an infinite gradient at zero."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x.abs().sqrt()


def batch(value: float = 1.0) -> Batch:
    return Batch(torch.full((2, 4), value), torch.zeros(2), torch.tensor([0, 2]), 2)


def loss(model: nn.Module, batch: Batch) -> torch.Tensor:
    return model(batch.input_ids).sum()


def explain(model: nn.Module, *batches: Batch, loss_fn=loss) -> str:  # type: ignore[no-untyped-def]
    error = explain_nonfinite(model, batches or [batch()], loss_fn, step=7)
    assert isinstance(error, NonFiniteError)
    assert all(not module._forward_hooks for module in model.modules())
    assert all(param.grad is None for param in model.parameters())
    assert "step 7" in str(error)
    assert "Nothing was saved" in str(error)
    return str(error)


def stack(middle: nn.Module) -> nn.Sequential:
    return nn.Sequential(nn.Linear(4, 4), middle, nn.Linear(4, 4))


def test_parameter() -> None:
    model = stack(nn.ReLU())
    with torch.no_grad():
        model[2].weight[1, 1] = torch.nan
    text = explain(model)
    assert "first tensor to go bad: parameter 2.weight, shape (4, 4) float32: 1 NaN and 0 inf of 16" in text


def test_module_output_inside_a_parent() -> None:
    model = nn.Sequential(stack(nn.ReLU()), nn.Sequential(Divide()), nn.Linear(4, 4))
    with torch.no_grad():
        model[0][2].weight.zero_()
        model[0][2].bias.zero_()
    text = explain(model)
    assert "output of 1.0 (Divide), shape (2, 4) float32: 8 NaN and 0 inf of 8" in text


def test_right_micro_batch() -> None:
    model = nn.Sequential(Divide(), nn.Linear(4, 4))
    assert "output of 0 (Divide)" in explain(model, batch(1.0), batch(0.0))
    assert "(micro-batch 1)" in explain(model, batch(1.0), batch(0.0))


def test_loss() -> None:
    text = explain(stack(nn.ReLU()), loss_fn=lambda model, batch: loss(model, batch) * torch.inf)
    assert "the loss itself" in text


def test_gradient_in_the_order_of_the_backward_pass() -> None:
    model = nn.Sequential(nn.Linear(4, 4, bias=False), SquareRoot(), nn.Linear(4, 4))
    text = explain(model, batch(0.0))
    assert "gradient of the output of 0 (Linear), shape (2, 4) float32" in text


def test_gradient_of_a_parameter() -> None:
    class Root(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.scale = nn.Parameter(torch.zeros(4))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x * self.scale.sqrt()

    assert "gradient of parameter 1.scale, shape (4,)" in explain(nn.Sequential(nn.Linear(4, 4), Root()))


def test_nothing_found_is_said() -> None:
    assert "overflowed" in explain(stack(nn.ReLU()))


def test_minus_infinity_is_counted() -> None:
    model = stack(nn.ReLU())
    with torch.no_grad():
        model[0].bias[2] = -torch.inf
    assert "parameter 0.bias, shape (4,) float32: 0 NaN and 1 inf of 4" in explain(model)


@pytest.mark.parametrize("recipe", ["delayed", "tensorwise", "rowwise", "blockwise", "nvfp4"])
def test_an_infinite_weight_that_fp8_hides_ends_the_step(make_config: MakeConfig, recipe: str) -> None:
    config = make_config(precision={"recipe": recipe})
    model = build_model(config, 280, 0, torch.device("cpu"))
    optimizer = MasterAdamW(model, config.optimizer)
    batches = [make_batch([torch.arange(33).numpy()], None) for _ in range(2)]
    step = functools.partial(train_step, model, optimizer, batches, lr=1e-3, max_grad_norm=1.0)
    step(step=1)
    weight = model.layers[1].mlp.down_proj.weight
    with torch.no_grad():
        weight[3, 5] = torch.inf
    before = {name: p.clone() for name, p in model.named_parameters()}
    assert_raises(NonFiniteError, r"step 2: .* parameter layers\.1\.mlp\.down_proj\.weight.* 1 inf of", step, step=2)
    assert all(torch.equal(before[name], p) for name, p in model.named_parameters())
    with torch.no_grad():
        weight[3, 5] = 0.0
    model.mark_weights_updated()
    assert step(step=3).num_tokens == 64


def test_an_infinite_activation_that_fp8_hides_is_named(make_config: MakeConfig) -> None:
    model = build_model(make_config(precision={"recipe": "blockwise"}), 280, 0, torch.device("cpu"))
    layer, seen = model.layers[0].mlp.down_proj, []
    layer.observer = lambda role, tensor, codes: seen.append(role)
    kept = layer.observer
    with torch.no_grad():
        model.layers[0].mlp.gate_up_proj.weight.mul_(1e25)  # finite, as are its outputs; their product is not
    one = make_batch([torch.arange(33).numpy()], None)
    text = str(explain_nonfinite(model, [one], summed_loss, step=1))
    assert "input of layers.0.mlp.down_proj, shape (32, 48)" in text
    assert layer.observer is kept
