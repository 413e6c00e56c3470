"""A run as of its last whole step, so that a step that fails can be answered with a checkpoint of the one before it."""

import torch

from octavo.nn import DELAYED_BUFFERS
from octavo.rl.checkpoint import Progress
from octavo.rl.history import StepRow
from octavo.rl.learner import Learner
from octavo.rl.rollout_worker import RolloutWorker


class LastStep:
    """What a failing step may have changed already: small tensors are copied at each note and can be put back.

    Parameters, masters and moments are not copied. They change in an optimizer step alone, and once a later one has
    begun the step before it is gone.

    Attributes:
        row: of the last whole step; None before the first.
        progress: of the last whole step; None before the first.
    """

    row: StepRow | None = None
    progress: Progress | None = None

    def __init__(self, worker: RolloutWorker, learner: Learner) -> None:
        self._worker, self._learner = worker, learner
        self._num_begun = 0

    def note(self, row: StepRow, progress: Progress) -> None:
        """A step is whole: its update is made, and the engine has the new weights."""
        self.row, self.progress = row, progress
        self._num_begun = self._learner.num_updates_begun
        self._buffers = {name: buffer.clone() for name, buffer in self._delayed_buffers().items()}
        self._random = torch.get_rng_state()
        self._cuda_random = torch.cuda.get_rng_state(self._device) if self._device.type == "cuda" else None
        table = None if self._worker.is_asynchronous else self._worker.kv_scales.table
        self._kv_scales = None if table is None else table.state_dict()

    @property
    def is_intact(self) -> bool:
        """Whether there was a whole step, and no update has begun since."""
        return self.row is not None and self._num_begun == self._learner.num_updates_begun

    @torch.no_grad()
    def put_back(self) -> None:
        """Undo what a failed step changed beside the parameters."""
        for name, buffer in self._delayed_buffers().items():
            buffer.copy_(self._buffers[name])
        torch.set_rng_state(self._random)
        if self._cuda_random is not None:
            torch.cuda.set_rng_state(self._cuda_random, self._device)
        table = self._worker.kv_scales.table
        if table is not None and self._kv_scales is not None:
            table.load_state_dict(self._kv_scales)

    @property
    def _device(self) -> torch.device:
        return self._learner.model.device

    def _delayed_buffers(self) -> dict[str, torch.Tensor]:
        buffers = self._learner.model.named_buffers()
        return {name: buffer for name, buffer in buffers if name.endswith(DELAYED_BUFFERS)}
