"""Deterministic algorithms are on while a run asks for them, and as they were after it."""

import pytest
import torch

from octavo.run.determinism import deterministic


def state() -> tuple[bool, bool, bool]:
    return (
        torch.are_deterministic_algorithms_enabled(),
        torch.is_deterministic_algorithms_warn_only_enabled(),
        torch.utils.deterministic.fill_uninitialized_memory,
    )


def test_they_are_on_within_and_as_before_after(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CUBLAS_WORKSPACE_CONFIG", raising=False)
    before = state()
    with deterministic(False):
        assert state() == before
    with deterministic(True):
        assert state() == (True, False, False)
    assert state() == before
