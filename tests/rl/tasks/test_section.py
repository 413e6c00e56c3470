"""The [task] section: which keys a task has, a task of one's own by name, and reasoning-gym behind its own API."""

import importlib.util
import random
import sys
from pathlib import Path
from typing import Any, get_args

import pytest

from octavo.errors import BackendError, ConfigError, DataError
from octavo.rl.config import RLConfig
from octavo.rl.tasks import Arithmetic, Calculator, ReasoningGym, TaskSection

NEED_MORE = {"reasoning_gym", "questions", "callable"}  # a file, a package or a function: tested by themselves


def make_task(num_digits: int = 1) -> Arithmetic:
    return Arithmetic(num_digits=num_digits)


def make_nothing() -> object:
    return object()


class NoTurns(Arithmetic):
    def environment(self, prompt: str) -> object:
        return object()


def test_every_task_has_a_name(tmp_path: Path) -> None:
    for name in set(get_args(TaskSection.model_fields["name"].annotation)) - NEED_MORE:
        assert TaskSection(name=name).build().name == name
    assert isinstance(TaskSection().build(), Arithmetic)
    calculator = TaskSection(name="calculator", num_digits=3, call_cost=0.1, max_turns=2, instructions=True).build()
    assert isinstance(calculator, Calculator)
    assert (calculator.num_digits, calculator.call_cost, calculator.max_turns) == (3, 0.1, 2)
    own = TaskSection(name="callable", function=f"{__file__}:make_task", options={"num_digits": 3}).build()
    assert isinstance(own, Arithmetic)
    assert own.num_digits == 3


@pytest.mark.parametrize(
    ("section", "message"),
    [
        ({"path": "x.jsonl"}, "task.path has no effect with task.name = 'arithmetic', whose keys are operation"),
        ({"name": "questions"}, "task.name = 'questions' needs task.path"),
        ({"name": "reasoning_gym"}, "needs task.dataset"),
        ({"name": "questions", "path": "x", "drop_long_prompts": True}, "needs task.max_prompt_tokens"),
        ({"name": "callable"}, "needs task.function"),
        ({"name": "calculator", "num_operands": 3}, "task.num_operands has no effect with task.name = 'calculator'"),
        ({"numdigits": 3}, "did you mean task.num_digits"),
        ({"name": "arithmetik"}, "task.name must be .*'callable', got \"arithmetik\" .*; did you mean 'arithmetic'"),
    ],
)
def test_keys_of_another_task_are_refused(section: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        RLConfig(task=section)


@pytest.mark.parametrize(
    ("function", "options", "message"),
    [
        ("make_nothing", {}, "gave a object without name, end, prompts, score, examples"),
        ("NoTurns", {}, "a NoTurns with environment, and .* has max_turns and max_prompt_tokens"),
        ("make_task", {"digits": 3}, "unexpected keyword argument 'digits'"),
        ("nobody", {}, "has no function 'nobody'"),
    ],
)
def test_bad_callables(function: str, options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        TaskSection(name="callable", function=f"{__file__}:{function}", options=options).build()


class StandIn:
    """reasoning-gym's documented API: create_dataset(name, seed, size, **config), items by index, score_answer."""

    __spec__ = None

    class Sums:
        def __init__(self, low: int) -> None:
            self.low = low

        def __getitem__(self, index: int) -> dict[str, Any]:
            rng = random.Random(index)
            a, b = rng.randrange(self.low, 100), rng.randrange(self.low, 100)
            return {"question": f"{a}+{b}?", "answer": str(a + b), "metadata": {"source_dataset": "sums"}}

        def score_answer(self, answer: str | None, entry: dict[str, Any]) -> float:
            return 0.0 if answer is None else 1.0 if answer == entry["answer"] else 0.01

    @classmethod
    def create_dataset(cls, name: str, seed: int, size: int, low: int = 0) -> "StandIn.Sums":
        if name != "sums":
            raise ValueError(f"Dataset '{name}' not registered")
        return cls.Sums(low)


@pytest.fixture
def gym(monkeypatch: pytest.MonkeyPatch) -> None:
    find_spec = importlib.util.find_spec
    monkeypatch.setitem(sys.modules, "reasoning_gym", StandIn)  # type: ignore[arg-type]
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: True if name == "reasoning_gym" else find_spec(name))


def test_reasoning_gym(gym: None) -> None:
    task = TaskSection(name="reasoning_gym", dataset="sums", options={"low": 90}, end="\n", heldout_share=0.3).build()
    assert isinstance(task, ReasoningGym)
    train, heldout = task.prompts("train", 30, 0), task.prompts("heldout", 10, 0)
    assert set(train).isdisjoint(heldout)
    assert all(min(map(int, prompt[:-1].split("+"))) >= 90 for prompt in train)
    assert train == task.prompts("train", 30, 0) != task.prompts("train", 30, 1)
    for prompt, answer in task.examples("train", 5, 3):
        assert answer.endswith("\n")
        assert set(prompt + answer) <= set(task.alphabet)
        assert task.score(prompt, answer) == 1.0
        assert task.score(prompt, "0\n") == 0.01
    assert task.messages("1+1?") == [{"role": "user", "content": "1+1?"}]
    with pytest.raises(DataError, match="was not drawn from this data set"):
        task.score("5+5?", "10\n")


def test_reasoning_gym_with_tags(gym: None) -> None:
    task = ReasoningGym("sums", answer_tag="answer", system_prompt="Use tags.", max_prompt_tokens=5)
    prompt, answer = task.examples("train", 1, 0)[0]
    assert answer.startswith("<answer>")
    assert task.score(prompt, f"so {answer}, yes") == 1.0
    assert task.score(prompt, answer.removeprefix("<answer>")) == 0.0
    assert [m["role"] for m in task.messages(prompt)] == ["system", "user"]
    with pytest.raises(ConfigError, match=r"set task.end = '\\n'"):
        task.alphabet  # noqa: B018


def test_reasoning_gym_refuses_by_name(gym: None) -> None:
    with pytest.raises(ConfigError, match=r"refuses data set 'sum' .* not registered; fix task.dataset"):
        ReasoningGym("sum")
    with pytest.raises(ConfigError, match="unexpected keyword argument 'high'"):
        ReasoningGym("sums", {"high": 3})


def test_reasoning_gym_is_optional(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(BackendError, match="pip install reasoning-gym"):
        ReasoningGym("sums")


def test_the_real_reasoning_gym() -> None:
    pytest.importorskip("reasoning_gym")
    task = ReasoningGym("chain_sum", {"max_terms": 3})
    for prompt, answer in task.examples("heldout", 3, 0):
        assert task.score(prompt, answer) == 1.0
        assert task.score(prompt, "none") < 1.0
