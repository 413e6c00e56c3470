"""Tensor-parallel workers of these tests are forks."""

import subprocess

import pytest

from tests import forks


@pytest.fixture(autouse=True)
def workers_are_forks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Real ones take seconds to start; those of a first rank that is killed and of torchrun's server are real."""
    monkeypatch.setattr(subprocess, "Popen", forks.popen_or_fork)
