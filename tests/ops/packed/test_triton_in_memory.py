"""All-reduce through the memory of the ranks, all of them in this process: the bits of the reference's pieces."""

import random
from collections.abc import Iterator
from typing import Any, NamedTuple

import pytest
import torch

from octavo.distributed.symmetric import Shared, Workspace
from octavo.distributed.two_shot import Part, steps_in_memory
from octavo.ops.packed import reference
from octavo.testing import assert_bitwise, generate
from octavo.testing.interpreter import is_interpreting
from tests.ops.packed.cases import buffer

DEVICE = "cpu" if is_interpreting() else "cuda"
NUM_BLOCKS = 32  # of a slot: what is longer travels in several messages


class Reduced(NamedTuple):
    """What each rank has after an all-reduce of several tensors."""

    results: list[torch.Tensor]  # [ranks, n]
    residuals: list[torch.Tensor | None]


def workspaces(world: int) -> list[Workspace]:
    """Whose bytes are all 0xFF: NaN."""
    buffers = [
        torch.full((2 * world * NUM_BLOCKS * 132,), 0xFF, dtype=torch.uint8, device=DEVICE) for _ in range(world)
    ]
    return [Workspace(Shared(buffers, rank, lambda: None)) for rank in range(world)]


def in_memory(spaces: list[Workspace], given: list[list[Part]], average: bool, seed: int) -> None:
    """Reduce each rank's parts; ranks take turns by chance, and none goes on from where not all have come."""
    order = random.Random(seed)
    ranks: list[Iterator[None]] = [steps_in_memory(given[s.rank], s, average) for s in spaces]
    num_steps, left = [0] * len(ranks), set(range(len(ranks)))
    while left:
        rank = order.choice([r for r in left if num_steps[r] <= min(num_steps)])
        if next(ranks[rank], "done") == "done":
            left.remove(rank)
        num_steps[rank] += 1


def by_reference(given: list[list[Part]], average: bool) -> None:
    """The same by the reference's ops on pieces, which collectives would carry."""
    world = len(given)
    for parts in zip(*given, strict=True):
        blocks = -(-parts[0].values.shape[1] // 128)
        sent = [buffer(world, blocks) for _ in range(world)]
        for part, (codes, scales) in zip(parts, sent, strict=True):
            reference.quantize_pieces(part.values, codes, scales, part.residual)
        sums = buffer(world, blocks)
        for rank, part in enumerate(parts):
            came = [torch.stack([made[i][rank] for made in sent]) for i in range(2)]
            own = None if part.residual is None else part.residual[rank : rank + 1]
            reference.requantize_pieces(*came, *(x[rank : rank + 1] for x in sums), average, own)
        for part in parts:
            reference.decode_pieces(*sums, part.result)


def drawn(world: int, widths: list[int], dtype: torch.dtype, feedback: bool, seed: int) -> list[list[Part]]:
    """Every rank's parts; of each rank one block in some is not finite."""
    given = []
    for rank in range(world):
        parts = []
        for index, width in enumerate(widths):
            values = generate("normal", (world, width), dtype, seed=100 * seed + 10 * rank + index)
            if index == rank % len(widths):
                values[(rank + 1) % world, width // 2] = [torch.nan, torch.inf, -torch.inf][rank % 3]
            kept = generate("normal", (world, width), dtype, seed=rank + 7) * 0.01 if feedback else None
            parts.append(Part(values, torch.full_like(values, torch.nan), kept))
        given.append(parts)
    return given


def moved(given: list[list[Part]]) -> list[list[Part]]:
    return [[Part(*(None if x is None else x.clone().to(DEVICE) for x in part)) for part in parts] for parts in given]  # type: ignore[arg-type]


def check(world: int, **options: Any) -> None:
    """Several reductions one after the other in the same memory."""
    spaces = workspaces(world)
    for seed in range(3):
        average = seed % 2 == 0
        theirs = drawn(world, seed=seed, **options)
        ours = moved(theirs)
        by_reference(theirs, average)
        in_memory(spaces, ours, average, seed)
        for rank in range(world):
            for index, (found, wanted) in enumerate(zip(ours[rank], theirs[rank], strict=True)):
                for name in ("result", "residual"):
                    x, y = getattr(found, name), getattr(wanted, name)
                    if y is None:
                        continue
                    is_nan, x = y.isnan(), x.cpu()  # whose bits are a device's own
                    assert torch.equal(x.isnan(), is_nan), f"{name} {index} of rank {rank}"
                    assert_bitwise(x[~is_nan], y[~is_nan], f"{name} {index} of rank {rank}")


@pytest.mark.parametrize("world", [2, 3, 4, 8])
def test_worlds(world: int) -> None:
    """A part that is cut by a message's end, short ones that share a message."""
    check(world, widths=[NUM_BLOCKS * 128 + 640, 128, 384], dtype=torch.bfloat16, feedback=True)


@pytest.mark.parametrize("feedback", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_dtypes(dtype: torch.dtype, feedback: bool) -> None:
    check(2, widths=[33 * 128, 2048], dtype=dtype, feedback=feedback)
