"""The first stage: the same small model from the same seed and data order, once in bf16 and once in each FP8 recipe."""

import dataclasses
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from octavo.demo.budget import num_steps_within
from octavo.demo.display import Display
from octavo.demo.sizes import Sizes
from octavo.demo.workers import Tell, Workers
from octavo.train.config import (
    CheckpointSection,
    MetricsSection,
    OptimizerSection,
    PrecisionSection,
    RunSection,
    ScheduleSection,
    TrainConfig,
)
from octavo.train.loop import train
from octavo.train.metrics import Row
from octavo.train.tokens import TokenizedText, load_text

ARMS = ("bf16", "blockwise", "delayed")
_MIN_STEPS, _MAX_STEPS = 12, 4000
_TIMED_STEPS = 5
_UNTIMED_STEPS = 2  # the first ones also allocate


@dataclasses.dataclass(frozen=True)
class PretrainArm:
    """One trained model.

    Attributes:
        recipe: of its linears.
        rows: a row a step.
        model_path: the checkpoint's Hugging Face directory.
        conversion: which linear ran in what, as a table.
        fp8_flop_share: share of the linears' FLOPs in FP8.
        seconds: of its training.
    """

    recipe: str
    rows: list[Row]
    model_path: Path
    conversion: str
    fp8_flop_share: float
    seconds: float


@dataclasses.dataclass(frozen=True)
class Pretraining:
    """All arms and what they share."""

    arms: dict[str, PretrainArm]
    config: TrainConfig
    num_params: int
    num_train_tokens: int
    num_validation_tokens: int


def prepare_text(sizes: Sizes, out: Path, seed: int, device: str) -> tuple[TrainConfig, TokenizedText]:
    """Read the corpus, train the tokenizer and tokenize, into out/cache; the arms find it there.

    Returns:
        (the config of all arms but for precision and steps, the text).
    """
    config = TrainConfig(
        model=sizes.model,
        data=sizes.data.model_copy(update={"cache_dir": out / "cache"}),
        optimizer=OptimizerSection(lr=sizes.lr),
        schedule=ScheduleSection(warmup_steps=0),
        checkpoint=CheckpointSection(every=0, keep=1),
        metrics=MetricsSection(eval_every=0, eval_tokens=sizes.eval_tokens, tensorboard=False),
        run=RunSection(seed=seed, device=device),
    )
    return config, load_text(config.data)


def pretrain(
    base: TrainConfig, text: TokenizedText, out: Path, seconds: float, workers: Workers, display: Display
) -> Pretraining:
    """Train every arm for the same number of steps, as many as fit.

    Args:
        seconds: for calibration and training together.
    """
    began = time.monotonic()
    step_s = _calibrate(base, out, workers)
    left_s = seconds - (time.monotonic() - began)
    num_steps = num_steps_within(left_s, step_s, least=_MIN_STEPS, most=_MAX_STEPS)
    display.say(f"{num_steps} steps for each arm, by {step_s:.2f} s a step in {_TIMED_STEPS} timed ones")
    jobs = {recipe: _arm_config(base, recipe, num_steps, out / "pretrain" / recipe) for recipe in ARMS}
    with display.bars() as bars:

        def on_event(arm: str, row: Row) -> None:
            bars.update(arm, row.step, num_steps, f"loss {row.loss:.3f}  {row.tokens_per_s:,.0f} tokens/s")

        results = workers.run(_train_arm, jobs, on_event)
    return Pretraining(
        arms=results,
        config=base,
        num_params=_num_params(results),
        num_train_tokens=len(text.train),
        num_validation_tokens=len(text.validation),
    )


def _arm_config(base: TrainConfig, recipe: str, num_steps: int, directory: Path) -> TrainConfig:
    return base.model_copy(
        update={
            "precision": PrecisionSection(recipe=recipe),
            "schedule": ScheduleSection(warmup_steps=min(20, num_steps // 4)),
            "run": base.run.model_copy(update={"dir": directory, "steps": num_steps}),
        }
    )


def _calibrate(base: TrainConfig, out: Path, workers: Workers) -> float:
    """Seconds of a step of all arms together: side by side the slowest one's, one after another their sum."""
    num_steps = _UNTIMED_STEPS + _TIMED_STEPS
    jobs = {recipe: _arm_config(base, recipe, num_steps, out / "calibration" / recipe) for recipe in ARMS}
    times = workers.run(_time_arm, jobs)
    return max(times.values()) if workers.is_parallel else sum(times.values())
