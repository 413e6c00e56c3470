"""The loop on a tiny policy: exact steps have no mismatch, FP8 rollouts of a bf16 trainer have one that TIS sees."""

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch

from octavo.errors import ConfigError, ExactnessError, NonFiniteError
from octavo.models import Decoder, load_model, load_tokenizer
from octavo.rl import loop
from octavo.rl.config import RLConfig
from octavo.rl.history import StepRow
from octavo.rl.learner import Learner
from octavo.rl.rollout_batch import Rollouts
from octavo.rl.tasks import Arithmetic
from octavo.run.folder_lock import locked_folder
from octavo.run.optimizer import MasterAdamW
from tests.rl.conftest import Policy, tiny_config

ROOT = Path(__file__).parent.parent.parent


class EasyTask(Arithmetic):
    """Rewards the share of digits in a completion, so that an untrained policy's groups differ."""

    def score(self, prompt: str, completion: str) -> float:
        return sum(char.isdigit() for char in completion) / 4


EASY = EasyTask(num_digits=1, heldout_share=0.3)


def run(config: RLConfig, **kwargs: Any) -> loop.RLResult:
    return loop.run(config, progress=False, task=kwargs.pop("task", EASY), **kwargs)


def weights_of(model: Decoder) -> dict[str, torch.Tensor]:
    return {name: param.detach().clone() for name, param in model.named_parameters()}


@pytest.mark.parametrize("recipe", ["blockwise", "rowwise", "bf16"])
@pytest.mark.parametrize("kv_cache_dtype", ["fp8", "bf16"])
def test_exact_steps_have_no_mismatch_and_learn(
    tmp_path: Path, policy: Policy, recipe: str, kv_cache_dtype: str
) -> None:
    model, tokenizer = policy
    before = weights_of(model)
    config = tiny_config(tmp_path, trainer={"recipe": recipe}, rollout={"kv_cache_dtype": kv_cache_dtype})
    result = run(config, model=model, tokenizer=tokenizer)
    assert len(result.history) == 3
    for row in result.history:
        assert row["mismatch/logprob_abs_diff_max"] == 0.0
        assert row["rollout_corr/k3_kl"] == 0.0
        assert row["rollout_corr/rollout_is_eff_sample_size"] == 1.0
        assert row["mismatch/policy_lag_max"] == 0.0
        assert row["actor/grad_norm"] > 0
    assert all(not torch.equal(before[name], param) for name, param in model.named_parameters() if param.dim() == 2)
    versions = [row["refit/weight_version"] for row in result.history]
    assert versions == [versions[0], versions[0] + 1, versions[0] + 2]
    assert (result.history[0]["refit/bytes"] > 0) == (recipe != "bf16")


def test_exact_with_minibatches_micro_batches_kl_and_entropy(tmp_path: Path, policy: Policy) -> None:
    trainer = {"minibatches": 2, "micro_batch_sequences": 5}
    config = tiny_config(tmp_path, trainer=trainer, algorithm={"kl_coef": 0.1, "entropy_coef": 0.01})
    result = run(config, model=policy[0], tokenizer=policy[1])
    assert [row["mismatch/logprob_abs_diff_max"] for row in result.history] == [0.0] * 3
    assert result.history[0]["actor/ppo_kl"] != 0.0  # the second minibatch's policy is not the first's
    assert result.history[1]["actor/kl_loss"] > 0.0


def inexact_config(tmp_path: Path, **correction: Any) -> RLConfig:
    return tiny_config(
        tmp_path,
        exact=False,
        trainer={"recipe": "bf16"},
        rollout={"recipe": "blockwise", "kv_cache_dtype": "fp8"},
        correction={"kind": "token_tis", **correction},
    )


def test_fp8_rollouts_of_a_bf16_trainer_need_and_get_weights(tmp_path: Path, policy: Policy) -> None:
    result = run(inexact_config(tmp_path, effect_every=2), model=policy[0], tokenizer=policy[1])
    for row in result.history:
        assert row["mismatch/logprob_abs_diff_max"] > 0.0
        assert row["rollout_corr/k3_kl"] > 0.0
        assert 0.0 < row["rollout_corr/rollout_is_min"] < 1.0 < row["rollout_corr/rollout_is_max"]
        assert 0.0 < row["correction/weight_mean"] <= 2.0
        assert 0.0 < row["rollout_corr/rollout_is_eff_sample_size"] < 1.0
    assert ["correction/grad_cosine" in row.metrics for row in result.history] == [True, False, True]
    assert result.history[0]["correction/grad_cosine"] > 0.9
    assert result.history[0]["correction/grad_relative_change"] > 0.0
    assert result.model.numerics.recipe.name == "bf16"


