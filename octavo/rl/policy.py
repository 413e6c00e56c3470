"""The policy before its first step: built or loaded, warmed up on right answers, and what looks on beside it."""

import copy
import dataclasses

import torch

from octavo.errors import ConfigError
from octavo.models import Decoder, load_model
from octavo.models.initial import STD as INIT_STD
from octavo.models.tokenizer import Tokenizer, char_tokenizer, load_tokenizer
from octavo.rl.config import RLConfig
from octavo.rl.evaluate import Evaluator
from octavo.rl.progress import RLProgress
from octavo.rl.ranks import Ranks
from octavo.rl.tasks import Task
from octavo.rl.warmup import WarmupStep, warm_up
from octavo.run.build import build_model_config, find_device

_DEFAULT_CONTEXT = 256


def warm_start(
    config: RLConfig, *, task: Task | None = None, progress: RLProgress | None = None
) -> tuple[Decoder, Tokenizer, list[WarmupStep]]:
    """Build or load the policy of config.model, and train it on right answers by config.warmup.

    The warm start computes in bf16, not exact, whatever the run's numerics: it only sets the starting point.

    Returns:
        (model, tokenizer, the warm start's steps).
    """
    task = task or config.task.build()
    model, tokenizer = build_policy(config, task)
    return model, tokenizer, warm_policy(config, model, tokenizer, task, progress or RLProgress(enabled=False))


def warm_policy(
    config: RLConfig, model: Decoder, tokenizer: Tokenizer, task: Task, progress: RLProgress
) -> list[WarmupStep]:
    """warm_start of a policy that is built; its steps."""
    if not config.warmup.steps:
        return []
    evaluator = build_evaluator(config, model, tokenizer, task)
    prompts = task.prompts("train", config.warmup.check_prompts, config.run.seed)
    progress.begin("warm start", config.warmup.steps)
    steps = warm_up(
        evaluator.model,
        tokenizer,
        task,
        config.warmup,
        seed=config.run.seed,
        measure=lambda: evaluator.mean_reward(prompts, config.rollout.temperature),
        on_step=progress.show_warmup,
    )
    progress.end()
    if steps and (reward := steps[-1].reward) is not None:
        said = f"a mean reward of {reward:.2f} in step {steps[-1].step}"
        target = f"warmup.target_reward = {config.warmup.target_reward}"
        if reward >= config.warmup.target_reward:
            progress.say(f"the warm start reached {said}; {target}")
        else:
            progress.say(
                f"warning: the warm start ended at {said}, below {target}; what is never rewarded cannot be "
                "reinforced: raise warmup.steps"
            )
    model.mark_weights_updated()  # the warm start's optimizer knows its bf16 view alone
    return steps


def build_policy(config: RLConfig, task: Task) -> tuple[Decoder, Tokenizer]:
    """The untrained policy of config.model: a checkpoint, or random weights over the task's alphabet."""
    device = find_device(config.run.device)
    if config.model.path:
        model, tokenizer = load_model(config.model.path, device=device, trainable=True), build_tokenizer(config, task)
        mask_padded_ids(config, model, tokenizer)
        return model, tokenizer
    if config.router_replay and not config.model.num_experts:
        raise ConfigError("router_replay = true replays the choice of experts, and this policy has none; leave it out")
    tokenizer = build_tokenizer(config, task)
    architecture = build_model_config(config.model, tokenizer.vocab_size, tokenizer.eos_id, _DEFAULT_CONTEXT)
    model = Decoder(architecture, device=device, seed=config.run.seed)
    with torch.no_grad():
        for param in model.parameters():
            if param.dim() == 2:
                param.mul_(config.warmup.init_std / INIT_STD)
    model.mark_weights_updated()
    return model, tokenizer


def build_tokenizer(config: RLConfig, task: Task) -> Tokenizer:
    """The policy's: the checkpoint's, or one of the task's alphabet."""
    return load_tokenizer(config.model.path) if config.model.path else char_tokenizer(task.alphabet)


def mask_padded_ids(config: RLConfig, model: Decoder, tokenizer: Tokenizer) -> str:
    """What rollout.mask_padded_ids asks for.

    A remote engine samples from all ids, so the trainer's logprobs are of all ids then too.

    Returns:
        What a person should know of ids beyond the tokenizer's; empty where there are none.
    """
    num_padded = model.config.vocab_size - tokenizer.vocab_size
    if num_padded <= 0:
        return ""
    said = f"the model has {num_padded} ids beyond the tokenizer's {tokenizer.vocab_size}"
    if config.rollout.mask_padded_ids and not config.engine.is_remote:
        return (
            f"{said}: {model.mask_padded_ids(tokenizer.vocab_size)} are masked on both sides (rollout.mask_padded_ids)"
        )
    return f"{said}: they may be sampled, and have no text"


def build_reference(config: RLConfig, model: Decoder) -> Decoder | None:
    """The policy as it is now, frozen, where KL is to be measured to it; its KV scales are one a token and head."""
    if not config.algorithm.kl_coef:
        return None
    reference = copy.deepcopy(model).requires_grad_(False)
    reference.set_numerics(dataclasses.replace(model.numerics, kv_scales="per_token_head"))
    return reference


def build_evaluator(
    config: RLConfig,
    model: Decoder,
    tokenizer: Tokenizer,
    task: Task,
    ranks: Ranks | None = None,
    sampler: Decoder | None = None,
) -> Evaluator:
    """The bf16 greedy engine over the policy's weights."""
    return Evaluator(model, tokenizer, task, config.rollout.max_tokens, config.rollout.max_num_seqs, ranks, sampler)
