"""Notices that a weight was written unseen, so that the FP8 codes that a linear keeps of it are stale."""

from collections.abc import Sequence

import torch

from octavo.errors import StaleCodesError
from octavo.nn.weights.capture import is_capturing
from octavo.nn.weights.version import num_optimizer_steps


class WriteWatch:
    """Notices that a weight, or one of several, was written unseen (through .data) while older codes are still in use.

    A sum over some 4,096 elements' bits of each, evenly spread, is taken when codes are made and compared when they are
    used again, in the first MOST_STEPS steps in which the weights are used: a step ends with any optimizer's, or with
    another version of a weight. Of one step's uses the first MOST_USES count, and then every MOST_USES-th. Afterwards
    nothing is taken or compared. On a GPU nothing waits for the answer: it is copied to the host and read at a later
    use. docs/adr/0010 has the costs.
    """

    MOST_STEPS, MOST_USES, SAMPLE = 100, 100, 4096

    def __init__(self) -> None:
        self._num_steps = self._num_uses = 0  # uses: of this step
        self._version, self._step = (0, 0), -1
        self._made: torch.Tensor | None = None  # the sum of the weight that the codes are of
        self._answer: tuple[torch.Tensor, torch.cuda.Event] | None = None  # whether it differed, once the event is over

    def end(self) -> None:
        """Nothing is taken or compared from here on."""
        self._num_steps, self._made, self._answer = self.MOST_STEPS + 1, None, None

    def begin(self, weights: Sequence[torch.Tensor], version: tuple[int, int]) -> None:
        """New codes are about to be made of this version of some weights: the modules' count, and torch's."""
        self._made = self._answer = None
        if self._is_over(version) or not all(map(_can_watch, weights)):
            return
        self._made = self._sum(weights)

    def look(self, weights: Sequence[torch.Tensor], name: str = "") -> None:
        """The codes are about to be used again.

        Raises:
            StaleCodesError: a weight is another than the one that they were made of.
        """
        made = self._made
        if made is None:
            return
        if self._is_over(self._version):
            self._made = self._answer = None
        elif self._num_uses > self.MOST_USES and self._num_uses % self.MOST_USES:
            return
        elif not weights[0].is_cuda:
            if bool(self._sum(weights) != made):
                raise stale_codes([name or f"a weight of shape {tuple(weights[0].shape)}"])
        elif not is_capturing():
            self._look_later(weights, made, name)

    def _is_over(self, version: tuple[int, int]) -> bool:
        """Count a use, and the step where it is another; returns whether these were MOST_STEPS already."""
        if self._num_steps > self.MOST_STEPS:
            return True
        step = num_optimizer_steps()
        if (version, step) != (self._version, self._step):
            self._version, self._step = version, step
            self._num_steps, self._num_uses = self._num_steps + 1, 0
        self._num_uses += 1
        return self._num_steps > self.MOST_STEPS

    def _look_later(self, weights: Sequence[torch.Tensor], made: torch.Tensor, name: str) -> None:
        if self._answer is not None and not self._answer[1].query():
            return
        if self._answer is not None and bool(self._answer[0]):
            raise stale_codes([name or f"a weight of shape {tuple(weights[0].shape)}"])
        differs = torch.empty((), dtype=torch.bool, pin_memory=True)
        differs.copy_(self._sum(weights) != made, non_blocking=True)
        event = torch.cuda.Event()
        event.record(torch.cuda.current_stream(weights[0].device))
        self._answer = differs, event

    def _sum(self, weights: Sequence[torch.Tensor]) -> torch.Tensor:
        samples = []
        for weight in weights:
            bits = weight.detach().view(torch.int16 if weight.element_size() == 2 else torch.int32).reshape(-1)
            step = max(1, bits.numel() // self.SAMPLE) | 1  # odd, so that no column is left out
            samples.append(bits[::step])
        return (samples[0] if len(samples) == 1 else torch.cat(samples)).sum(dtype=torch.int64)


def _can_watch(weight: torch.Tensor) -> bool:
    """Whether sums over its elements have a meaning here and now; one that is captured has none before a replay."""
    is_plain = type(weight) in (torch.Tensor, torch.nn.Parameter) and weight.is_contiguous()
    return is_plain and weight.numel() > 0 and not weight.is_meta and not (weight.is_cuda and is_capturing())


def stale_codes(names: list[str]) -> StaleCodesError:
    """The error for weights that were written unseen."""
    return StaleCodesError(
        f"FP8 codes must be those of the weight; {', '.join(names)} changed without notice (through .data, or by a "
        "replayed graph), so that its codes are of older values; call octavo.nn.mark_weights_updated(model) after each "
        "such write, or write under torch.no_grad() without .data"
    )