def test_the_correction_changes_the_update_not_the_first_rollouts(
    tmp_path: Path, config: RLConfig, caplog: pytest.LogCaptureFixture
) -> None:
    rollouts, weights = [], []
    for kind in ("none", "token_tis"):
        model, tokenizer = loop.build_policy(config, EASY)
        trainer = config.trainer.model_copy(update={"steps": 1, "recipe": "bf16"})
        one_step = inexact_config(tmp_path, kind=kind).model_copy(update={"trainer": trainer})
        rollouts.append(run(one_step, model=model, tokenizer=tokenizer).last_rollouts)
        weights.append(weights_of(model))
    assert rollouts[0].sequences == rollouts[1].sequences
    assert caplog.text.count("nothing weighs the difference") == 1  # of the two runs, which are quiet
    assert any(not torch.equal(weights[0][name], weights[1][name]) for name in weights[0])


def test_a_tampered_logprob_is_caught_and_nothing_is_updated(
    config: RLConfig, policy: Policy, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, tokenizer = policy
    learn = Learner.learn
    tampered: dict[str, Any] = {}

    def tamper(self: Learner, rollouts: Rollouts, advantages: torch.Tensor, step: int) -> Any:
        if step == 2:
            token = rollouts.response_lens[0] + 1
            old = rollouts.rollout_logprobs[token].clone()
            rollouts.rollout_logprobs[token] = torch.nextafter(old, torch.tensor(0.0))
            tampered.update(weights=weights_of(model), rollouts=rollouts, token=token, trainer=old)
        return learn(self, rollouts, advantages, step)

    monkeypatch.setattr(Learner, "learn", tamper)
    with pytest.raises(ExactnessError) as caught:
        run(config, model=model, tokenizer=tokenizer)
    rollouts, token = tampered["rollouts"], tampered["token"]
    sequence, position = rollouts.locate(token)
    message = str(caught.value)
    assert f"step 2, sequence {sequence} (prompt {rollouts.prompts[sequence]!r}), position {position}" in message
    assert repr(float(tampered["trainer"])) in message
    assert repr(float(rollouts.rollout_logprobs[token])) in message
    assert f"1 of {rollouts.num_tokens} tokens differ" in message
    assert all(torch.equal(tampered["weights"][name], param) for name, param in model.named_parameters())


def test_a_nan_logprob_is_caught(config: RLConfig, policy: Policy, monkeypatch: pytest.MonkeyPatch) -> None:
    learn = Learner.learn

    def spoil(self: Learner, rollouts: Rollouts, *args: Any) -> Any:
        rollouts.rollout_logprobs[0] = math.nan
        return learn(self, rollouts, *args)

    monkeypatch.setattr(Learner, "learn", spoil)
    with pytest.raises(ExactnessError, match="the sampler's nan"):
        run(config, model=policy[0], tokenizer=policy[1])


def test_a_run_leaves_metrics_rows_and_a_checkpoint(tmp_path: Path) -> None:
    rows: list[StepRow] = []
    warmup = {"steps": 2, "check_every": 1, "check_prompts": 8, "batch_size": 8}
    config = tiny_config(tmp_path, warmup=warmup, run={"save": True}, eval={"every": 2})
    result = run(config, on_step=rows.append, task=None)
    assert rows == result.history
    lines = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines] == [1, 2, 3]
    assert lines == [row.as_dict() for row in rows]
    assert ["eval/reward" in row.metrics for row in rows] == [False, True, True]
    assert [step.step for step in result.warmup] == [1, 2]
    assert result.warmup[-1].reward is not None
    assert result.checkpoint is not None
    again, tokenizer = load_model(result.checkpoint), load_tokenizer(result.checkpoint)
    assert tokenizer.vocab_size == result.tokenizer.vocab_size
    saved = weights_of(again)
    assert all(torch.equal(saved[name], param) for name, param in result.model.named_parameters())


def test_a_checkpoint_can_be_reinforced(tmp_path: Path, policy: Policy) -> None:
    from octavo.models import save_model

    save_model(policy[0], tmp_path / "start", tokenizer=policy[1])
    config = tiny_config(tmp_path / "rl", model={"path": str(tmp_path / "start")}, trainer={"steps": 1})
    assert run(config).history[0]["mismatch/logprob_abs_diff_max"] == 0.0


def test_time_limit_ends_a_run_with_an_evaluation(tmp_path: Path, policy: Policy) -> None:
    config = tiny_config(tmp_path, run={"max_seconds": 1e-3}, trainer={"steps": 50})
    result = run(config, model=policy[0], tokenizer=policy[1])
    assert len(result.history) == 1
    assert "eval/reward" in result.history[-1].metrics


def test_a_run_folder_is_one_jobs(config: RLConfig) -> None:
    with locked_folder(config.run.dir), pytest.raises(ConfigError, match=r"run\.dir = .* is used by process"):
        run(config)


def test_no_device_of_that_name_is_said_before_any_work(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"run\.device must be 'cpu', 'cuda' or 'cuda:N', got 'gpu'"):
        run(tiny_config(tmp_path, run={"device": "gpu"}))


def test_a_model_needs_its_tokenizer(config: RLConfig, policy: Policy) -> None:
    with pytest.raises(ConfigError, match="pass tokenizer="):
        run(config, model=policy[0])


