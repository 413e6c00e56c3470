"""The ops of attention's heads on any device: torch's own checks, and what they refuse."""

import pytest
import torch

from octavo.errors import ShapeError
from octavo.ops.attention.qkv_cache import Rotation
from octavo.ops.attention.qkv_heads import qkv_heads
from octavo.ops.attention.rope import rope_tables


@pytest.mark.parametrize(("has_norms", "has_v"), [(True, False), (True, True), (False, True)])
def test_the_ops_pass_torchs_own_checks(has_norms: bool, has_v: bool, device: torch.device) -> None:
    qkv, positions = torch.randn(5, 8 * 32, device=device), torch.arange(5, device=device)
    rotation = (positions, *(t.to(device) for t in rope_tables(32, 8, 1e4)), False)
    weights = [torch.ones(32, device=device) if has_norms else None for _ in "qk"]
    ops = torch.ops.octavo
    given = (qkv, 2, 32, *rotation, *weights, 1e-6, False, has_v, has_norms and has_v, None, None)
    torch.library.opcheck(ops.qkv_heads.default, given)
    q, k, _, rstd = ops.qkv_heads.default(*given)
    source = qkv if has_norms else None
    torch.library.opcheck(ops.qkv_heads_backward.default, (q, k, k, source, rstd, *weights, *rotation))


def test_other_widths_are_refused() -> None:
    rotation = Rotation(torch.arange(4), *rope_tables(32, 8, 1e4))
    for width in (100, 4 * 32):
        with pytest.raises(ShapeError, match=r"qkv must be \[T, \(H \+ 2 \* 2\) \* 32\] for 2 kv heads of 32, got"):
            qkv_heads(torch.zeros(4, width), 2, 32, rotation)
