"""Prompts, conversations and sampling parameters in the forms that LLM's methods take, brought to one form each."""

from collections.abc import Mapping, Sequence
from typing import Any

from octavo.errors import RequestError
from octavo.models.tokenizer import Tokenizer
from octavo.serve.sampling_params import SamplingParams

PlainPrompt = str | list[int] | tuple[int, ...]
Prompt = PlainPrompt | Mapping[str, Any]
Conversation = Sequence[Mapping[str, Any]]


def plain_prompt(prompt: Prompt) -> tuple[Any, str | None]:
    """What is to be encoded, and the prompt's text where it is known."""
    if not isinstance(prompt, Mapping):
        return prompt, prompt if isinstance(prompt, str) else None
    fields = {name: value for name, value in prompt.items() if value is not None}
    if not fields or not {*fields} <= {"prompt", "prompt_token_ids"}:
        raise RequestError(
            "a dict for a prompt has 'prompt', a string, or 'prompt_token_ids', or both, and nothing else; got "
            f"{sorted(prompt)}"
        )
    text = fields.get("prompt")
    return fields.get("prompt_token_ids", text), text if isinstance(text, str) else None


def encode_prompt(prompt: PlainPrompt, tokenizer: Tokenizer | None) -> list[int]:
    """Token ids of a prompt.

    Args:
        tokenizer: that a string needs.
    """
    if isinstance(prompt, str):
        if tokenizer is None:
            raise RequestError(
                "a string prompt needs a tokenizer, and this LLM has none; pass LLM(..., tokenizer=PATH), or give "
                "lists of token ids"
            )
        return tokenizer.encode(prompt, add_special_tokens=True)
    if not isinstance(prompt, list | tuple):
        raise RequestError(
            f"a prompt must be a string or a list of token ids, got {prompt!r}; one prompt of ids is [[1, 2, 3]]"
        )
    return list(prompt)


def plain_message(message: Mapping[str, Any]) -> Mapping[str, Any]:
    """A message whose content is one text, where it came as a list of them."""
    if not isinstance(message, Mapping):
        raise RequestError(f"a message must be a dict of role and content, got {message!r:.80}")
    content = message.get("content")
    if not isinstance(content, list | tuple):
        return message
    if others := [part for part in content if not _is_text(part)]:
        text = "a content has parts {'type': 'text', 'text': a string} alone, for models read text"
        raise RequestError(f"{text}; got {others[0]!r:.80}")
    return {**message, "content": "".join(part["text"] for part in content)}


def _is_text(part: Any) -> bool:
    return isinstance(part, Mapping) and part.get("type") == "text" and isinstance(part.get("text"), str)


def params_of(params: SamplingParams | Sequence[SamplingParams] | None, num_prompts: int) -> list[SamplingParams]:
    """One SamplingParams a prompt."""
    if params is None or isinstance(params, SamplingParams):
        return [params or SamplingParams()] * num_prompts
    several: list[Any] = list(params) if isinstance(params, list | tuple) else [params]
    if others := [one for one in several if not isinstance(one, SamplingParams)]:
        raise RequestError(f"sampling_params must be SamplingParams, or a list of them, got {others[0]!r:.80}")
    if len(several) != num_prompts:
        raise RequestError(f"{num_prompts} prompts need as many SamplingParams, or one for all, got {len(several)}")
    return several
