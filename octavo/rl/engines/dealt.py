"""The engines of several ranks as one: each samples its share of the prompts, and all of them get all completions.

Ranks of a tensor-parallel group have a share together, and sample it as one batch.
"""

import dataclasses
import functools
import hashlib
import logging
import time
from array import array
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

from octavo.distributed.mesh import Mesh
from octavo.distributed.outcome import together
from octavo.distributed.tensor_group import TensorGroup
from octavo.errors import CheckpointError, DataError, OctavoError
from octavo.models import Decoder
from octavo.models.tokenizer import Tokenizer
from octavo.nn.finite_weights import check_finite_weights
from octavo.nn.live_weights import renew_codes
from octavo.parallel import gathered, give_memory, lent, parallelize, weight_copies
from octavo.rl.engines.embedded import EmbeddedEngine
from octavo.rl.engines.old_weights import OldWeights
from octavo.rl.engines.protocol import Generation, Prompt, SamplingSpec
from octavo.serve import LLM
from octavo.weights.errors import EngineError
from octavo.weights.refit import RefitReport

logger = logging.getLogger(__name__)


@dataclasses.dataclass(frozen=True)
class _Answer:
    """What a rank tells the others after a batch: its completions or its error, its counters, and how long it took."""

    digest: str
    generations: list[Generation]
    error: str | None
    stats: dict[str, float]
    seconds: float


