"""The learning matrix's task: `3b07...=` wants its symbols in order, `037b...;`, one token each.

Answers are as long as the problem has symbols, and a wrong token spoils what follows: the reward is the share of the
answer that stands before the first wrong token, 1 for the whole of it.
"""

import itertools
import random

from octavo.errors import ConfigError
from octavo.rl.tasks.draw import draw_distinct, split_of

_SYMBOLS = "0123456789abcdefghijklmnopqrstuvwxyz"


class Sorting:
    """The task; see octavo.rl.tasks.Task for its members. What a config's task.function names.

    Args:
        num_items: symbols of a problem; its answer has one token more.
        num_symbols: different symbols that there are; fewer give more repetitions, which must be counted.
        heldout_share: share of all problems that only evaluation sees.
    Raises:
        ConfigError: numbers that leave no problem.
    """

    name = "sorting"
    end = ";"

    def __init__(self, num_items: int = 48, num_symbols: int = 16, heldout_share: float = 0.1) -> None:
        if num_items < 1 or not 2 <= num_symbols <= len(_SYMBOLS) or not 0 < heldout_share < 1:
            raise ConfigError(
                f"sorting needs num_items >= 1, 2 <= num_symbols <= {len(_SYMBOLS)} and 0 < heldout_share < 1, got "
                f"{num_items}, {num_symbols}, {heldout_share}"
            )
        self.num_items, self.num_symbols, self.heldout_share = num_items, num_symbols, heldout_share
        self.alphabet = _SYMBOLS[:num_symbols] + "=" + self.end

    def prompts(self, split: str, n: int, seed: int) -> list[str]:
        """Distinct problems of one split, in an order that the seed decides.

        Raises:
            ConfigError: another split, or one that has fewer than `n` problems.
        """
        return draw_distinct(
            self._make,
            lambda prompt: split_of(prompt, self.heldout_share) == split,
            name=self.name,
            split=split,
            n=n,
            seed=seed,
            share=self.heldout_share if split == "heldout" else 1.0 - self.heldout_share,
            num_problems=self.num_symbols**self.num_items,
            remedy="raise num_items",
        )

    def answer(self, prompt: str) -> str:
        """The right completion of a prompt, `end` included."""
        return "".join(sorted(prompt.removesuffix("="))) + self.end

    def score(self, prompt: str, completion: str) -> float:
        """The share of the right answer's tokens before the first one that is wrong or missing."""
        wanted = self.answer(prompt)
        pairs = zip(wanted, completion, strict=False)
        return sum(1 for _ in itertools.takewhile(lambda pair: pair[0] == pair[1], pairs)) / len(wanted)

    def examples(self, split: str, n: int, seed: int) -> list[tuple[str, str]]:
        """Problems with their answers."""
        return [(prompt, self.answer(prompt)) for prompt in self.prompts(split, n, seed)]

    def _make(self, rng: random.Random) -> str:
        return "".join(rng.choices(_SYMBOLS[: self.num_symbols], k=self.num_items)) + "="
