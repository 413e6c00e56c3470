"""Reading a request's body within its limits of size and time, and checking it against its schema."""

import asyncio
import json
from collections.abc import Awaitable, Callable
from typing import Any, TypeVar

from fastapi import Request
from pydantic import ValidationError
from pydantic_core import ErrorDetails, from_json

from octavo.errors import did_you_mean
from octavo.serve.http.config import ServerConfig
from octavo.serve.http.errors import ApiError
from octavo.serve.http.schema import ADVICE, MAX_LOGIT_BIASES, Body
from octavo.serve.http.service import get_service
from octavo.serve.http.texts import SHORT

T = TypeVar("T", bound=Body)

# of a body longer than SHORT
MAX_TOKENS, MAX_PROMPTS, MAX_REST_BYTES = 1 << 20, 1 << 16, 128 << 10
_LONG_FIELDS = ("prompt", "messages", "tokens", "tensors", "checksums", "partial")

_MOST_SHOWN = 80  # characters of a value that is refused
_SEVERAL_KINDS = {
    "prompt": "a string, a list of token ids, a list of strings, or a list of lists of token ids",
    "stop": "a string or a list of strings",
    "content": "a string or a list of {'type': 'text', 'text': ...}",
}


def body_of(schema: type[T]) -> Callable[[Request], Awaitable[T]]:
    """A dependency that reads the body as `schema`."""

    async def read(request: Request) -> T:
        check_json(request)
        service = get_service(request)
        raw = await read_bytes(request, service.config)
        if len(raw) > SHORT:
            service.ready_engine()  # the workers have its tokenizer
        return await service.texts.run(len(raw), parse_body, schema, raw)

    return read


def check_json(request: Request) -> None:
    """Refuse another content type: any web page may send those to a server here; for this one a browser asks first.

    Raises:
        ApiError: 415.
    """
    content_type = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if content_type != "application/json":
        raise ApiError(415, f"the content type must be application/json, got {content_type!r}")


def openapi_of(schema: type[Body]) -> dict[str, Any]:
    """What a route whose body is read by body_of says of it in /openapi.json."""
    # with an $id of its own the schema's references stay within it
    content = {"$id": schema.__name__, **schema.model_json_schema()}
    return {"requestBody": {"required": True, "content": {"application/json": {"schema": content}}}}


def parse_body(schema: type[T], raw: bytes) -> T:
    """A body as its schema's object.

    Raises:
        ApiError: 400 that names the first field at fault.
    """
    try:
        content = from_json(raw, allow_inf_nan=False)
    except ValueError as error:
        raise ApiError(400, f"the body is not valid JSON: {error}", code="invalid_json") from None
    if not isinstance(content, dict):
        raise ApiError(400, f"the body must be a JSON object, got {type(content).__name__}", code="invalid_json")
    if len(raw) > SHORT:
        _check_sizes(content)
    try:
        return schema.model_validate(content)
    except ValidationError as error:
        raise _refusal(error.errors(include_url=False), schema) from None


def _check_sizes(content: dict[str, Any]) -> None:
    """Refuse what would take long to check, and long to hand over."""
    prompt, tokens, bias = content.get("prompt"), content.get("tokens"), content.get("logit_bias")
    if isinstance(prompt, list) and len(prompt) > (MAX_TOKENS if prompt and type(prompt[0]) is int else MAX_PROMPTS):
        text = f"prompt has {len(prompt)} items; {MAX_TOKENS} token ids or {MAX_PROMPTS} prompts are the most"
        raise ApiError(400, text, "prompt", "invalid_value")
    if isinstance(tokens, list) and len(tokens) > MAX_TOKENS:
        raise ApiError(400, f"tokens has {len(tokens)} items; {MAX_TOKENS} are the most", "tokens", "invalid_value")
    if isinstance(bias, dict) and len(bias) > MAX_LOGIT_BIASES:
        text = f"logit_bias must have at most {MAX_LOGIT_BIASES} entries, got {len(bias)}"
        raise ApiError(400, text, "logit_bias", "invalid_value")
    sizes = {name: len(json.dumps(value)) for name, value in content.items() if name not in _LONG_FIELDS}
    if (size := sum(sizes.values()) + sum(map(len, sizes))) > MAX_REST_BYTES:
        name = max(sizes, key=lambda name: sizes[name])
        text = f"the fields beside {', '.join(_LONG_FIELDS)} take {size} bytes, most of them {name[:50]}; "
        raise ApiError(400, f"{text}{MAX_REST_BYTES} are the most", name[:50], "invalid_value")


async def read_bytes(request: Request, config: ServerConfig) -> bytes:
    """The body.

    Raises:
        ApiError: 408 and 413 for one that is too slow or too large.
    """
    try:
        async with asyncio.timeout(config.body_timeout_s):
            return await _read_up_to(request, config.max_body_bytes)
    except TimeoutError:
        raise ApiError(408, f"the body did not arrive within {config.body_timeout_s:g} s") from None


async def _read_up_to(request: Request, limit: int) -> bytes:
    too_large = ApiError(413, f"the body is larger than {limit} bytes", code="body_too_large")
    length = request.headers.get("content-length", "")
    if length.isdecimal() and int(length) > limit:
        raise too_large
    parts: list[bytes] = []
    size = 0
    async for part in request.stream():
        size += len(part)
        if size > limit:
            raise too_large
        parts.append(part)
    return b"".join(parts)


def _refusal(errors: list[ErrorDetails], schema: type[Body]) -> ApiError:
    first = errors[0]
    param = str(first["loc"][0]) if first["loc"] else None
    if first["type"] == "extra_forbidden":
        return ApiError(400, _unknown(first, schema), param, "unknown_field")
    if first["type"] == "missing":
        unknown = next((f"; {_unknown(error, schema)}" for error in errors if error["type"] == "extra_forbidden"), "")
        return ApiError(400, f"{'.'.join(map(str, first['loc']))} is missing{unknown}", param, "missing_field")
    # behind the name of a field of several kinds pydantic puts the kind
    named = next((part for part in reversed(first["loc"]) if part in _SEVERAL_KINDS), None)
    if named is not None:
        return ApiError(400, f"{named} must be {_SEVERAL_KINDS[str(named)]}", param, "invalid_value")
    place = ".".join(map(str, first["loc"])) or "the body"
    return ApiError(400, f"{place}: {first['msg']}, got {_shown(first['input'])}", param, "invalid_value")


def _unknown(error: ErrorDetails, schema: type[Body]) -> str:
    """What is wrong with a field that is none of the schema's."""
    place, name = ".".join(map(str, error["loc"])), str(error["loc"][-1])
    advice = ADVICE.get(name, "remove it")
    if neutral := schema.NEUTRAL.get(place):
        allowed = " or ".join(json.dumps(value) for value in neutral)
        return f"{place} is honoured as {allowed} alone, got {_shown(error['input'])}; {advice}"
    near = did_you_mean(name, schema.model_fields) if place == name and name not in ADVICE else ""
    return f"{place} is not a field that this server honours{near or f'; {advice}'}"


def _shown(value: object) -> str:
    """What was sent, cut where it is long."""
    text = json.dumps(value)
    return text if len(text) <= _MOST_SHOWN else f"{text[:_MOST_SHOWN]}..."
