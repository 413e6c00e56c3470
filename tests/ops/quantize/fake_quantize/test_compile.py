"""Every launch of the fake-quantization kernels compiles for Hopper without spills, and means what the rule says."""

import re
from collections.abc import Callable

import pytest
import torch

from octavo.ops.quantize.fake_quantize import triton as kernels
from octavo.testing import tolerances
from tests.ops.compiled import Launch, assert_moves_16_bytes, compiled, launched

CALLS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "mxfp8": lambda x: kernels.mxfp8(x, torch.float8_e4m3fn),
    "mxfp8 down": lambda x: kernels.mxfp8(x, torch.float8_e4m3fn, "down"),
    "mxfp8 columns": lambda x: kernels.mxfp8(x.t(), torch.float8_e5m2),
    "hadamard": lambda x: kernels.random_hadamard(x),
    "nvfp4": lambda x: kernels.nvfp4(x),
    "nvfp4 columns": lambda x: kernels.nvfp4(x.t()),
    "nvfp4 square": lambda x: kernels.nvfp4(x, square_blocks=True),
    "nvfp4 noise": lambda x: kernels.nvfp4(x, stochastic_seed=123),
    "nvfp4 columns, noise": lambda x: kernels.nvfp4(x.t(), stochastic_seed=123),
}
ALIGNED, ODD = (4096, 7168), (303, 305)


def check(launch: Launch, max_spill_bytes: int = 0) -> str:
    report = compiled(launch, max_spill_bytes)
    # Flushing would lose subnormal scales and products; an approximate division its last bit.
    assert ".ftz" not in report.ptx, f"{launch} flushes subnormals"
    assert set(re.findall(r"div\.\w+\.f32", report.ptx)) <= {"div.rn.f32"}, f"{launch} divides inexactly"
    assert ".f64" not in report.ptx, f"{launch} computes in fp64"
    return report.ptx


def launches(name: str, shape: tuple[int, int], dtype: torch.dtype) -> list[Launch]:
    return launched(lambda: CALLS[name](torch.empty(shape, dtype=dtype)), 2 if "nvfp4" in name else 1)


@pytest.mark.parametrize("name", ["mxfp8", "mxfp8 columns", "nvfp4", "nvfp4 square", "hadamard"])
def test_aligned_tiles_move_16_bytes_at_once(name: str) -> None:
    *_, tiles = launches(name, ALIGNED, torch.bfloat16)
    ptx = check(tiles)
    assert_moves_16_bytes(tiles, ptx)
    assert "fma" not in ptx, "products are not fused into sums"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("dtype", "shape"),
    [
        *((torch.bfloat16, ODD), (torch.float16, ALIGNED), (torch.float32, ODD)),
        *(
            pytest.param(*rest, marks=pytest.mark.largest)
            for rest in ((torch.bfloat16, ALIGNED), (torch.float16, ODD), (torch.float32, ALIGNED))
        ),
    ],
    ids=str,
)
@pytest.mark.parametrize("name", list(CALLS))
def test_every_launch_compiles(name: str, dtype: torch.dtype, shape: tuple[int, int]) -> None:
    for launch in launches(name, shape, dtype):
        check(launch, tolerances.MAX_SPILL_BYTES)
