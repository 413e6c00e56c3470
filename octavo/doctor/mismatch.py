"""What makes trainer and sampler differ: the KL between them, shared out to the parts in which they are computed.

Each part is turned on alone (the trainer with that part of the sampler) and off alone (the sampler without it); its
contribution is the mean of what the one adds and the other takes away.
"""

import dataclasses
from collections.abc import Sequence
from typing import Any

import torch

from octavo.deprecation import former_attribute
from octavo.doctor.candidate_causes import CandidateCause, find_cause, k3
from octavo.doctor.replay import Replay
from octavo.doctor.sides import LABELS, PARTS, Side, differences, linears_of, stale_weights
from octavo.errors import ConfigError, RecipeError, ShapeError
from octavo.models import sequence_logprobs
from octavo.rl.metrics import mismatch_metrics

K3 = "rollout_corr/k3_kl"
_NAMED_TENSORS = 4
_SCORED_TOGETHER = 32


@dataclasses.dataclass(frozen=True)
class Contribution:
    """One part's share of the mismatch; KLs are k3 estimates in nats a token.

    Attributes:
        part: of octavo.doctor.sides.PARTS.
        trainer: how the trainer computes it, in words.
        sampler: how the sampler computes it, in words.
        alone: KL of the trainer with nothing but this part of the sampler; 0 where the two do not differ in it.
        without: KL that is left where this part alone is the trainer's.
        contribution: mean of `alone` and of what `without` lacks to the whole.
        max_abs_delta: the largest |delta logprob| of the part alone.
    """

    part: str
    trainer: str
    sampler: str
    alone: float
    without: float
    contribution: float
    max_abs_delta: float

    @property
    def label(self) -> str:
        """The part's name for a person."""
        return LABELS[self.part]


@dataclasses.dataclass(frozen=True)
class MismatchReport:
    """What find_mismatch saw.

    Attributes:
        num_tokens: response tokens.
        measured: every mismatch metric of the trainer's own scores and the sampler's own reports.
        total: KL of the sampler, modelled part by part, against the trainer so modelled.
        contributions: one a part, in the order of PARTS.
        stale: names of weights (or of linears' codes) that are not the same on both sides.
        routing_flip_share: share of (token, layer) pairs with other experts on the two sides; None without experts.
        with_replayed_routing: KL that would be left if the trainer took the sampler's experts (R3); None where that
            cannot be known.
        residual: KL of what the sampler reported against what the model of it gives: what no part explains.
        cause: what the sampler was found to do other than it was said to, or None; suspect is its former name.
    """

    num_tokens: int
    measured: dict[str, float]
    total: float
    contributions: tuple[Contribution, ...]
    stale: tuple[str, ...]
    routing_flip_share: float | None
    with_replayed_routing: float | None
    residual: float
    cause: CandidateCause | None
    suspect = former_attribute("MismatchReport", "suspect", "cause")

    @property
    def largest(self) -> Contribution | None:
        """The part that contributes most; None where the two sides agree."""
        found = max(self.contributions, key=lambda c: c.contribution)
        return found if found.contribution > 0 else None

    @property
    def verdict(self) -> str:
        """The finding in a sentence or two."""
        kl = self.measured[K3]
        if self.largest is None and self.cause is None:
            same = "bit for bit" if self.measured["mismatch/logprob_abs_diff_max"] == 0.0 else "part by part"
            return f"trainer and sampler agree {same} over {self.num_tokens} tokens; mismatch KL (k3) {kl:.2e}"
        text = f"mismatch KL (k3) {kl:.2e} a token"
        if self.largest is not None:
            share = self.largest.contribution / sum(max(c.contribution, 0.0) for c in self.contributions)
            text += (
                f", most of it by {self.largest.label} ({share:.0%}): trainer {self.largest.trainer}, sampler "
                f"{self.largest.sampler}"
            )
        if self.stale:
            more = "" if len(self.stale) <= _NAMED_TENSORS else f" and {len(self.stale) - _NAMED_TENSORS} more"
            text += f". Not the same weights: {', '.join(self.stale[:_NAMED_TENSORS])}{more}"
        return text + (f". {self.cause.text}" if self.cause is not None else "")

    def as_dict(self) -> dict[str, Any]:
        """Plain JSON values."""
        cause = None if self.cause is None else {"name": self.cause.name, "text": self.cause.text}
        return {
            "num_tokens": self.num_tokens,
            "measured": self.measured,
            "total": self.total,
            "residual": self.residual,
            "largest": None if self.largest is None else self.largest.part,
            "contributions": [{"label": c.label, **dataclasses.asdict(c)} for c in self.contributions],
            "stale": list(self.stale),
            "routing_flip_share": self.routing_flip_share,
            "with_replayed_routing": self.with_replayed_routing,
            "cause": cause,
            "suspect": cause,  # the former name, which leaves with the next release
            "verdict": self.verdict,
        }


