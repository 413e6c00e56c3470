"""The Triton kernels on pieces of blocks against the reference, bit for bit, in the interpreter and on a GPU."""

import pytest
import torch

from octavo.ops.packed import reference
from octavo.ops.packed import triton as kernels
from octavo.testing import GENERATORS, assert_bitwise, generate
from octavo.testing.interpreter import is_interpreting

DEVICE = "cpu" if is_interpreting() else "cuda"
# (pieces, elements of a piece): one, a ragged block, several programs, many pieces
SMALL = [(1, 1), (2, 131), (3, 33 * 128), (8, 256)]
SHAPES = SMALL if is_interpreting() else [*SMALL, (2, 63 * 431), (4, 4096 * 1792)]


def buffer(num_pieces: int, num_blocks: int, device: str) -> tuple[torch.Tensor, torch.Tensor]:
    """Codes and scales as views of one buffer, filled with NaN."""
    num_bytes = num_blocks * 132 + -num_blocks * 132 % 16
    made = torch.full((num_pieces, num_bytes), 0x7F, dtype=torch.uint8, device=device)
    codes = made[:, : num_blocks * 128].unflatten(1, (num_blocks, 128)).view(torch.float8_e4m3fn)
    return codes, made[:, num_blocks * 128 : num_blocks * 132].view(torch.float32)


def both(x: torch.Tensor, seed: int = 3, start: int = 0) -> None:
    made = {}
    for name, run, device in (("ours", kernels, DEVICE), ("theirs", reference, "cpu")):
        codes, scales = buffer(len(x), -(-x.shape[1] // 128), device)
        run.round_pieces(x.to(device), codes, scales, torch.tensor(seed, dtype=torch.int32, device=device), start)
        made[name] = codes, scales, run.decode_pieces(codes, scales, torch.bfloat16), run.sum_pieces(codes, scales)
    for what, ours, theirs in zip(("codes", "scales", "decoded", "summed"), *made.values(), strict=True):
        # NaN has other bits on another device, but for codes
        nan = theirs.float().isnan()
        assert torch.equal(ours.float().isnan().cpu(), nan), what
        assert_bitwise(ours.float().cpu()[~nan], theirs.float()[~nan], what)


@pytest.mark.parametrize("shape", SHAPES, ids=lambda shape: "x".join(map(str, shape)))
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_shapes(shape: tuple[int, int], dtype: torch.dtype) -> None:
    both(generate("normal", shape, dtype))


@pytest.mark.parametrize("name", GENERATORS)
def test_values(name: str) -> None:
    both(generate(name, (3, 520), torch.float32))


@pytest.mark.parametrize("start", [1, 2**31 - 100, 2**32 - 100, 2**33 + 7])
def test_places_beyond_32_bits(start: int) -> None:
    both(generate("normal", (2, 300), torch.float32), seed=-5, start=start)


def test_rows_of_a_larger_matrix() -> None:
    both(generate("normal", (4, 700), torch.float32)[:, 100:400])
