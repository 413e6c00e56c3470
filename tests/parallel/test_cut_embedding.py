"""An embedding cut along the vocabulary: one process's rows and gradients, bit for bit, in every layout of tokens."""

from typing import Any

import pytest
import torch
from torch import nn

from octavo.distributed.tensor_group import TensorGroup
from octavo.distributed.token_shards import TokenShards
from octavo.models import Decoder, ModelConfig
from octavo.nn.cut_embedding import CutEmbedding, embed
from octavo.parallel import parallelize
from tests.ranks import run_group

VOCAB, WIDTH, NUM = 96, 128, 37


def make(dtype: torch.dtype, vocab_size: int = VOCAB) -> Decoder:
    config = ModelConfig("llama", vocab_size, WIDTH, 128, 1, 4, 4, 32, tie_word_embeddings=True)
    model = Decoder(config, dtype=dtype, seed=0)
    with torch.no_grad():
        model.embed_tokens.weight[::3, ::2] = -0.0
        model.embed_tokens.weight[::5, 1] = float("inf")
    return model


def look_up(embedding: nn.Embedding, shards: TokenShards | None) -> tuple[torch.Tensor, torch.Tensor]:
    """Rows of ids, of which some come often, and the gradient of the weight."""
    noise = torch.Generator().manual_seed(2)
    ids = torch.randint(0, VOCAB, (NUM,), generator=noise)
    ids[::4] = 5
    rows = embed(embedding, ids, shards)
    if shards is not None:
        rows = shards.join(rows)
    rows.backward(torch.randn(NUM, WIDTH, generator=noise).to(rows.dtype))
    assert embedding.weight.grad is not None
    return rows.detach(), embedding.weight.grad


def bits(x: torch.Tensor) -> torch.Tensor:
    return x.contiguous().view(torch.uint8)


def job(rank: int, world: int) -> dict[str, Any]:
    group, found = TensorGroup.of(), dict[str, Any]()
    for dtype in (torch.bfloat16, torch.float32):
        rows, grad = look_up(make(dtype).embed_tokens, None)
        for has_shards in (False, True):
            model = make(dtype)
            parallelize(model, group)
            shards = TokenShards(group) if has_shards else None
            if shards is not None:
                shards.num_tokens = NUM
            own_rows, own_grad = look_up(model.embed_tokens, shards)
            each = VOCAB // world
            found[f"rows {dtype} {has_shards}"] = torch.equal(bits(own_rows), bits(rows))
            expected = grad[rank * each : (rank + 1) * each]
            found[f"grad {dtype} {has_shards}"] = torch.equal(bits(own_grad), bits(expected))
        found[f"kept {dtype}"] = model.embed_tokens.weight.shape == (each, WIDTH) and model.head_group is not None
    odd = make(torch.bfloat16, VOCAB + 1)
    parallelize(odd, group)
    found["odd"] = type(odd.embed_tokens) is nn.Embedding and odd.head_group is None
    assert isinstance(model.embed_tokens, CutEmbedding)
    found["refused"] = [is_refused(model.embed_tokens, each) for each in (-1, VOCAB)]
    return found


def is_refused(embedding: CutEmbedding, index: int) -> bool:
    try:
        embedding.part(torch.tensor([index]))
    except IndexError:
        return True
    return False


@pytest.mark.parametrize("world", [2, pytest.param(4, marks=pytest.mark.largest)])
def test_a_cut_embedding_has_the_bits_of_a_whole_one(world: int) -> None:
    for rank, found in enumerate(run_group(job, world)):
        assert found.pop("refused") == [rank == 0, rank == world - 1]
        assert all(found.values()), found
