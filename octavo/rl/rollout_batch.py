"""Rollouts: what was sampled for a step's prompts, packed, with the sampler's logprob of every token."""

import dataclasses
import itertools
import math
from typing import Any, Self

import torch

from octavo.errors import DataError

_BY_TOKEN = {"rollout_logprobs", "weight_versions"}


@dataclasses.dataclass(frozen=True)
class Rollouts:
    """Completions of one step. Sequences of one prompt follow each other; response tokens are packed, [tokens].

    Attributes:
        prompts: text of each sequence's prompt.
        completions: text of each sequence's response, the end character included where it was reached.
        sequences: token ids of each sequence, prompt and response.
        prompt_lens: tokens of each sequence's prompt.
        response_lens: tokens of each sequence's response.
        rollout_logprobs: [tokens] fp32, log pi of each response token as the sampler computed it.
        rewards: [sequences] fp32.
        group_ids: [sequences] int64, equal for completions of one prompt.
        weight_versions: [tokens] int64, the version of the weights that sampled each token.
        is_finished: [sequences] bool, false where max_tokens cut the response.
        is_sampled: for each sequence whether the policy sampled each token after its prompt; empty where it sampled
            them all. Response tokens, their lens and all that is [tokens] are the sampled ones alone.
        routed_experts: for each sequence the experts that its tokens but the last were sent to, [len - 1, layers,
            experts a token]; empty where the engine was not asked for it.
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
    is_sampled: list[list[bool]] = dataclasses.field(default_factory=list)
    routed_experts: list[torch.Tensor] = dataclasses.field(default_factory=list)

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
        fields = {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}
        return type(self)(**{k: v[tokens] if k in _BY_TOKEN else v[rows] for k, v in fields.items()})

    def shuffled(self, seed: int) -> Self:
        """The same sequences in another order, so that minibatches mix prompts."""
        order = torch.randperm(len(self), generator=torch.Generator().manual_seed(seed)).tolist()
        fields = {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}
        for name, value in fields.items():
            if name in _BY_TOKEN:
                parts = value.split(self.response_lens)
                fields[name] = torch.cat([parts[i] for i in order])
            else:
                fields[name] = value[order] if isinstance(value, torch.Tensor) else [value[i] for i in order if value]
        return type(self)(**fields)

    def split_groups(self) -> tuple[list[Self], list[Self]]:
        """The groups one by one, in order: those whose rewards differ, and those that teach nothing."""
        informative: list[Self] = []
        equal: list[Self] = []
        bounds = [0, *(torch.diff(self.group_ids).nonzero().flatten() + 1).tolist(), len(self)]
        for start, stop in itertools.pairwise(bounds):
            group = self.part(start, stop)
            (equal if (group.rewards == group.rewards[0]).all() else informative).append(group)
        return informative, equal

    def count_equal_groups(self, advantages: torch.Tensor) -> tuple[int, int]:
        """(groups whose advantages are all 0, which teach nothing; groups)."""
        groups = self.group_ids.unique()
        equal = sum(not advantages[self.group_ids == group].any() for group in groups)
        return equal, len(groups)

    @classmethod
    def join(cls, groups: list[Self]) -> Self:
        """Groups, numbered from 0, one after the other."""
        fields: dict[str, Any] = {}
        for field in dataclasses.fields(cls):
            values = [getattr(group, field.name) for group in groups]
            is_tensor = isinstance(values[0], torch.Tensor)
            fields[field.name] = torch.cat(values) if is_tensor else [x for value in values for x in value]
        sizes = torch.tensor([len(group) for group in groups])
        fields["group_ids"] = torch.arange(len(groups)).repeat_interleave(sizes)
        return cls(**fields)


def checked_reward(reward: float, where: str) -> float:
    """A reward as a finite float.

    Raises:
        DataError: it is none; `where` names whose it is.
    """
    try:
        value = float(reward)
    except (TypeError, ValueError):
        raise DataError(f"{where}: gave {reward!r}; a reward must be a number") from None
    if not math.isfinite(value):
        raise DataError(f"{where}: gave the reward {value}; a reward must be a finite number, 0 where in doubt")
    return value


def check_rewards(rollouts: Rollouts, step: int) -> None:
    """Refuse a reward that is no finite number.

    Raises:
        DataError: naming step, sequence and prompt.
    """
    bad = (~torch.isfinite(rollouts.rewards)).nonzero().flatten()
    if len(bad):
        i = int(bad[0])
        raise DataError(
            f"step {step}, sequence {i} (prompt {rollouts.prompts[i]!r}): the reward is {float(rollouts.rewards[i])}, "
            "and a reward must be a finite number; fix the verifier or the environment. Nothing was updated"
        )
