"""The norm of all gradients: near torch's, and the same bits whatever rows a rank has (tests/parallel: on ranks)."""

import math

import pytest
import torch

from octavo.distributed.norm import global_norm
from octavo.testing import assert_bitwise, generate


def tensors(device: torch.device) -> list[torch.Tensor]:
    shapes = [(300, 64), (3,), (7, 5000), (0, 4), (2, 3, 130), ()]
    return [generate("heavy_tailed", shape or (1,), seed=i).view(shape).to(device) for i, shape in enumerate(shapes)]


def test_it_is_the_norm_of_one_vector(device: torch.device) -> None:
    found = tensors(device)
    expected = torch.linalg.vector_norm(torch.cat([t.double().flatten() for t in found]))
    norm = global_norm(found)
    assert (norm.shape, norm.dtype) == ((), torch.float32)
    torch.testing.assert_close(norm.double(), expected, rtol=1e-6, atol=0.0)
    mixed = [t.bfloat16() if i % 2 else t for i, t in enumerate(found)]
    assert_bitwise(global_norm(mixed), global_norm([t.float() for t in mixed]))


def test_nothing_and_empty_tensors_have_norm_zero(device: torch.device) -> None:
    assert global_norm([]) == 0.0
    assert global_norm([torch.zeros(0, 8, device=device), torch.zeros(4, 0, device=device)]) == 0.0


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_what_is_not_finite_shows(bad: float, device: torch.device) -> None:
    found = tensors(device)
    found[2][6, 4999] = bad
    assert not global_norm(found).isfinite()


def test_threads_and_addresses_change_no_bit() -> None:
    found = tensors(torch.device("cpu"))
    norm = global_norm(found)
    shifted = [torch.cat([t.new_zeros(1), t.flatten()])[1:].view(t.shape) for t in found]
    num_threads = torch.get_num_threads()
    try:
        for num in (1, 3):
            torch.set_num_threads(num)
            assert_bitwise(global_norm(shifted), norm)
    finally:
        torch.set_num_threads(num_threads)
