"""Router replay: the engine tells where each token went, the trainer sends it there, and says where it would not."""

import dataclasses
from pathlib import Path
from typing import Any

import pytest
import torch

from octavo.errors import ConfigError
from octavo.models import Decoder, sequence_logprobs
from octavo.nn.router_watch import sparse_blocks
from octavo.rl.config import RLConfig
from octavo.rl.engines.build import build_engine
from octavo.rl.engines.config import EngineSection
from octavo.rl.learner import response_logprobs
from octavo.rl.rollout import generate_rollouts
from octavo.rl.rollout_batch import Rollouts
from octavo.rl.router_replay import RouterReplay
from octavo.rl.tasks import StepResult
from octavo.run.sections import ModelSection
from octavo.serve import LLM, SamplingParams
from octavo.weights.errors import EngineAnswerError
from tests.rl.test_loop import EASY, EasyTask, run
from tests.rl.test_moe import moe_config, moe_policy
from tests.serve.random_models import make_model, random_prompts

INEXACT: dict[str, Any] = {
    "exact": False, "router_replay": True, "rollout": {"recipe": "blockwise"}, "correction": {"kind": "token_tis"},
}  # fmt: skip


def inexact_config(directory: Path, trainer: dict[str, Any] | None = None, **sections: Any) -> RLConfig:
    return moe_config(directory, trainer={"recipe": "bf16", "steps": 2, **(trainer or {})}, **{**INEXACT, **sections})


def trainer_choices(model: Decoder, sequences: list[list[int]]) -> list[torch.Tensor]:
    """The experts of each sequence's tokens in one packed forward pass: [len - 1, L, S]."""
    found: list[torch.Tensor] = []
    for block in sparse_blocks(model):
        block.recorder = found.append
    with torch.no_grad():
        sequence_logprobs(model, sequences)
    for block in sparse_blocks(model):
        block.recorder = None
    return list(torch.stack(found, dim=1).cpu().split([len(ids) - 1 for ids in sequences]))


@pytest.mark.parametrize("ahead", [False, True], ids=["step by step", "ahead"])
def test_the_engine_returns_where_each_token_went(ahead: bool, device: torch.device) -> None:
    """Exact numerics as the oracle: prefixes shared, prompts in chunks, sequences preempted, others' pages reused."""
    model = make_model("qwen3_moe", device=device, num_experts=4)
    limits = {"max_num_seqs": 4, "num_kv_pages": 9, "max_num_batched_tokens": 48, "plan_known_lengths": False}
    llm = LLM(model, async_scheduling=ahead, enable_return_routed_experts=True, **limits)  # type: ignore[arg-type]
    outputs = llm.generate(random_prompts(6), SamplingParams(n=2, max_tokens=16, ignore_eos=True, logprobs=0))
    assert llm.stats.num_preemptions > 0 and llm.stats.num_prefix_hit_tokens > 0
    samples = [(out.prompt_token_ids, sample) for out in outputs for sample in out.outputs]
    expected = trainer_choices(model, [prompt + sample.token_ids for prompt, sample in samples])
    for (prompt, sample), ours in zip(samples, expected, strict=True):
        found = sample.routed_experts
        assert found is not None and found.dtype == torch.uint8
        assert found.shape == (len(prompt) + len(sample.token_ids) - 1, 2, 3)
        assert torch.equal(found.long(), ours)
    assert all(block.recorder is None for block in sparse_blocks(model))


def test_choices_survive_sleep_and_are_not_there_unasked() -> None:
    model = make_model("qwen3_moe")
    params = SamplingParams(max_tokens=4, temperature=0.0, ignore_eos=True)
    llm = LLM(model, max_num_seqs=2, num_kv_pages=4, enable_return_routed_experts=True)
    before = llm.generate(random_prompts(1), params)[0].outputs[0].routed_experts
    llm.engine.sleep()
    assert llm.engine.model_runner.choices is not None and llm.engine.model_runner.choices.table.shape[1] == 1
    llm.engine.wake()
    after = llm.generate(random_prompts(1), params)[0].outputs[0].routed_experts
    assert before is not None and after is not None and torch.equal(before, after)
    plain = LLM(model, max_num_seqs=2, num_kv_pages=4).generate(random_prompts(1), params)[0]
    assert plain.outputs[0].routed_experts is None
    with pytest.raises(ConfigError, match=r"enable_return_routed_experts .* this model has none"):
        LLM(make_model("qwen3"), num_kv_pages=4, enable_return_routed_experts=True)


