"""update_weights of a model that torchrun's ranks have cut: each keeps the slices that a new model's cut would have."""

from typing import Any

import pytest
import torch

import octavo
from octavo.distributed import pieces
from octavo.distributed.tensor_group import TensorGroup
from octavo.models import Decoder
from octavo.models.checkpoint.names import parameter_names
from octavo.nn import keep_codes_only
from octavo.nn.live_weights import live_tensors, pin_codes
from octavo.parallel import parallelize
from octavo.weights import exchange
from octavo.weights.manifest import tensor_sha256
from tests.parallel.test_tensor_parallel import make, refusal
from tests.ranks import run_group

CASES: list[tuple[str, str, Any, bool]] = [
    ("qwen3", "blockwise", "gather", True),
    ("qwen3", "rowwise", "reduce", True),
    ("tied", "rowwise", "gather", False),
    ("llama", "bf16", "reduce", False),
    ("gptj", "blockwise", "reduce", False),
    ("gptj", "blockwise", "gather", True),
    ("qwen3_moe", "blockwise", "gather", False),
    ("qwen3", "delayed", "reduce", False),
]


def cases(world: int) -> list[tuple[str, str, Any, bool]]:
    """Experts, whose draws import the compiler, in the slow lane."""
    return [case for case in CASES if world > 2 or case[0] != "qwen3_moe"]


def new_weights(family: str, recipe: str, hidden_size: int) -> Decoder:
    model = make(family, recipe, hidden_size=hidden_size)
    noise = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for param in model.parameters():
            param += torch.randn(param.shape, generator=noise).to(param.dtype) / 50
    model.mark_weights_updated()
    return model


def tensors_of(model: Decoder) -> dict[str, torch.Tensor]:
    found: dict[str, torch.Tensor] = {}
    for parameter in parameter_names(model.config):
        found |= parameter.split(model.get_parameter(parameter.name).detach())
    return found


def bits(model: Decoder) -> dict[str, torch.Tensor]:
    pin_codes(model)
    return {name: t.contiguous().view(torch.uint8).clone() for name, t in live_tensors(model).items() if t.dim()}


def job(rank: int, world: int) -> dict[str, Any]:
    group, found, hidden_size = TensorGroup.of(), dict[str, Any](), 128 * world
    for family, recipe, mode, codes_only in cases(world):
        new = new_weights(family, recipe, hidden_size)
        given = {name: tensor.clone() for name, tensor in tensors_of(new).items()}
        given |= {name: buffer.clone() for name, buffer in new.named_buffers() if ".fp8_" in name}
        if new.config.tie_word_embeddings:  # as some checkpoints have it
            given["lm_head.weight"] = given["model.embed_tokens.weight"].clone()
        cut = make(family, recipe, hidden_size=hidden_size)
        for model in (cut, new) if codes_only else ():
            keep_codes_only(model.requires_grad_(False))
        for model in (cut, new):
            parallelize(model, group, mode=mode)
        llm = octavo.LLM(cut, num_kv_pages=4)
        begin, old = cut.weight_version, bits(cut)
        version = llm.update_weights(given)
        after, expected = bits(cut), bits(new)
        differing = [name for name in expected if not torch.equal(after[name], expected[name])]
        same = [name for name in old if name.endswith(("weight", "codes.0")) and torch.equal(after[name], old[name])]
        found[f"{family} {recipe} {mode}"] = version - begin, differing, same
    checksums = {name: tensor_sha256(tensor) for name, tensor in given.items()}
    if rank == 1:
        given["model.norm.weight"] = -given["model.norm.weight"]
    before = bits(cut)
    found["flipped"] = refusal(lambda _: llm.update_weights(given, checksums=checksums), group)
    copies: list[int] = []
    copy = exchange.copy_piece

    def fail(target: torch.Tensor, source: torch.Tensor) -> None:
        copies.append(1)
        if rank == 1 and len(copies) == 5:
            raise octavo.errors.BackendError("no memory")
        copy(target, source)

    exchange.copy_piece = fail
    found["written"] = refusal(lambda _: llm.update_weights(given), group)
    found["same"] = all(torch.equal(tensor, before[name]) for name, tensor in bits(cut).items())
    found["version"] = cut.weight_version - begin
    pieces.PIECE_BYTES = 1000
    sent = torch.arange(2500).to(torch.uint8)
    received = sent.clone() if rank == 0 else torch.zeros_like(sent)
    pieces.broadcast_in_pieces(received, None)
    found["pieces"] = torch.equal(received, sent)
    return found


@pytest.mark.parametrize("world", [2, pytest.param(4, marks=pytest.mark.slow)])  # at 4 ranks KV heads repeat
def test_each_rank_keeps_its_slices_of_an_update(world: int) -> None:
    for found in run_group(job, world):
        for family, recipe, mode, _ in cases(world):
            assert found[f"{family} {recipe} {mode}"] == (1, [], []), (family, recipe, mode)
        assert "CheckpointError: rank 1: model.norm.weight: the bytes do not have" in found["flipped"]
        assert "rank 1: no memory); the old weights are back" in found["written"]
        assert found["same"] and found["version"] == 1
        assert found["pieces"]
