"""What a reinforcement-learning task is, in small protocols; and the tasks that octavo has."""

from octavo.rl.tasks.arithmetic import Arithmetic
from octavo.rl.tasks.calculator import Calculator
from octavo.rl.tasks.encode import encode_prompts, num_prompt_tokens
from octavo.rl.tasks.gym import ReasoningGym
from octavo.rl.tasks.protocols import (
    SPLITS,
    ChatTask,
    CountedTask,
    Environment,
    EnvironmentTask,
    ListedTask,
    StepResult,
    Task,
    TooFewPromptsError,
)
from octavo.rl.tasks.questions import Questions
from octavo.rl.tasks.section import TaskSection

__all__ = [
    "SPLITS",
    "Arithmetic",
    "Calculator",
    "ChatTask",
    "CountedTask",
    "Environment",
    "EnvironmentTask",
    "ListedTask",
    "Questions",
    "ReasoningGym",
    "StepResult",
    "Task",
    "TaskSection",
    "TooFewPromptsError",
    "encode_prompts",
    "num_prompt_tokens",
]
