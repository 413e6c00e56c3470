"""POST /v1/chat/completions."""

from collections.abc import Sequence
from typing import Annotated, Any

from fastapi import APIRouter, Depends, Request
from fastapi.responses import Response

from octavo.errors import OctavoError
from octavo.serve.engine.request import Delta, RequestInput
from octavo.serve.http.answer import Answer, compile_schema
from octavo.serve.http.body import body_of, openapi_of
from octavo.serve.http.errors import ApiError, as_api_error
from octavo.serve.http.params import make_params
from octavo.serve.http.schema import ChatRequest, Message
from octavo.serve.http.service import Service, ServiceOf, require_api_key
from octavo.serve.http.token_text import GrowingTexts, TokenTexts, json_number
from octavo.serve.outputs import Logprob
from octavo.serve.sampling_params import MAX_LOGPROBS

router = APIRouter(dependencies=[Depends(require_api_key)])


@router.post("/v1/chat/completions", openapi_extra=openapi_of(ChatRequest))
async def chat_completions(
    request: Request,
    service: ServiceOf,
    body: Annotated[ChatRequest, Depends(body_of(ChatRequest))],
) -> Response:
    """Answer a conversation."""
    model_name = service.check_model(body.model)
    engine = service.ready_engine()
    try:
        max_tokens = _max_tokens(body)
        params = make_params(body, service.config, max_tokens=max_tokens, logprobs=_num_logprobs(body))
        schema = await compile_schema(request, service, params)
        ids, text = await encode_chat(service, body.messages, body.add_generation_prompt, body.chat_template_kwargs)
        inputs = [await service.make_input(ids, params, text, schema, max_tokens=max_tokens, field="messages")]
        form = ChatFormat(body, TokenTexts(engine.tokenizer, body.return_tokens_as_token_ids), inputs)
        usage = body.stream_options is not None and body.stream_options.include_usage
        answer = Answer(service, form, model_name, inputs, include_usage=usage)
        return await answer.respond(request, body.stream)
    except OctavoError as error:
        raise as_api_error(error, "messages") from error


async def encode_chat(
    service: Service, messages: list[Message], add_generation_prompt: bool, template_kwargs: dict[str, Any]
) -> tuple[list[int], str]:
    """A conversation's token ids and its text; the template writes special tokens itself."""
    rows = [message.as_dict() for message in messages]
    text = await service.texts.render(service.tokenizer(), rows, add_generation_prompt, template_kwargs)
    return await service.encode(text, add_special_tokens=False, field="messages"), text


def _max_tokens(body: ChatRequest) -> int | None:
    """OpenAI's new name or its old one; without either as many as the context holds."""
    old, new = body.max_tokens, body.max_completion_tokens
    if old is not None and new is not None and old != new:
        text = f"max_completion_tokens={new} and max_tokens={old} disagree; give one of them"
        raise ApiError(400, text, "max_completion_tokens", "invalid_value")
    name, value = ("max_tokens", old) if new is None else ("max_completion_tokens", new)
    if value is not None and value < 1:  # 0 scores a prompt, and a chat echoes none
        raise ApiError(400, f"{name} must be at least 1 in a chat, got {value}", name, "invalid_value")
    return value


def _num_logprobs(body: ChatRequest) -> int | None:
    if not 0 <= (body.top_logprobs or 0) <= MAX_LOGPROBS:
        text = f"top_logprobs must be from 0 to {MAX_LOGPROBS}, got {body.top_logprobs}"
        raise ApiError(400, text, "top_logprobs", "invalid_value")
    if body.top_logprobs and not body.logprobs:
        raise ApiError(400, "top_logprobs needs logprobs=true", "top_logprobs", "invalid_value")
    return body.top_logprobs or 0 if body.logprobs else None


class ChatFormat:
    """Writes choices as /v1/chat/completions does."""

    id_prefix, object_name, chunk_object_name = "chatcmpl", "chat.completion", "chat.completion.chunk"

    def __init__(self, body: ChatRequest, texts: TokenTexts, inputs: Sequence[RequestInput] = ()) -> None:
        self._body, self._texts = body, texts
        self._growing = GrowingTexts(texts, inputs)

    def opening(self, num_choices: int) -> list[dict[str, Any]]:
        delta = {"role": "assistant", "content": ""}
        return [{"index": i, "delta": delta, "logprobs": None, "finish_reason": None} for i in range(num_choices)]

    @property
    def is_text_alone(self) -> bool:
        return not self._body.logprobs and not self._body.return_token_ids

    def chunk(self, delta: Delta) -> dict[str, Any]:
        return {"index": delta.index, "delta": {"content": delta.text}} | self._rest(delta)

    def choice(self, delta: Delta) -> dict[str, Any]:
        return {"index": delta.index, "message": {"role": "assistant", "content": delta.text}} | self._rest(delta)

    def _rest(self, delta: Delta) -> dict[str, Any]:
        rest: dict[str, Any] = {
            "logprobs": {"content": self._content(delta)} if self._body.logprobs else None,
            "finish_reason": delta.finish_reason,
            "stop_reason": delta.stop_reason,
        }
        if self._body.return_token_ids:
            rest |= {"token_ids": delta.token_ids, "weight_versions": delta.weight_versions}
        return rest

    def _content(self, delta: Delta) -> list[dict[str, Any]]:
        growing = self._growing[delta.index]
        is_end = delta.finish_reason is not None
        texts, _ = growing.add(delta.token_ids, is_end=is_end, ends_by_token=delta.ends_by_token)
        entries = []
        for token_id, text, entry in zip(delta.token_ids, texts, delta.logprobs, strict=True):
            assert entry is not None, "only a prompt's first token has none"
            shown = {i: self._token(i, e, text if i == token_id else self._texts.text(i)) for i, e in entry.items()}
            best = [shown[i] for i, e in entry.items() if e.rank is not None and e.rank <= self._num_best]
            # the token has a rank among them too where it is as likely as the last of them
            entries.append(shown[token_id] | {"top_logprobs": best[: self._num_best]})
        return entries

    @property
    def _num_best(self) -> int:
        return self._body.top_logprobs or 0

    def _token(self, token_id: int, entry: Logprob, text: str) -> dict[str, Any]:
        return {
            "token": text,
            "logprob": json_number(entry.logprob),
            "bytes": self._texts.utf8(token_id, text),
        }
