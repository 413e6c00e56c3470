"""The first stage: the same small model from the same seed and data order, once in bf16 and once in each FP8 recipe."""

import dataclasses
import time
from pathlib import Path

from bench.demo.budget import num_steps_within
from bench.demo.display import Display
from bench.demo.workers import Tell, Workers
from octavo.run.build import find_device
from octavo.run.checkpoint_store import MODEL_DIR
from octavo.run.metrics import Row
from octavo.run.optimizer import MasterAdamW
from octavo.train.build import build_model
from octavo.train.config import PrecisionSection, ScheduleSection, TrainConfig
from octavo.train.data import Sampler
from octavo.train.loop import train
from octavo.train.step import train_step
from octavo.train.tokens import TokenizedText, load_text

VARIANTS = ("bf16", "blockwise", "delayed")
_MIN_STEPS, _MAX_STEPS = 12, 4000
_UNTIMED_STEPS = 2  # the first ones also allocate
_TIMED_SHARE = 0.06  # of the stage's time goes into timing steps


@dataclasses.dataclass(frozen=True)
class PretrainVariant:
    """One trained model.

    Attributes:
        recipe: of its linears.
        rows: a row a step.
        model_path: the checkpoint's Hugging Face directory.
        num_params: of the model.
        conversion: which linear ran in what, as a table.
        fp8_flop_share: share of the linears' FLOPs in FP8.
        seconds: of its training.
    """

    recipe: str
    rows: list[Row]
    model_path: Path
    num_params: int
    conversion: str
    fp8_flop_share: float
    seconds: float


@dataclasses.dataclass(frozen=True)
class Pretraining:
    """All variants and what they share."""

    variants: dict[str, PretrainVariant]
    config: TrainConfig
    num_train_tokens: int
    num_validation_tokens: int


def pretrain(
    base: TrainConfig, text: TokenizedText, out: Path, seconds: float, workers: Workers, display: Display
) -> Pretraining:
    """Train every variant for the same number of steps, as many as fit.

    Args:
        seconds: for calibration and training together.
    """
    began = time.monotonic()
    with display.working("timing a few steps of each run"):
        step_s = _calibrate(base, seconds * _TIMED_SHARE, workers)
    left_s = seconds - (time.monotonic() - began)
    num_steps = num_steps_within(left_s, step_s, least=_MIN_STEPS, most=_MAX_STEPS)
    display.say(f"{num_steps} steps for each of {', '.join(VARIANTS)}, {step_s:.2f} s a step")
    jobs = {recipe: _variant_config(base, recipe, num_steps, out / "pretrain" / recipe) for recipe in VARIANTS}
    with display.bars() as bars:

        def on_event(variant: str, row: Row) -> None:
            bars.update(variant, row.step, num_steps, f"loss {row.loss:.3f}  {row.tokens_per_s:,.0f} tokens/s")

        results = workers.run(_train_variant, jobs, on_event)
    return Pretraining(
        variants=results,
        config=base,
        num_train_tokens=len(text.train),
        num_validation_tokens=len(text.validation),
    )


def _variant_config(base: TrainConfig, recipe: str, num_steps: int, directory: Path) -> TrainConfig:
    return base.model_copy(
        update={
            "precision": PrecisionSection(recipe=recipe),
            "schedule": ScheduleSection(warmup_steps=min(20, num_steps // 4)),
            "run": base.run.model_copy(update={"dir": directory, "steps": num_steps}),
        }
    )


def _calibrate(base: TrainConfig, seconds: float, workers: Workers) -> float:
    """Seconds of a step of all variants together: side by side the slowest one's, one after another their sum."""
    jobs = {recipe: (_variant_config(base, recipe, _MIN_STEPS, base.run.dir), seconds) for recipe in VARIANTS}
    times = workers.run(_time_variant, jobs)
    return max(times.values()) if workers.is_parallel else sum(times.values())


def _time_variant(job: tuple[TrainConfig, float], tell: Tell) -> float:
    """Mean seconds of a step: steps are taken for the given time, so that variants side by side disturb each other."""
    config, seconds = job
    text = load_text(config.data, config.model.path)
    eos_id = text.tokenizer.eos_id
    model = build_model(config, text.tokenizer.vocab_size, eos_id, find_device(config.run.device))
    optimizer = MasterAdamW(model, config.optimizer)
    data = config.data
    sampler = Sampler(text.train, data.seq_len, data.batch_size, data.num_micro_batches, config.run.seed, eos_id)
    began, step = 0.0, 0
    while step <= _UNTIMED_STEPS + 1 or time.perf_counter() - began < seconds:
        if step == _UNTIMED_STEPS:
            began = time.perf_counter()
        train_step(model, optimizer, sampler.batches(step), lr=1e-4, max_grad_norm=1.0, step=step + 1)
        step += 1
    return (time.perf_counter() - began) / (step - _UNTIMED_STEPS)


def _train_variant(config: TrainConfig, tell: Tell) -> PretrainVariant:
    began = time.monotonic()
    result = train(config, on_step=tell, progress=False)
    return PretrainVariant(
        recipe=config.precision.recipe,
        rows=list(result.rows),
        model_path=result.checkpoint / MODEL_DIR,
        num_params=result.model.num_params,
        conversion=str(result.conversion_report),
        fp8_flop_share=result.conversion_report.fp8_flop_share,
        seconds=time.monotonic() - began,
    )
