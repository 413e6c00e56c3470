"""The scoring probe: a few sequences' logprobs as the engine told them, beside those of the policy that it was sent."""

import itertools

import torch

from octavo.models import Decoder
from octavo.rl.learner import score_rollouts
from octavo.rl.rollout_batch import Rollouts
from octavo.weights.errors import ProbeError

_NOISE = 0.01  # nats: below it nothing is explained
_MIN_TOKENS = 8  # of fewer, any cause may seem to explain what is chance
_SMALL = 0.5  # a cause explains a difference of which it leaves less than this share


class LogprobProbe:
    """Compares a batch's logprobs with the sampler's policy as this process computes it.

    FP8 and another engine's kernels shift logprobs a little. Causes that shift them otherwise are found by trying them:
    logprobs one place off, the temperature left out on one side, and, above the tolerance, other weights.

    Args:
        model: the policy, in the sampler's numerics.
        num_sequences: probed of each batch, 0 for none.
        temperature: of sampling.
        tolerance: nats, mean of absolute differences.
    """

    def __init__(self, model: Decoder, *, num_sequences: int, temperature: float, tolerance: float) -> None:
        self._model, self._num_sequences = model, num_sequences
        self._temperature, self._tolerance = temperature, tolerance

    def check(self, rollouts: Rollouts) -> float:
        """Probe the first sequences.

        Returns:
            The mean absolute difference, in nats; 0 where nothing was probed.
        Raises:
            ProbeError: naming the cause.
        """
        part = rollouts.part(0, min(self._num_sequences, len(rollouts)))
        if not part.num_tokens:
            return 0.0
        theirs = part.rollout_logprobs
        ours = self._score(part, self._temperature)
        difference = _distance(theirs, ours)
        if difference > _NOISE and part.num_tokens >= _MIN_TOKENS:
            self._refuse_causes(part, theirs, ours, difference)
        if not difference <= self._tolerance:  # so written that NaN is refused
            raise ProbeError(
                "other weights",
                f"the engine's logprobs are {difference:.3g} nats a token from the policy's (engine.probe_tolerance is "
                f"{self._tolerance:g}), and neither their place nor the temperature explains it: it holds other "
                "weights (scales, a tensor that was not updated) or computes in other numerics",
            )
        return difference

    def _refuse_causes(self, part: Rollouts, theirs: torch.Tensor, ours: torch.Tensor, difference: float) -> None:
        for places in (1, -1):
            a, b = _shifted(theirs, part.response_lens, places), _shifted(ours, part.response_lens, -places)
            in_place = _distance(a, _shifted(ours, part.response_lens, places)) if len(a) else 0.0
            if in_place > _NOISE and _distance(a, b) < _SMALL * in_place:
                raise ProbeError(
                    "off-by-one logprobs",
                    f"the engine's logprobs fit the policy's once they are moved by {places} place "
                    f"({_distance(a, b):.3g} nats a token instead of {in_place:.3g})",
                )
        if self._temperature == 1.0:
            return
        plain = _distance(theirs, self._score(part, 1.0))
        if plain < _SMALL * difference:
            raise ProbeError(
                "temperature on one side",
                f"the engine's logprobs are those of temperature 1 ({plain:.3g} nats a token apart instead of "
                f"{difference:.3g}), though it sampled at {self._temperature:g}; for vLLM set --logprobs-mode "
                "processed_logprobs, for SGLang leave SGLANG_RETURN_ORIGINAL_LOGPROB unset",
            )

    def _score(self, part: Rollouts, temperature: float) -> torch.Tensor:
        return score_rollouts(self._model, part, temperature, 0)


def _distance(a: torch.Tensor, b: torch.Tensor) -> float:
    return float((a - b).abs().mean())


def _shifted(x: torch.Tensor, lens: list[int], places: int) -> torch.Tensor:
    """Each sequence's values without the first `places`, or, where negative, without the last."""
    bounds = [0, *itertools.accumulate(lens)]
    rows = [x[start:stop] for start, stop in itertools.pairwise(bounds)]
    return torch.cat([row[places:] if places > 0 else row[:places] for row in rows])
