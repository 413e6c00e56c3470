"""Making rollouts: the engine samples a step's prompts, the task scores what came."""

from collections.abc import Sequence
from typing import Any

import torch

from octavo.distributed.outcome import all_do
from octavo.errors import DataError
from octavo.rl.engines.protocol import Completion, RolloutEngine, SamplingSpec
from octavo.rl.episodes import play_episodes
from octavo.rl.prompts import check_context
from octavo.rl.rollout_batch import Rollouts, checked_reward
from octavo.rl.tasks import EnvironmentTask, Task, encode_prompts


def generate_rollouts(
    engine: RolloutEngine,
    task: Task,
    prompts: list[str],
    *,
    samples_per_prompt: int,
    max_tokens: int,
    temperature: float,
    group: Any = None,
) -> Rollouts:
    """Sample completions and score them.

    Args:
        engine: with a tokenizer; its own seed makes the noise, fresh at each call.
        prompts: one group each.
        temperature: of sampling, and of the logprobs, which are untruncated.
        group: the process group of ranks that make this call together; None for one process.
    Returns:
        Rollouts of len(prompts) * samples_per_prompt sequences, on the CPU.
    Raises:
        EngineError: of a remote engine.
        DataError: the verifier raises or gives no finite reward, on any rank; the message names the sample's index and
            prompt, and the rank.
        ConfigError: a prompt that leaves less than max_tokens of the context; nothing is then sampled.
    """
    if isinstance(task, EnvironmentTask):
        assert engine.tokenizer is not None, "the loop's engine has one"

        def sample(prompt_ids: Sequence[list[int]], room: int) -> list[Completion]:
            spec = SamplingSpec(1, room, temperature, task.end or None)
            return [generation.completions[0] for generation in engine.generate(list(prompt_ids), spec)]

        limits = {"samples_per_prompt": samples_per_prompt, "max_tokens": max_tokens, "max_len": engine.max_model_len}
        return play_episodes(sample, task, prompts, engine.tokenizer, **limits, group=group)
    spec = SamplingSpec(samples_per_prompt, max_tokens, temperature, task.end or None)
    inputs = all_do(group, lambda: encode_prompts(task, prompts, engine.tokenizer))
    check_context(prompts, [len(ids) for ids in inputs], max_tokens, engine.max_model_len)
    rows = [
        (group, prompt, generation.prompt_token_ids, completion)
        for group, (prompt, generation) in enumerate(zip(prompts, engine.generate(inputs, spec), strict=True))
        for completion in generation.completions
    ]
    # the engine cuts the text before what stopped it
    texts = [c.text + (task.end if c.stop_reason == task.end else "") for *_, c in rows]
    rewards = score_all(task, [prompt for _, prompt, *_ in rows], texts, group)
    return Rollouts(
        prompts=[prompt for _, prompt, *_ in rows],
        completions=texts,
        sequences=[prompt_ids + c.token_ids for *_, prompt_ids, c in rows],
        prompt_lens=[len(prompt_ids) for *_, prompt_ids, _ in rows],
        response_lens=[len(c.token_ids) for *_, c in rows],
        rollout_logprobs=torch.tensor([logprob for *_, c in rows for logprob in c.logprobs], dtype=torch.float32),
        rewards=torch.tensor(rewards, dtype=torch.float32),
        group_ids=torch.tensor([group for group, *_ in rows]),
        weight_versions=torch.tensor([version for *_, c in rows for version in c.weight_versions]),
        is_finished=torch.tensor([c.finish_reason == "stop" for *_, c in rows]),
        routed_experts=[c.routed_experts for *_, c in rows if c.routed_experts is not None],
    )


def score_all(task: Task, prompts: Sequence[str], completions: Sequence[str], group: Any = None) -> list[float]:
    """The task's rewards, checked. Every rank of a group scores all; where one cannot, all raise its error.

    Raises:
        DataError: where the verifier raises, or where a reward is no finite number.
    """
    pairs = enumerate(zip(prompts, completions, strict=True))
    return all_do(group, lambda: [score(task, *pair, index) for index, pair in pairs])


def score(task: Task, prompt: str, completion: str, index: int) -> float:
    """The task's reward, checked.

    Args:
        index: of the sample in its batch, for messages.
    Raises:
        DataError: where the verifier raises, or where its reward is no finite number.
    """
    where = f"the verifier of task {task.name!r}, sample {index} (prompt {prompt!r}, completion {completion!r})"
    try:
        reward = task.score(prompt, completion)
    except Exception as error:
        raise DataError(f"{where}: raised {type(error).__name__}: {error}; fix the verifier") from error
    return checked_reward(reward, where)
