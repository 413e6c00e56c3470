"""One rank's kernel, its peer's message already there: the reference's bits, and what it leaves at the peer."""

import pytest
import torch

from octavo.ops.one_shot import reference
from octavo.ops.one_shot import triton as kernels
from octavo.testing import assert_bitwise
from octavo.testing.interpreter import is_interpreting

DEVICE = "cpu" if is_interpreting() else "cuda"
WORLD = 2
SHAPES = [(1, 128), (3, 512), (5, 1280)]


class Place:
    """Staging memory and flags of two ranks, as they are in a turn."""

    def __init__(self, dtype: torch.dtype, rank: int, count: int) -> None:
        size = (WORLD, 2, WORLD, kernels.MOST, kernels.REGION)  # [owner, turn, from, program, region]
        self.memory = torch.zeros(size, dtype=dtype, device=DEVICE)
        self.flags = torch.full((WORLD, WORLD, kernels.MOST), count, dtype=torch.int32, device=DEVICE)
        self.counters = torch.full((kernels.MOST,), count, dtype=torch.int32, device=DEVICE)
        self.rank, self.turn = rank, (count + 1) % 2
        self.flags[rank, 1 - rank] = count + 1  # the peer has written
        addresses = [[part.data_ptr() for part in parts] for parts in (self.memory, self.flags)]
        self.staging, self.flag_places = (torch.tensor(each, device=DEVICE) for each in addresses)

    def receive(self, message: torch.Tensor) -> None:
        self.region(self.rank, 1 - self.rank)[: message.numel()] = message.flatten()

    def region(self, owner: int, sender: int) -> torch.Tensor:
        return self.memory[owner, self.turn, sender].view(-1)

    def check_sent(self, message: torch.Tensor, count: int) -> None:
        sent = self.region(1 - self.rank, self.rank)[: message.numel()]
        assert_bitwise(sent, message.flatten())
        num_programs = -(-message.numel() // kernels.REGION)
        for flags in (self.flags[1 - self.rank, self.rank], self.counters):
            assert (flags[:num_programs] == count + 1).all() and (flags[num_programs:] == count).all()


@pytest.mark.parametrize("count", [0, 7, -1, 2**31 - 1], ids=lambda count: f"after-{count}")
@pytest.mark.parametrize("rank", range(WORLD))
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_gather(shape: tuple[int, int], rank: int, count: int) -> None:
    if count == 2**31 - 1:
        count = -(2**31)  # the next turn's count after the wrap
    pieces = [torch.randint(-(2**31), 2**31 - 1, shape, dtype=torch.int32, device=DEVICE) for _ in range(WORLD)]
    rests = [torch.randint(-9, 9, (shape[0] * 3,), dtype=torch.int32, device=DEVICE) for _ in range(WORLD)]
    messages = [torch.cat([piece.flatten(), rest]) for piece, rest in zip(pieces, rests, strict=True)]
    place = Place(torch.int32, rank, count)
    place.receive(messages[1 - rank])
    out = torch.zeros(shape[0], WORLD * shape[1], dtype=torch.int32, device=DEVICE)
    out_rest = torch.zeros(WORLD, shape[0] * 3, dtype=torch.int32, device=DEVICE)
    sizes = rank, pieces[0].numel(), shape[1], rests[0].numel()
    shared = place.staging, place.flag_places, place.counters
    arguments = out, out_rest, pieces[rank], rests[rank], *shared, *sizes
    kernels.launch(kernels.gather_columns, len(messages[0]), WORLD, out, *arguments)
    assert_bitwise(out, reference.gather(pieces))
    assert_bitwise(out_rest, torch.stack(rests))
    place.check_sent(messages[rank], count)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("rank", range(WORLD))
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_add(shape: tuple[int, int], rank: int, dtype: torch.dtype) -> None:
    parts = [torch.randn(shape, device=DEVICE).to(dtype) for _ in range(WORLD)]
    place = Place(dtype, rank, 3)
    place.receive(parts[1 - rank])
    out = torch.zeros(shape, dtype=dtype, device=DEVICE)
    shared = place.staging, place.flag_places, place.counters
    kernels.launch(kernels.add_parts, out.numel(), WORLD, out, out, parts[rank], *shared, rank, out.numel())
    assert_bitwise(out, reference.add(parts))
    place.check_sent(parts[rank], 3)
