"""What the learner scores and steps with, on rollouts of random tokens; tests/rl/test_loop.py has it learn."""

import copy
from pathlib import Path
from typing import Any

import pytest
import torch

from octavo.distributed.mesh import Mesh
from octavo.errors import ConfigError, ExactnessError
from octavo.models import Decoder, sequence_logprobs
from octavo.nn.weights.write_watch import WriteWatch
from octavo.rl import learner
from octavo.rl.config import RLConfig
from octavo.rl.correction import CorrectionSection
from octavo.rl.learner import Learner, Update
from octavo.rl.refit import share_weights
from octavo.rl.rollout_batch import Rollouts
from octavo.run.optimizer import MasterAdamW
from tests.rl.conftest import Policy, make_rollouts, tiny_config

TEMPERATURE = 0.7
LENS, ADVANTAGES = [3, 1, 4, 2], [1.0, -1.0, 0.5, -0.5]


def trainer_config(tmp_path: Path, **trainer: Any) -> RLConfig:
    """Of a bf16 trainer that need not agree with anybody."""
    rollout = {"temperature": TEMPERATURE, "recipe": "bf16", "kv_cache_dtype": "bf16"}
    trainer = {"recipe": "bf16", "minibatches": 2, **trainer}
    return tiny_config(tmp_path, exact=False, rollout=rollout, trainer=trainer, algorithm={"kl_coef": 0.1})


def logprobs(model: Decoder, rollouts: Rollouts) -> torch.Tensor:
    """Of the response tokens at the rollout's temperature."""
    with torch.no_grad():
        return torch.cat(sequence_logprobs(model, rollouts.sequences, TEMPERATURE, prompt_lens=rollouts.prompt_lens))


def random_rollouts(model: Decoder) -> Rollouts:
    gen = torch.Generator().manual_seed(0)
    sequences = [torch.randint(model.config.vocab_size, (2 + n,), generator=gen).tolist() for n in LENS]
    rollouts = make_rollouts(LENS, sequences=sequences)
    rollouts.rollout_logprobs.copy_(logprobs(model, rollouts))
    return rollouts


def sampled(model: Decoder) -> Rollouts:
    """Rollouts whose logprobs are the model's at temperature 1, in the numerics of exact mode."""
    rollouts = random_rollouts(model)
    rollouts.rollout_logprobs.copy_(
        torch.cat(sequence_logprobs(model, rollouts.sequences, prompt_lens=rollouts.prompt_lens)).detach()
    )
    return rollouts


def learn(it: Learner, rollouts: Rollouts) -> Update:
    return it.learn(rollouts, torch.tensor(ADVANTAGES), 1)


@pytest.mark.parametrize("minibatches", [1, 2])
def test_every_logprob_is_of_the_rollout_s_temperature(tmp_path: Path, policy: Policy, minibatches: int) -> None:
    """Those of the loss, of the policy before the step (of two minibatches), and of the reference policy."""
    model, _ = policy
    config = trainer_config(tmp_path, minibatches=minibatches, lr_warmup_steps=10**30)  # weights stay
    rollouts = random_rollouts(model)
    update = learn(Learner(model, config, reference=share_weights(model, model.numerics)), rollouts)
    expected = logprobs(model, rollouts)
    torch.testing.assert_close(update.trainer_logprobs, expected)
    plain = torch.cat(sequence_logprobs(model, rollouts.sequences, prompt_lens=rollouts.prompt_lens))
    assert (plain - expected).abs().max() > 0.01
    assert update.metrics["actor/kl_loss"] == pytest.approx(0.0, abs=1e-9)
    assert update.metrics["actor/ppo_kl"] == pytest.approx(0.0, abs=1e-6)


