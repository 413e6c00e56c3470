"""Self-made arithmetic: sums and products of small numbers as character strings, `37+58=` -> `95.`

A problem's split is decided by a hash of its operands in sorted order, so that `58+37` never leaks from `37+58`.
"""

import math

from octavo.errors import ConfigError
from octavo.rl.tasks.draw import draw_distinct, split_of

_SIGNS = {"add": "+", "multiply": "*"}


class Arithmetic:
    """The task; see octavo.rl.tasks.Task for its members.

    Args:
        operation: "add" or "multiply".
        num_digits: of every operand: 0 to 9, 10 to 99, 100 to 999, ...
        num_operands: how many are added or multiplied.
        reverse_answer: write the answer's last digit first, as carries run.
        heldout_share: share of all problems that only evaluation sees.
    Raises:
        ConfigError: another operation, or numbers that leave no problem.
    """

    name = "arithmetic"
    end = "."

    def __init__(
        self,
        operation: str = "add",
        num_digits: int = 2,
        num_operands: int = 2,
        reverse_answer: bool = False,
        heldout_share: float = 0.1,
    ) -> None:
        if operation not in _SIGNS:
            raise ConfigError(f"operation must be one of {', '.join(_SIGNS)}, got {operation!r}")
        if num_digits < 1 or num_operands < 2 or not 0 < heldout_share < 1:
            raise ConfigError(
                "arithmetic needs num_digits >= 1, num_operands >= 2 and 0 < heldout_share < 1, got "
                f"{num_digits}, {num_operands}, {heldout_share}"
            )
        self.operation, self.num_digits, self.num_operands = operation, num_digits, num_operands
        self.reverse_answer, self.heldout_share = reverse_answer, heldout_share
        self.sign = _SIGNS[operation]
        self.alphabet = "0123456789" + self.sign + "=" + self.end

    def prompts(self, split: str, n: int, seed: int) -> list[str]:
        """Distinct problems of one split, in an order that the seed decides.

        Raises:
            ConfigError: another split.
            TooFewPromptsError: it has fewer than `n` problems.
        """
        low, high = 10 ** (self.num_digits - 1) * (self.num_digits > 1), 10**self.num_digits
        return draw_distinct(
            lambda rng: self.sign.join(str(rng.randrange(low, high)) for _ in range(self.num_operands)) + "=",
            lambda prompt: self.split_of(prompt) == split,
            name=self.name,
            split=split,
            n=n,
            seed=seed,
            share=self.heldout_share if split == "heldout" else 1.0 - self.heldout_share,
            num_problems=high**self.num_operands,
            remedy="raise num_digits or num_operands",
        )

    def split_of(self, prompt: str) -> str:
        """The split that a problem is in, with all its mirror images."""
        key = self.sign.join(map(str, sorted(self._operands(prompt))))
        return split_of(key, self.heldout_share)

    def answer(self, prompt: str) -> str:
        """The right completion of a prompt, `end` included."""
        operands = self._operands(prompt)
        digits = str(sum(operands) if self.operation == "add" else math.prod(operands))
        return (digits[::-1] if self.reverse_answer else digits) + self.end

    def score(self, prompt: str, completion: str) -> float:
        """1 for the right digits followed by `end`, else 0: no leading zeros, nothing before or after."""
        return float(completion == self.answer(prompt))

    def examples(self, split: str, n: int, seed: int) -> list[tuple[str, str]]:
        """Problems with their answers."""
        return [(prompt, self.answer(prompt)) for prompt in self.prompts(split, n, seed)]

    def _operands(self, prompt: str) -> list[int]:
        return [int(text) for text in prompt.removesuffix("=").split(self.sign)]