@pytest.mark.parametrize(
    ("trainer", "asynchronous"),
    [({}, {}), ({"minibatches": 2, "micro_batch_sequences": 5}, {}), ({}, {"max_policy_lag": 1})],
    ids=["one batch", "minibatches", "asynchronous"],
)
def test_a_run_replays(tmp_path: Path, trainer: dict[str, Any], asynchronous: dict[str, Any]) -> None:
    config = inexact_config(tmp_path, trainer, asynchronous=asynchronous)
    model, tokenizer = moe_policy(config)
    result = run(config, model=model, tokenizer=tokenizer)
    for row in result.history:
        assert 0.0 < row["router_replay/flipped_choices_share"] <= row["router_replay/flipped_tokens_share"] < 1.0
        assert row["mismatch/logprob_abs_diff_max"] > 0.0
        assert row["actor/grad_norm"] > 0.0
    assert all(block.replay is None for block in sparse_blocks(model))
    last = result.last_rollouts
    assert [len(x) for x in last.routed_experts] == [len(ids) - 1 for ids in last.sequences]


def test_a_dense_policy_is_refused_before_its_warm_start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("octavo.rl.policy.warm_up", lambda *_, **__: pytest.fail("a warm start began"))
    with pytest.raises(ConfigError, match="this policy has none; leave it out"):
        run(inexact_config(tmp_path).model_copy(update={"model": ModelSection()}))


def test_the_trainer_computes_with_the_samplers_choices(tmp_path: Path) -> None:
    """One difference alone: the engine's router is another. With its choices the trainer's mismatch goes down."""
    config = inexact_config(tmp_path, rollout={"recipe": "bf16", "kv_cache_dtype": "bf16"})
    model, tokenizer = moe_policy(config)
    sampler = moe_policy(config)[0]
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for block in sparse_blocks(sampler):
            block.gate.weight.add_(0.05 * torch.randn(block.gate.weight.shape, generator=generator))
    rollouts = sample(config, sampler, tokenizer)
    replay = RouterReplay(model)
    alone = response_logprobs(model, rollouts, 1.0)
    with replay.of(rollouts):
        replayed = response_logprobs(model, rollouts, 1.0)
        replayed.sum().backward()
    flipped = replay.metrics()["router_replay/flipped_tokens_share"]
    assert 0.05 < flipped < 0.9
    gaps = [float((x.detach() - rollouts.rollout_logprobs).abs().mean()) for x in (alone, replayed)]
    assert gaps[1] < 0.7 * gaps[0]
    for block in sparse_blocks(model):
        assert block.gate.weight.grad is not None and block.gate.weight.grad.abs().max() > 0


def test_choices_that_are_the_trainers_own_change_nothing(tmp_path: Path) -> None:
    config = inexact_config(tmp_path)
    model, tokenizer = moe_policy(config)
    rollouts = sample(config, model, tokenizer)
    rollouts = dataclasses.replace(rollouts, routed_experts=trainer_choices(model, rollouts.sequences))
    replay = RouterReplay(model)
    with replay.of(rollouts, is_counted=False):
        response_logprobs(model, rollouts, 1.0)
    assert replay.metrics() == {}
    with replay.of(rollouts):
        replayed = response_logprobs(model, rollouts, 1.0)
    assert torch.equal(replayed, response_logprobs(model, rollouts, 1.0))
    assert replay.metrics() == {"router_replay/flipped_tokens_share": 0.0, "router_replay/flipped_choices_share": 0.0}
    other = rollouts.routed_experts[0].clone()
    unused = next(e for e in range(8) if e not in other[0, 1])
    other[0, 1, 0], other[1, 1] = unused, other[1, 1].flip(0)  # one choice flipped; an order alone is none
    rollouts = dataclasses.replace(rollouts, routed_experts=[other, *rollouts.routed_experts[1:]])
    with replay.of(rollouts):
        changed = response_logprobs(model, rollouts, 1.0)
    num_pairs = 2 * sum(len(ids) - 1 for ids in rollouts.sequences)
    found = replay.metrics()
    assert found["router_replay/flipped_tokens_share"] == pytest.approx(1 / num_pairs)
    assert found["router_replay/flipped_choices_share"] == pytest.approx(1 / (2 * num_pairs))
    assert torch.equal(changed[rollouts.response_lens[0] :], replayed[rollouts.response_lens[0] :])


