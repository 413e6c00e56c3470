"""Large messages between two GPUs, and over gloo: the reference's bits, whatever comes late, in CUDA graphs too."""

import torch
import torch.distributed as dist

from octavo.distributed.pushes import Pushes, pushes_of
from octavo.distributed.tensor_group import PartialRows, RowShare, TensorGroup
from octavo.numerics.scaling import Scaling
from octavo.ops.one_shot import reference
from octavo.ops.quantize import quantize
from octavo.testing.assertions import assert_bitwise
from tests.ranks import on_two_gpus, run_group

SHAPES = [(130, 256), (1000, 1024), (2048, 2048), (777, 4096), (4096, 4096)]
KINDS = ("sum", "columns", "codes", "row codes", "rows")
TURNS = 150


def draw(seed: int, rank: int, shape: tuple[int, int], device: str) -> torch.Tensor:
    generator = torch.Generator(device).manual_seed(100 * seed + rank)
    return torch.randn(*shape, generator=generator, device=device).bfloat16()


def check(group: TensorGroup, pieces: list[torch.Tensor], kind: str, scaling: Scaling) -> None:
    own, num_rows = pieces[group.rank], len(pieces[0])
    mine = group.share_of(num_rows)
    if kind in ("sum", "columns"):
        whole = reference.add(pieces) if kind == "sum" else reference.gather(pieces)
        assert_bitwise(PartialRows(own, group, kind == "sum").share(), whole[mine])
    elif kind == "codes":
        made, want = group.gather_codes(quantize(own, scaling)), quantize(reference.gather(pieces), scaling)
        assert_bitwise(made.qdata.view(torch.uint8), want.qdata.view(torch.uint8))
        assert_bitwise(made.scale, want.scale)
        assert made.scale.stride(0) == want.scale.stride(0)
    elif kind == "row codes":
        want = quantize(pieces[0], scaling)
        made = group.gather_row_codes(quantize(pieces[0][mine], scaling), num_rows)
        assert_bitwise(made.qdata.view(torch.uint8), want.qdata.view(torch.uint8))
        assert_bitwise(made.scale, want.scale)
        assert made.scale.stride(0) == want.scale.stride(0)
    else:
        assert_bitwise(RowShare(pieces[0][mine], num_rows, group).whole(), pieces[0])


def exchanged(rank: int, world: int) -> int:
    group, device = TensorGroup.of(), torch.device("cuda", rank)
    assert isinstance(pushes_of(None, device), Pushes)
    for seed in range(TURNS):
        pieces = [draw(seed, each, SHAPES[seed % len(SHAPES)], "cuda") for each in range(world)]
        if seed % 3 == rank:  # now one rank is late, now the other
            torch.cuda._sleep(300_000)
        kind = KINDS[seed // len(SHAPES) % len(KINDS)]
        check(group, pieces, kind, Scaling.of_kind("per_row" if seed % 2 and kind == "row codes" else "block_1x128"))
    return TURNS


def replayed(rank: int, world: int) -> int:
    """A graph of exchanges, replayed with new values, and larger ones between the replays."""
    group, shape = TensorGroup.of(), (512, 1024)
    x = torch.zeros(shape, device="cuda", dtype=torch.bfloat16)

    def run() -> torch.Tensor:
        return group.gather_rows(PartialRows(x, group, is_sum=True).share(), len(x))

    with torch.no_grad():
        run()
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            out = run()
        for seed in range(30):
            pieces = [draw(seed, each, shape, "cuda") for each in range(world)]
            x.copy_(pieces[rank])
            if seed % 3 == rank:
                torch.cuda._sleep(300_000)
            graph.replay()
            assert_bitwise(out, reference.add(pieces))
            large = [draw(seed, each, (1000 * (1 + seed % 8), 4096), "cuda") for each in range(world)]
            check(group, large, KINDS[seed % len(KINDS)], Scaling.of_kind("block_1x128"))
    dist.barrier()
    return 30


@on_two_gpus
def test_exchanges_have_the_references_bits() -> None:
    assert run_group(exchanged, 2, "nccl") == [TURNS, TURNS]


@on_two_gpus
def test_graphs_of_exchanges_replay() -> None:
    assert run_group(replayed, 2, "nccl") == [30, 30]


def over_gloo(rank: int, world: int) -> int:
    group, num_checked = TensorGroup.of(), 0
    for seed, kind in enumerate(KINDS * 2):
        pieces = [draw(seed, each, (13 + seed, 256), "cpu") for each in range(world)]
        check(group, pieces, kind, Scaling.of_kind("block_1x128" if seed % 2 or kind == "codes" else "per_row"))
        num_checked += 1
    return num_checked


def test_collectives_have_the_references_bits() -> None:
    assert run_group(over_gloo, 3) == [2 * len(KINDS)] * 3
