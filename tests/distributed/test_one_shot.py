"""One-shot exchanges between two GPUs: the reference's bits, whatever comes late, in CUDA graphs too."""

import torch
import torch.distributed as dist

from octavo.distributed.one_shot import OneShot, one_shot_of
from octavo.distributed.tensor_group import PartialRows, TensorGroup
from octavo.numerics.scaling import Scaling
from octavo.ops.norm.norm_quantize import exchange_norm_quantize, norm_quantize
from octavo.ops.norm.norm_quantize.triton import can_exchange
from octavo.ops.one_shot import reference
from octavo.ops.quantize import quantize
from octavo.testing.assertions import assert_bitwise
from tests.ranks import on_two_gpus, run_group

SHAPES = [(1, 128), (1, 2048), (3, 256), (64, 512), (256, 256), (7, 14336 // 2), (256, 4096)]
TURNS = 420
SCALING = Scaling.of_kind("block_1x128")


def draw(seed: int, rank: int, shape: tuple[int, int]) -> torch.Tensor:
    generator = torch.Generator().manual_seed(100 * seed + rank)
    return torch.randn(*shape, generator=generator).cuda().bfloat16()


def delay(seed: int, rank: int) -> None:
    """Now one rank is late, now the other."""
    if seed % 3 == rank:
        torch.cuda._sleep(200_000)


def check_norm(group: TensorGroup, pieces: list[torch.Tensor], *, is_sum: bool) -> None:
    whole = reference.add(pieces) if is_sum else reference.gather(pieces)
    residual, weight = whole.roll(1, 0) * 0.5, whole[0].abs() + 0.5
    want = norm_quantize(whole, weight, residual=residual, scaling=SCALING, eps=1e-6, kind="rms_norm")
    parts = PartialRows(pieces[group.rank], group, is_sum)
    places = parts.places()
    assert places is not None
    made = exchange_norm_quantize(
        parts.own, places, is_sum, weight, eps=1e-6, kind="rms_norm", residual=residual, scaling=SCALING
    )
    if not can_exchange(parts.own, whole.shape[1], SCALING):
        assert made is None and (whole.shape[1] > 8192 or len(whole) > 128), "longer rows, or more, than programs have"
        return
    assert made is not None and made.summed is not None and want.summed is not None
    assert_bitwise(made.rows.qdata.view(torch.uint8), want.rows.qdata.view(torch.uint8))
    assert_bitwise(made.rows.scale, want.rows.scale)
    assert_bitwise(made.summed, want.summed)


def exchanged(rank: int, world: int) -> int:
    group, num_checked = TensorGroup.of(), 0
    one_shot = one_shot_of(None, torch.device("cuda", rank))
    assert isinstance(one_shot, OneShot)
    for seed in range(TURNS):
        shape = SHAPES[seed % len(SHAPES)]
        pieces = [draw(seed, each, shape) for each in range(world)]
        delay(seed, rank)
        kind = seed // len(SHAPES) % 5
        if kind >= 3:
            check_norm(group, pieces, is_sum=kind == 3)
        elif kind == 0:
            assert_bitwise(group.gather_columns(pieces[rank]), reference.gather(pieces))
        elif kind == 1:
            assert_bitwise(group.sum(pieces[rank]), reference.add(pieces))
        else:
            made, want = (
                group.gather_codes(quantize(pieces[rank], SCALING)),
                quantize(reference.gather(pieces), SCALING),
            )
            assert_bitwise(made.qdata.view(torch.uint8), want.qdata.view(torch.uint8))
            assert_bitwise(made.scale, want.scale)
        num_checked += 1
    assert one_shot.gather_columns(torch.zeros(2, one_shot.max_bytes, device="cuda")) is None
    large = [draw(1, each, (4096, 512)) for each in range(world)]  # by NCCL
    assert_bitwise(group.gather_columns(large[rank]), reference.gather(large))
    return num_checked


def replayed(rank: int, world: int) -> int:
    """A graph of three exchanges, replayed with new values, and other exchanges between the replays."""
    group, x = TensorGroup.of(), torch.zeros(4, 512, device="cuda", dtype=torch.bfloat16)
    with torch.no_grad():
        group.gather_columns(x)

        def run() -> torch.Tensor:
            return group.sum(group.gather_columns(x)[:, :512] + group.gather_columns(x)[:, -512:])

        run()
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            out = run()
        for seed in range(50):
            pieces = [draw(seed, each, (4, 512)) for each in range(world)]
            x.copy_(pieces[rank])
            delay(seed, rank)
            graph.replay()
            half = (pieces[0] + pieces[-1]).float() * world
            assert_bitwise(out, half.bfloat16())
            assert_bitwise(group.sum(pieces[rank]), reference.add(pieces))
    dist.barrier()
    return 50


@on_two_gpus
def test_exchanges_have_the_references_bits() -> None:
    assert run_group(exchanged, 2, "nccl") == [TURNS, TURNS]


@on_two_gpus
def test_graphs_of_exchanges_replay() -> None:
    assert run_group(replayed, 2, "nccl") == [50, 50]


def test_the_reference() -> None:
    parts = [torch.tensor([[1.0, 256.0]]).bfloat16(), torch.tensor([[2.0, 1.0]]).bfloat16()]
    assert_bitwise(reference.gather(parts), torch.tensor([[1.0, 256.0, 2.0, 1.0]]).bfloat16())
    assert_bitwise(reference.add(parts), torch.tensor([[3.0, 256.0]]).bfloat16())  # rounded once, to even
