"""A run's prompts at its border: which there are, how many are held out, and that each leaves room for a response."""

from collections.abc import Callable, Sequence

from octavo.errors import ConfigError
from octavo.models.tokenizer import Tokenizer
from octavo.rl.config import EvalSection, RLConfig
from octavo.rl.tasks import (
    CountedTask,
    EnvironmentTask,
    ListedTask,
    Questions,
    Task,
    TooFewPromptsError,
    encode_prompts,
    num_prompt_tokens,
)

_MOST_ENCODED = 4096  # of a list's prompts, at the start of a run; the others' lengths are known once they are drawn
_SHOWN = 80  # characters of a prompt in an error's text


def drop_long_prompts(task: Task, load_tokenizer: Callable[[], Tokenizer]) -> str:
    """What task.drop_long_prompts asks for.

    Args:
        load_tokenizer: gives the model's; called where it is needed.
    Returns:
        What a person should know of it; empty where nothing was left out.
    """
    if not isinstance(task, Questions) or not task.drop_long_prompts:
        return ""
    limit, num_all, tokenizer = task.max_prompt_tokens, len(task.all_prompts()), load_tokenizer()
    count = task.drop_prompts(lambda prompt: num_prompt_tokens(task, prompt, tokenizer) > limit)
    return f"{count} of {num_all} prompts have more than {limit} tokens and are left out" if count else ""


def step_limits(config: RLConfig, task: Task) -> dict[str, int]:
    """The most steps of a run, by each key that says so; whichever comes first ends it.

    Raises:
        ConfigError: a task without a list of prompts, or with too few for a step.
    """
    trainer, size = config.trainer, config.rollout.prompts_per_step
    limits = {"trainer.steps": trainer.steps}
    if trainer.epochs is None:
        return limits
    if not isinstance(task, CountedTask):
        raise ConfigError(
            f"trainer.epochs = {trainer.epochs} counts passes over a list of prompts, and task {task.name!r} makes its "
            "own; give trainer.steps"
        )
    if (num_prompts := task.num_prompts("train")) < size:
        raise ConfigError(
            f"the train split has {num_prompts} prompts, fewer than the {size} of a step; lower "
            "rollout.prompts_per_step, or give a larger file"
        )
    by_epochs = {"trainer.epochs": trainer.epochs * (num_prompts // size)}
    return by_epochs | limits if "steps" in trainer.model_fields_set else by_epochs


def with_steps(config: RLConfig, task: Task) -> RLConfig:
    """The config with trainer.steps as step_limits says. Errors as that."""
    steps = min(step_limits(config, task).values())
    return config.model_copy(update={"trainer": config.trainer.model_copy(update={"steps": steps})})


def prompts_of_step(config: RLConfig, task: Task, step: int, seed_of: Callable[[int], int]) -> list[str]:
    """The prompts that a step begins with: a draw of its own, or with trainer.epochs its part of the epoch's order.

    Args:
        step: from 1.
        seed_of: the seed of a step, or of an epoch from 0.
    """
    size = config.rollout.prompts_per_step
    if config.trainer.epochs is None:
        return task.prompts("train", size, seed_of(step))
    assert isinstance(task, CountedTask), "with_steps has asked"
    num_prompts = task.num_prompts("train")
    epoch, index = divmod(step - 1, num_prompts // size)
    return task.prompts("train", num_prompts, seed_of(epoch))[index * size : (index + 1) * size]


def draw_heldout(section: EvalSection, task: Task) -> list[str]:
    """The evaluation's prompts; drawn first, so that a task with too few of them fails before any work.

    Returns:
        section.num_prompts of them; where that key was not set and there are fewer, all that there are.
    Raises:
        ConfigError: fewer than the config asks for, or none at all.
    """
    wanted = section.num_prompts
    try:
        found = task.prompts("heldout", wanted, 0)
        why = f"task {task.name!r} gave {len(found)} held-out prompts, of {wanted} asked for"
    except TooFewPromptsError as error:
        found, why = error.found, str(error)
    except ConfigError as error:
        raise ConfigError(f"{error}; lower eval.num_prompts, which is {wanted}") from None
    if not found:
        raise ConfigError(f"{why}; an evaluation needs at least one: hold some out")
    if len(found) < wanted and "num_prompts" in section.model_fields_set:
        raise ConfigError(f"{why}; lower eval.num_prompts, which is {wanted}, or leave it out to take all there are")
    return found


def check_context(prompts: Sequence[str], lens: Sequence[int], max_tokens: int, context: int) -> None:
    """Refuse prompts after which a response of max_tokens would be cut short.

    Args:
        prompts: as the task gave them.
        lens: their tokens, as the model reads them.
        max_tokens: of a response.
        context: the most tokens of a whole sequence.
    Raises:
        ConfigError: the longest prompt and max_tokens together are longer than the context.
    """
    longest = max(range(len(lens)), key=lens.__getitem__)
    room = context - lens[longest]
    if max_tokens <= room:
        return
    lower = f"lower rollout.max_tokens to at most {room}" if room > 0 else "it leaves no room for a response"
    raise ConfigError(
        f"rollout.max_tokens = {max_tokens} does not fit: the longest prompt has {lens[longest]} tokens "
        f"({prompts[longest][:_SHOWN]!r}), and prompt and response together may have {context} (the model's context, "
        f"or what the KV cache holds of it); {lower}, take long prompts out, or, of a new model, raise "
        "model.max_position_embeddings"
    )


def check_known_prompts(
    task: Task, heldout: Sequence[str], tokenizer: Tokenizer, max_tokens: int, context: int
) -> None:
    """check_context of what is known before the first draw: held-out prompts, and a list's longest by characters.

    An environment's first messages are known once an episode begins; see play_episodes.
    """
    if isinstance(task, EnvironmentTask):
        return
    listed = sorted(task.all_prompts(), key=len)[-_MOST_ENCODED:] if isinstance(task, ListedTask) else []
    prompts = list(dict.fromkeys([*heldout, *listed]))
    check_context(prompts, [len(ids) for ids in encode_prompts(task, prompts, tokenizer)], max_tokens, context)
