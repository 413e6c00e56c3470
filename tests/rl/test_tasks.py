"""The arithmetic task: its verifier, its splits, and what it refuses."""

import pytest

from octavo.errors import ConfigError
from octavo.rl.tasks import SPLITS, Arithmetic

KINDS = [
    Arithmetic(),
    Arithmetic("multiply", num_digits=1),
    Arithmetic(num_operands=4),
    Arithmetic(num_digits=3, reverse_answer=True),
]


@pytest.mark.parametrize(
    ("task", "prompt", "completion", "reward"),
    [
        (KINDS[0], "37+58=", "95.", 1.0), (KINDS[0], "37+58=", "95", 0.0), (KINDS[0], "37+58=", "095.", 0.0),
        (KINDS[0], "37+58=", " 95.", 0.0), (KINDS[0], "37+58=", "95.5.", 0.0), (KINDS[0], "37+58=", "94.", 0.0),
        (KINDS[0], "37+58=", "", 0.0), (KINDS[0], "0+0=", "0.", 1.0), (KINDS[1], "7*8=", "56.", 1.0),
        (KINDS[2], "1+2+3+94=", "100.", 1.0), (KINDS[3], "120+3=", "321.", 1.0), (KINDS[3], "120+3=", "123.", 0.0),
    ],
)  # fmt: skip
def test_verifier(task: Arithmetic, prompt: str, completion: str, reward: float) -> None:
    assert task.score(prompt, completion) == reward


@pytest.mark.parametrize("task", KINDS, ids=["add", "multiply", "four-operands", "reversed"])
def test_examples_are_right_and_spelled_in_the_alphabet(task: Arithmetic) -> None:
    for prompt, answer in task.examples("train", 20, seed=3):
        assert task.score(prompt, answer) == 1.0
        assert answer.endswith(task.end)
        assert answer.count(task.end) == 1
        assert set(prompt + answer) <= set(task.alphabet)


def test_splits_share_no_problem_not_even_mirrored() -> None:
    task = Arithmetic()
    seen = {
        split: {
            tuple(sorted(map(int, prompt[:-1].split("+"))))
            for seed in range(3)
            for prompt in task.prompts(split, 400, seed)
        }
        for split in SPLITS
    }
    assert seen["train"].isdisjoint(seen["heldout"])


def test_a_split_can_be_drawn_in_full() -> None:
    task = Arithmetic(num_digits=1, heldout_share=0.3)
    problems = [f"{a}+{b}=" for a in range(10) for b in range(10)]
    sizes = {split: sum(task.split_of(problem) == split for problem in problems) for split in SPLITS}
    drawn = [prompt for split in SPLITS for prompt in task.prompts(split, sizes[split], seed=0)]
    assert sorted(drawn) == sorted(problems)
    assert 15 < sizes["heldout"] < 45


def test_prompts_are_distinct_and_reproducible() -> None:
    task = Arithmetic()
    first = task.prompts("train", 300, seed=1)
    assert len(set(first)) == 300
    assert first == Arithmetic().prompts("train", 300, seed=1)
    assert first != task.prompts("train", 300, seed=2)
    assert first[:50] == task.prompts("train", 50, seed=1)


def test_refusals() -> None:
    with pytest.raises(ConfigError, match="fewer than the 5000 asked for; raise num_digits"):
        Arithmetic(num_digits=1).prompts("train", 5000, 0)
    with pytest.raises(ConfigError, match="split must be 'train' or 'heldout', got 'test'"):
        Arithmetic().prompts("test", 1, 0)
    with pytest.raises(ConfigError, match="operation must be one of add, multiply, got 'divide'"):
        Arithmetic("divide")
    with pytest.raises(ConfigError, match="arithmetic needs num_digits >= 1"):
        Arithmetic(num_operands=1)
