"""One rank's kernel, its peer's message already there: the reference's bits, and what it leaves at the peer."""

import pytest
import torch

from octavo.numerics import Scaling
from octavo.ops.norm.norm_quantize import exchange_norm_quantize
from octavo.ops.norm.norm_quantize import triton as norms
from octavo.ops.one_shot import Places, reference
from octavo.ops.one_shot import triton as kernels
from octavo.testing import assert_bitwise
from octavo.testing.interpreter import is_interpreting

DEVICE = "cpu" if is_interpreting() else "cuda"
WORLD = 2
SHAPES = [(1, 128), (3, 512), (5, 1280)]


class Place:
    """Staging memory and flags of two ranks, as they are in a turn."""

    def __init__(self, dtype: torch.dtype, rank: int, count: int) -> None:
        region = kernels.REGION_BYTES // dtype.itemsize
        size = (WORLD, 2, WORLD, kernels.MOST, region)  # [owner, turn, from, program, region]
        self.memory = torch.zeros(size, dtype=dtype, device=DEVICE)
        self.flags = torch.full((WORLD, WORLD, kernels.MOST), count, dtype=torch.int32, device=DEVICE)
        self.counters = torch.full((kernels.MOST,), count, dtype=torch.int32, device=DEVICE)
        self.rank, self.turn = rank, (count + 1) % 2
        self.flags[rank, 1 - rank] = count + 1  # the peer has written
        packets = (WORLD, 2, WORLD, kernels.FEW, kernels.PACKETS)
        self.packets = torch.zeros(packets, dtype=torch.int64, device=DEVICE)
        addresses = [[part.data_ptr() for part in parts] for parts in (self.memory, self.flags, self.packets)]
        staging, flags, packet_places = (torch.tensor(each, device=DEVICE) for each in addresses)
        self.places = Places(staging, flags, packet_places, self.counters, rank, WORLD)

    def receive(self, message: torch.Tensor, block: int = kernels.MIN_BLOCK) -> None:
        for program, part in enumerate(message.flatten().split(block)):
            self.region(self.rank, 1 - self.rank)[program, : len(part)] = part

    def region(self, owner: int, sender: int) -> torch.Tensor:
        return self.memory[owner, self.turn, sender]

    def receive_packets(self, message: torch.Tensor, block: int = kernels.MIN_BLOCK) -> None:
        for program, part in enumerate(message.flatten().view(torch.int32).split(block)):
            place = self.packets[self.rank, self.turn, 1 - self.rank, program, : len(part)]
            place.copy_(part.long() & 0xFFFFFFFF | int(self.flags[self.rank, 1 - self.rank, 0]) << 32)

    def check_packets(self, message: torch.Tensor, count: int, block: int = kernels.MIN_BLOCK) -> None:
        parts = message.flatten().view(torch.int32).split(block)
        for program, part in enumerate(parts):
            sent = self.packets[1 - self.rank, self.turn, self.rank, program, : len(part)]
            assert_bitwise(sent.to(torch.int32), part)
            assert (sent >> 32 == count + 1).all()
        assert (self.counters[: len(parts)] == count + 1).all() and (self.counters[len(parts) :] == count).all()

    def check_sent(self, message: torch.Tensor, count: int, block: int = kernels.MIN_BLOCK) -> None:
        parts = message.flatten().split(block)
        for program, part in enumerate(parts):
            assert_bitwise(self.region(1 - self.rank, self.rank)[program, : len(part)], part)
        self.check_flags(len(parts), count)

    def check_sent_rows(self, part: torch.Tensor, count: int, rows: int, block_k: int) -> None:
        """As check_sent, of a norm's program with so many rows, which lie as far apart as its tile is wide."""
        tiles = part.split(rows)
        for program, tile in enumerate(tiles):
            sent = self.region(1 - self.rank, self.rank)[program, : rows * block_k].view(rows, block_k)
            assert_bitwise(sent[: len(tile), : tile.shape[1]], tile)
        self.check_flags(len(tiles), count)

    def check_sent_packets(self, part: torch.Tensor, count: int, rows: int, block_k: int) -> None:
        """As check_sent_rows, of packets."""
        tiles = part.split(rows)
        for program, tile in enumerate(tiles):
            words = tile.view(torch.int32)
            sent = self.packets[1 - self.rank, self.turn, self.rank, program, : rows * block_k // 2]
            sent = sent.view(rows, -1)[: words.shape[0], : words.shape[1]]
            assert_bitwise(sent.to(torch.int32), words)
            assert (sent >> 32 == count + 1).all()
        assert (self.counters[: len(tiles)] == count + 1).all() and (self.counters[len(tiles) :] == count).all()

    def check_flags(self, num_programs: int, count: int) -> None:
        for flags in (self.flags[1 - self.rank, self.rank], self.counters):
            assert (flags[:num_programs] == count + 1).all() and (flags[num_programs:] == count).all()


@pytest.mark.parametrize("count", [0, 7, -1, 2**31 - 1], ids=lambda count: f"after-{count}")
@pytest.mark.parametrize("rank", range(WORLD))
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("by_packets", [False, True], ids=["by-flags", "by-packets"])
def test_gather(
    shape: tuple[int, int], rank: int, count: int, by_packets: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if count == 2**31 - 1:
        count = -(2**31)  # the next turn's count after the wrap
    pieces = [torch.randint(-(2**31), 2**31 - 1, shape, dtype=torch.int32, device=DEVICE) for _ in range(WORLD)]
    rests = [torch.randint(-9, 9, (shape[0] * 3,), dtype=torch.int32, device=DEVICE) for _ in range(WORLD)]
    messages = [torch.cat([piece.flatten(), rest]) for piece, rest in zip(pieces, rests, strict=True)]
    place = Place(torch.int32, rank, count)
    if by_packets:
        place.receive_packets(messages[1 - rank])
    else:
        monkeypatch.setattr(kernels, "FEW", 0)
        place.receive(messages[1 - rank])
    out = torch.zeros(shape[0], WORLD * shape[1], dtype=torch.int32, device=DEVICE)
    out_rest = torch.zeros(WORLD, shape[0] * 3, dtype=torch.int32, device=DEVICE)
    kernels.gather(pieces[rank], out, rests[rank], out_rest, place.places)
    assert_bitwise(out, reference.gather(pieces))
    assert_bitwise(out_rest, torch.stack(rests))
    if by_packets:
        place.check_packets(messages[rank], count)
    else:
        place.check_sent(messages[rank], count)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("rank", range(WORLD))
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_add(shape: tuple[int, int], rank: int, dtype: torch.dtype) -> None:
    parts = [torch.randn(shape, device=DEVICE).to(dtype) for _ in range(WORLD)]
    for part in parts:
        part[:, 0] = -0.0  # as of an embedding's rows
    place = Place(dtype, rank, 3)
    place.receive(parts[1 - rank])
    out = torch.zeros(shape, dtype=dtype, device=DEVICE)
    kernels.add(parts[rank], out, place.places)
    assert_bitwise(out, reference.add(parts))
    place.check_sent(parts[rank], 3)


@pytest.mark.parametrize("kind", ["block_1x128", "per_row"])
@pytest.mark.parametrize("is_sum", [True, False], ids=["sum", "columns"])
@pytest.mark.parametrize("rank", range(WORLD))
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=["by-packets", "by-flags"])
@pytest.mark.parametrize("shape", [(3, 4096), (20, 256)], ids=str)
def test_norm_of_parts(shape: tuple[int, int], dtype: torch.dtype, rank: int, is_sum: bool, kind: str) -> None:
    width = shape[1] if is_sum else shape[1] // WORLD
    parts = [torch.randn(shape[0], width, device=DEVICE).to(dtype) for _ in range(WORLD)]
    residual, weight = torch.randn(shape, device=DEVICE).to(dtype), torch.rand(shape[1], device=DEVICE).to(dtype)
    rows, block_k, _ = norms.row_tile(shape[1])
    # a program's rows lie as far apart as the tile is wide
    messages = [torch.nn.functional.pad(part, (0, block_k - width)) for part in parts]
    place, by_packets = Place(dtype, rank, 3), dtype == torch.bfloat16
    if by_packets:
        place.receive_packets(messages[1 - rank], rows * block_k // 2)
    else:
        place.receive(messages[1 - rank], rows * block_k)
    scaling = Scaling.of_kind(kind)
    made = exchange_norm_quantize(
        parts[rank], place.places, is_sum, weight, eps=1e-6, kind="rms_norm", residual=residual, scaling=scaling
    )
    assert made is not None and made.summed is not None
    whole = reference.add(parts) if is_sum else reference.gather(parts)
    wanted = norms.norm_quantize(
        whole, weight, None, residual, None, None, 1e-6, "rms_norm", False, scaling, None, None
    )
    assert_bitwise(made.rows.qdata.view(torch.uint8), wanted[0].view(torch.uint8))
    assert_bitwise(made.rows.scale, wanted[1])
    assert_bitwise(made.summed, wanted[4])
    assert_bitwise(made.rstd, wanted[8])
    if by_packets:
        place.check_sent_packets(parts[rank], 3, rows, block_k)
    else:
        place.check_sent_rows(parts[rank], 3, rows, block_k)
