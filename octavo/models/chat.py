"""Conversations as text in which the assistant's answers are marked, so that a loss can count them and nothing else.

The tokenizer's own chat template decides the text; a tokenizer without one takes DEFAULT_CHAT_TEMPLATE.
"""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

from octavo.errors import DataError
from octavo.models.tokenizer import Tokenizer

# Role and colon on a line, the content on the next; an answer ends with the end-of-sequence token. The cuts around an
# answer (a line end, a special token) are cuts for every pre-tokenizer too: training and sampling see one tokenization.
DEFAULT_CHAT_TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}{{ message['role'].capitalize() + ':\\n' + message['content'] }}"
    "{% if message['role'] == 'assistant' %}{{ eos_token }}{% endif %}{{ '\\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ 'Assistant:\\n' }}{% endif %}"
)
ROLES = ("system", "developer", "user", "assistant", "tool", "function")
Message = Mapping[str, Any]


@dataclasses.dataclass(frozen=True)
class Segment:
    """A stretch of a conversation's text; segments are tokenized one by one, so that no token lies across an answer's
    edge.
    """

    text: str
    is_answer: bool


def chat_examples(
    tokenizer: Tokenizer, messages: Sequence[Message], counted: Sequence[bool] | None = None
) -> list[list[Segment]]:
    """Cut a conversation at its answers.

    Args:
        tokenizer: its chat_template is used, DEFAULT_CHAT_TEMPLATE where it has none.
        messages: "role" and "content", from the first turn on.
        counted: which messages' answers are targets; None for every message of the assistant's.
    Returns:
        One example, whose segments joined are the conversation's text. Where the template writes earlier turns another
        way once later ones follow (some drop their reasoning), one example for each answer, which is that example's
        last segment but for white space.
    Raises:
        DataError: a content that spells a special token, a conversation that begins with an answer, or a template
            that refuses the messages or whose generation prompt is not how its answers begin.
    """
    _check_contents(tokenizer, messages)
    answers = [i for i, message in enumerate(messages) if message["role"] == "assistant"]
    if answers and answers[0] == 0:
        raise DataError("the conversation begins with the assistant's message; there is nothing that it answers")
    wanted = [i for i in answers if counted is None or counted[i]]
    whole = render(tokenizer, messages)
    spans = {i: _answer_span(tokenizer, messages, i) for i in wanted}
    if all(whole.startswith(text) for text, _ in spans.values()):
        return [_cut(tokenizer, whole, [(start, len(text)) for text, start in spans.values()])]
    return [_cut(tokenizer, text, [(start, len(text))]) for text, start in spans.values()]


def describe_template(tokenizer: Tokenizer) -> str:
    """Which chat template render uses, for a log."""
    if tokenizer.chat_template is None:
        return (
            'this tokenizer has no chat template; octavo\'s default is used: "User:" and "Assistant:" before contents'
        )
    return "the tokenizer's own chat template"


def render(
    tokenizer: Tokenizer,
    messages: Sequence[Message],
    *,
    add_generation_prompt: bool = False,
    template_kwargs: Mapping[str, Any] | None = None,
) -> str:
    """A conversation as text: by the tokenizer's chat template, or by DEFAULT_CHAT_TEMPLATE without transformers.

    Args:
        template_kwargs: further variables of the template; one that it never names is an error.
    """
    kwargs = dict(template_kwargs or {})
    if unknown := [name for name in kwargs if name not in (tokenizer.chat_template or "")]:
        raise DataError(f"the chat template has no variable {unknown[0]!r}; leave it out")
    if tokenizer.chat_template not in (None, DEFAULT_CHAT_TEMPLATE):
        return tokenizer.render_chat(messages, add_generation_prompt=add_generation_prompt, template_kwargs=kwargs)
    parts = [tokenizer.bos_token or ""]
    for message in messages:
        if extra := sorted(set(message) - {"role", "content"}):
            raise DataError(f"the default chat template shows role and content only, a message also has {extra}")
        if not all(isinstance(message.get(name), str) for name in ("role", "content")):
            raise DataError(
                f"the default chat template needs a role and a content, both texts, got {dict(message)!r:.80}"
            )
        end = tokenizer.eos_token or "" if message["role"] == "assistant" else ""
        parts.append(f"{message['role'].capitalize()}:\n{message['content']}{end}\n")
    return "".join(parts) + ("Assistant:\n" if add_generation_prompt else "")


def _answer_span(tokenizer: Tokenizer, messages: Sequence[Message], index: int) -> tuple[str, int]:
    """(the text up to the end of a message, where its answer starts in it)."""
    prompt = render(tokenizer, messages[:index], add_generation_prompt=True)
    text = render(tokenizer, messages[: index + 1])
    if not text.startswith(prompt):
        raise DataError(
            f"the chat template's generation prompt {prompt[-40:]!r} is not how it begins the answer in "
            f"{text[max(len(prompt) - 40, 0) :][:80]!r}; give another data.chat_template"
        )
    return text, len(prompt)


def _cut(tokenizer: Tokenizer, text: str, spans: Sequence[tuple[int, int]]) -> list[Segment]:
    segments, done = [], 0
    for start, end in spans:
        bare = text[start:end].rstrip()
        if bare.endswith(tokenizer.special_tokens):  # white space after it is the template's, and is never sampled
            end = start + len(bare)
        segments += [Segment(text[done:start], False), Segment(text[start:end], True)]
        done = end
    return [segment for segment in (*segments, Segment(text[done:], False)) if segment.text]


def _check_contents(tokenizer: Tokenizer, messages: Sequence[Message]) -> None:
    for message in messages:
        found = [token for token in tokenizer.special_tokens if token in message["content"]]
        if found:
            raise DataError(
                f"the {message['role']}'s content spells the special token {found[0]!r}, which would end a turn or "
                "begin one; remove it"
            )
