"""POST /v1/completions."""

from collections.abc import Sequence
from typing import Annotated, Any

from fastapi import APIRouter, Depends, Request
from fastapi.responses import Response
from pydantic import Field

from octavo.errors import OctavoError
from octavo.serve.engine.grammar import CompiledSchema
from octavo.serve.engine.request import Delta, RequestInput
from octavo.serve.http.answer import Answer, compile_schema
from octavo.serve.http.body import body_of, openapi_of
from octavo.serve.http.errors import ApiError, as_api_error
from octavo.serve.http.params import check_routed_experts, make_params
from octavo.serve.http.schema import CompletionRequest
from octavo.serve.http.service import Service, ServiceOf, require_api_key
from octavo.serve.http.token_text import GrowingTexts, TokenTexts, json_number
from octavo.serve.outputs import Logprob
from octavo.serve.sampling_params import SamplingParams

router = APIRouter(dependencies=[Depends(require_api_key)])

# OpenAI's default
DEFAULT_MAX_TOKENS = 16


class RoutedCompletionRequest(CompletionRequest):
    """POST /v1/completions, with what a trainer that replays routers asks for."""

    return_routed_experts: bool = Field(
        False,
        description="The last piece of each choice has routed_experts: where every token but the last was sent, "
        "[prompt and completion - 1, layers, experts a token], as dtype, shape and base64.",
    )


@router.post("/v1/completions", openapi_extra=openapi_of(RoutedCompletionRequest))
async def completions(
    request: Request,
    service: ServiceOf,
    body: Annotated[RoutedCompletionRequest, Depends(body_of(RoutedCompletionRequest))],
) -> Response:
    """Continue one prompt or many."""
    model_name = service.check_model(body.model)
    engine = service.ready_engine()
    if body.return_routed_experts:
        check_routed_experts(engine)
    try:
        params = make_params(
            body,
            service.config,
            max_tokens=DEFAULT_MAX_TOKENS if body.max_tokens is None else body.max_tokens,
            logprobs=body.logprobs,
            prompt_logprobs=body.logprobs if body.echo else None,
        )
        schema = await compile_schema(request, service, params)
        inputs = await _make_inputs(service, body, params, schema)
        texts = TokenTexts(engine.tokenizer, body.return_tokens_as_token_ids)
        echoes = [texts.join(given.prompt_ids) if given.prompt is None else given.prompt for given in inputs]
        form = CompletionFormat(body, texts, inputs)
        usage = body.stream_options is not None and body.stream_options.include_usage
        answer = Answer(
            service,
            form,
            model_name,
            inputs,
            echoes if body.echo else None,
            usage,
            with_routed_experts=body.return_routed_experts,
        )
        return await answer.respond(request, body.stream)
    except OctavoError as error:
        raise as_api_error(error, "prompt") from error


async def _make_inputs(
    service: Service, body: CompletionRequest, params: SamplingParams, schema: CompiledSchema | None
) -> list[RequestInput]:
    prompts = _prompts(body.prompt)
    most = service.config.max_prompts
    if not 1 <= len(prompts) <= most:
        raise ApiError(400, f"prompt must be from 1 to {most} prompts, got {len(prompts)}", "prompt", "invalid_value")
    inputs = []
    for prompt in prompts:
        text = prompt if isinstance(prompt, str) else None
        ids = (
            await service.encode(prompt, add_special_tokens=body.add_special_tokens)
            if isinstance(prompt, str)
            else prompt
        )
        inputs.append(await service.make_input(ids, params, text, schema, max_tokens=body.max_tokens, field="prompt"))
    return inputs


def _prompts(prompt: str | list[int] | list[str] | list[list[int]]) -> list[str | list[int]]:
    if isinstance(prompt, str):
        return [prompt]
    ids = [item for item in prompt if isinstance(item, int)]
    return [ids] if ids else [item for item in prompt if not isinstance(item, int)]


class CompletionFormat:
    """Writes choices as /v1/completions does."""

    id_prefix, object_name, chunk_object_name = "cmpl", "text_completion", "text_completion"

    def __init__(self, body: CompletionRequest, texts: TokenTexts, inputs: Sequence[RequestInput] = ()) -> None:
        self._body, self._texts = body, texts
        self._growing = GrowingTexts(texts, inputs)

    def opening(self, num_choices: int) -> list[dict[str, Any]]:
        return []

    def choice(self, delta: Delta) -> dict[str, Any]:
        return self.chunk(delta)

    @property
    def is_text_alone(self) -> bool:
        return self._body.logprobs is None and not self._body.return_token_ids

    def chunk(self, delta: Delta) -> dict[str, Any]:
        choice = {
            "index": delta.index,
            "text": delta.text,
            "logprobs": None if self._body.logprobs is None else self._logprobs(delta),
            "finish_reason": delta.finish_reason,
            "stop_reason": delta.stop_reason,
        }
        if self._body.return_token_ids:
            choice |= {"token_ids": delta.token_ids, "weight_versions": delta.weight_versions}
        return choice

    def _logprobs(self, delta: Delta) -> dict[str, Any]:
        growing, num_echoed = self._growing[delta.index], delta.num_echoed
        tokens: list[str] = []
        offsets: list[int] = []
        if num_echoed:
            tokens, offsets = growing.echo(delta.token_ids[:num_echoed], delta.text[: delta.echo_len])
        is_end = delta.finish_reason is not None
        said = growing.add(delta.token_ids[num_echoed:], is_end=is_end, ends_by_token=delta.ends_by_token)
        tokens, offsets = tokens + said[0], offsets + said[1]
        return {
            "tokens": tokens,
            "token_logprobs": [
                None if entry is None else json_number(entry[token_id].logprob)
                for token_id, entry in zip(delta.token_ids, delta.logprobs, strict=True)
            ],
            "top_logprobs": [
                None if entry is None else self._top(entry, token_id, text)
                for entry, token_id, text in zip(delta.logprobs, delta.token_ids, tokens, strict=True)
            ],
            "text_offset": offsets,
        }

    def _top(self, entry: dict[int, Logprob], token_id: int, text: str) -> dict[str, float | None]:
        """By text, which is the token's own at its place; a token whose text is taken is "token_id:N"."""
        top: dict[str, float | None] = {}
        for other_id, logprob in entry.items():
            name = text if other_id == token_id else self._texts.text(other_id)
            is_taken = name in top or (name == text and other_id != token_id)
            top[f"token_id:{other_id}" if is_taken else name] = json_number(logprob.logprob)
        return top
