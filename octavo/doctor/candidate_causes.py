"""Known faults of a sampler whose reports do not fit its description: each is modelled, the best fit is named."""

import dataclasses
from collections.abc import Callable, Iterator

import torch

from octavo.doctor.replay import Replay
from octavo.doctor.sides import PARTS, Side
from octavo.errors import OctavoError
from octavo.numerics import Numerics, get_recipe
from octavo.rl.correction import LOG_RATIO_BOUND
from octavo.weights.refit import share_weights

_NOTICED = 0.1  # of the whole mismatch: a residual below it is rounding that no part models
_NOTICED_KL = 1e-6
_EXPLAINS = 0.5  # a fault is named where it takes away at least this share of the residual
_QUANTIZED = ("rowwise", "tensorwise", "blockwise")


@dataclasses.dataclass(frozen=True)
class CandidateCause:
    """What the sampler seems to do.

    Attributes:
        name: a short one, "" where no known fault fits.
        text: a sentence.
        sampler: the side that does so; None where it is no matter of how the policy is computed.
        residual: KL of the reports against that side's model.
    """

    name: str
    text: str
    sampler: Side | None
    residual: float


def find_cause(
    trainer: Side,
    sampler: Side,
    replay: Callable[[Side], Replay],
    modelled: torch.Tensor,
    observed: torch.Tensor,
    response_lens: list[int],
) -> CandidateCause | None:
    """The known fault that best explains reported logprobs which the sampler as described would not give.

    Args:
        replay: of a sampler.
        modelled: logprobs of the sampler as described.
        observed: those that it reported.
    Returns:
        None where the description fits.
    """
    residual = k3(modelled, observed)
    base = replay(sampler).logprobs(frozenset())
    if residual <= max(_NOTICED_KL, _NOTICED * k3(base, observed)):
        return None
    causes = [
        CandidateCause(name, text, side, k3(replay(side).logprobs(frozenset(PARTS)), observed))
        for name, text, side in _candidates(trainer, sampler)
    ]
    best = min((*_shifted(modelled, observed, response_lens), *causes), key=lambda cause: cause.residual, default=None)
    if best is not None and best.residual <= (1.0 - _EXPLAINS) * residual:
        return best
    return CandidateCause(
        "",
        f"What the sampler reports is not what its description gives (KL {residual:.2e} a token), and no known fault "
        "explains it: compare the checksums of the weights, and how the engine aligns tokens and logprobs",
        None,
        residual,
    )


def _candidates(trainer: Side, sampler: Side) -> Iterator[tuple[str, str, Side]]:
    """(name, sentence, the sampler with that fault)."""
    one = "The sampler's K and V were quantized with the scale 1: scales were left out or lost on the way"
    if sampler.kv_scale is None:
        yield "kv_scale_1", one, dataclasses.replace(sampler, kv_scale=1.0)
    for recipe in map(get_recipe, _QUANTIZED):
        head = f"The sampler's lm_head is quantized ({recipe.name}): leave it in high precision"
        yield "quantized_head", head, dataclasses.replace(sampler, head_recipe=recipe)
        if sampler.model.config.num_experts:
            router = f"The sampler's routers are quantized ({recipe.name}): leave them in high precision"
            yield "quantized_router", router, dataclasses.replace(sampler, router_recipe=recipe)
    for temperature in {1.0, trainer.temperature} - {sampler.temperature}:
        text = f"The sampler's logprobs are of temperature {temperature:g} instead of {sampler.temperature:g}"
        yield "temperature", text, dataclasses.replace(sampler, temperature=temperature)
    numerics = sampler.model.numerics
    if numerics.recipe.is_fp8:
        plain = _in_high_precision(sampler)
        if plain is not None:
            yield "not_quantized", "The sampler's linears are not quantized, though they are said to be", plain


def _in_high_precision(sampler: Side) -> Side | None:
    """The sampler with bf16 linears; None where it has codes alone."""
    numerics = dataclasses.replace(sampler.model.numerics, recipe=get_recipe("bf16"))
    try:
        model = share_weights(sampler.model, Numerics())
        model.set_numerics(numerics)
    except OctavoError:
        return None
    model.kv_table = sampler.model.kv_table
    return dataclasses.replace(sampler, model=model)


def _shifted(modelled: torch.Tensor, observed: torch.Tensor, response_lens: list[int]) -> Iterator[CandidateCause]:
    """Reports that are one token early or late."""
    pairs = list(zip(modelled.split(response_lens), observed.split(response_lens), strict=True))
    for words, ours, theirs in (
        ("of the token before", slice(None, -1), slice(1, None)),
        ("of the token after", slice(1, None), slice(None, -1)),
    ):
        a, b = (torch.cat([pair[k][part] for pair in pairs]) for k, part in ((0, ours), (1, theirs)))
        if a.numel():
            text = f"Each logprob that the sampler reports is that {words}: tokens and logprobs are off by one"
            yield CandidateCause("off_by_one", text, None, k3(a, b))


def k3(trainer_logprobs: torch.Tensor, rollout_logprobs: torch.Tensor) -> float:
    """The k3 estimate of KL(rollout || trainer) in nats a token: mean of ratio - 1 - log ratio, both [tokens]."""
    d = (trainer_logprobs.double() - rollout_logprobs.double()).clamp(-LOG_RATIO_BOUND, LOG_RATIO_BOUND)
    return float((torch.expm1(d) - d).mean())