def find_mismatch(
    trainer: Side,
    sampler: Side,
    sequences: Sequence[Sequence[int]],
    prompt_lens: Sequence[int],
    rollout_logprobs: torch.Tensor | None = None,
) -> MismatchReport:
    """Share the KL between sampler and trainer out to the parts in which they differ.

    Args:
        trainer: how it computes the policy. Its model must hold its high-precision weights.
        sampler: how it computes the same policy.
        sequences: token ids, prompt and response, as the sampler drew them.
        prompt_lens: of each, at least 1.
        rollout_logprobs: [tokens] fp32, what the sampler reported of the response tokens, packed; None takes what
            the sampler's model of parts gives, for a sampler that is only described.
    Returns:
        MismatchReport. Where the reports do not fit the description of the sampler, known faults are tried
        (octavo.doctor.candidate_causes), and the parts are those of the one that explains them.
    Raises:
        RecipeError: two architectures, or a trainer of codes alone.
        ConfigError: a model that is cut among ranks.
        ShapeError: lengths that do not fit.
    """
    _check(trainer, sampler, sequences, prompt_lens, rollout_logprobs)
    response_lens = [len(s) - n for s, n in zip(sequences, prompt_lens, strict=True)]
    scores = score_responses(trainer, sequences, prompt_lens)
    stale = stale_weights(trainer.model, sampler.model)

    def replay(side: Side) -> Replay:
        return Replay(trainer, side, stale, sequences, prompt_lens)

    whole, cause, residual = frozenset(PARTS), None, 0.0
    modelled = replay(sampler).logprobs(whole)
    observed = modelled if rollout_logprobs is None else rollout_logprobs.detach().float().cpu()
    if rollout_logprobs is not None:
        cause = find_cause(trainer, sampler, replay, modelled, observed, response_lens)
        if cause is not None and cause.sampler is not None:
            sampler = cause.sampler
            modelled = replay(sampler).logprobs(whole)
        residual = k3(modelled, observed)
    mixture = replay(sampler)
    total, contributions = _attribute(mixture, trainer, sampler, differences(trainer, sampler, stale), modelled)
    flip_share, replayed = mixture.routing() or (None, None)
    return MismatchReport(
        num_tokens=sum(response_lens),
        measured=mismatch_metrics(scores, observed, response_lens),
        total=total,
        contributions=contributions,
        stale=stale,
        routing_flip_share=flip_share,
        with_replayed_routing=None if replayed is None else k3(replayed, observed),
        residual=residual,
        cause=cause,
    )


@torch.no_grad()
def score_responses(side: Side, sequences: Sequence[Sequence[int]], prompt_lens: Sequence[int]) -> torch.Tensor:
    """What a trainer really scores of the response tokens, by its own path: [tokens] fp32 on the CPU."""
    pieces = []
    for start in range(0, len(sequences), _SCORED_TOGETHER):
        batch = slice(start, start + _SCORED_TOGETHER)
        pieces += sequence_logprobs(side.model, sequences[batch], side.temperature, prompt_lens=prompt_lens[batch])
    return torch.cat(pieces).cpu()


def _attribute(
    replay: Replay, trainer: Side, sampler: Side, differing: tuple[str, ...], modelled: torch.Tensor
) -> tuple[float, tuple[Contribution, ...]]:
    """(the whole KL, each part's contribution)."""
    base = replay.logprobs(frozenset())
    total = k3(base, modelled)
    rows = []
    for part in PARTS:
        words = (trainer.describe(part), sampler.describe(part))
        if part not in differing:
            rows.append(Contribution(part, *words, 0.0, total, 0.0, 0.0))
            continue
        added = replay.logprobs(frozenset({part}))
        left = replay.logprobs(frozenset(PARTS) - {part})
        alone, without = k3(base, added), k3(base, left)
        delta = float((added - base).abs().max())
        rows.append(Contribution(part, *words, alone, without, (alone + total - without) / 2, delta))
    return total, tuple(rows)


def _check(
    trainer: Side,
    sampler: Side,
    sequences: Sequence[Sequence[int]],
    prompt_lens: Sequence[int],
    rollout_logprobs: torch.Tensor | None,
) -> None:
    if trainer.model.config != sampler.model.config:
        raise RecipeError("trainer and sampler must be of one architecture; give two checkpoints of one model")
    if any(linear.weight is None for linear in linears_of(trainer.model).values()):
        raise RecipeError("the trainer holds FP8 codes only; load its checkpoint with trainable=True")
    for name, side in (("trainer", trainer), ("sampler", sampler)):
        if (group := side.model.tensor_group) is not None:
            raise ConfigError(
                f"find_mismatch mixes the weights of whole models, and the {name}'s are cut among {group.size} ranks; "
                "load the checkpoint in one process"
            )
    if len(sequences) != len(prompt_lens) or any(
        not 1 <= n <= len(s) for s, n in zip(sequences, prompt_lens, strict=True)
    ):
        raise ShapeError("each sequence needs a prompt of at least one token, and no longer than itself")
    num_tokens = sum(map(len, sequences)) - sum(prompt_lens)
    if not num_tokens or (rollout_logprobs is not None and tuple(rollout_logprobs.shape) != (num_tokens,)):
        got = None if rollout_logprobs is None else tuple(rollout_logprobs.shape)
        raise ShapeError(f"responses of {num_tokens} tokens in all need at least one, and a logprob each; got {got}")
