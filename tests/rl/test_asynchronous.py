"""Asynchronous mode: rollouts of older weights within a bound, every token stamped, partial rollouts by policy."""

import dataclasses
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from octavo.errors import ConfigError, DataError
from octavo.models import Decoder, Tokenizer, sequence_logprobs
from octavo.numerics import Numerics, get_recipe
from octavo.rl.asynchronous import AsyncEmbeddedEngine, PolicyLagError, RolloutProducer, own_weights
from octavo.rl.config import RLConfig
from octavo.rl.engines.embedded import EmbeddedEngine
from octavo.rl.engines.protocol import Generation, SamplingSpec
from octavo.rl.rollout import generate_rollouts
from octavo.rl.rollout_batch import Rollouts
from octavo.serve import LLM
from tests.rl.conftest import Policy, nudge, tiny_config
from tests.rl.test_loop import EASY, EasyTask, run, weights_of

PROMPTS = ["1+2=", "3+4=", "5+1="]
SPEC = SamplingSpec(samples_per_prompt=2, max_tokens=6, temperature=1.0)


def async_config(tmp_path: Path, lag: int = 1, **sections: Any) -> RLConfig:
    asynchronous = {"max_policy_lag": lag, **sections.pop("asynchronous", {})}
    fields = {"exact": False, "precision": "linears+kv", "correction": {"kind": "token_tis"}, **sections}
    return tiny_config(tmp_path, asynchronous=asynchronous, **fields)


@pytest.mark.parametrize("partial", ["continue", "drop"])
@pytest.mark.parametrize("lag", [1, 2])
def test_a_run_stays_within_the_bound(tmp_path: Path, policy: Policy, lag: int, partial: str) -> None:
    model, tokenizer = policy
    before = weights_of(model)
    config = async_config(tmp_path, lag, asynchronous={"partial_rollouts": partial}, trainer={"steps": 5})
    result = run(config, model=model, tokenizer=tokenizer)
    assert [row.step for row in result.history] == [1, 2, 3, 4, 5]
    for row in result.history:
        assert 0.0 <= row["async/policy_lag_mean"] <= row["async/policy_lag_max"] <= min(lag, row.step - 1)
        assert row["async/num_steps_ahead"] <= lag
        assert 0.0 < row["correction/weight_mean"] <= 2.0
        assert row["mismatch/policy_lag_max"] == row["async/policy_lag_max"]  # one optimizer step a rollout step
    assert result.history[0]["async/policy_lag_max"] == 0.0
    assert any(not torch.equal(before[name], param) for name, param in model.named_parameters())
    assert not [thread for thread in threading.enumerate() if thread.name == "octavo-rollouts"]


@pytest.mark.parametrize("kind", ["engine", "trainer"])
def test_kv_scales_follow_the_weights(tmp_path: Path, policy: Policy, kind: str) -> None:
    """No stale scale is met, whichever side makes them and however late an update comes."""
    config = async_config(tmp_path, rollout={"kv_scales": kind}, trainer={"steps": 4})
    result = run(config, model=policy[0], tokenizer=policy[1])
    assert len(result.history) == 4
    assert all("kv/num_bf16_layers" in row.metrics for row in result.history)


def test_a_layer_falls_back_under_way(tmp_path: Path, policy: Policy) -> None:
    rollout = {"kv_scales": "_fixed", "kv_fallback_flush_share": 1e-9, "samples_per_prompt": 8}
    result = run(async_config(tmp_path, rollout=rollout), model=policy[0], tokenizer=policy[1])
    assert result.history[-1]["kv/num_bf16_layers"] == 1.0  # in which step depends on what was sampled by then


def make_engine(model: Decoder, tokenizer: Tokenizer, partial: Any) -> AsyncEmbeddedEngine:
    sampler = own_weights(model, Numerics(get_recipe("blockwise"), "fp8", True))
    return AsyncEmbeddedEngine(LLM(sampler, tokenizer=tokenizer, seed=3, async_scheduling=False), partial)


def generate_with_update(
    engine: AsyncEmbeddedEngine, after_steps: int, update: Callable[[], object]
) -> list[Generation]:
    """Sample the prompts, with an update after so many steps of the engine."""
    inner, count = engine.llm.engine.step, 0

    def step() -> Any:
        nonlocal count
        out = inner()
        count += 1
        if count == after_steps:
            thread = threading.Thread(target=update)  # the trainer's thread has its turn between two steps
            thread.start()
            waiting.append(thread)
        return out

    waiting: list[threading.Thread] = []
    engine.llm.engine.step = step  # type: ignore[method-assign]
    found = engine.generate(PROMPTS, SPEC)
    for thread in waiting:
        thread.join()
    return found


def test_a_continued_rollout_has_the_logprobs_of_the_version_that_stamped_each_token(
    policy: Policy,
) -> None:
    model, tokenizer = policy
    engine = make_engine(model, tokenizer, "continue")
    model.set_numerics(engine.llm.model.numerics)
    first = model.weight_version
    scorers = {first: own_weights(model, model.numerics)}
    nudge(model)
    scorers[model.weight_version] = model
    found = generate_with_update(engine, 3, lambda: engine.publish(model, engine.llm.model))
    completions = [(g.prompt_token_ids, c) for g in found for c in g.completions]
    stamps = {version for _, c in completions for version in c.weight_versions}
    assert stamps == {first, model.weight_version}
    for prompt, completion in completions:
        assert completion.weight_versions == sorted(completion.weight_versions)
        scored = {v: sequence_logprobs(m, [prompt + completion.token_ids])[0].tolist() for v, m in scorers.items()}
        for i, version in enumerate(completion.weight_versions):  # K and V of older weights take no part in it
            assert scored[version][len(prompt) - 1 + i] == completion.logprobs[i]
    assert engine.num_restarted == 0