def test_exact_mode_scores_a_whole_step_every_n_steps(
    tmp_path: Path, policy: Policy, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Steps 1 and 4 of 5; the others compare their first minibatch, and all weights are those of scoring every step."""
    scored: list[tuple[int, int]] = []
    real = learner.score_rollouts

    def count(model: Decoder, rollouts: Rollouts, *rest: Any, **kwargs: Any) -> torch.Tensor:
        scored.append((step, len(rollouts)))
        return real(model, rollouts, *rest, **kwargs)

    monkeypatch.setattr(learner, "score_rollouts", count)
    found = {}
    for every in (1, 3, 0):
        scored.clear()
        it = Learner(
            copy.deepcopy(policy[0]), tiny_config(tmp_path, trainer={"minibatches": 2, "check_exact_every": every})
        )
        shares = []
        for step in range(1, 6):
            rollouts = sampled(it.model)
            update = it.learn(rollouts, torch.tensor(ADVANTAGES), step)
            shares.append(update.metrics["mismatch/tokens_checked_share"])
            assert torch.equal(update.trainer_logprobs, rollouts.rollout_logprobs)
        found[every] = list(it.model.state_dict().values()), [*scored], shares
    assert [steps for _, steps, _ in found.values()] == [[(step, 4) for step in range(1, 6)], [(1, 4), (4, 4)], []]
    assert [shares for *_, shares in found.values()] == [[1.0] * 5, [1.0, 0.4, 0.4, 1.0, 0.4], [0.4] * 5]
    for weights, *_ in found.values():
        assert all(torch.equal(a, b) for a, b in zip(weights, found[1][0], strict=True))
    scored.clear()
    one = Learner(policy[0], tiny_config(tmp_path, trainer={"minibatches": 1, "check_exact_every": 1}))
    update = one.learn(sampled(one.model), torch.tensor(ADVANTAGES), 1)
    assert not scored and update.metrics["mismatch/tokens_checked_share"] == 1.0  # by the minibatch itself


def test_mismatch_is_measured_before_the_device_is_waited_for(
    tmp_path: Path, policy: Policy, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The gradients' norm is read from it, once a minibatch; a GPU then still runs the backward."""
    order: list[str] = []
    mismatch, clip = learner.mismatch_metrics, MasterAdamW.clip_gradients

    def measure(*args: Any) -> dict[str, float]:
        order.append("mismatch")
        return mismatch(*args)

    def wait(optimizer: MasterAdamW, max_norm: float) -> torch.Tensor:
        order.append("norm")
        return clip(optimizer, max_norm)

    monkeypatch.setattr(learner, "mismatch_metrics", measure)
    monkeypatch.setattr(MasterAdamW, "clip_gradients", wait)
    model, _ = policy
    config = trainer_config(tmp_path)
    learn(Learner(model, config, reference=share_weights(model, model.numerics)), random_rollouts(model))
    assert order == ["mismatch", "norm", "norm"]


def test_ranks_that_would_wait_for_each_other_are_refused(tmp_path: Path, policy: Policy) -> None:
    """Four sequences in two minibatches are one micro-batch each, or two of one sequence."""
    mesh = Mesh(0, 2, 1, 2, torch.device("cpu"))
    it = Learner(policy[0], tiny_config(tmp_path, trainer={"minibatches": 2}), mesh=mesh)
    with pytest.raises(ConfigError, match=r"got 1 of 2 sequences each for 2.*set trainer\.micro_batch_sequences to 1"):
        it.learn(sampled(it.model), torch.tensor(ADVANTAGES), 1)
    assert it.num_updates_begun == 0


def test_a_first_minibatch_without_tokens_leaves_the_check_to_the_whole_step(tmp_path: Path, policy: Policy) -> None:
    """As of episodes that ended before the policy wrote anything."""
    it = Learner(policy[0], tiny_config(tmp_path, trainer={"minibatches": 2, "check_exact_every": 0}))
    rollouts = make_rollouts([0, 0, 3, 2])
    rollouts.rollout_logprobs.copy_(
        torch.cat(sequence_logprobs(it.model, rollouts.sequences, prompt_lens=[2] * 4)).detach()
    )
    assert it.learn(rollouts, torch.tensor(ADVANTAGES), 2).metrics["mismatch/tokens_checked_share"] == 1.0


@pytest.mark.parametrize("sequence", [1, 3], ids=["first minibatch", "second minibatch"])
@pytest.mark.parametrize("step", [1, 2])
def test_what_differs_in_a_checked_minibatch_updates_nothing(
    tmp_path: Path, policy: Policy, step: int, sequence: int
) -> None:
    """Of a step that is compared whole, and of one whose first minibatch alone is."""
    it = Learner(policy[0], tiny_config(tmp_path, trainer={"minibatches": 2, "check_exact_every": 2}))
    rollouts = sampled(it.model)
    token = sum(LENS[:sequence])
    rollouts.rollout_logprobs[token] = rollouts.rollout_logprobs[token].nextafter(torch.tensor(0.0))
    if step == 2 and sequence == 3:
        it.learn(rollouts, torch.tensor(ADVANTAGES), step)
        assert it.num_updates == 2
        return
    before = [x.clone() for x in it.model.state_dict().values()]
    with pytest.raises(ExactnessError, match=f"step {step}, sequence {sequence} .*position 0 .* 1 of"):
        it.learn(rollouts, torch.tensor(ADVANTAGES), step)
    assert it.num_updates == 0
    assert all(torch.equal(a, b) for a, b in zip(before, it.model.state_dict().values(), strict=True))


def test_the_first_minibatch_is_not_scored_twice(
    tmp_path: Path, policy: Policy, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without exact mode the later ones alone are scored, unless a correction looks at the whole step."""
    scored: list[list[list[int]]] = []
    real = learner.score_rollouts

    def note(model: Decoder, rollouts: Rollouts, *rest: Any, **kwargs: Any) -> torch.Tensor:
        scored.append(rollouts.sequences)
        return real(model, rollouts, *rest, **kwargs)

    monkeypatch.setattr(learner, "score_rollouts", note)
    config = trainer_config(tmp_path, lr_warmup_steps=10**30)  # weights stay
    config = config.model_copy(update={"algorithm": config.algorithm.model_copy(update={"kl_coef": 0.0})})
    rollouts = random_rollouts(policy[0])
    rollouts.rollout_logprobs.sub_(0.25)
    update = learn(Learner(policy[0], config), rollouts)
    torch.testing.assert_close(update.trainer_logprobs, logprobs(policy[0], rollouts))
    assert update.metrics["mismatch/tokens_checked_share"] == 1.0
    assert update.metrics["mismatch/logprob_abs_diff_mean"] == pytest.approx(0.25, abs=1e-5)
    assert update.metrics["actor/ppo_kl"] == pytest.approx(
        0.0, abs=1e-6
    )  # against the trainer's own, not the sampler's
    whole = config.model_copy(update={"correction": CorrectionSection(reject="token", reject_low=0.5, reject_high=2.0)})
    learn(Learner(policy[0], whole), rollouts)
    assert scored == [rollouts.sequences[2:], rollouts.sequences]


def test_the_learning_rate_of_each_update(tmp_path: Path, policy: Policy, monkeypatch: pytest.MonkeyPatch) -> None:
    """Update n of the warm-up's four has n / 4 of it, the first one too; a step of two updates reports their mean."""
    taken: list[float] = []
    real = MasterAdamW.step
    monkeypatch.setattr(MasterAdamW, "step", lambda self, lr: (taken.append(lr), real(self, lr=lr)))
    it = Learner(policy[0], trainer_config(tmp_path, lr_warmup_steps=4, optimizer={"lr": 1e-2, "weight_decay": 0.0}))
    reported = [learn(it, random_rollouts(policy[0])).metrics["actor/lr"] for _ in range(3)]
    assert taken == pytest.approx([0.0025, 0.005, 0.0075, 0.01, 0.01, 0.01])
    assert reported == pytest.approx([0.00375, 0.00875, 0.01])


@pytest.mark.parametrize("is_rejected", [False, True], ids=["all", "one rejected"])
@pytest.mark.parametrize("aggregation", ["token-mean", "seq-mean-token-mean"])
def test_the_loss_is_the_mean_that_the_config_names(
    tmp_path: Path, policy: Policy, aggregation: str, is_rejected: bool
) -> None:
    """Over the tokens that count, however they are cut into micro-batches: all alike, or all sequences alike."""
    config = trainer_config(tmp_path, minibatches=1, micro_batch_sequences=3)
    algorithm = config.algorithm.model_copy(update={"loss_aggregation": aggregation, "kl_coef": 0.0})
    correction = CorrectionSection(reject="token", reject_low=0.5, reject_high=2.0)
    rollouts = random_rollouts(policy[0])
    rollouts.rollout_logprobs[0] -= 3.0 * is_rejected  # the first of its sequence's three
    config = config.model_copy(update={"algorithm": algorithm, "correction": correction})
    update = learn(Learner(policy[0], config), rollouts)
    counts = [3 - is_rejected, *LENS[1:]]
    parts = [1 / 4] * 4 if aggregation != "token-mean" else [count / sum(counts) for count in counts]
    expected = -sum(part * advantage for part, advantage in zip(parts, ADVANTAGES, strict=True))
    assert update.metrics["actor/pg_loss"] == pytest.approx(expected, abs=1e-6)


def test_host_math_beside_a_gpu_takes_one_thread_and_gives_the_others_back() -> None:
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        with learner._host_math(torch.device("cpu")):
            assert torch.get_num_threads() == 2
        with learner._host_math(torch.device("cuda")):
            assert torch.get_num_threads() == 1
        assert torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(before)


def test_no_sums_are_taken_of_weights_that_only_the_learner_writes(
    policy: Policy, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = trainer_config(tmp_path, recipe="blockwise")
    model, _ = policy
    model.set_numerics(config.trainer_numerics)
    it, sampler = Learner(model, config), share_weights(model, config.trainer_numerics)
    monkeypatch.setattr(WriteWatch, "_sum", lambda *_: pytest.fail("a sum was taken"))
    rollouts = sampled(model)
    logprobs(sampler, rollouts)
    logprobs(sampler, rollouts)
    learn(it, rollouts)
    assert it.num_updates == 2
