"""Rollouts: what the engine sampled for a step's prompts, packed, with the sampler's logprob of every token."""

import dataclasses
import itertools
import math
from typing import Any, Self

import torch

from octavo.errors import DataError
from octavo.rl.tasks import Task
from octavo.serve import LLM, SamplingParams


@dataclasses.dataclass(frozen=True)
class Rollouts:
    """Completions of one step. Sequences of one prompt follow each other; response tokens are packed, [tokens].

    Attributes:
        prompts: text of each sequence's prompt.
        completions: text of each sequence's response, the end character included where it was reached.
        sequences: token ids of each sequence, prompt and response.
        prompt_lens, response_lens: tokens of each sequence's two parts.
        rollout_logprobs: [tokens] fp32, log pi of each response token as the sampler computed it.
        rewards: [sequences] fp32.
        group_ids: [sequences] int64, equal for completions of one prompt.
        weight_versions: [tokens] int64, the version of the weights that sampled each token.
        is_finished: [sequences] bool, false where max_tokens cut the response.
    """

    prompts: list[str]
    completions: list[str]
    sequences: list[list[int]]
    prompt_lens: list[int]
    response_lens: list[int]
    rollout_logprobs: torch.Tensor
    rewards: torch.Tensor
    group_ids: torch.Tensor
    weight_versions: torch.Tensor
    is_finished: torch.Tensor

    def __len__(self) -> int:
        return len(self.sequences)

    @property
    def num_tokens(self) -> int:
        """Response tokens in all."""
        return sum(self.response_lens)

    def locate(self, token: int) -> tuple[int, int]:
        """(sequence, position in its response) of a packed response token."""
        for sequence, length in enumerate(self.response_lens):
            if token < length:
                return sequence, token
            token -= length
        raise IndexError(f"there are {self.num_tokens} response tokens")

    def part(self, start: int, stop: int) -> Self:
        """The sequences start to stop, as Rollouts of their own."""
        first = sum(self.response_lens[:start])
        tokens = slice(first, first + sum(self.response_lens[start:stop]))
        rows = slice(start, stop)
        by_token = {"rollout_logprobs", "weight_versions"}
        fields = {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}
        return type(self)(**{k: v[tokens] if k in by_token else v[rows] for k, v in fields.items()})

    def shuffled(self, seed: int) -> Self:
        """The same sequences in another order, so that minibatches mix prompts."""
        order = torch.randperm(len(self), generator=torch.Generator().manual_seed(seed)).tolist()
        logprobs, versions = (x.split(self.response_lens) for x in (self.rollout_logprobs, self.weight_versions))
        rows = {
            name: [getattr(self, name)[i] for i in order]
            for name in ("prompts", "completions", "sequences", "prompt_lens", "response_lens")
        }
        return type(self)(
            **rows,
            rollout_logprobs=torch.cat([logprobs[i] for i in order]),
            rewards=self.rewards[order],
            group_ids=self.group_ids[order],
            weight_versions=torch.cat([versions[i] for i in order]),
            is_finished=self.is_finished[order],
        )

    def split_groups(self) -> tuple[list[Self], list[Self]]:
        """The groups one by one, in order: those whose rewards differ, and those that teach nothing."""
        informative: list[Self] = []
        equal: list[Self] = []
        bounds = [0, *(torch.diff(self.group_ids).nonzero().flatten() + 1).tolist(), len(self)]
        for start, stop in itertools.pairwise(bounds):
            group = self.part(start, stop)
            (equal if (group.rewards == group.rewards[0]).all() else informative).append(group)
        return informative, equal

    @classmethod
    def join(cls, groups: list[Self]) -> Self:
        """Groups, numbered anew, one after the other."""
        fields: dict[str, Any] = {}
        for field in dataclasses.fields(cls):
            values = [getattr(group, field.name) for group in groups]
            is_tensor = isinstance(values[0], torch.Tensor)
            fields[field.name] = torch.cat(values) if is_tensor else [x for value in values for x in value]
        sizes = torch.tensor([len(group) for group in groups])
        fields["group_ids"] = torch.arange(len(groups)).repeat_interleave(sizes)
        return cls(**fields)


def generate_rollouts(
    llm: LLM, task: Task, prompts: list[str], *, samples_per_prompt: int, max_tokens: int, temperature: float
) -> Rollouts:
    """Sample completions and score them.

    Args:
        llm: the engine, with a tokenizer; its own seed makes the noise, fresh at each call.
        prompts: one group each.
        temperature: of sampling, and of the logprobs, which are untruncated.
    Returns:
        Rollouts of len(prompts) * samples_per_prompt sequences, on the CPU.
    Raises:
        DataError: the verifier raises or gives no finite reward; the message names the prompt.
    """
    params = SamplingParams(
        n=samples_per_prompt, max_tokens=max_tokens, temperature=temperature, stop=task.end, logprobs=0
    )
    rows = [
        (group, prompt, output.prompt_token_ids, completion)
        for group, (prompt, output) in enumerate(zip(prompts, llm.generate(prompts, params), strict=True))
        for completion in output.outputs
    ]
    # the engine cuts the text before what stopped it
    texts = [c.text + (task.end if c.stop_reason == task.end else "") for *_, c in rows]
    rewards = [score(task, prompt, text) for (_, prompt, *_), text in zip(rows, texts, strict=True)]
    tokens = [pair for *_, c in rows for pair in zip(c.token_ids, c.logprobs or [], strict=True)]
    return Rollouts(
        prompts=[prompt for _, prompt, *_ in rows],
        completions=texts,
        sequences=[prompt_ids + c.token_ids for *_, prompt_ids, c in rows],
        prompt_lens=[len(prompt_ids) for *_, prompt_ids, _ in rows],
        response_lens=[len(c.token_ids) for *_, c in rows],
        rollout_logprobs=torch.tensor([entry[token].logprob for token, entry in tokens], dtype=torch.float32),
        rewards=torch.tensor(rewards, dtype=torch.float32),
        group_ids=torch.tensor([group for group, *_ in rows]),
        weight_versions=torch.tensor([version for *_, c in rows for version in c.weight_versions]),
        is_finished=torch.tensor([c.finish_reason == "stop" for *_, c in rows]),
    )


def score(task: Task, prompt: str, completion: str) -> float:
    """The task's reward, checked.

    Raises:
        DataError, where the verifier raises, or where its reward is no finite number.
    """
    where = f"the verifier of task {task.name!r}, prompt {prompt!r}, completion {completion!r}"
    try:
        reward = float(task.score(prompt, completion))
    except Exception as error:
        raise DataError(f"{where}: raised {type(error).__name__}: {error}; mend the verifier") from error
    if not math.isfinite(reward):
        raise DataError(f"{where}: gave the reward {reward}; a reward must be a finite number, 0 where in doubt")
    return reward
