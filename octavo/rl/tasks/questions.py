"""Questions and answers from a user's files, judged by math-verify, by their text, or by any callable."""

import dataclasses
import random
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from octavo.errors import ConfigError, DataError
from octavo.rl.tasks.answers import final_answer, make_verifier
from octavo.rl.tasks.draw import split_of
from octavo.rl.tasks.gym import as_messages
from octavo.rl.tasks.protocols import Message, TooFewPromptsError, check_split
from octavo.rl.tasks.records import ANSWER_KEYS, QUESTION_KEYS, Row, find_field, read_rows


@dataclasses.dataclass(frozen=True)
class Problem:
    """One row: its conversation, the right answer, and the row itself for verifiers that want more."""

    messages: tuple[Message, ...]
    answer: str
    row: Row


class Questions:
    """The task; see octavo.rl.tasks.Task, ListedTask, CountedTask and ChatTask for its members.

    A row's question is a text or a conversation, its answer a text or a number. Rows that repeat a question count once;
    two answers to one question are an error.

    Args:
        path: a .jsonl, .json or .parquet file, or several of them.
        heldout_path: other files, which evaluation alone sees; empty to keep heldout_share of the first, by a hash.
        question_key: a field, with dots into nested ones; empty for the first of octavo.rl.tasks.records' names that a
            row has, which are those of DAPO-Math, AIME and GSM8K files.
        answer_key: as question_key, of the answer.
        verifier: "math", "exact", or a callable; see octavo.rl.tasks.answers.make_verifier.
        verifier_options: its keyword arguments.
        end: the text that ends a completion; empty for the model's end-of-sequence token.
        system_prompt: said before each question, where it is not empty.
        max_prompt_tokens: a longer prompt is an error; 0 for no limit.
        drop_long_prompts: a run leaves longer prompts out in place of the error, and says how many (`drop_prompts`).
    Raises:
        DataError: a file that cannot be used, with the row.
        BackendError: what a file or verifier needs is missing.
    """

    name = "questions"

    def __init__(
        self,
        path: str | Path | Sequence[str],
        heldout_path: str | Path | Sequence[str] = "",
        question_key: str = "",
        answer_key: str = "",
        verifier: str = "math",
        verifier_options: Mapping[str, Any] | None = None,
        end: str = "",
        system_prompt: str = "",
        max_prompt_tokens: int = 0,
        drop_long_prompts: bool = False,
        heldout_share: float = 0.1,
    ) -> None:
        self.end, self.max_prompt_tokens, self.drop_long_prompts = end, max_prompt_tokens, drop_long_prompts
        self._verify = make_verifier(verifier, verifier_options or {})
        self._problems: dict[str, Problem] = {}
        keys = (question_key, answer_key, system_prompt)
        first = list(dict.fromkeys(self._read(path, *keys)))
        if heldout_path:
            heldout = list(dict.fromkeys(self._read(heldout_path, *keys)))
            if both := set(first) & set(heldout):
                raise DataError(
                    f"{len(both)} questions are in {path} and in {heldout_path} both, such as {min(both)[:80]!r}; take "
                    "them out of one"
                )
            self._splits = {"train": first, "heldout": heldout}
        else:
            splits = [split_of(prompt, heldout_share) for prompt in first]
            self._splits = {
                name: [prompt for prompt, split in zip(first, splits, strict=True) if split == name]
                for name in ("train", "heldout")
            }

    @property
    def alphabet(self) -> str:
        """Every character of the files."""
        if not self.end:
            raise ConfigError("a new model can learn to end an answer with one character only; set task.end = '\\n'")
        texts = [self.end, *(p.answer for p in self._problems.values())]
        texts += [str(m["content"]) for p in self._problems.values() for m in p.messages]
        return "".join(sorted(set().union(*texts)))

    def prompts(self, split: str, n: int, seed: int) -> list[str]:
        """Distinct questions of one split, in an order that the seed decides.

        Raises:
            ConfigError: another split.
            TooFewPromptsError: it has fewer than `n` questions.
        """
        check_split(split)
        known = self._splits[split]
        rng = random.Random(f"{self.name}/{split}/{seed}")
        if n > len(known):
            raise TooFewPromptsError(
                f"the {split} split of these questions has {len(known)}, fewer than the {n} asked for; give a larger "
                "file, or ask for fewer",
                rng.sample(known, len(known)),
            )
        return rng.sample(known, n)

    def all_prompts(self) -> list[str]:
        """The questions of both splits."""
        return [prompt for known in self._splits.values() for prompt in known]

    def num_prompts(self, split: str) -> int:
        """Distinct questions of one split."""
        check_split(split)
        return len(self._splits[split])

    def drop_prompts(self, is_dropped: Callable[[str], bool]) -> int:
        """Take questions out of both splits; how many they were."""
        before = self.all_prompts()
        self._splits = {name: [p for p in known if not is_dropped(p)] for name, known in self._splits.items()}
        return len(before) - len(self.all_prompts())

    def messages(self, prompt: str) -> list[Message]:
        """A question's conversation."""
        return list(self._problem(prompt).messages)

    def score(self, prompt: str, completion: str) -> float:
        """The verifier's number."""
        problem = self._problem(prompt)
        text = completion.removesuffix(self.end) if self.end else completion
        return self._verify(prompt, text, problem.answer, problem.row)

    def examples(self, split: str, n: int, seed: int) -> list[tuple[str, str]]:
        """Questions with their bare answers."""
        if not self.end:
            raise ConfigError(
                "a file's bare answers teach a model with a tokenizer nothing it should learn; set warmup.steps = 0"
            )
        return [(prompt, self._problem(prompt).answer + self.end) for prompt in self.prompts(split, n, seed)]

    def _problem(self, prompt: str) -> Problem:
        if prompt not in self._problems:
            raise DataError(f"{prompt[:80]!r} is no question of these files; score prompts that prompts() gave")
        return self._problems[prompt]

    def _read(
        self, path: str | Path | Sequence[str], question_key: str, answer_key: str, system_prompt: str
    ) -> Iterable[str]:
        """The prompts of one file or of several, whose problems are kept."""
        if not isinstance(path, str | Path):
            for each in path:
                yield from self._read(each, question_key, answer_key, system_prompt)
            return
        num_rows = 0
        for index, row in read_rows(path):
            num_rows += 1
            where = f"{path}, row {index}"
            messages = _as_conversation(find_field(row, question_key, QUESTION_KEYS, where), system_prompt, where)
            answer = _as_answer(find_field(row, answer_key, ANSWER_KEYS, where), where)
            prompt = "\n\n".join(str(message["content"]) for message in messages)
            known = self._problems.setdefault(prompt, Problem(messages, answer, row))
            if known.answer != answer:
                raise DataError(f"{where}: {prompt[:80]!r} has two answers, {known.answer!r} and {answer!r}; keep one")
            yield prompt
        if not num_rows:
            raise DataError(f"{path}: has no rows")


def _as_conversation(question: Any, system_prompt: str, where: str) -> tuple[Message, ...]:
    if isinstance(question, str):
        return tuple(as_messages(question, system_prompt))
    messages = question if isinstance(question, list) else []
    if not messages or not all(isinstance(m, dict) and {"role", "content"} <= set(m) for m in messages):
        raise DataError(f"{where}: a question must be a text or a list of messages, got {str(question)[:80]!r}")
    system = [{"role": "system", "content": system_prompt}] if system_prompt else []
    return (*system, *({"role": m["role"], "content": m["content"]} for m in question))


def _as_answer(answer: Any, where: str) -> str:
    if isinstance(answer, list) and len(answer) == 1:
        answer = answer[0]
    if not isinstance(answer, str | int | float) or isinstance(answer, bool):
        raise DataError(f"{where}: an answer must be a text or a number, got {str(answer)[:80]!r}")
    text = str(answer)
    return final_answer(text) if "####" in text or "\\boxed{" in text else text
