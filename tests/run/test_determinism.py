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


@pytest.mark.gpu
def test_attention_adds_in_a_fixed_order_on_a_gpu() -> None:
    """What torch takes by itself on Hopper does not, over a few thousand tokens."""
    generator = torch.Generator("cuda").manual_seed(0)
    q, k, v, grad = (
        torch.randn(4, 16, 4096, 128, device="cuda", dtype=torch.bfloat16, generator=generator) for _ in range(4)
    )
    inputs = [x.requires_grad_() for x in (q, k, v)]
    with deterministic(True):
        found = [
            torch.autograd.grad(
                torch.nn.functional.scaled_dot_product_attention(*inputs, is_causal=True), inputs, grad_outputs=grad
            )
            for _ in range(5)
        ]
    for others in found[1:]:
        assert all(torch.equal(a, b) for a, b in zip(found[0], others, strict=True))
