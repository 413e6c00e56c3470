"""One step's loss and a validation's: means over the targets that count, of all batches together."""

import numpy as np
import pytest
import torch
from torch.nn.functional import cross_entropy

from octavo.models import Decoder, ModelConfig
from octavo.nn import PackedContext
from octavo.numerics import Numerics
from octavo.run.optimizer import MasterAdamW
from octavo.train.config import OptimizerSection
from octavo.train.data import IGNORED, Batch, make_batch
from octavo.train.evaluate import validation_loss
from octavo.train.step import TrainStepResult, train_step

EOS = 0


@pytest.fixture
def model() -> Decoder:
    fields = {"vocab_size": 40, "hidden_size": 16, "intermediate_size": 24, "num_layers": 1, "num_heads": 2}
    config = ModelConfig(family="llama", num_kv_heads=1, head_dim=8, max_position_embeddings=64, **fields)
    model = Decoder(config, seed=0).float()
    with torch.no_grad():
        for param in model.parameters():
            param.mul_(8.0 if param.dim() == 2 else 1.0)  # so that tokens' losses differ
    return model


def make_batches(*num_ends: int) -> list[Batch]:
    """Batches of 2 x 12 tokens, of which so many end a document, so that their next one is no target."""
    rng, batches = np.random.default_rng(0), []
    for num in num_ends:
        tokens = rng.integers(1, 40, (2, 13))
        tokens.reshape(-1)[rng.choice(12, num, replace=False)] = EOS
        batches.append(make_batch(list(tokens), EOS))
        assert batches[-1].num_targets == 24 - num
    return batches


def losses(model: Decoder, batches: list[Batch]) -> torch.Tensor:
    """-log p of every target that counts, by torch alone."""
    found = []
    for batch in batches:
        hidden = model(batch.input_ids, PackedContext(batch.cu_seqlens))
        each = cross_entropy(hidden @ model.head_weight.t(), batch.targets, ignore_index=IGNORED, reduction="none")
        found.append(each[batch.targets != IGNORED])
    return torch.cat(found)


def step(model: Decoder, batches: list[Batch]) -> TrainStepResult:
    optimizer = MasterAdamW(model, OptimizerSection(lr=1e-3))
    return train_step(model, optimizer, batches, lr=1e-3, max_grad_norm=0.0, step=1)


@pytest.mark.parametrize("exact", [False, True], ids=["fast", "exact"])
def test_the_loss_is_one_mean_over_all_targets(model: Decoder, exact: bool) -> None:
    """Not over all tokens, and no mean of the micro-batches' means; its gradient is that of the same mean."""
    model.set_numerics(Numerics(exact=exact))
    batches = make_batches(1, 9)
    expected = losses(model, batches).mean()
    expected.backward()
    norm = torch.stack([param.grad.norm() for param in model.parameters() if param.grad is not None]).norm()
    model.zero_grad()
    result = step(model, batches)
    assert result.loss == pytest.approx(expected.item(), rel=1e-5)
    assert result.grad_norm == pytest.approx(norm.item(), rel=1e-3)
    assert result.num_tokens == 48


def test_a_validation_is_the_mean_over_its_targets(model: Decoder) -> None:
    batches = make_batches(0, 10)
    found = validation_loss(model, iter(batches))
    assert found == pytest.approx(losses(model, batches).mean().item(), rel=1e-5)
