"""Reinforcement learning: tasks, rollouts, advantages, losses, correction, refit, and the loop that joins them."""

from octavo.rl.config import RLConfig
from octavo.rl.history import StepRow
from octavo.rl.loop import run
from octavo.rl.policy import warm_start
from octavo.rl.tasks import Task
from octavo.rl.trainer import RLResult

__all__ = ["RLConfig", "RLResult", "StepRow", "Task", "run", "warm_start"]
