"""Training a mixture of experts: what its rows say of the routers, the losses that even them out."""

import json
from pathlib import Path

import pytest
import torch

from octavo.errors import ConfigError
from octavo.nn.router_watch import sparse_blocks
from octavo.run.metrics import METRICS_FILE
from octavo.train.build import build_model
from tests.assertions import assert_raises

from .conftest import MakeConfig
from .test_families import FAMILIES
from .test_loop import quiet

MOE = {"family": "qwen3_moe", **FAMILIES["qwen3_moe"]}


@pytest.mark.parametrize("recipe", ["bf16", "blockwise"])
def test_rows_say_how_the_load_lies(make_config: MakeConfig, recipe: str) -> None:
    result = quiet(
        make_config("watched", model=MOE, precision={"recipe": recipe}, run={"recompute": "full", "steps": 3})
    )
    for row in result.rows:
        assert row.router_load_mean_share == pytest.approx(0.25)
        assert row.router_load_max_share is not None and 0.25 < row.router_load_max_share < 1.0
        assert row.router_aux_loss is not None and 0.9 < row.router_aux_loss < 4.0
        assert row.router_entropy is not None and 0.0 < row.router_entropy < 1.387  # ln 4
        assert row.router_dropped_share == 0.0
    path = Path(result.checkpoint).parent.parent / METRICS_FILE
    written = [json.loads(line) for line in path.read_text().splitlines()]
    assert [line["router_aux_loss"] for line in written] == [row.router_aux_loss for row in result.rows]


def test_a_dense_run_has_no_router_rows(make_config: MakeConfig) -> None:
    rows = quiet(make_config("dense", run={"steps": 3})).rows
    assert all(key.startswith("router") is False for row in rows for key in row.as_dict())


def test_the_load_balancing_loss_evens_the_load_out(make_config: MakeConfig) -> None:
    """The same run with and without; the loss that is reported is the text's alone."""
    found = {}
    for name, coef in (("without", 0.0), ("with", 0.5)):
        model = {**MOE, "router_aux_loss_coef": coef}
        found[name] = quiet(make_config(name, model=model, optimizer={"lr": 1e-2})).rows
    assert found["with"][0].loss == found["without"][0].loss
    assert found["with"][0].grad_norm != found["without"][0].grad_norm
    assert found["with"][-1].router_aux_loss < found["without"][-1].router_aux_loss  # type: ignore[operator]


def test_a_checkpoint_takes_other_coefficients(make_config: MakeConfig) -> None:
    first = make_config("first", model={**MOE, "router_aux_loss_coef": 0.5}, run={"steps": 3})
    saved = str(quiet(first).checkpoint / "model")
    for section, aux, z in (
        ({}, 0.25, 0.0),  # two micro-batches a step
        ({"router_aux_loss_coef": 0.0}, 0.0, 0.0),
        ({"router_aux_loss_coef": 0.1, "router_z_loss_coef": 0.02}, 0.05, 0.01),
    ):
        model = build_model(make_config("second", model={"path": saved, **section}), 280, 0, torch.device("cpu"))
        assert {(block.aux_loss_coef, block.z_loss_coef) for block in sparse_blocks(model)} == {(aux, z)}


def test_router_losses_of_a_dense_model_are_refused(make_config: MakeConfig) -> None:
    config = make_config("dense", model={"router_z_loss_coef": 0.1})
    assert_raises(ConfigError, "has no experts", build_model, config, 280, 0, torch.device("cpu"))
