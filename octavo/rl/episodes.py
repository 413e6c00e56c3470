"""Episodes of several turns: the policy writes, the environment answers, and the tokens of both make one sequence.

Turns are joined as token ids, never as text that is tokenized again, so that what trains is what was sampled.
"""

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch

from octavo.distributed.outcome import all_do, together
from octavo.errors import DataError
from octavo.models.tokenizer import Tokenizer
from octavo.rl.engines.protocol import Completion
from octavo.rl.prompts import check_context
from octavo.rl.rollout_batch import Rollouts, checked_reward
from octavo.rl.tasks import Environment, EnvironmentTask, StepResult
from octavo.rl.tasks.encode import encode_messages, encode_observation

# one turn for each list of token ids, of so many tokens at most
Sample = Callable[[Sequence[list[int]], int], Sequence[Completion]]


@dataclasses.dataclass
class Episode:
    """One sample of one prompt, as it grows."""

    index: int
    group: int
    prompt: str
    environment: Environment
    ids: list[int]
    prompt_len: int
    is_sampled: list[bool] = dataclasses.field(default_factory=list)
    logprobs: list[float] = dataclasses.field(default_factory=list)
    versions: list[int] = dataclasses.field(default_factory=list)
    experts: torch.Tensor | None = None
    text: str = ""
    reward: float = 0.0
    is_done: bool = False

    def room(self, max_tokens: int, max_len: int) -> int:
        """Tokens that the policy may still sample."""
        return min(max_tokens - len(self.logprobs), max_len - len(self.ids))

    def take(self, turn: Completion, room: int) -> bool:
        """Add what was sampled, `room` tokens at most; whether the turn came to its end."""
        ids = turn.token_ids[:room]
        self.ids += ids
        self.is_sampled += [True] * len(ids)
        self.logprobs += turn.logprobs[:room]
        self.versions += turn.weight_versions[:room]
        if turn.routed_experts is not None:  # an earlier turn's choices are those that its tokens were sampled under
            old = turn.routed_experts[:0] if self.experts is None else self.experts
            self.experts = torch.cat([old, turn.routed_experts[len(old) :]])
        return len(ids) == len(turn.token_ids) and turn.finish_reason == "stop"

    def observe(self, ids: list[int]) -> None:
        """Add what the environment said."""
        self.ids += ids
        self.is_sampled += [False] * len(ids)


def play_episodes(
    sample: Sample,
    task: EnvironmentTask,
    prompts: list[str],
    tokenizer: Tokenizer,
    *,
    samples_per_prompt: int,
    max_tokens: int,
    max_len: int,
    group: Any = None,
) -> Rollouts:
    """Play every episode to its end, all of them turn by turn in one batch.

    Args:
        sample: the engine.
        prompts: one group each.
        max_tokens: that the policy may sample in an episode.
        max_len: tokens of a whole sequence. An episode that reaches one of them, or the task's max_turns, is over with
            the rewards so far, and is not finished.
        group: the process group of ranks that make this call together; None for one process.
    Returns:
        Rollouts of len(prompts) * samples_per_prompt sequences, the environment's tokens marked by is_sampled;
        completions are all text after the prompt.
    Raises:
        DataError: an environment raises or gives no finite reward, on any rank; the message names it, the sample, its
            index and the rank.
        ConfigError: first messages that leave less than max_tokens of max_len; nothing is then sampled.
    """
    episodes = all_do(group, lambda: _begin_all(task, tokenizer, prompts, samples_per_prompt))
    check_context([e.prompt for e in episodes], [e.prompt_len for e in episodes], max_tokens, max_len)
    active = episodes
    for _ in range(task.max_turns):
        active = [episode for episode in active if episode.room(max_tokens, max_len) > 0]
        if not active:
            break
        rooms = [episode.room(max_tokens, max_len) for episode in active]
        turns = sample([episode.ids for episode in active], max(rooms))
        found: list[list[Episode]] = []
        play = functools.partial(_play_all, task, tokenizer, active, turns, rooms)
        _check_alike(together(group, lambda: _indices(found, play())), episodes, task)  # noqa: B023 - called at once
        (active,) = found
    return _pack(episodes)


def _indices(found: list[list[Episode]], active: list[Episode]) -> list[int]:
    found.append(active)
    return [episode.index for episode in active]


