"""What the loop asks of a task: prompts and a verifier; of one in a chat, messages; of one with tools, environments."""

import dataclasses
from collections.abc import Mapping
from typing import Any, Protocol, runtime_checkable

from octavo.errors import ConfigError

SPLITS = ("train", "heldout")
Message = Mapping[str, Any]  # {"role", "content"}


class TooFewPromptsError(ConfigError):
    """A split has fewer prompts than were asked for.

    Attributes:
        found: all that it has, in the seed's order.
    """

    def __init__(self, message: str, found: list[str]) -> None:
        super().__init__(message)
        self.found = found


class Task(Protocol):
    """Prompts and a verifier. To add one: write these six members, and name a function that makes the object.

    Attributes:
        name: for messages and metrics.
        alphabet: every character of prompts and answers, `end` included: what a new model's tokenizer needs. It may
            raise ConfigError, where the task is for models that have a tokenizer.
        end: the text that ends a completion; empty for the model's end-of-sequence token.
    """

    name: str
    end: str

    @property
    def alphabet(self) -> str: ...

    def prompts(self, split: str, n: int, seed: int) -> list[str]:
        """`n` distinct prompts of "train" or "heldout", which share none; equal for equal arguments.

        Raises:
            TooFewPromptsError: the split has fewer.
        """
        ...

    def score(self, prompt: str, completion: str) -> float:
        """The reward of a completion (`end` included where it was reached): a finite number."""
        ...

    def examples(self, split: str, n: int, seed: int) -> list[tuple[str, str]]:
        """Prompts with a right completion each, `end` included, for the supervised warm start."""
        ...


@runtime_checkable
class ListedTask(Protocol):
    """A task whose prompts are all known from the start, so that their lengths can be checked there."""

    def all_prompts(self) -> list[str]:
        """Those of both splits."""
        ...


@runtime_checkable
class CountedTask(Protocol):
    """A task whose prompts are counted, so that a run can go through all of them (`trainer.epochs`)."""

    def num_prompts(self, split: str) -> int:
        """Prompts of "train" or "heldout": the most that `prompts` gives."""
        ...


@runtime_checkable
class ChatTask(Protocol):
    """A task whose prompts are conversations, written by the model's chat template where it has one.

    Attributes:
        max_prompt_tokens: a longer prompt is an error; 0 for no limit.
    """

    max_prompt_tokens: int

    def messages(self, prompt: str) -> list[Message]:
        """The conversation that a prompt stands for."""
        ...


@dataclasses.dataclass(frozen=True)
class StepResult:
    """What an environment says to one turn of the policy.

    Attributes:
        observation: text that the policy reads next; no token of it is ever in the loss. Not read where done.
        reward: of this turn; an episode's reward is the sum over its turns.
        done: the episode is over.
        role: whose message the observation is, for the chat template.
    """

    observation: str = ""
    reward: float = 0.0
    done: bool = False
    role: str = "user"


class Environment(Protocol):
    """One episode: reset once, then step after each of the policy's turns."""

    def reset(self) -> list[Message]:
        """The conversation that the policy answers first."""
        ...

    def step(self, text: str) -> StepResult:
        """Answer a turn.

        Args:
            text: what the policy wrote, the task's `end` included where it was reached.
        """
        ...


@runtime_checkable
class EnvironmentTask(Protocol):
    """A task of several turns: the other members are Task's (`score` is never called).

    Attributes:
        max_turns: of the policy in one episode; the environment may end it sooner.
        max_prompt_tokens: as in ChatTask, for the messages of reset.
    """

    name: str
    end: str
    max_turns: int
    max_prompt_tokens: int

    def environment(self, prompt: str) -> Environment:
        """A fresh environment for one episode of a prompt."""
        ...


def check_split(split: str) -> None:
    """Refuse what is no split."""
    if split not in SPLITS:
        raise ConfigError(f"split must be 'train' or 'heldout', got {split!r}")
