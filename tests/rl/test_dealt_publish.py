"""New weights for the samplers of several ranks: a bit that flips on the way to one is an error on all, and no more."""

import contextlib
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from octavo import LLM
from octavo.distributed.mesh import Mesh, ParallelSection
from octavo.distributed.shards import local
from octavo.errors import OctavoError
from octavo.models import Decoder
from octavo.nn.live_weights import live_tensors
from octavo.numerics import Numerics, get_recipe
from octavo.parallel import lend, make_shell, shard, slice_copies
from octavo.rl.engines.dealt import DealtEngine
from octavo.rl.engines.old_weights import OldWeights
from octavo.rl.engines.protocol import SamplingSpec
from octavo.rl.ranks import Ranks
from tests.parallel.test_tensor_parallel import make
from tests.ranks import run_ranks
from tests.rl.conftest import nudge

PROMPTS: list[Any] = [[1, 2, 3], list(range(70)), [7]]
DAMAGED = "layers.1.mlp.down_proj.weight"
NAMED = {"cut": "embed_tokens.weight, or of one of the ", "whole": f"{DAMAGED} were"}  # slices travel together
LAYOUTS = {"cut": 2, "whole": 1}  # ranks that sample as one


def build(mesh: Mesh, num_sharing: int) -> tuple[Decoder, Decoder, DealtEngine]:
    policy = make("llama", "bf16")
    shell = make_shell(policy)
    report = shard(policy.float(), mesh, reduction="ordered", param_dtype=torch.bfloat16)
    ranks = Ranks(mesh, policy, shell, report, mesh.neighbours(2, 60) if num_sharing > 1 else None)
    sampler = ranks.view(Numerics(get_recipe("rowwise"), "fp8", exact=True))
    tokenizer: Any = None
    engine = ranks.engine(sampler, tokenizer, keeps_weights=True, num_kv_pages=16, max_num_seqs=4)
    return policy, sampler, engine


def bits(model: Decoder) -> dict[str, torch.Tensor]:
    return {name: t.contiguous().view(torch.uint8).clone() for name, t in live_tensors(model).items() if t.dim()}


def answers(engine: DealtEngine) -> list[Any]:
    engine.num_requests = 0
    found = engine.generate(PROMPTS, SamplingSpec(2, 5, 1.0))
    return [(list(c.token_ids), list(c.logprobs), list(c.weight_versions)) for each in found for c in each.completions]


@contextlib.contextmanager
def flipping(rank: int) -> Iterator[None]:
    """A bit of one parameter flips on the way to rank 1, however it travels."""
    gathered, exchange_parts = lend.gathered, slice_copies.exchange_parts

    def flip(made: torch.Tensor) -> torch.Tensor:
        made.detach().view(torch.uint8).view(-1)[made.nbytes // 2] ^= rank
        return made

    def received(answer: torch.Tensor, *arguments: Any) -> None:
        exchange_parts(answer, *arguments)
        flip(answer)

    @contextlib.contextmanager
    def gathered_of_one(model: Decoder) -> Iterator[None]:
        with gathered(model):
            flip(model.get_parameter(DAMAGED))
            yield

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(slice_copies, "exchange_parts", received)
        patch.setattr(lend, "gathered", gathered_of_one)
        yield


def job(rank: int) -> dict[str, Any]:
    mesh, found = Mesh.from_config(ParallelSection(timeout_s=60), "cpu"), dict[str, Any]()
    for name, num_sharing in LAYOUTS.items():
        policy, sampler, engine = build(mesh, num_sharing)
        first, before, began = answers(engine), bits(sampler), sampler.weight_version
        with torch.no_grad():
            for param in policy.parameters():
                local(param).neg_()
        policy.mark_weights_updated()
        error = ""
        try:
            with flipping(rank):
                engine.publish(policy, sampler)
        except OctavoError as caught:
            error = f"{type(caught).__name__}: {caught}"
        changed = [key for key, value in bits(sampler).items() if not torch.equal(value, before[key])]
        is_old = answers(engine) == first and sampler.weight_version == began
        version = engine.publish(policy, sampler).weight_version
        after = answers(engine)
        versions = {each for _, _, of_tokens in after for each in of_tokens}
        found[name] = error, changed, is_old, version - began, versions == {version}, after != first
    mesh.close()
    return found


def test_a_flipped_bit_is_caught_on_all_ranks_and_the_old_weights_serve() -> None:
    for found in run_ranks(job, 2):
        for name in LAYOUTS:
            error, *rest = found[name]
            assert error.startswith(f"CheckpointError: rank 1: bits of {NAMED[name]}"), (name, error)
            assert "damaged on the way" in error
            assert rest == [[], True, 1, True, True], name


@pytest.mark.parametrize("num_kv_pages", [4, 64])
def test_old_weights_wait_in_the_idle_cache_and_on_the_host(num_kv_pages: int) -> None:
    model = make("llama", "bf16")
    llm = LLM(model, num_kv_pages=num_kv_pages, max_num_seqs=2)
    before = bits(model)
    old = OldWeights(llm.engine)
    num_bytes = sum(param.nbytes for param in model.parameters())
    assert (sum(map(len, old._taken)) == num_bytes) == (num_kv_pages == 64)
    nudge(model)
    old.restore()
    old.release()
    assert all(torch.equal(value, before[key]) for key, value in bits(model).items())
    caches = [cache for layer in llm.engine.model_runner.layers for cache in (layer.k, layer.v)]
    assert not any(cache.any() for cache in caches)
