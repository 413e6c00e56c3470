"""The two ways in which results are compared: equal in every bit, or close by signal-to-noise ratio."""

import torch

from octavo.numerics.analysis import sqnr

_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def assert_bitwise(actual: torch.Tensor, expected: torch.Tensor, what: str = "tensor") -> None:
    """Shape, dtype and every bit are equal; NaN equals a NaN of the same bits and 0.0 is not -0.0.

    Args:
        actual: a tensor of any dtype, float8 included, on any device.
        expected: as actual.
        what: named in the message.
    Raises:
        AssertionError: with the share of differing elements, the first of them and both bit patterns.
    """
    assert actual.shape == expected.shape, f"{what}: shape {tuple(actual.shape)}, expected {tuple(expected.shape)}"
    assert actual.dtype == expected.dtype, f"{what}: {actual.dtype}, expected {expected.dtype}"
    got, want = _bits(actual), _bits(expected)
    if torch.equal(got, want):
        return
    differs = (got != want).nonzero()
    first = tuple(int(i) for i in differs[0])
    width = 2 * actual.element_size()
    mask = (1 << 4 * width) - 1
    raise AssertionError(
        f"{what}: {len(differs)} of {got.numel()} elements differ; first at {first}: "
        f"0x{int(got[first]) & mask:0{width}x} ({float(actual[first])}), "
        f"expected 0x{int(want[first]) & mask:0{width}x} ({float(expected[first])})"
    )


def assert_sqnr(actual: torch.Tensor, reference: torch.Tensor, min_db: float, what: str = "tensor") -> None:
    """`actual` has the shape of `reference` and at least `min_db` of SQNR against it; inf or NaN fails.

    Args:
        min_db: from tolerances.py.
    Raises:
        AssertionError: with the ratio that was found.
    """
    assert actual.shape == reference.shape, f"{what}: shape {tuple(actual.shape)}, expected {tuple(reference.shape)}"
    found = sqnr(reference.cpu(), actual.cpu())
    assert found >= min_db, f"{what}: SQNR {found:.2f} dB, at least {min_db:.2f} dB expected"


def _bits(x: torch.Tensor) -> torch.Tensor:
    x = x.detach().cpu().contiguous()
    return x if not x.dtype.is_floating_point else x.view(_BITS[x.element_size()])
