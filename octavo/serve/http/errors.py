"""Errors as OpenAI's clients read them: {"error": {message, type, param, code}} with the HTTP status that fits."""

from collections.abc import Mapping
from typing import Any

from starlette.exceptions import HTTPException

from octavo.errors import DataError, OctavoError, RequestError, StaleScaleError
from octavo.serve.engine.request import BusyError, FailedError, LostRankError, UnavailableError
from octavo.serve.sampling_params import ParameterError
from octavo.weights.kv_scales.handover import RefusedScalesError

_TYPES = {401: "authentication_error", 403: "permission_error", 404: "not_found_error", 429: "rate_limit_error"}
# what SamplingParams calls something that the API calls otherwise
_API_NAMES = {"json_schema": "response_format"}
BUSY_RETRY_S, UNAVAILABLE_RETRY_S = 1, 5


class ApiError(Exception):
    """A refusal.

    Args:
        param: the field that it is about.
        code: a word for programs.
    """

    def __init__(
        self,
        status: int,
        message: str,
        param: str | None = None,
        code: str | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.status, self.message, self.param, self.code, self.headers = status, message, param, code, headers

    def __reduce__(self) -> tuple[Any, ...]:
        """A worker process sends it."""
        return type(self), (self.status, self.message, self.param, self.code, self.headers)

    def body(self) -> dict[str, Any]:
        """The answer's JSON."""
        kind = _TYPES.get(self.status, "invalid_request_error" if self.status < 500 else "server_error")
        return {"error": {"message": self.message, "type": kind, "param": self.param, "code": self.code}}


def as_api_error(error: Exception, prompt_field: str | None = None) -> ApiError:
    """The refusal that an error of octavo's means.

    Args:
        prompt_field: the field that holds the prompt, which errors without a name are about.
    """
    match error:
        case ApiError():
            return error
        case BusyError():
            return ApiError(429, str(error), code="queue_full", headers={"Retry-After": str(BUSY_RETRY_S)})
        case FailedError() | LostRankError():  # without a Retry-After: it does not recover
            return ApiError(503, str(error), code="engine_failed")
        case UnavailableError():
            return ApiError(503, str(error), code="unavailable", headers={"Retry-After": str(UNAVAILABLE_RETRY_S)})
        case StaleScaleError():
            retry = {"Retry-After": str(UNAVAILABLE_RETRY_S)}
            return ApiError(503, str(error), code="stale_kv_scale", headers=retry)
        case RefusedScalesError():
            return ApiError(400, str(error), error.field, error.code)
        case ParameterError():
            field = _API_NAMES.get(error.field, error.field)
            return ApiError(400, f"{field}{str(error).removeprefix(error.field)}", field, "invalid_value")
        case RequestError() | DataError():
            return ApiError(400, str(error), prompt_field, "invalid_value")
        case OctavoError():  # a chat template without transformers, say
            return ApiError(400, str(error), prompt_field, "unsupported")
        case HTTPException():
            return ApiError(error.status_code, str(error.detail), headers=error.headers)
    return ApiError(500, "the server failed at this request; its log says more", code="internal_error")
