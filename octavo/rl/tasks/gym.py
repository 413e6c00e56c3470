"""Any data set of reasoning-gym: problems made on the spot, with its own verifier. The package is optional."""

import importlib
import importlib.util
import random
from collections.abc import Mapping
from typing import Any

from octavo.errors import BackendError, ConfigError, DataError
from octavo.rl.tasks.answers import last_tagged
from octavo.rl.tasks.draw import draw_distinct, split_of
from octavo.rl.tasks.protocols import Message

ALPHABET = "\n" + "".join(chr(code) for code in range(32, 127))
_SIZE = 2**31 - 1  # entries of a data set, each made when it is asked for


class ReasoningGym:
    """The task; see octavo.rl.tasks.Task and ChatTask for its members.

    Args:
        dataset: its name in reasoning-gym, such as "chain_sum" or "countdown".
        options: its parameters.
        end: the text that ends a completion; empty for the model's end-of-sequence token.
        answer_tag: the answer is what the last <tag>...</tag> holds; empty for the whole completion.
        system_prompt: said before each question, where it is not empty.
        max_prompt_tokens: a longer prompt is an error; 0 for no limit.
        heldout_share: share of all problems that only evaluation sees, by a hash of the question.
    Raises:
        BackendError: reasoning-gym is not installed.
        ConfigError: no such data set, or not its parameters.
    """

    name = "reasoning_gym"

    def __init__(
        self,
        dataset: str,
        options: Mapping[str, Any] | None = None,
        end: str = "",
        answer_tag: str = "",
        system_prompt: str = "",
        max_prompt_tokens: int = 0,
        heldout_share: float = 0.1,
    ) -> None:
        if importlib.util.find_spec("reasoning_gym") is None:
            raise BackendError("task.name = 'reasoning_gym' needs the package; pip install reasoning-gym")
        self.dataset, self.end, self.answer_tag = dataset, end, answer_tag
        self.system_prompt, self.max_prompt_tokens = system_prompt, max_prompt_tokens
        self.heldout_share = heldout_share
        try:
            self._data = importlib.import_module("reasoning_gym").create_dataset(
                dataset, seed=0, size=_SIZE, **(options or {})
            )
        except (ValueError, TypeError, AssertionError) as error:  # its three ways to refuse
            raise ConfigError(
                f"reasoning-gym refuses data set {dataset!r} with options {dict(options or {})}: {error}; fix "
                "task.dataset and task.options"
            ) from error
        self._entries: dict[str, Any] = {}  # by question, of the prompts that were drawn

    @property
    def alphabet(self) -> str:
        """ASCII and line ends; questions with other characters need a model with a tokenizer."""
        if not self.end:
            raise ConfigError("a new model can learn to end an answer with one character only; set task.end = '\\n'")
        return ALPHABET if self.end in ALPHABET else ALPHABET + self.end

    def prompts(self, split: str, n: int, seed: int) -> list[str]:
        """Distinct questions of one split, in an order that the seed decides."""
        return draw_distinct(
            self._draw,
            lambda question: split_of(question, self.heldout_share) == split,
            name=self.dataset,
            split=split,
            n=n,
            seed=seed,
            share=self.heldout_share if split == "heldout" else 1.0 - self.heldout_share,
            num_problems=n,
            remedy="choose harder task.options",
        )

    def messages(self, prompt: str) -> list[Message]:
        """The question as the user's message."""
        return as_messages(prompt, self.system_prompt)

    def score(self, prompt: str, completion: str) -> float:
        """reasoning-gym's own score of the answer, from 0 to 1; 0 where the tag is missing."""
        text = completion.removesuffix(self.end) if self.end else completion
        answer = last_tagged(text, self.answer_tag) if self.answer_tag else text.strip()
        return float(self._data.score_answer(answer, entry=self._entry(prompt)))

    def examples(self, split: str, n: int, seed: int) -> list[tuple[str, str]]:
        """Questions with the answers that come with them."""
        return [(prompt, self._written(self._entry(prompt)["answer"])) for prompt in self.prompts(split, n, seed)]

    def _draw(self, rng: random.Random) -> str:
        entry = self._data[rng.randrange(_SIZE)]
        question: str = entry["question"]
        self._entries[question] = entry
        return question

    def _entry(self, prompt: str) -> Any:
        if prompt not in self._entries:
            raise DataError(f"{prompt[:80]!r} was not drawn from this data set; score prompts that prompts() gave")
        return self._entries[prompt]

    def _written(self, answer: str) -> str:
        tag = self.answer_tag
        return (f"<{tag}>{answer}</{tag}>" if tag else str(answer)) + self.end


def as_messages(question: str, system_prompt: str) -> list[Message]:
    """A question as a conversation."""
    user = {"role": "user", "content": question}
    return [{"role": "system", "content": system_prompt}, user] if system_prompt else [user]
