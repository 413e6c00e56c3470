"""From a request's fields to SamplingParams, within the server's limits."""

import dataclasses
from typing import Any

from octavo.serve.engine import Engine
from octavo.serve.http.config import ServerConfig
from octavo.serve.http.errors import ApiError
from octavo.serve.http.schema import ResponseFormat, SamplingFields, note_harmless
from octavo.serve.sampling_params import SamplingParams

# fields that SamplingParams has under the same name and meaning
_SAME = {field.name for field in dataclasses.fields(SamplingParams)} & SamplingFields.model_fields.keys()
_SAME -= {"max_tokens", "logit_bias"}


def make_params(
    fields: SamplingFields,
    config: ServerConfig,
    *,
    max_tokens: int | None,
    logprobs: int | None,
    prompt_logprobs: int | None = None,
) -> SamplingParams:
    """SamplingParams of a request.

    Raises:
        ApiError: a field that breaks a limit.
        ParameterError: a field that breaks a limit.
    """
    _check_limits(fields, config)
    return SamplingParams(
        **{name: getattr(fields, name) for name in _SAME},
        max_tokens=max_tokens,
        logprobs=logprobs,
        prompt_logprobs=prompt_logprobs,
        logit_bias=_logit_bias(fields.logit_bias),
        json_schema=_json_schema(fields.response_format),
    )


def check_length(engine: Engine, prompt_len: int, max_tokens: int | None, prompt_field: str) -> None:
    """Refuse what cannot be had: more tokens than the context holds.

    Raises:
        ApiError: 400 with OpenAI's code for it.
    """
    limit = engine.max_model_len
    wanted = 1 if max_tokens is None else max_tokens
    if prompt_len + wanted > limit:
        raise ApiError(
            400,
            f"the context holds {limit} tokens, but the prompt has {prompt_len} and {wanted} are to be generated; "
            "shorten the prompt or lower max_tokens",
            prompt_field if prompt_len >= limit else "max_tokens",
            "context_length_exceeded",
        )


def check_routed_experts(engine: Engine) -> None:
    """Refuse a request for the experts of its tokens where they are not recorded.

    Raises:
        ApiError: 400.
    """
    if engine.model_runner.choices is None:
        has_experts = engine.model.config.num_experts > 0
        why = "this server does not record them; start it with --enable-return-routed-experts"
        text = f"return_routed_experts: {why if has_experts else 'this model has no experts; leave it out'}"
        raise ApiError(400, text, "return_routed_experts", "invalid_value")


def _check_limits(fields: SamplingFields, config: ServerConfig) -> None:
    if fields.n > config.max_n:
        raise ApiError(400, f"n must be at most {config.max_n} on this server, got {fields.n}", "n", "invalid_value")
    for name in ("stop", "stop_token_ids"):
        given = getattr(fields, name)
        if isinstance(given, list) and len(given) > config.max_stop:
            text = f"{name} must have at most {config.max_stop} entries on this server, got {len(given)}"
            raise ApiError(400, text, name, "invalid_value")
    if fields.stream_options is not None and not fields.stream:
        note_harmless("stream_options without stream")  # a whole answer counts its tokens anyway


def _logit_bias(bias: dict[str, float] | None) -> dict[int, float] | None:
    if bias is None:
        return None
    if bad := [key for key in bias if not (key.isascii() and key.isdecimal() and len(key) < 19)]:
        text = f"logit_bias must map token ids to numbers, got the key {bad[0][:50]!r}"
        raise ApiError(400, text, "logit_bias", "invalid_value")
    return {int(key): value for key, value in bias.items()}


def _json_schema(response_format: ResponseFormat | None) -> dict[str, Any] | None:
    if response_format is None or response_format.type == "text":
        return None
    if response_format.type == "json_object":
        return {"type": "object"}
    if response_format.json_schema is None:
        text = "response_format.json_schema is missing, which the type json_schema needs"
        raise ApiError(400, text, "response_format", "missing_field")
    return response_format.json_schema.json_schema
