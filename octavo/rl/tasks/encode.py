"""Prompts as a model reads them: conversations through its chat template, plain text with its start token."""

from collections.abc import Sequence

from octavo.errors import DataError
from octavo.models.tokenizer import Tokenizer
from octavo.rl.tasks.protocols import ChatTask, Message

_MARK = "OCTAVO"  # stands for an answer while the text around one is looked for


def encode_prompts(task: object, prompts: Sequence[str], tokenizer: Tokenizer | None) -> list[list[int]]:
    """Token ids of prompts, as the policy is to read them.

    Args:
        tokenizer: the model's.
    Raises:
        DataError: a prompt of more than max_prompt_tokens, no tokenizer, a template that refuses the messages, or a
            task that raises instead of giving them.
    """
    if tokenizer is None:
        raise DataError("the task's prompts are text, which an engine without a tokenizer cannot read; give it one")
    if not isinstance(task, ChatTask):
        # with the start token that a checkpoint's tokenizer may put before a prompt
        return tokenizer.encode_batch(prompts, add_special_tokens=True)
    return [
        encode_messages(_messages(task, prompt), tokenizer, task.max_prompt_tokens, f"prompt {prompt[:80]!r}")
        for prompt in prompts
    ]


def _messages(task: ChatTask, prompt: str) -> Sequence[Message]:
    try:
        return task.messages(prompt)
    except Exception as error:
        raise DataError(
            f"the messages of prompt {prompt[:80]!r}: {type(task).__name__}.messages raised {type(error).__name__}: "
            f"{error}; fix the task"
        ) from error


def encode_messages(messages: Sequence[Message], tokenizer: Tokenizer, limit: int, what: str) -> list[int]:
    """A conversation up to where the policy begins to write. Without a chat template, the contents one by one.

    Args:
        limit: the most tokens; 0 for any number.
        what: names the conversation in messages.
    """
    ids = _encode(messages, tokenizer)
    if limit and len(ids) > limit:
        raise DataError(
            f"{what} has {len(ids)} tokens, more than task.max_prompt_tokens = {limit}; raise it, or take long "
            "questions out of the file"
        )
    return ids


def num_prompt_tokens(task: ChatTask, prompt: str, tokenizer: Tokenizer) -> int:
    """Tokens of a prompt, as the policy is to read it, however many there are."""
    return len(_encode(task.messages(prompt), tokenizer))


def _encode(messages: Sequence[Message], tokenizer: Tokenizer) -> list[int]:
    if tokenizer.chat_template is None:
        return tokenizer.encode("".join(str(m["content"]) for m in messages), add_special_tokens=True)
    # the template writes the special tokens itself
    return tokenizer.encode(tokenizer.render_chat(messages, add_generation_prompt=True))


def encode_observation(content: str, role: str, tokenizer: Tokenizer, last_id: int) -> list[int]:
    """What stands between one turn of the policy and its next: the end of the turn, a message, the next one's begin.

    Args:
        content: of the environment's message.
        role: of the environment's message.
        last_id: the turn's last token; where it is the end of turn that the template writes too, it is not repeated.
    """
    if tokenizer.chat_template is None:
        return tokenizer.encode(content)
    messages = [
        {"role": "user", "content": _MARK.lower()},
        {"role": "assistant", "content": _MARK},
        {"role": role, "content": content},
    ]
    text = tokenizer.render_chat(messages, add_generation_prompt=True)
    _, found, rest = text.partition(_MARK)
    if not found:
        raise DataError("the chat template does not show what the assistant wrote; give a model with another template")
    ids = tokenizer.encode(rest)
    return ids[1:] if ids[:1] == [last_id] else ids
