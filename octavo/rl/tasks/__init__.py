"""What a reinforcement-learning task is: prompts and a verifier, in one small protocol."""

from typing import Protocol

from octavo.rl.tasks.arithmetic import Arithmetic

__all__ = ["SPLITS", "Arithmetic", "Task"]

SPLITS = ("train", "heldout")


class Task(Protocol):
    """Prompts and a verifier. To add one: write these five members and give `run(task=...)` the object.

    Attributes:
        name: for messages and metrics.
        alphabet: every character of prompts and answers, `end` included: what a character tokenizer needs.
        end: the one character that ends a completion.
    """

    name: str
    alphabet: str
    end: str

    def prompts(self, split: str, n: int, seed: int) -> list[str]:
        """`n` distinct prompts of "train" or "heldout", which share none; equal for equal arguments."""
        ...

    def score(self, prompt: str, completion: str) -> float:
        """The reward of a completion (`end` included where it was reached): a finite number."""
        ...

    def examples(self, split: str, n: int, seed: int) -> list[tuple[str, str]]:
        """Prompts with a right completion each, `end` included, for the supervised warm start."""
        ...
