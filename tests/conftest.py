"""Shared fixtures: the device that a test runs on, and one thread so that two workers do not fight over two cores."""

import pytest
import torch


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def device(request: pytest.FixtureRequest) -> torch.device:
    """The CPU always; the GPU in the lane `make test-gpu`."""
    return torch.device(request.param)


@pytest.fixture
def generator() -> torch.Generator:
    """Fresh seeded randomness on the CPU: inputs are the same on every device."""
    return torch.Generator().manual_seed(0)
