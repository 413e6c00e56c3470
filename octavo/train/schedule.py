"""The learning rate as a pure function of the step: warm-up, then constant, linear or cosine."""

import math

from octavo.train.config import ScheduleSection


def learning_rate(step: int, num_steps: int, peak: float, schedule: ScheduleSection) -> float:
    """The learning rate of one optimizer step.

    Args:
        step: 0-based, below num_steps.
        num_steps: the run's length; a decay reaches peak * min_ratio at its last step.
        peak: the learning rate at the end of the warm-up.
    Returns:
        A learning rate in [0, peak].
    """
    if step < schedule.warmup_steps:
        return peak * (step + 1) / schedule.warmup_steps
    if schedule.kind == "constant":
        return peak
    num_decay_steps = max(num_steps - 1 - schedule.warmup_steps, 1)
    progress = min((step - schedule.warmup_steps) / num_decay_steps, 1.0)
    remaining = 1.0 - progress if schedule.kind == "linear" else 0.5 * (1.0 + math.cos(math.pi * progress))
    return peak * (schedule.min_ratio + (1.0 - schedule.min_ratio) * remaining)