def test_choices_follow_their_sequences(tmp_path: Path) -> None:
    config = inexact_config(tmp_path)
    rollouts = sample(config, *moe_policy(config))
    of = {id(experts): ids for experts, ids in zip(rollouts.routed_experts, rollouts.sequences, strict=True)}
    informative, equal = rollouts.split_groups()
    groups = Rollouts.join((informative + equal)[::-1])
    for other in (rollouts.shuffled(3), rollouts.part(5, 9), groups):
        assert len(other.routed_experts) == len(other)
        for experts, ids in zip(other.routed_experts, other.sequences, strict=True):
            assert of[id(experts)] == ids


class TwoTurns(EasyTask):
    """An environment that asks another question after the first answer."""

    max_turns, max_prompt_tokens = 3, 64

    def environment(self, prompt: str) -> "TwoTurns":
        self.prompt = prompt
        return self

    def reset(self) -> list[dict[str, str]]:
        return [{"role": "user", "content": self.prompt}]

    def step(self, text: str) -> StepResult:
        return StepResult("1+1=", float(len(text)))


@pytest.mark.parametrize("max_tokens", [4, 40])
def test_choices_of_several_turns(tmp_path: Path, max_tokens: int) -> None:
    """Exact numerics as the oracle: turns cut to what room is left, the environment's tokens, the last one's end."""
    config = moe_config(tmp_path)
    model, tokenizer = moe_policy(config)
    model.set_numerics(config.trainer_numerics)
    with torch.no_grad():  # a policy that ends its turns
        model.embed_tokens.weight[tokenizer.encode(EASY.end)[0]] *= 4.0
    model.mark_weights_updated()
    rollouts = sample(config, model, tokenizer, TwoTurns(num_digits=1, heldout_share=0.3), max_tokens)
    assert any(not all(mask) for mask in rollouts.is_sampled)
    for ours, theirs in zip(trainer_choices(model, rollouts.sequences), rollouts.routed_experts, strict=True):
        assert torch.equal(ours, theirs.long())


def sample(config: RLConfig, model: Decoder, tokenizer: Any, task: Any = EASY, max_tokens: int = 6) -> Rollouts:
    engine = build_engine(config.engine, model, tokenizer, max_num_seqs=16, seed=0, router_replay=True)
    prompts = EASY.prompts("train", 4, 1)
    return generate_rollouts(engine, task, prompts, samples_per_prompt=4, max_tokens=max_tokens, temperature=1.0)


BAD = {
    "none": (lambda x: [], "0 of 16 sequences came with the experts"),
    "short": (lambda x: [x[0][:-1], *x[1:]], r"sequence 0 has \d+ tokens; experts of shape"),
    "outside": (lambda x: [x[0].clone().fill_(9), *x[1:]], r"different ones of 0 to 7; the engine sent \d to 9"),
    "twice": (lambda x: [x[0].clone().fill_(1), *x[1:]], "one of them twice"),
}


@pytest.mark.parametrize("fault", BAD)
def test_choices_that_do_not_belong_are_refused(tmp_path: Path, fault: str) -> None:
    damage, message = BAD[fault]
    config = inexact_config(tmp_path)
    model, tokenizer = moe_policy(config)
    rollouts = sample(config, model, tokenizer)
    rollouts = dataclasses.replace(rollouts, routed_experts=damage(rollouts.routed_experts))
    with pytest.raises(EngineAnswerError, match=message), RouterReplay(model).of(rollouts):
        pass


def test_another_batch_under_a_replay_is_refused(tmp_path: Path) -> None:
    config = inexact_config(tmp_path)
    model, tokenizer = moe_policy(config)
    rollouts = sample(config, model, tokenizer)
    with pytest.raises(EngineAnswerError, match="the trainer's batch has"), RouterReplay(model).of(rollouts):
        response_logprobs(model, rollouts.part(0, 3), 1.0)


def test_what_cannot_be_replayed_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="nothing to do under exact = true"):
        moe_config(tmp_path, router_replay=True)
    remote = {"name": "vllm", "url": "http://127.0.0.1:1", "weights_dir": str(tmp_path)}
    with pytest.raises(ValueError, match=r"engine\.name='vllm' does not return"):
        inexact_config(tmp_path, engine=remote)
    config = inexact_config(tmp_path)
    model, tokenizer = moe_policy(config)
    with pytest.raises(ConfigError, match=r"engine\.name='vllm' does not return"):
        build_engine(EngineSection(**remote), model, tokenizer, max_num_seqs=1, seed=0, router_replay=True)
