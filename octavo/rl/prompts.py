"""A run's prompts at its border: how many are held out, and that each leaves the room that a response may take."""

from collections.abc import Sequence

from octavo.errors import ConfigError
from octavo.models.tokenizer import Tokenizer
from octavo.rl.config import EvalSection
from octavo.rl.tasks import EnvironmentTask, ListedTask, Task, TooFewPromptsError, encode_prompts

_MOST_ENCODED = 4096  # of a list's prompts, at the start of a run; the others' lengths are known once they are drawn
_SHOWN = 80  # characters of a prompt in an error's text


def draw_heldout(section: EvalSection, task: Task) -> list[str]:
    """The evaluation's prompts; drawn first, so that a task with too few of them fails before any work.

    Returns:
        section.num_prompts of them; where that key was not set and there are fewer, all that there are.
    Raises:
        ConfigError: fewer than the recipe asks for, or none at all.
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
        prompts: as the task gave them. lens: their tokens, as the model reads them.
        max_tokens: of a response. context: the most tokens of a whole sequence.
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