def test_a_dropped_rollout_is_sampled_again_under_the_new_weights(policy: Policy) -> None:
    model, tokenizer = policy
    engine = make_engine(model, tokenizer, "drop")
    nudge(model)
    found = generate_with_update(engine, 3, lambda: engine.publish(model, engine.llm.model))
    assert engine.num_restarted > 0
    versions = [c.weight_versions for g in found for c in g.completions]
    assert all(len(set(each)) == 1 for each in versions)  # no token of a half is left
    assert any(set(each) == {model.weight_version} for each in versions)
    assert all(len(g.completions) == 2 for g in found)


def test_weights_that_are_published_are_the_trainers(policy: Policy) -> None:
    model, tokenizer = policy
    engine = make_engine(model, tokenizer, "continue")
    sampler = engine.llm.model
    kept = weights_of(sampler)
    nudge(model)
    assert all(torch.equal(kept[name], param) for name, param in sampler.named_parameters())  # its own, until then
    report = engine.publish(model, engine.llm.model)
    assert report.weight_version == model.weight_version == sampler.weight_version
    assert report.num_bytes > 0
    theirs = weights_of(model)
    assert all(torch.equal(theirs[name], param) for name, param in sampler.named_parameters())


def some_rollouts(policy: Policy) -> Rollouts:
    llm = LLM(policy[0], tokenizer=policy[1])
    return generate_rollouts(EmbeddedEngine(llm), EASY, PROMPTS, samples_per_prompt=2, max_tokens=3, temperature=1.0)


def test_what_is_too_old_is_not_trained_on(policy: Policy) -> None:
    rollouts = some_rollouts(policy)
    first = int(rollouts.weight_versions[0])
    engine = make_engine(*policy, "continue")
    sampled = {1: rollouts, 2: rollouts, 3: rollouts}
    begun: list[int] = []

    def sample(step: int) -> Rollouts:
        begun.append(step)
        return sampled[step]

    producer = RolloutProducer(sample, engine, first_step=1, last_step=3, max_policy_lag=1, weight_version=first)
    producer.start()
    assert producer.take(1)[1]["async/policy_lag_max"] == 0.0
    assert producer.take(2)[1]["async/policy_lag_max"] == 1.0
    assert begun == [1, 2]  # step 3 waits for an update
    producer.note_published(first + 1)
    with pytest.raises(PolicyLagError, match=r"step 3, sequence 0, position 0 .*sampled 2 updates before its training"):
        producer.take(3)
    producer.close()


def test_a_verifier_that_raises_in_the_thread_stops_the_run_by_name(tmp_path: Path, policy: Policy) -> None:
    class Raising(EasyTask):
        def score(self, prompt: str, completion: str) -> float:
            if threading.current_thread().name == "octavo-rollouts":
                raise ZeroDivisionError("no digits")
            return 0.0

    with pytest.raises(DataError, match="raised ZeroDivisionError: no digits"):
        run(async_config(tmp_path), model=policy[0], tokenizer=policy[1], task=Raising(num_digits=1, heldout_share=0.3))
    assert not [thread for thread in threading.enumerate() if thread.name == "octavo-rollouts"]


def test_a_run_goes_on_from_its_checkpoint(tmp_path: Path) -> None:
    keys = {"run": {"checkpoint_every": 2}}
    run(async_config(tmp_path, trainer={"steps": 2}, **keys))
    result = run(async_config(tmp_path, trainer={"steps": 4}, **keys))
    assert [row.step for row in result.history] == [1, 2, 3, 4]
    assert result.history[2]["async/policy_lag_max"] == 0.0  # what was under way is sampled again


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"exact": True, "precision": ""}, "exact = true promises the sampler's bits at every step"),
        ({"correction": {}}, "weigh them by correction.kind = 'token_tis'"),
        ({"engine": {"name": "octavo-server", "url": "http://127.0.0.1:1"}}, "wants engine.name = 'embedded'"),
    ],
    ids=["exact", "uncorrected", "remote"],
)
def test_what_cannot_be_asynchronous_is_refused(tmp_path: Path, fields: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        async_config(tmp_path, **fields)


def test_dynamic_sampling_goes_with_it(tmp_path: Path, policy: Policy) -> None:
    config = async_config(tmp_path, algorithm={"filter_groups": True, "max_gen_batches": 3}, trainer={"steps": 3})
    result = run(config, model=policy[0], tokenizer=policy[1])
    assert all(1.0 <= row["rollout/num_gen_batches"] <= 3.0 for row in result.history)
    assert dataclasses.is_dataclass(result.last_rollouts)


@pytest.mark.gpu
@pytest.mark.parametrize("partial", ["continue", "drop"])
def test_a_run_on_the_gpu(tmp_path: Path, partial: str) -> None:
    """Sampling and learning on streams of their own: finite numbers, and weights that arrive whole."""
    sizes = {"hidden_size": 128, "intermediate_size": 384, "head_dim": 64, "num_hidden_layers": 2}
    config = async_config(
        tmp_path,
        2,
        model={**tiny_config(tmp_path).model.model_dump(), **sizes},
        asynchronous={"partial_rollouts": partial},
        rollout={"kv_scales": "engine", "max_tokens": 24},
        trainer={"steps": 6},
        run={"device": "cuda"},
    )
    result = run(config)
    assert max(row["async/policy_lag_max"] for row in result.history) <= 2.0
    assert all(row["rollout_corr/k3_kl"] < 0.5 for row in result.history if row["async/policy_lag_max"] == 0.0)
