"""The deltas of one answer, its prompts' echoes before them. Streams send each, other answers send their sum."""

from collections.abc import AsyncIterator

from octavo.serve.engine.request import Delta, RequestInput
from octavo.serve.engine_client import DeltaStream
from octavo.serve.http.errors import UNAVAILABLE_RETRY_S, ApiError


async def answer_deltas(
    stream: DeltaStream, inputs: list[RequestInput], echoes: list[str] | None
) -> AsyncIterator[list[Delta]]:
    """All deltas of an answer, as they come, with the index of the answer's choice; those that came together at once.

    Args:
        echoes: each prompt's text, where choices begin with it.
    Raises:
        ApiError: a sequence ended without its due end.
    """
    held: dict[int, list[Delta]] = {}  # of requests whose prompt is still to be echoed
    if echoes is not None:
        held = {position: [] for position in range(len(inputs))}
    async for arrived in stream.batches():
        batch: list[Delta] = []
        for position, delta in arrived:
            if delta.finish_reason in ("error", "abort"):
                if batch:
                    yield batch
                raise _ending(delta)
            params = inputs[position].params
            delta.index += position * params.n
            if position not in held:
                batch.append(delta)
                continue
            held[position].append(delta)
            if params.prompt_logprobs is None or delta.prompt_logprobs is not None:
                assert echoes is not None, "prompts are held back for their echo alone"
                batch += _echoes(inputs[position], position, echoes[position], delta) + held.pop(position)
        if batch:
            yield batch


def _ending(delta: Delta) -> ApiError:
    """Why there will be no whole answer; an error that comes with a token is the request's own (its grammar's)."""
    if delta.finish_reason == "abort":
        retry = {"Retry-After": str(UNAVAILABLE_RETRY_S)}
        why = delta.stop_reason or "the server shut down"
        return ApiError(503, f"{why} before the answer was finished", code="aborted", headers=retry)
    if delta.token_ids:
        return ApiError(400, f"{delta.stop_reason}", "response_format", "invalid_value")
    return ApiError(500, str(delta.stop_reason), code="engine_error")


def _echoes(given: RequestInput, position: int, text: str, delta: Delta) -> list[Delta]:
    num_echoed = len(given.prompt_ids)
    return [
        Delta(
            position * given.params.n + sample,
            text,
            list(given.prompt_ids),
            list(delta.prompt_logprobs or []),
            num_echoed=num_echoed,
            echo_len=len(text),
        )
        for sample in range(given.params.n)
    ]
