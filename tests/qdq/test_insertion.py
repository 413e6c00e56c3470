"""insert: pairs around every linear, scales from a calibration, one weight scale for linears of one input."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from octavo.errors import ConfigError, RecipeError
from octavo.numerics.analysis import sqnr
from octavo.qdq import QDQLinear, fuse, insert
from octavo.testing.tolerances import LINEAR_DB
from tests.assertions import assert_raises
from tests.qdq.graphs import randn


class Small(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c = nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 8)
        self.lm_head = nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.lm_head(self.c(self.a(x) + self.b(input=x)))


def plain(model: Small, x: torch.Tensor) -> torch.Tensor:
    """What the model gave before."""
    a, b = (F.linear(x, linear.weight, linear.bias) for linear in (model.a, model.b))
    return model.lm_head(F.linear(a + b, model.c.weight, model.c.bias))


def test_scales_come_from_the_calibration() -> None:
    model, x = Small(), 3.0 * randn(16, 8)
    weight = model.a.weight
    placed = insert(model, lambda m: [m(x[:8]), m(x[8:])])
    assert sorted(placed) == ["a", "b", "c"]
    assert type(model.lm_head) is nn.Linear
    assert isinstance(model.a, QDQLinear)
    assert model.a.weight is weight
    assert model.a.input_scale.item() == pytest.approx(x.abs().max().item() / 448)
    largest = max(model.a.weight.abs().max().item(), model.b.weight.abs().max().item())
    assert model.a.weight_scale.item() == model.b.weight_scale.item() == pytest.approx(largest / 448)
    with torch.no_grad():
        assert sqnr(plain(model, x), model(x)) >= LINEAR_DB - 3.0  # two quantized linears in a row
    assert model.c.weight_scale.item() == pytest.approx(model.c.weight.abs().max().item() / 448)


def test_a_linear_in_two_places_stays_one() -> None:
    model = Small()
    model.b = model.a
    placed = insert(model, lambda m: m(randn(2, 8)))
    assert sorted(placed) == ["a", "c"]
    assert model.b is model.a is placed["a"]


def test_torchs_encoder_layer_runs_its_pairs_without_gradients_too() -> None:
    layer, x = nn.TransformerEncoderLayer(16, 2, 32, dropout=0.0, batch_first=True).eval(), randn(2, 4, 16)
    assert sorted(insert(layer, lambda m: m(x))) == ["linear1", "linear2"]
    with torch.no_grad():
        found = layer(x)
    assert sqnr(layer(x).detach(), found) >= 90.0  # torch's attention sums in another order there


def test_a_calibration_that_reaches_too_little() -> None:
    model = Small()
    assert_raises(ConfigError, "did not reach b, c", insert, model, lambda m: m.a(randn(2, 8)))
    assert type(model.a) is nn.Linear
    assert not model.a._forward_pre_hooks


def test_nothing_to_convert() -> None:
    for model in (nn.Sequential(nn.ReLU()), nn.Linear(8, 8)):
        assert_raises(ConfigError, r"no torch\.nn\.Linear below", insert, model, lambda m: m(randn(2, 8)))


def test_names_to_ignore_are_a_list() -> None:
    """The letters of one string would be names."""
    assert_raises(RecipeError, "takes a list or tuple", insert, Small(), lambda m: m(randn(2, 8)), ignore="a")


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_a_weight_that_is_not_finite_is_refused(value: float) -> None:
    model = Small()
    model.b.weight.data[0, 0] = value
    assert_raises(ConfigError, "weights of b must be finite", insert, model, lambda m: m(randn(2, 8)))
    assert type(model.a) is nn.Linear


def test_calibration_without_a_scale_is_refused() -> None:
    for factor in (0.0, float("nan"), float("inf")):
        model = nn.Sequential(nn.Linear(16, 16))
        with pytest.raises(ConfigError, match="gave no scale to 0"):
            insert(model, lambda m, factor=factor: m(torch.ones(2, 16) * factor))
        assert type(model[0]) is nn.Linear


def test_a_fused_graph_refuses_gradients() -> None:
    model = nn.Sequential(nn.Linear(16, 16))
    insert(model, lambda m: m(torch.randn(4, 16)))
    fused, _ = fuse(torch.export.export(model.eval(), (torch.randn(4, 16),)))
    wanting = torch.randn(4, 16, requires_grad=True)
    assert_raises(RecipeError, "for inference", fused, wanting)
    by_name, _ = fuse(torch.export.export(model, (), {"input": torch.randn(4, 16)}))
    assert_raises(RecipeError, "for inference", by_name, input=wanting)
    with torch.no_grad():
        assert fused(wanting).shape == (4, 16)