class DealtEngine(EmbeddedEngine):
    """An LLM on each rank over the weights of one sharded policy, whole for as long as it samples, or cut.

    A request has the noise of its number among those of all ranks, so that it has the tokens of one process wherever
    its logits do not depend on what else is in the batch: exact numerics promise that.

    Args:
        policy: sharded; what it is trained in stays.
        sampler: the policy itself, or a view of it (octavo.rl.ranks), which its weights are lent to.
        mesh: of the ranks; all make each call, with the same arguments.
        keeps_weights: a view gets memory of its own, into which publish copies them; nothing is gathered between.
        tensor_group: neighbours among which a view that keeps its weights is cut; None for a whole one, or for one that
            shares the weights of a sampler that was cut.
        limits: LLM's.
    """

    def __init__(
        self,
        policy: Decoder,
        sampler: Decoder,
        tokenizer: Tokenizer,
        mesh: Mesh,
        *,
        keeps_weights: bool = False,
        tensor_group: TensorGroup | None = None,
        **limits: Any,
    ) -> None:
        self._mesh, self._seconds = mesh, [0.0] * mesh.world_size
        self._stats = [dict[str, float]() for _ in range(mesh.world_size)]
        self._keeps_weights = keeps_weights
        self._weights: Callable[[], AbstractContextManager[None]] = nullcontext
        if keeps_weights:
            if tensor_group is not None:
                parallelize(sampler, tensor_group)  # a shell: no rank has memory for the whole of it
            give_memory(sampler, mesh.device)
            self._copies = weight_copies(policy, sampler)
            self._copy_weights(sampler)
        elif sampler is policy:
            self._weights = functools.partial(gathered, policy)
        elif sampler.tensor_group is None:
            self._weights = functools.partial(lent, policy, sampler)
        self._num_sharing = 1 if sampler.tensor_group is None else sampler.tensor_group.size
        is_lent = self._weights is not nullcontext  # at other addresses each time
        with self._weights():
            super().__init__(LLM(sampler, tokenizer=tokenizer, enforce_eager=is_lent, **limits))

    def generate(self, prompts: Sequence[Prompt], spec: SamplingSpec) -> list[Generation]:
        """See RolloutEngine; every rank returns the completions of all.

        Where ranks sample as one (a cut sampler) and one of them fails alone, out of memory say, the others wait for it
        within the model: it logs its error, and the job ends after parallel.timeout_s. What fails on all of them is an
        EngineError.

        Raises:
            EngineError: on all ranks, naming the one that could not sample.
            DataError: on all ranks, where they were not given the same prompts.
        """
        num_before = self.llm.engine.num_requests
        answers = self._mesh.gather_objects(self._answer(prompts, spec, num_before))
        self.llm.engine.num_requests = num_before + len(prompts)
        self._refuse(answers)
        self._stats = [answer.stats for answer in answers[:: self._num_sharing]]
        self._seconds = [old + answer.seconds for old, answer in zip(self._seconds, answers, strict=True)]
        found = [generation for answer in answers[:: self._num_sharing] for generation in answer.generations]
        return _with_numbers(found, lambda _, numbers: list(numbers))

    def _answer(self, prompts: Sequence[Prompt], spec: SamplingSpec, num_before: int) -> _Answer:
        """Sample this rank's share of the prompts; what goes wrong is told to the others, who wait."""
        digest = hashlib.sha256(repr((list(prompts), spec, num_before)).encode()).hexdigest()
        share, place = divmod(self._mesh.rank, self._num_sharing)
        num_shares = self._mesh.world_size // self._num_sharing
        first, stop = (len(prompts) * each // num_shares for each in (share, share + 1))
        found: list[Generation] = []
        error = None
        with self._weights():
            began = time.perf_counter()
            self.llm.engine.num_requests = num_before + first
            try:
                found = super().generate(prompts[first:stop], spec)
            except Exception as caught:
                error = f"{type(caught).__name__}: {caught}"
                if self._num_sharing > 1:  # the others may never hear of it
                    logger.error("rank %d could not sample its share of the prompts: %s", self._mesh.rank, error)
            found = _with_numbers(found, array) if place == 0 else []  # the others have the same
            return _Answer(digest, found, error, super().stats(), time.perf_counter() - began)

    def _refuse(self, answers: list[_Answer]) -> None:
        for rank, answer in enumerate(answers):
            if answer.digest != answers[0].digest:
                raise DataError(
                    f"all ranks must sample from the same prompts, and rank {rank} has others than rank 0; the task's "
                    "data must be the same everywhere, and what its environment says must follow from the tokens alone"
                )
            if answer.error is not None:
                raise EngineError(f"rank {rank} could not sample its share of the prompts: {answer.error}")

    def publish(
        self, trainer: Decoder, sampler: Decoder, hand_over_scales: Callable[[], None] = lambda: None
    ) -> RefitReport:
        """See RolloutEngine; where the sampler keeps its weights, they come to all ranks or to none.

        Raises:
            CheckpointError: on all ranks: weights were damaged on the way to one; all sample from the old ones.
            NonFiniteError: the same, for weights that are inf or NaN.
        """
        if not self._keeps_weights:
            with self._weights():
                return super().publish(trainer, sampler, hand_over_scales)
        began = time.perf_counter()
        self.begin_update(sampler, trainer.weight_version)  # which refuses another sampler
        old = OldWeights(self.llm.engine)
        try:
            self._copy_weights(sampler)
        except OctavoError:  # on all ranks
            old.restore()
            raise
        finally:
            old.release()
        sampler.mark_weights_updated()
        sampler.weight_version = trainer.weight_version
        hand_over_scales()
        codes = renew_codes(sampler)
        version = self.llm.refit(is_checked=True)
        return RefitReport(version, len(codes), sum(q.num_bytes for q in codes), time.perf_counter() - began)

    def _copy_weights(self, sampler: Decoder) -> None:
        """Write the policy's weights into the sampler's memory.

        Raises:
            CheckpointError: on all ranks, naming one that got other bits than were sent, and of what.
            NonFiniteError: on all ranks, for a weight that is inf or NaN.
        """
        damaged = self._copies()

        def check() -> None:
            if damaged:
                more = f", or of one of the {len(damaged) - 1} that came with it," if len(damaged) > 1 else ""
                raise CheckpointError(
                    f"bits of {damaged[0]}{more} were damaged on the way to the sampler; the old weights serve on; "
                    "look for a defect of this rank's GPU or links"
                )
            check_finite_weights(sampler)  # ranks may hold different slices

        together(self._mesh.host_group, check)

    def reallocate(self) -> None:
        """See RolloutEngine."""
        with self._weights():
            super().reallocate()

    def stats(self) -> dict[str, float]:
        """Counters of all ranks together after the last batch, and the seconds of the fastest and the slowest rank."""
        sums = {name: sum(found[name] for found in self._stats) for name in self._stats[0]}
        return sums | {"sampling_s_min": min(self._seconds), "sampling_s_max": max(self._seconds)}


def _with_numbers(found: list[Generation], make: Callable[[str, Sequence[Any]], Any]) -> list[Generation]:
    """Completions with other sequences for their tokens' numbers: arrays travel several times as fast as lists."""
    return [
        dataclasses.replace(
            generation,
            completions=[
                dataclasses.replace(
                    each,
                    token_ids=make("q", each.token_ids),
                    logprobs=make("d", each.logprobs),
                    weight_versions=make("q", each.weight_versions),
                )
                for each in generation.completions
            ],
        )
        for generation in found
    ]
