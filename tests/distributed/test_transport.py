"""FP8 collectives on 2 and 4 gloo ranks: the two-shot formula bit for bit, its error, NaN, sizes, error feedback."""

from typing import Any

import pytest
import torch
import torch.distributed as dist

from octavo.distributed import two_shot
from octavo.distributed.packed import Packed
from octavo.distributed.transport import all_gather_q, all_to_all_q, reduce_scatter_q
from octavo.distributed.two_shot import all_reduce_q, all_reduce_q_
from octavo.errors import BackendError, ConfigError, DtypeError, ShapeError
from octavo.numerics.analysis import sqnr
from octavo.testing.assertions import assert_bitwise
from octavo.testing.tolerances import E4M3_NORMAL_DB, TWO_SHOT_DB
from tests.assertions import assert_raises
from tests.distributed.two_shots import as_blocks, rounded, sum_in_order, two_shots
from tests.ranks import run_group

WORLDS = (2, 4)
SHAPES = [(1,), (127,), (513,), (63, 431), (8, 1024), (0,), ()]
DTYPES = [torch.float32, torch.bfloat16]
STEPS = 20


def made(rank: int, shape: tuple[int, ...], dtype: torch.dtype = torch.float32, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(100 * seed + rank)
    return torch.randn(shape, generator=generator).to(dtype)


def broken(rank: int) -> torch.Tensor:
    """NaN in block 0 on rank 0, +inf in block 2 and -inf in block 5 on the last, a sum beyond fp32 in block 7."""
    x = made(rank, (1500,))
    x[3] = torch.nan if rank == 0 else x[3]
    x[300] = torch.inf if rank == 1 else x[300]
    x[5 * 128 + 127] = -torch.inf if rank == 1 else x[700]
    x[7 * 128] = 3e38
    return x


def gradient(rank: int, step: int) -> torch.Tensor:
    """A part that stays, and noise; tails as gradients have them."""
    lasting = made(0, (4096,)) * made(1, (4096,)).exp()
    return lasting + 0.3 * made(rank, (4096,), seed=step + 1)


def accumulated(rank: int, world: int, residual: torch.Tensor | None) -> torch.Tensor:
    steps = [all_reduce_q(gradient(rank, step), average=True, residual=residual) for step in range(STEPS)]
    return torch.stack(steps).double().sum(dim=0)


def collectives(rank: int, world: int) -> dict[str, Any]:
    found: dict[str, Any] = {"reduced": {}, "gathered": {}, "exchanged": {}, "scattered": {}}
    for shape in SHAPES:
        for dtype in DTYPES:
            x, many = made(rank, shape, dtype), made(rank, (world, *shape), dtype)
            found["reduced"][shape, dtype] = all_reduce_q(x), all_reduce_q(x, average=True)
            found["gathered"][shape, dtype] = all_gather_q(x), all_gather_q(x, async_op=True).wait()
            found["exchanged"][shape, dtype] = all_to_all_q(many), all_to_all_q(many, async_op=True).wait()
            found["scattered"][shape, dtype] = reduce_scatter_q(many), reduce_scatter_q(many, async_op=True).wait()
    two_shot.MESSAGE_NUMEL = 512 * world
    residuals = [torch.full((63, 431), 0.01).to(dtype) for dtype in DTYPES]
    found["in messages"] = [all_reduce_q(made(rank, (63, 431)), residual=residual) for residual in residuals]
    two_shot.MESSAGE_NUMEL = 1 << 20
    again = [torch.full((63, 431), 0.01).to(dtype) for dtype in DTYPES]
    found["at once"] = [all_reduce_q(made(rank, (63, 431)), residual=residual) for residual in again]
    found["residuals"] = residuals, again
    several = [made(rank, shape) for shape in SHAPES]
    two_shot.MESSAGE_NUMEL = 512 * world
    all_reduce_q_(several)
    two_shot.MESSAGE_NUMEL = 1 << 20
    found["several"] = several
    found["strided"] = all_reduce_q(made(rank, (64, 96)).t())
    column = torch.zeros(8, 1024, 2)[..., 1]  # no element next to another
    found["strided residual"] = all_reduce_q(made(rank, (8, 1024)), residual=column), column
    plain = torch.zeros(8, 1024)
    found["plain residual"] = all_reduce_q(made(rank, (8, 1024)), residual=plain), plain
    found["broken"] = all_reduce_q(broken(rank))
    residual = torch.zeros(1500)
    found["broken residual"] = [all_reduce_q(broken(rank), residual=residual), residual.clone()]
    found["after broken"] = all_reduce_q(made(rank, (1500,)), residual=residual)
    found["kept"] = accumulated(rank, world, torch.zeros(4096))
    found["lost"] = accumulated(rank, world, None)
    pairs = [dist.new_group([first, first + 1]) for first in range(0, world, 2)]
    found["pair"] = all_reduce_q(made(rank, (300,)), pairs[rank // 2])
    if world > 2:
        other = pairs[1 - rank // 2]
        assert_raises(ConfigError, f"rank {rank} is in none of it", all_reduce_q, torch.ones(3), other)
    assert_raises(DtypeError, "take float32 or bfloat16, got torch.float16", all_reduce_q, torch.ones(3).half())
    assert_raises(ShapeError, rf"a piece for each of {world} ranks", reduce_scatter_q, torch.ones(3, 2))
    assert_raises(ShapeError, "the residual must have x's shape", all_reduce_q, torch.ones(3), residual=torch.ones(4))
    return found


@pytest.fixture(scope="module", params=WORLDS)
def ranks(request: pytest.FixtureRequest) -> list[dict[str, Any]]:
    return run_group(collectives, request.param)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_the_bits_are_those_of_the_two_shot_formula(
    shape: tuple[int, ...], dtype: torch.dtype, ranks: list[dict[str, Any]]
) -> None:
    inputs = [made(rank, shape, dtype) for rank in range(len(ranks))]
    for found in ranks:
        for result, average in zip(found["reduced"][shape, dtype], (False, True), strict=True):
            assert_bitwise(result, two_shots(inputs, average))


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_one_shot_collectives_round_once(
    shape: tuple[int, ...], dtype: torch.dtype, ranks: list[dict[str, Any]]
) -> None:
    world = len(ranks)

    def once(x: torch.Tensor) -> torch.Tensor:
        return rounded(as_blocks(x)).view(-1)[: x.numel()].view(shape)

    gathered = torch.stack([once(made(rank, shape, dtype)).to(dtype) for rank in range(world)])
    sent = [[once(piece) for piece in made(rank, (world, *shape), dtype)] for rank in range(world)]
    for rank, found in enumerate(ranks):
        came = [sent[other][rank] for other in range(world)]
        for result in found["gathered"][shape, dtype]:
            assert_bitwise(result, gathered)
        for result in found["exchanged"][shape, dtype]:
            assert_bitwise(result, torch.stack(came).to(dtype))
        for result in found["scattered"][shape, dtype]:
            assert_bitwise(result, sum_in_order(came).to(dtype))


def test_messages_change_no_bit(ranks: list[dict[str, Any]]) -> None:
    for found in ranks:
        for ours, wanted in zip(found["in messages"], found["at once"], strict=True):
            assert_bitwise(ours, wanted)
        for ours, wanted in zip(*found["residuals"], strict=True):
            assert_bitwise(ours, wanted)
            assert (ours != 0.01).float().mean() > 0.9
        for ours, shape in zip(found["several"], SHAPES, strict=True):
            assert_bitwise(ours, found["reduced"][shape, torch.float32][0])


def test_a_residual_is_what_the_codes_lack(ranks: list[dict[str, Any]]) -> None:
    """Of this rank's quantization, and on the owner that of the sum: together all that the result lacks of the sum."""
    given = [(made(rank, (63, 431)) + 0.01).double() for rank in range(len(ranks))]
    lacking = sum(given) - ranks[0]["at once"][0].double()
    kept = sum(found["residuals"][1][0].double() for found in ranks)
    assert ((lacking - kept).norm() / lacking.norm()).item() < 1e-5


def test_strides_and_groups(ranks: list[dict[str, Any]]) -> None:
    transposed = [made(rank, (64, 96)).t() for rank in range(len(ranks))]
    for rank, found in enumerate(ranks):
        assert_bitwise(found["strided"], two_shots(transposed))
        for strided, plain in zip(found["strided residual"], found["plain residual"], strict=True):
            assert_bitwise(strided, plain)
        first = rank // 2 * 2
        assert_bitwise(found["pair"], two_shots([made(first, (300,)), made(first + 1, (300,))]))


def test_the_error_is_that_of_two_roundings(ranks: list[dict[str, Any]]) -> None:
    inputs = [made(rank, (8, 1024)) for rank in range(len(ranks))]
    error = sqnr(sum_in_order(inputs), ranks[0]["reduced"][(8, 1024), torch.float32][0])
    assert TWO_SHOT_DB <= error < E4M3_NORMAL_DB


def test_a_block_that_is_not_finite_on_one_rank_is_nan_on_all(ranks: list[dict[str, Any]]) -> None:
    expected = torch.zeros(12 * 128, dtype=torch.bool).view(12, 128)
    expected[[0, 2, 5, 7]] = True
    for found in ranks:
        assert torch.equal(found["broken"].isnan(), expected.view(-1)[:1500])
        assert_bitwise(found["broken"], ranks[0]["broken"])


def test_a_block_that_is_not_finite_leaves_no_trace_in_the_residual(ranks: list[dict[str, Any]]) -> None:
    for found in ranks:
        result, residual = found["broken residual"]
        assert residual.isfinite().all() and (residual != 0).any()
        assert torch.equal(result.isnan(), found["broken"].isnan())
        assert found["after broken"].isfinite().all()


def test_error_feedback_keeps_the_accumulated_error_at_that_of_a_step(ranks: list[dict[str, Any]]) -> None:
    world = len(ranks)
    exact = sum(gradient(rank, step).double() for rank in range(world) for step in range(STEPS)) / world
    kept, lost = (((ranks[0][name] - exact).norm() / exact.norm()).item() for name in ("kept", "lost"))
    assert kept < lost / 5
    for found in ranks:
        assert_bitwise(found["kept"], ranks[0]["kept"])


def test_codes_and_scales_lie_in_one_buffer() -> None:
    packed = Packed.empty(3, 4, torch.device("cpu"))
    assert packed.buffer.shape == (3, 4 * 132) and packed.buffer.stride(0) % 16 == 0
    storages = {part.untyped_storage().data_ptr() for part in (packed.buffer, packed.codes, packed.scales)}
    assert len(storages) == 1
    assert [codes.shape[1] for codes, _ in packed.split([300, 7])] == [3, 1]
    mixed = Packed.empty(2, 3, torch.device("cpu"), num_plain=5)
    assert mixed.plain.shape == (2, 5) and mixed.buffer.shape == (2, 3 * 132 + 20)


def test_without_a_process_group() -> None:
    assert_raises(BackendError, "needs a process group, and there is none", all_reduce_q, torch.ones(3))
