"""The fused kernels compile for Hopper without spills, in few registers, and move whole words."""

import pytest
import torch

from octavo.ops.attention.qkv_heads import triton as kernels
from tests.ops.compiled import assert_moves_16_bytes, compiled, launched

ROUNDING = {"none": (False, None, None), "own": (True, None, None), "known": (True, torch.ones(2), torch.ones(2))}


def run(tokens: int, dim: int, rounding: str, *, has_norms: bool, turned: int | None = None) -> None:
    """Forward and backward of 32 heads and 8; turned: of heads whose pairs are neighbours."""
    qkv = torch.empty(tokens, 48 * dim, dtype=torch.bfloat16)
    positions, table = torch.zeros(tokens, dtype=torch.int64), torch.empty(4096, (turned or dim) // 2)
    rotation = (positions, table, table.clone(), turned is not None)
    weights = [torch.empty(dim, dtype=torch.bfloat16) if has_norms else None for _ in "qk"]
    q, k, _, rstd = kernels.qkv_heads(qkv, 8, dim, *rotation, *weights, 1e-6, False, True, *ROUNDING[rounding])
    kernels.qkv_heads_backward(q, k, k, qkv, rstd, *weights, *rotation)


@pytest.mark.parametrize("has_norms", [True, False], ids=["norms", "plain"])
@pytest.mark.parametrize("rounding", ["own", *(pytest.param(n, marks=pytest.mark.slow) for n in ("none", "known"))])
def test_launches(rounding: str, has_norms: bool) -> None:
    found = launched(lambda: run(64, 128, rounding, has_norms=has_norms), 3 if has_norms else 2)
    names = ["qkv_head_rows", "qkv_head_gradients", "sum_partials"]
    assert [launch.kernel.__name__ for launch in found] == names[: len(found)]
    for launch, most in zip(found[:2], (64, 128), strict=True):  # eight and four programs of four warps an SM
        report = compiled(launch)
        assert_moves_16_bytes(launch, report.ptx)
        assert report.registers <= most, f"{launch}: {report.registers} registers"


@pytest.mark.slow
@pytest.mark.parametrize(("dim", "turned"), [(64, None), (256, 64)], ids=str)
def test_other_heads(dim: int, turned: int | None) -> None:
    for launch in launched(lambda: run(64, dim, "none", has_norms=False, turned=turned), 2):
        assert_moves_16_bytes(launch, compiled(launch).ptx)


def test_only_the_gradient_of_the_norm_fuses_products_into_sums() -> None:
    """The separate ops round RoPE's products; norm_backward's fuse as here, or the gradient had other bits."""
    forward, backward, _ = launched(lambda: run(64, 128, "none", has_norms=True), 3)
    assert "fma.rn.f32" not in compiled(forward).ptx
    # of 16 elements a thread, of Q and of K: their weight's sum, the difference, a product in each first pair
    assert compiled(backward).ptx.count("fma.rn.f32") == 2 * (16 + 16 + 8)
    plain = launched(lambda: run(64, 128, "none", has_norms=False), 2)[1]
    assert "fma.rn.f32" not in compiled(plain).ptx


def test_batches_of_other_sizes_share_their_kernels() -> None:
    launched(lambda: [run(tokens, 64, "own", has_norms=True) for tokens in (16, 32, 4096)], 3)
