"""The [task] section of a config: which problems there are, by the name of a task and its own keys."""

from collections.abc import Callable
from typing import Any, Literal, Self

from pydantic import Field, NonNegativeFloat, NonNegativeInt, PositiveInt, model_validator

from octavo.config import Config
from octavo.errors import ConfigError
from octavo.rl.tasks.answers import load_callable
from octavo.rl.tasks.arithmetic import Arithmetic
from octavo.rl.tasks.calculator import Calculator
from octavo.rl.tasks.gym import ReasoningGym
from octavo.rl.tasks.protocols import EnvironmentTask, Task
from octavo.rl.tasks.questions import Questions

_CHAT = ("end", "system_prompt", "max_prompt_tokens", "heldout_share")
_JUDGED = ("verifier", "verifier_options", "drop_long_prompts")
# the keys that each task has
_KEYS = {
    "arithmetic": ("operation", "num_digits", "num_operands", "reverse_answer", "heldout_share"),
    "calculator": ("num_digits", "call_cost", "max_turns", "instructions", "heldout_share"),
    "reasoning_gym": ("dataset", "options", "answer_tag", *_CHAT),
    "questions": ("path", "heldout_path", "question_key", "answer_key", *_JUDGED, *_CHAT),
    "callable": ("function", "options"),
}
_TASKS: dict[str, Callable[..., Task]] = {
    "arithmetic": Arithmetic,
    "calculator": Calculator,
    "reasoning_gym": ReasoningGym,
    "questions": Questions,
}
_NEEDED = {"reasoning_gym": "dataset", "questions": "path", "callable": "function"}
_MEMBERS = ("name", "end", "prompts", "score", "examples")


class TaskSection(Config):
    """Which problems there are. A key that the named task does not have is an error.

    Attributes:
        name: "arithmetic" (octavo.rl.tasks.Arithmetic), "calculator" (Calculator: several turns with a tool),
            "reasoning_gym" (ReasoningGym), "questions" (Questions: a file of questions and answers), or "callable"
            (`function` makes the task).
        dataset: of reasoning_gym.
        options: of it, or of `function`: a table of its arguments.
        function: module:function or file.py:function that returns an object with the members of octavo.rl.tasks.Task;
            one of several turns has EnvironmentTask's too.

    The other keys are the arguments of the classes named above.
    """

    name: Literal["arithmetic", "calculator", "reasoning_gym", "questions", "callable"] = "arithmetic"
    operation: Literal["add", "multiply"] = "add"
    num_digits: int = Field(default=2, ge=1, le=9)
    num_operands: int = Field(default=2, ge=2, le=9)
    reverse_answer: bool = True
    heldout_share: float = Field(default=0.1, gt=0.0, lt=1.0)
    call_cost: NonNegativeFloat = 0.0
    max_turns: PositiveInt = 4
    instructions: bool = False
    dataset: str = ""
    options: dict[str, Any] = {}
    answer_tag: str = ""
    path: str | tuple[str, ...] = ""
    heldout_path: str | tuple[str, ...] = ""
    question_key: str = ""
    answer_key: str = ""
    verifier: str = "math"
    verifier_options: dict[str, Any] = {}
    drop_long_prompts: bool = False
    end: str = ""
    system_prompt: str = ""
    max_prompt_tokens: NonNegativeInt = 0
    function: str = ""

    def build(self) -> Task:
        """The task that this section describes.

        Raises:
            ConfigError: it cannot be made; the message says what to do.
            DataError: the same.
            BackendError: the same.
        """
        fields = self.model_dump(include=set(_KEYS[self.name]))
        return _call(self.function, self.options) if self.name == "callable" else _TASKS[self.name](**fields)

    @model_validator(mode="after")
    def _check(self) -> Self:
        own = {"name", *_KEYS[self.name]}
        defaults = type(self).model_fields
        foreign = [
            key
            for key in sorted(self.model_fields_set - own)
            if getattr(self, key) != defaults[key].get_default(call_default_factory=True)
        ]
        if foreign:
            raise ValueError(
                f"task.{foreign[0]} has no effect with task.name = {self.name!r}, whose keys are "
                f"{', '.join(_KEYS[self.name])}; leave it out"
            )
        needed = _NEEDED.get(self.name)
        if needed and not getattr(self, needed):
            raise ValueError(f"task.name = {self.name!r} needs task.{needed}")
        if self.drop_long_prompts and not self.max_prompt_tokens:
            raise ValueError("task.drop_long_prompts needs task.max_prompt_tokens, beyond which a prompt is long")
        return self


def _call(target: str, options: dict[str, Any]) -> Task:
    function = load_callable(target)
    try:
        task = function(**options)
    except TypeError as error:
        raise ConfigError(f"task.function {target!r} with task.options {options}: {error}") from error
    missing = [name for name in _MEMBERS if not hasattr(task, name)]
    if missing:
        raise ConfigError(
            f"task.function {target!r} gave a {type(task).__name__} without {', '.join(missing)}; a task has "
            f"{', '.join(_MEMBERS)} and alphabet (see octavo.rl.tasks.Task)"
        )
    if hasattr(task, "environment") and not isinstance(task, EnvironmentTask):
        raise ConfigError(
            f"task.function {target!r} gave a {type(task).__name__} with environment, and a task of several turns has "
            "max_turns and max_prompt_tokens (0 for no limit) too (see octavo.rl.tasks.EnvironmentTask)"
        )
    return task  # type: ignore[no-any-return]
