"""The supervised warm start: training on right answers until sampling is rewarded often enough."""

import dataclasses
import math
from collections.abc import Callable

import torch

from octavo.deprecation import former_attribute
from octavo.errors import NonFiniteError
from octavo.models import Decoder
from octavo.models.scoring import joined_logprobs
from octavo.models.tokenizer import Tokenizer
from octavo.numerics.infinity import take_infinity
from octavo.rl.config import WarmupSection
from octavo.rl.losses import token_coefficients
from octavo.rl.tasks import Task, encode_prompts
from octavo.run.optimizer import MasterAdamW
from octavo.run.sections import OptimizerSection

LR_WARMUP_STEPS = 20


@dataclasses.dataclass(frozen=True)
class WarmupStep:
    """One step: `reward` is the mean reward of samples for training prompts, where it was measured."""

    step: int
    loss: float
    reward: float | None = None

    accuracy = former_attribute("WarmupStep", "accuracy", "reward")


def warm_up(
    model: Decoder,
    tokenizer: Tokenizer,
    task: Task,
    config: WarmupSection,
    *,
    seed: int,
    measure: Callable[[], float],
    on_step: Callable[[WarmupStep], None] = lambda _: None,
) -> list[WarmupStep]:
    """Train on the task's examples, in the model's numerics.

    Args:
        model: trained in place.
        measure: samples completions for training prompts and gives their mean reward.
    Returns:
        The steps, the last with a reward; none where the policy is warm already.
    Raises:
        NonFiniteError: a loss or gradient is inf or NaN.
    """
    steps: list[WarmupStep] = []
    if config.steps and measure() >= config.target_reward:
        return steps
    optimizer = MasterAdamW(model, OptimizerSection(lr=config.lr, weight_decay=0.0))
    for step in range(1, config.steps + 1):
        examples = task.examples("train", config.batch_size, seed * 1_000_003 + step)
        loss = _update(model, optimizer, tokenizer, task, examples, config.lr * min(1.0, step / LR_WARMUP_STEPS), step)
        is_check = step % config.check_every == 0 or step == config.steps
        steps.append(WarmupStep(step, loss, measure() if is_check else None))
        on_step(steps[-1])
        if (steps[-1].reward or 0.0) >= config.target_reward:
            break
    return steps


def _update(
    model: Decoder,
    optimizer: MasterAdamW,
    tokenizer: Tokenizer,
    task: Task,
    examples: list[tuple[str, str]],
    lr: float,
    step: int,
) -> float:
    prompts = encode_prompts(task, [prompt for prompt, _ in examples], tokenizer)
    answers = tokenizer.encode_batch([answer for _, answer in examples])
    sequences = [prompt + answer for prompt, answer in zip(prompts, answers, strict=True)]
    of_answers, _ = joined_logprobs(model, sequences, 1.0, prompt_lens=[len(ids) for ids in prompts])  # [tokens]
    coefficients = token_coefficients([len(answer) for answer in answers]).to(of_answers.device)
    loss = -(of_answers * coefficients).sum()
    loss.backward()
    optimizer.accumulate_gradients()
    norm = optimizer.clip_gradients(1.0)
    found = torch.stack([loss.detach().float().to(norm.device), norm, take_infinity(norm.device)])
    mean_loss, grad_norm, is_infinite = found.tolist()
    if is_infinite or not (math.isfinite(mean_loss) and math.isfinite(grad_norm)):
        raise NonFiniteError(
            f"warm start, step {step}: the loss is {mean_loss}, the gradient's norm {grad_norm}"
            f"{', and an operand of a linear in FP8 was infinite' if is_infinite else ''}; lower warmup.lr"
        )
    optimizer.step(lr=lr)
    return mean_loss