def _check_alike(everyone: list[list[int]], episodes: list[Episode], task: EnvironmentTask) -> None:
    """Refuse episodes that go on for some ranks: the next turn is one batch of all ranks.

    Raises:
        DataError: on all ranks.
    """
    for rank, active in enumerate(everyone):
        if differ := sorted(set(active) ^ set(everyone[0])):
            episode = episodes[differ[0]]
            ends, goes_on = (0, rank) if episode.index in active else (rank, 0)
            raise DataError(
                f"{_where(task, episode.index, episode.prompt)}: the episode ended on rank {ends} and goes on on rank "
                f"{goes_on}; an environment must answer the same actions alike on every rank"
            )


def _begin_all(task: EnvironmentTask, tokenizer: Tokenizer, prompts: list[str], num_samples: int) -> list[Episode]:
    episodes: list[Episode] = []
    for group, prompt in enumerate(prompts):
        for _ in range(num_samples):
            episodes.append(_begin(task, tokenizer, prompt, group, len(episodes)))
    return episodes


def _begin(task: EnvironmentTask, tokenizer: Tokenizer, prompt: str, group: int, index: int) -> Episode:
    where = _where(task, index, prompt)
    try:
        environment = task.environment(prompt)
        messages = environment.reset()
    except Exception as error:
        raise DataError(f"{where}: reset raised {type(error).__name__}: {error}; fix the environment") from error
    ids = encode_messages(messages, tokenizer, task.max_prompt_tokens, where)
    return Episode(index, group, prompt, environment, list(ids), len(ids))


def _play_all(
    task: EnvironmentTask,
    tokenizer: Tokenizer,
    episodes: Sequence[Episode],
    turns: Sequence[Completion],
    rooms: Sequence[int],
) -> list[Episode]:
    """The episodes that go on."""
    played = zip(episodes, turns, rooms, strict=True)
    return [episode for episode, turn, room in played if _play(task, tokenizer, episode, turn, room)]


def _play(task: EnvironmentTask, tokenizer: Tokenizer, episode: Episode, turn: Completion, room: int) -> bool:
    """Take one turn and the environment's answer to it; whether the episode goes on."""
    has_ended = episode.take(turn, room)
    text = turn.text + (task.end if turn.stop_reason == task.end else "")
    if not has_ended:
        episode.text += tokenizer.decode(turn.token_ids[:room])
        return False
    episode.text += text
    result = _step(task, episode, text)
    episode.reward += result.reward
    if result.done:
        episode.is_done = True
        return False
    episode.text += result.observation
    episode.observe(encode_observation(result.observation, result.role, tokenizer, episode.ids[-1]))
    return True


def _step(task: EnvironmentTask, episode: Episode, text: str) -> StepResult:
    where = f"{_where(task, episode.index, episode.prompt)}, turn {text!r}"
    try:
        result = episode.environment.step(text)
    except Exception as error:
        raise DataError(f"{where}: step raised {type(error).__name__}: {error}; fix the environment") from error
    if not isinstance(result, StepResult):
        raise DataError(f"{where}: step gave a {type(result).__name__}, not an octavo.rl.tasks.StepResult")
    checked_reward(result.reward, where)
    return result


def _where(task: EnvironmentTask, index: int, prompt: str) -> str:
    return f"the environment of task {task.name!r}, sample {index} (prompt {prompt!r})"


def _pack(episodes: list[Episode]) -> Rollouts:
    return Rollouts(
        prompts=[e.prompt for e in episodes],
        completions=[e.text for e in episodes],
        sequences=[e.ids[: e.prompt_len + _last_sampled(e)] for e in episodes],
        prompt_lens=[e.prompt_len for e in episodes],
        response_lens=[len(e.logprobs) for e in episodes],
        rollout_logprobs=torch.tensor([x for e in episodes for x in e.logprobs], dtype=torch.float32),
        rewards=torch.tensor([e.reward for e in episodes], dtype=torch.float32),
        group_ids=torch.tensor([e.group for e in episodes]),
        weight_versions=torch.tensor([x for e in episodes for x in e.versions]),
        is_finished=torch.tensor([e.is_done for e in episodes]),
        is_sampled=[e.is_sampled[: _last_sampled(e)] for e in episodes],
        routed_experts=[e.experts[: e.prompt_len + _last_sampled(e) - 1] for e in episodes if e.experts is not None],
    )


def _last_sampled(episode: Episode) -> int:
    """Tokens after the prompt up to the last that was sampled: what an environment said last teaches nothing."""
    kept = list(episode.is_sampled)
    while kept and not kept[-1]:
        kept.pop()
    return len(kept)