def test_a_gradient_that_is_not_finite_updates_nothing(
    config: RLConfig, policy: Policy, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, tokenizer = policy
    before = weights_of(model)
    monkeypatch.setattr(MasterAdamW, "clip_gradients", lambda self, max_norm: torch.tensor(math.inf))
    with pytest.raises(NonFiniteError, match=r"step 1: .* the gradient's norm inf; nothing was updated"):
        run(config, model=model, tokenizer=tokenizer)
    assert all(torch.equal(before[name], param) for name, param in model.named_parameters())


def test_an_infinity_that_fp8_hides_updates_nothing(
    tmp_path: Path, policy: Policy, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of a weight, behind sampling: loss and gradients are finite."""
    model, tokenizer = policy
    learn, before = Learner.learn, {}

    def spoil_and_learn(self: Learner, *args: Any) -> Any:
        with torch.no_grad():
            model.layers[0].mlp.down_proj.weight[1, 2] = torch.inf
        model.mark_weights_updated()
        before.update(weights_of(model))
        return learn(self, *args)

    monkeypatch.setattr(Learner, "learn", spoil_and_learn)
    config = tiny_config(tmp_path, exact=False, correction={"kind": "token_tis"})
    with pytest.raises(NonFiniteError, match=r"layers\.0\.mlp\.down_proj\.weight"):
        run(config, model=model, tokenizer=tokenizer)
    assert all(torch.equal(before[name], param) for name, param in model.named_parameters())


def test_the_command_runs_a_recipe(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    from octavo.cli.rl import command

    sets = "model.hidden_size=32 model.intermediate_size=64 model.num_hidden_layers=1 warmup.steps=2 trainer.steps=2"
    sets += f" rollout.prompts_per_step=2 eval.num_prompts=8 run.tensorboard=false run.dir={tmp_path}"
    command(str(ROOT / "configs" / "rl_arithmetic.toml"), sets.split())
    shown = capfd.readouterr()
    assert "reinforce 2/2" in shown.err
    assert shown.out.split("max |delta logprob|")[1].splitlines()[0].split() == ["\u2502", "0", "\u2502", "0", "\u2502"]
    assert "mean reward (held-out)" in shown.out
    assert (tmp_path / "final" / "config.json").exists()


GEOMETRIC = {"reject": "geometric", "reject_low": 0.99, "reject_high": 1.01}


@pytest.mark.parametrize(
    ("algorithm", "correction"),
    [
        ({"name": "rloo", "policy_loss": "gspo", "clip_low": 3e-4, "clip_high": 4e-4, "clip_c": 0.0}, {}),
        ({"name": "reinforce", "policy_loss": "cispo", "loss_aggregation": "seq-mean-token-sum-norm"}, {}),
        ({"overlong_buffer": 2, "overlong_penalty": 0.5}, {"kind": "sequence_tis", "batch_normalize": True}),
        ({}, {"kind": "icepop", "cap": 5.0, "veto": 1e-4} | GEOMETRIC),
    ],
    ids=["rloo-gspo", "reinforce-cispo", "overlong-sequence", "icepop-geometric"],
)
def test_every_algorithm_and_correction_learns(
    tmp_path: Path, policy: Policy, algorithm: dict[str, Any], correction: dict[str, Any]
) -> None:
    """An FP8 sampler for a bf16 trainer: finite losses, weights that move, and rejection that is reported."""
    model, tokenizer = policy
    before = weights_of(model)
    sections = {"algorithm": algorithm, "correction": correction, "trainer": {"recipe": "bf16"}}
    config = tiny_config(tmp_path, exact=False, rollout={"recipe": "blockwise"}, **sections)
    result = run(config, model=model, tokenizer=tokenizer)
    for row in result.history:
        assert math.isfinite(row["actor/loss"]) and row["actor/grad_norm"] > 0
        assert row["mismatch/logprob_abs_diff_max"] > 0
        if "reject" in correction:
            assert 0 <= row["rollout_corr/rollout_rs_masked_fraction"] < 1
    assert any(not torch.equal(before[name], param) for name, param in model.named_parameters())


def test_dynamic_sampling_fills_a_step_with_groups_that_teach(tmp_path: Path, policy: Policy) -> None:
    model, tokenizer = policy

    class Rare(EasyTask):
        """Only answers to even prompts are rewarded."""

        def score(self, prompt: str, completion: str) -> float:
            return super().score(prompt, completion) if int(prompt[0]) % 2 == 0 else 0.0

    shares = {}
    for filters in (False, True):
        trainer = {"recipe": "blockwise", "steps": 1}
        config = tiny_config(tmp_path / str(filters), algorithm={"filter_groups": filters}, trainer=trainer)
        task = Rare(num_digits=1, heldout_share=0.3)
        (row,) = run(config, model=model, tokenizer=tokenizer, task=task).history
        shares[filters] = row["reward/informative_share"]
        assert (row["rollout/num_gen_batches"] > 1) == filters
    assert shares[True] > shares[False]
