"""What all ranks push, one after the other on one device, is what the reference leaves at each."""

import pytest
import torch

from octavo.ops.one_shot import reference as sums
from octavo.ops.push import reference
from octavo.ops.push import triton as kernels
from octavo.testing import assert_bitwise
from octavo.testing.interpreter import is_interpreting

DEVICE = "cpu" if is_interpreting() else "cuda"
SHAPES = [(1, 4), (9, 20), (64, 65), (130, 1030)]


class Memories:
    """So many words of each rank, and words behind them that stay as they are."""

    def __init__(self, world: int, words: int) -> None:
        self.words = words
        self.memory = torch.full((world, -(-(words + 64) // 4) * 4), -7, dtype=torch.int32, device=DEVICE)
        self.addresses = torch.tensor([part.data_ptr() for part in self.memory], device=DEVICE)

    def of(self, rank: int, shape: tuple[int, ...]) -> torch.Tensor:
        assert (self.memory[rank, self.words :] == -7).all()
        return self.memory[rank, : self.words].view(shape)


def pieces_of(world: int, shape: tuple[int, int]) -> list[torch.Tensor]:
    return [torch.randint(-(2**31), 2**31 - 1, shape, dtype=torch.int32, device=DEVICE) for _ in range(world)]


@pytest.mark.parametrize("world", [2, 4])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_columns(shape: tuple[int, int], world: int) -> None:
    pieces, (T, W) = pieces_of(world, shape), shape
    memories = Memories(world, T * W * world)
    for rank, piece in enumerate(pieces):
        kernels.push(piece, memories.addresses, rank, stride_out=world * W, first_word=rank * W)
    for rank in range(world):
        assert_bitwise(memories.of(rank, (T, world * W)), sums.gather(pieces))


@pytest.mark.parametrize("world", [2, 4])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_dealt_columns_and_parts(shape: tuple[int, int], world: int) -> None:
    pieces, (T, W) = pieces_of(world, shape), shape
    each = -(-T // world)
    for is_sum in (False, True):
        memories = Memories(world, each * W * world)
        memories.memory[:, : memories.words] = 0
        for rank, piece in enumerate(pieces):
            stride, first = (W, rank * each * W) if is_sum else (world * W, rank * W)
            kernels.push(piece, memories.addresses, rank, stride_out=stride, first_word=first, share=each)
        for rank in range(world):
            mine = reference.share_of(T, rank, world)
            if is_sum:
                found = memories.of(rank, (world, each, W))[:, : mine.stop - mine.start]
                assert_bitwise(found, reference.deal_parts(pieces, rank))
            else:
                found = memories.of(rank, (each, world * W))[: mine.stop - mine.start]
                assert_bitwise(found, reference.deal_columns(pieces, rank))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_add(shape: tuple[int, int], dtype: torch.dtype) -> None:
    parts = torch.randn(3, *shape, device=DEVICE).to(dtype)
    assert_bitwise(kernels.add(parts), sums.add(list(parts)))
    assert_bitwise(kernels.add(parts[:, :-1]), sums.add(list(parts[:, :-1])))
