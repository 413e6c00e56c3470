"""`python -m tests.serve.dying_worker`: a tensor-parallel worker that is killed as it captures its first graph."""

import os
import signal
import sys
from typing import Any

import pytest
import torch

from octavo.serve import tensor_worker
from octavo.serve.engine.model_runner import ModelRunner
from tests.serve.eager_graphs import EagerGraphs


class DyingGraphs(EagerGraphs):
    """Kills its process within a capture, behind the forward pass that is tried out."""

    def _draw(self, inputs: torch.Tensor, logits: torch.Tensor) -> torch.Tensor:
        os.kill(os.getpid(), signal.SIGKILL)
        raise AssertionError("it is dead")


def capture_with(kind: type[EagerGraphs], patch: pytest.MonkeyPatch) -> None:
    """Let engines on a CPU capture."""
    init = ModelRunner.__init__

    def init_with_graphs(runner: ModelRunner, *given: Any) -> None:
        init(runner, *given)
        runner.graphs = kind(runner, [4], 128)

    patch.setattr(ModelRunner, "__init__", init_with_graphs)


if __name__ == "__main__":
    with pytest.MonkeyPatch.context() as patch:
        capture_with(DyingGraphs, patch)
        tensor_worker.main(sys.argv[1:])
