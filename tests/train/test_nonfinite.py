"""The first tensor to go bad is named: parameter, module output, loss or gradient."""

import pytest
import torch
from torch import nn

from octavo.errors import NonFiniteError
from octavo.train.data import Batch
from octavo.train.nonfinite import explain_nonfinite


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


@pytest.mark.parametrize("bad", [torch.inf, -torch.inf])
def test_infinity_is_counted(bad: float) -> None:
    model = stack(nn.ReLU())
    with torch.no_grad():
        model[0].bias[2] = bad
    assert "parameter 0.bias, shape (4,) float32: 0 NaN and 1 inf of 4" in explain(model)
