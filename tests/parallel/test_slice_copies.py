"""Weights of a policy that is sharded, copied into a sampler that is cut: in bits what slicing whole ones gives."""

import functools
import itertools
from typing import Literal
from unittest import mock

import pytest
import torch

from octavo.distributed.mesh import Mesh
from octavo.models import Decoder
from octavo.nn.live_weights import own_slices
from octavo.parallel import give_memory, make_shell, parallelize, shard, slice_copies, weight_copies
from octavo.parallel.slice_copies import SliceCopies
from tests.parallel.test_cut_updates import new_weights
from tests.parallel.test_tensor_parallel import make
from tests.ranks import run_group

FAMILIES = ("llama", "qwen3", "gptj")
MODES: tuple[Literal["gather", "reduce"], ...] = ("gather", "reduce")


def differing(policy: Decoder, whole: Decoder, view: Decoder) -> list[str]:
    """Parameters of the view that are not what slicing the whole ones gives."""
    copy = weight_copies(policy, view)
    assert isinstance(copy, SliceCopies)
    with torch.no_grad():
        for param in view.parameters():
            param.fill_(float("nan"))
    copy()
    theirs = dict(whole.named_parameters())
    wanted = {name: own_slices(view, name, theirs[name].to(param.dtype)) for name, param in view.named_parameters()}
    return [name for name, param in view.named_parameters() if not torch.equal(param, wanted[name])]


def job(rank: int, world: int, num_cut: int = 2) -> dict[str, list[str]]:
    mesh = Mesh.of_process_group(1, world, "cpu")
    group, found = mesh.neighbours(num_cut, 60), dict[str, list[str]]()
    for family, mode in itertools.product(FAMILIES, MODES):
        policy, whole = (new_weights(family, "blockwise", 128 * world).float() for _ in range(2))
        view = make_shell(make(family, hidden_size=128 * world))
        parallelize(view, group, mode=mode)
        give_memory(view, mesh.device)
        shard(policy, mesh, reduction="ordered", param_dtype=torch.bfloat16)
        for bucket in (slice_copies.BUCKET_NUMEL, 1):
            with mock.patch.object(slice_copies, "BUCKET_NUMEL", bucket):
                found[f"{family} {mode} {bucket}"] = differing(policy, whole, view)
    return found


def test_slices_of_a_sharded_policy_are_those_of_the_whole_one() -> None:
    for found in run_group(job, 2):
        assert len(found) == 12 and not any(found.values()), found


@pytest.mark.largest
@pytest.mark.parametrize("num_cut", [2, 4])
def test_slices_on_four_ranks_are_those_of_the_whole_policy(num_cut: int) -> None:
    for found in run_group(functools.partial(job, num_cut=num_cut), 4):
        assert len(found) == 12 and not any(found.values()), found
