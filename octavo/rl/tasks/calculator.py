"""Arithmetic with a tool, over several turns: `12*34+5=`, the policy asks `?12*34;`, reads `408;`, answers `!413;`.

The example of a multi-turn environment, and the test of the masking: the tool's text is never in the loss.
"""

import random
import re

from octavo.errors import ConfigError
from octavo.rl.tasks.draw import draw_distinct, split_of
from octavo.rl.tasks.protocols import Message, StepResult

CALL, ANSWER = "?", "!"
ERROR = "error"
MAX_DIGITS = 18  # of a number that the tool takes
INSTRUCTIONS = (
    "Solve the problem. To use the calculator, write ? and one sum, difference or product of two numbers, then ; as in "
    "?12*34; and stop. Its result comes back. To answer, write ! and the number, then ; as in !408;"
)
_CALL = re.compile(rf"(-?\d{{1,{MAX_DIGITS}}})([-+*])(-?\d{{1,{MAX_DIGITS}}})")


class Calculator:
    """The task; see octavo.rl.tasks.EnvironmentTask for its members.

    A problem is a product and a number: `12*34+5=`. The reward is 1 for the right number, less `call_cost` for each
    use of the tool; what is neither a call nor an answer ends the episode.

    Args:
        num_digits: of every operand.
        call_cost: what a use of the tool costs.
        max_turns: of the policy.
        instructions: begin with a message that explains the tool; for models that have learned to read.
        heldout_share: share of all problems that only evaluation sees.
    Raises:
        ConfigError: numbers that leave no problem.
    """

    name = "calculator"
    end = ";"
    max_prompt_tokens = 0

    def __init__(
        self,
        num_digits: int = 2,
        call_cost: float = 0.0,
        max_turns: int = 4,
        instructions: bool = False,
        heldout_share: float = 0.1,
    ) -> None:
        if num_digits < 1 or max_turns < 1 or call_cost < 0 or not 0 < heldout_share < 1:
            raise ConfigError(
                "calculator needs num_digits >= 1, max_turns >= 1, call_cost >= 0 and 0 < heldout_share < 1, got "
                f"{num_digits}, {max_turns}, {call_cost}, {heldout_share}"
            )
        self.num_digits, self.call_cost, self.max_turns = num_digits, call_cost, max_turns
        self.instructions, self.heldout_share = instructions, heldout_share
        self.alphabet = "".join(dict.fromkeys("0123456789+-*=" + CALL + ANSWER + ERROR + self.end))

    def prompts(self, split: str, n: int, seed: int) -> list[str]:
        """Distinct problems of one split, in an order that the seed decides."""
        low, high = 10 ** (self.num_digits - 1) * (self.num_digits > 1), 10**self.num_digits

        def make(rng: random.Random) -> str:
            a, b, c = (rng.randrange(low, high) for _ in range(3))
            return f"{a}*{b}+{c}="

        return draw_distinct(
            make,
            lambda prompt: split_of(prompt, self.heldout_share) == split,
            name=self.name,
            split=split,
            n=n,
            seed=seed,
            share=self.heldout_share if split == "heldout" else 1.0 - self.heldout_share,
            num_problems=high**3,
            remedy="raise num_digits",
        )

    def environment(self, prompt: str) -> "CalculatorEnvironment":
        """A fresh episode."""
        return CalculatorEnvironment(prompt, self.call_cost, self.instructions)

    def score(self, prompt: str, completion: str) -> float:
        """The reward of a single turn."""
        return self.environment(prompt).step(completion).reward

    def examples(self, split: str, n: int, seed: int) -> list[tuple[str, str]]:
        """Every turn of right episodes: what was written before, the tool's text included, is a turn's prompt."""
        turns = []
        for prompt in self.prompts(split, (n + 2) // 3, seed):
            product, _, rest = prompt.removesuffix("=").partition("+")
            text = prompt
            for call in (product, f"{evaluate(product)}+{rest}"):
                written = f"{CALL}{call}{self.end}"
                turns.append((text, written))
                text += f"{written}{evaluate(call)}{self.end}"
            turns.append((text, f"{ANSWER}{answer_of(prompt)}{self.end}"))
        return turns[:n]


class CalculatorEnvironment:
    """One problem."""

    def __init__(self, prompt: str, call_cost: float, instructions: bool) -> None:
        self.prompt, self.call_cost, self.instructions = prompt, call_cost, instructions

    def reset(self) -> list[Message]:
        """The problem, after the instructions where they are asked for."""
        problem = {"role": "user", "content": self.prompt}
        return [{"role": "system", "content": INSTRUCTIONS}, problem] if self.instructions else [problem]

    def step(self, text: str) -> StepResult:
        """Compute what is asked, or judge what is answered."""
        if not text.endswith(Calculator.end):
            return StepResult(done=True)
        kind, rest = text[:1], text[1:].removesuffix(Calculator.end).strip()
        if kind == CALL:
            result = evaluate(rest)
            shown = ERROR if result is None else str(result)
            return StepResult(shown + Calculator.end, reward=-self.call_cost)
        is_right = kind == ANSWER and rest == str(answer_of(self.prompt))
        return StepResult(reward=float(is_right), done=True)


def evaluate(expression: str) -> int | None:
    """The value of one sum, difference or product of two integers; None for anything else."""
    match = _CALL.fullmatch(expression)
    if match is None:
        return None
    a, b = int(match[1]), int(match[3])
    return {"+": a + b, "-": a - b, "*": a * b}[match[2]]


def answer_of(prompt: str) -> int:
    """The number that a problem asks for."""
    product, _, rest = prompt.removesuffix("=").partition("+")
    value = evaluate(product)
    assert value is not None, f"{prompt!r} is no problem of this task"
    return value + int(rest)
