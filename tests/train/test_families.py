"""Every family of models trains, resumes and predicts its memory as the default one does."""

import pytest
import torch

from octavo import load_model
from octavo.nn import SparseMoE
from octavo.train.build import build_model
from octavo.train.config import TrainConfig
from tests.assertions import assert_raises

from .conftest import MakeConfig
from .test_loop import assert_same, crash_after, quiet
from .test_memory_plan import SIZES, configure, observed_and_predicted

FAMILIES: dict[str, dict[str, object]] = {
    "gptj": {"num_key_value_heads": 2, "rotary_dim": 8, "tie_word_embeddings": False},
    "mistral": {},
    "qwen2": {},
    "qwen3_moe": {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 40},
}
# What the sizes of the memory plan's tests need besides.
WIDE: dict[str, dict[str, object]] = {
    "gptj": {"num_key_value_heads": 4, "intermediate_size": 512},
    "qwen3_moe": {"moe_intermediate_size": 128},
}


SLOW = pytest.mark.slow


@pytest.mark.parametrize(
    ("family", "recompute"),
    [
        ("gptj", "none"),
        *(pytest.param(family, "none", marks=SLOW) for family in ("mistral", "qwen2", "qwen3_moe")),
        pytest.param("qwen3_moe", "full", marks=SLOW),
    ],
)
def test_a_run_learns_and_resumes_bit_for_bit(make_config, monkeypatch, family, recompute):
    def config(name: str) -> TrainConfig:
        model, run = {"family": family, **FAMILIES[family]}, {"recompute": recompute}
        return make_config(name, model=model, run=run, optimizer={"lr": 1e-2})

    whole = quiet(config("whole"))
    assert whole.rows[-1].loss < whole.rows[0].loss - 0.2
    with monkeypatch.context() as patch:
        crash_after(5, patch)
        assert_raises(KeyboardInterrupt, None, quiet, config("broken"))
    assert_same(whole, quiet(config("broken")))
    served = load_model(whole.checkpoint / "model")
    assert served.config.family == family
    trained = whole.model.state_dict()
    assert all(torch.equal(tensor, trained[name]) for name, tensor in served.state_dict().items())


@pytest.mark.parametrize("recipe", ["bf16", "rowwise", "blockwise"])
@pytest.mark.parametrize("family", WIDE)
def test_activations_are_predicted(make_config: MakeConfig, family: str, recipe: str) -> None:
    model = {"family": family, **SIZES, **FAMILIES[family], **WIDE[family]}
    observed, predicted = observed_and_predicted(configure(make_config, model=model, precision={"recipe": recipe}))
    assert predicted == pytest.approx(observed, rel=0.1)


def test_micro_batches_share_the_load_balancing_loss(make_config: MakeConfig) -> None:
    fields = {"family": "qwen3_moe", **FAMILIES["qwen3_moe"], "router_aux_loss_coef": 0.5}
    config = make_config(model=fields)  # two micro-batches a step
    model = build_model(config, 280, 0, torch.device("cpu"))
    assert [m.aux_loss_coef for m in model.modules() if isinstance(m, SparseMoE)] == [0.25, 0.25]
