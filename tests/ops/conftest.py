"""What tests of several kernels share: where test_triton*.py and test_compile.py run, and outputs that start as NaN.

The first run on a GPU, or in the interpreter on a CPU (tests/testing starts it); the second compile without a GPU.
"""

import importlib.util
from collections.abc import Iterator

import pytest
import torch

from octavo.testing.interpreter import correct_interpreter, is_interpreting

collect_ignore_glob: list[str] = []
if importlib.util.find_spec("triton") is None:  # only packaged for Linux
    collect_ignore_glob = ["*test_compile.py", "*test_triton*.py"]
elif is_interpreting():
    collect_ignore_glob = ["*test_compile.py"]
    correct_interpreter()


def pytest_itemcollected(item: pytest.Item) -> None:
    if item.path.name.startswith("test_triton") and not is_interpreting():
        item.add_marker(pytest.mark.gpu)


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
