"""Pieces: what a choice gained, by one token or by many. Streams send each, other answers send their sum."""

import dataclasses
from collections.abc import AsyncIterator
from typing import Self

from octavo.serve.async_engine import Generation
from octavo.serve.engine.ticket import Job, TokenEvent
from octavo.serve.http.errors import UNAVAILABLE_RETRY_S, ApiError
from octavo.serve.outputs import Logprob


@dataclasses.dataclass
class Piece:
    """A stretch of one choice.

    Attributes:
        index: of the choice in the answer.
        logprobs: one entry a token, None for a prompt's first; empty where none were asked for.
        num_echoed, echo_len: tokens and characters of the prompt that it begins with, where that is echoed.
    """

    index: int
    text: str = ""
    token_ids: list[int] = dataclasses.field(default_factory=list)
    logprobs: list[dict[int, Logprob] | None] = dataclasses.field(default_factory=list)
    weight_versions: list[int] = dataclasses.field(default_factory=list)
    finish_reason: str | None = None
    stop_reason: str | int | None = None
    num_echoed: int = 0
    echo_len: int = 0

    @property
    def ends_by_token(self) -> bool:
        """Its last token, an end of sequence or a stop token, ended it and has no text."""
        return self.finish_reason == "stop" and not isinstance(self.stop_reason, str)

    def extend(self, other: Self) -> None:
        """Add what came next."""
        self.text += other.text
        self.token_ids += other.token_ids
        self.logprobs += other.logprobs
        self.weight_versions += other.weight_versions
        self.finish_reason, self.stop_reason = other.finish_reason, other.stop_reason


async def pieces(generation: Generation, jobs: list[Job], echoes: list[str] | None) -> AsyncIterator[Piece]:
    """All pieces of an answer, as they come.

    Args:
        echoes: each prompt's text, where choices begin with it.
    Raises:
        ApiError: a sequence ended without its due end.
    """
    held: dict[int, list[Piece]] = {}  # of jobs whose prompt is still to be echoed
    if echoes is not None:
        held = {position: [] for position in range(len(jobs))}
    async for position, event in generation.events():
        job = jobs[position]
        piece = _piece(event, index=position * job.params.n + event.index)
        if position not in held:
            yield piece
            continue
        held[position].append(piece)
        if job.params.prompt_logprobs is None or event.prompt_logprobs is not None:
            assert echoes is not None, "prompts are held back for their echo alone"
            for echo in _echo_pieces(job, position, echoes[position], event):
                yield echo
            for waiting in held.pop(position):
                yield waiting


def _piece(event: TokenEvent, index: int) -> Piece:
    if event.finish_reason in ("error", "abort"):
        raise _ending(event)
    if event.token_id is None or event.weight_version is None:  # max_tokens=0
        return Piece(index, event.text, finish_reason=event.finish_reason, stop_reason=event.stop_reason)
    return Piece(
        index,
        event.text,
        [event.token_id],
        [] if event.logprobs is None else [event.logprobs],
        [event.weight_version],
        event.finish_reason,
        event.stop_reason,
    )


def _ending(event: TokenEvent) -> ApiError:
    """Why there will be no whole answer; an error that comes with a token is the request's own (its grammar's)."""
    if event.finish_reason == "abort":
        retry = {"Retry-After": str(UNAVAILABLE_RETRY_S)}
        why = event.stop_reason or "the server shut down"
        return ApiError(503, f"{why} before the answer was finished", code="aborted", headers=retry)
    if event.token_id is not None:
        return ApiError(400, f"{event.stop_reason}", "response_format", "invalid_value")
    return ApiError(500, str(event.stop_reason), code="engine_error")


def _echo_pieces(job: Job, position: int, text: str, event: TokenEvent) -> list[Piece]:
    return [
        Piece(
            position * job.params.n + sample,
            text,
            list(job.prompt_ids),
            list(event.prompt_logprobs or []),
            num_echoed=len(job.prompt_ids),
            echo_len=len(text),
        )
        for sample in range(job.params.n)
    ]
