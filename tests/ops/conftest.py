"""What tests of several kernels share."""

from collections.abc import Iterator

import pytest
import torch


@pytest.fixture
def poisoned_outputs(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """New tensors start as NaN, so that what a kernel leaves out, or reads past a row's end, is seen."""
    from octavo.ops.quantize.triton import plan

    empty = torch.empty

    def poisoned(*args, **kwargs):  # type: ignore[no-untyped-def]
        made = empty(*args, **kwargs)
        made.view(torch.uint8).fill_(0xFF)
        return made

    with monkeypatch.context() as patch:
        patch.setattr(torch, "empty", poisoned)
        patch.setattr(plan, "_empty_on_gpu", None)  # quantizers allocate past torch.empty
        yield
