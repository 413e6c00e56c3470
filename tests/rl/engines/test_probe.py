"""The scoring probe: right logprobs pass, and each way of being wrong is named."""

import dataclasses
from pathlib import Path

import pytest
import torch

from octavo.models import Decoder
from octavo.numerics import Numerics, get_recipe
from octavo.rl.engines import ProbeError
from octavo.rl.engines.embedded import EmbeddedEngine
from octavo.rl.engines.probe import LogprobProbe
from octavo.rl.learner import score_rollouts
from octavo.rl.refit import share_weights
from octavo.rl.rollout import generate_rollouts
from octavo.rl.rollout_batch import Rollouts
from octavo.serve import LLM
from tests.integrations.rollout.conftest import PROMPTS, TASK, make_policy
from tests.rl.conftest import Policy, nudge

TEMPERATURE = 0.6


@pytest.fixture
def lively(tmp_path: Path) -> Policy:
    """A policy whose logprobs differ from token to token, as trained ones do; tied heads would repeat a token."""
    model, tokenizer = make_policy(tmp_path)
    with torch.no_grad():
        for name, param in model.named_parameters():
            if param.dim() == 2:
                param.mul_(0.7 if "embed" in name else 3.0)
    model.mark_weights_updated()
    return model, tokenizer


def sample(policy: Policy, temperature: float = TEMPERATURE) -> Rollouts:
    llm = LLM(policy[0], tokenizer=policy[1], max_num_seqs=8)
    return generate_rollouts(
        EmbeddedEngine(llm), TASK, PROMPTS, samples_per_prompt=4, max_tokens=8, temperature=temperature
    )


def probe(model: Decoder, temperature: float = TEMPERATURE, tolerance: float = 0.5) -> LogprobProbe:
    return LogprobProbe(model, num_sequences=6, temperature=temperature, tolerance=tolerance)


def fault(it: LogprobProbe, rollouts: Rollouts) -> str:
    with pytest.raises(ProbeError) as caught:
        it.check(rollouts)
    return caught.value.fault


def with_logprobs(rollouts: Rollouts, logprobs: torch.Tensor) -> Rollouts:
    return dataclasses.replace(rollouts, rollout_logprobs=logprobs)


def test_right_logprobs_pass_to_the_bit(lively: Policy) -> None:
    assert probe(lively[0]).check(sample(lively)) == 0.0


def test_another_engines_rounding_passes(lively: Policy) -> None:
    bf16 = share_weights(lively[0], Numerics())
    for temperature in (TEMPERATURE, 1.0):
        difference = probe(bf16, temperature).check(sample(lively, temperature))
        assert 0.0 < difference < 0.2
    fp8 = share_weights(lively[0], Numerics(get_recipe("rowwise"), "fp8"))
    assert 0.0 < probe(fp8).check(sample(lively)) < 0.2


@pytest.mark.parametrize("places", [1, -1])
def test_logprobs_one_place_off(lively: Policy, places: int) -> None:
    rollouts = sample(lively)
    rows = rollouts.rollout_logprobs.split(rollouts.response_lens)
    shifted = with_logprobs(rollouts, torch.cat([row.roll(places) for row in rows]))
    assert fault(probe(lively[0]), shifted) == "off-by-one logprobs"


def test_temperature_on_one_side(lively: Policy) -> None:
    rollouts = sample(lively)
    plain = with_logprobs(rollouts, score_rollouts(lively[0], rollouts, 1.0, 0))
    for model in (lively[0], share_weights(lively[0], Numerics())):  # of the engine's rounding, and of another
        assert fault(probe(model), plain) == "temperature on one side"


def test_other_weights_and_nan(lively: Policy) -> None:
    rollouts = sample(lively)
    assert fault(probe(lively[0]), with_logprobs(rollouts, rollouts.rollout_logprobs * float("nan"))) == "other weights"
    nudge(lively[0], by=1.0)
    assert fault(probe(lively[0]), rollouts) == "other weights"


def test_one_outlier_among_sure_tokens_is_no_shift(lively: Policy) -> None:
    """The token that a shift would drop must not speak for the shift."""
    rollouts = sample(lively)
    ours = score_rollouts(lively[0], rollouts, TEMPERATURE, 0)
    last = ours.clone()
    last[rollouts.response_lens[0] - 1] -= 1.0
    assert 0.0 < probe(lively[0]).check(with_logprobs(rollouts, last)) < 0.5


def test_none_is_probed_where_none_is_asked_for(lively: Policy) -> None:
    rollouts = sample(lively)
    wrong = with_logprobs(rollouts, rollouts.rollout_logprobs - 100)
    assert LogprobProbe(lively[0], num_sequences=0, temperature=1.0, tolerance=0.1).check(wrong) == 0.0
