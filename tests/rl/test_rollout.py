"""Rollouts: packing, and that parts and shuffles keep every token with its sequence; sampling from a real engine."""

import torch

from octavo.rl.engines.embedded import EmbeddedEngine
from octavo.rl.rollout import generate_rollouts
from octavo.rl.rollout_batch import Rollouts
from octavo.rl.tasks import Arithmetic
from octavo.serve import LLM
from tests.rl.conftest import Policy, make_rollouts

TASK = Arithmetic(num_digits=1, heldout_share=0.3)


def some_rollouts() -> Rollouts:
    fields = {
        "prompts": ["a", "b", "c"],
        "rollout_logprobs": torch.tensor([0.0, 0.1, 1.0, 2.0, 2.1, 2.2]),
        "rewards": torch.tensor([0.0, 1.0, 2.0]),
        "group_ids": torch.tensor([0, 0, 1]),
        "weight_versions": torch.tensor([5, 5, 6, 7, 7, 7]),
    }
    return make_rollouts([2, 1, 3], **fields)


def test_locate_names_sequence_and_position() -> None:
    assert [some_rollouts().locate(token) for token in range(6)] == [(0, 0), (0, 1), (1, 0), (2, 0), (2, 1), (2, 2)]


def test_part_keeps_tokens_with_their_sequences() -> None:
    part = some_rollouts().part(1, 3)
    assert part.prompts == ["b", "c"]
    assert part.num_tokens == 4
    assert part.rollout_logprobs.tolist() == some_rollouts().rollout_logprobs[2:].tolist()
    assert part.weight_versions.tolist() == [6, 7, 7, 7]
    assert part.rewards.tolist() == [1.0, 2.0]


def test_shuffling_keeps_tokens_with_their_sequences() -> None:
    orders = set()
    for seed in range(6):
        shuffled = some_rollouts().shuffled(seed)
        orders.add(tuple(shuffled.prompts))
        for i, prompt in enumerate(shuffled.prompts):
            original = "abc".index(prompt)
            one, same = shuffled.part(i, i + 1), some_rollouts().part(original, original + 1)
            assert one.sequences == same.sequences
            assert torch.equal(one.rollout_logprobs, same.rollout_logprobs)
            assert torch.equal(one.weight_versions, same.weight_versions)
            assert torch.equal(one.group_ids, same.group_ids)
    assert len(orders) > 1


def test_rollouts_of_an_engine(policy: Policy) -> None:
    model, tokenizer = policy
    engine = EmbeddedEngine(LLM(model, tokenizer=tokenizer, max_num_seqs=8, seed=1))
    prompts = TASK.prompts("train", 3, 0)
    first, second = (
        generate_rollouts(engine, TASK, prompts, samples_per_prompt=5, max_tokens=4, temperature=1.0) for _ in range(2)
    )
    assert first.prompts == [prompt for prompt in prompts for _ in range(5)]
    assert first.group_ids.tolist() == [group for group in range(3) for _ in range(5)]
    assert first.rollout_logprobs.shape == first.weight_versions.shape == (first.num_tokens,)
    assert (first.rollout_logprobs < 0).all()
    for prompt, completion, ids, prompt_len, response_len in zip(
        first.prompts, first.completions, first.sequences, first.prompt_lens, first.response_lens, strict=True
    ):
        assert ids[:prompt_len] == tokenizer.encode(prompt)
        assert 1 <= response_len == len(ids) - prompt_len <= 4
        assert completion == tokenizer.decode(ids[prompt_len:])
    assert first.sequences != second.sequences  # the engine's noise is fresh at each call


def test_the_end_character_ends_a_completion_and_stays_in_it(policy: Policy) -> None:
    model, tokenizer = policy
    engine = EmbeddedEngine(LLM(model, tokenizer=tokenizer, seed=0))
    rollouts = generate_rollouts(engine, TASK, ["1+1="], samples_per_prompt=64, max_tokens=6, temperature=1.0)
    ended = [text for text, done in zip(rollouts.completions, rollouts.is_finished, strict=True) if done]
    assert any(text.endswith(TASK.end) for text in ended)
    assert all(text.count(TASK.end) == text.endswith(TASK.end) for text in rollouts.completions)
