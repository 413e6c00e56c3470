"""What goes in and out of an EngineLoop: jobs, tickets of those admitted, events of their tokens, refusals."""

import dataclasses
import enum

from octavo.errors import BackendError
from octavo.serve.engine.grammar import CompiledSchema
from octavo.serve.engine.sequence import Request, Sequence
from octavo.serve.outputs import Logprob
from octavo.serve.sampling_params import SamplingParams


class BusyError(BackendError):
    """There is no room for more requests now; later there may be."""


class UnavailableError(BackendError):
    """The engine takes no requests: it starts, sleeps, drains, or has failed."""


class Phase(enum.StrEnum):
    """What the loop is doing; requests are taken while it is SERVING alone."""

    STARTING = "starting"
    SERVING = "serving"
    SLEEPING = "asleep"
    DRAINING = "shutting down"
    STOPPED = "stopped"
    FAILED = "failed"


@dataclasses.dataclass(frozen=True)
class Job:
    """What a request is made of.

    Args:
        prompt: its text; None where it came as token ids.
        schema: of params.json_schema, where that was compiled ahead; held here, it is not compiled again.
    """

    prompt_ids: list[int]
    params: SamplingParams
    prompt: str | None = None
    schema: CompiledSchema | None = None


@dataclasses.dataclass(eq=False)
class Ticket:
    """A request that was admitted.

    Attributes:
        num_open: its sequences that have not ended.
        arrived_s, started_s: time.perf_counter() when it came, and when its first tokens were computed.
    """

    ticket_id: int
    job: Job
    num_open: int
    arrived_s: float
    started_s: float | None = None
    request: Request | None = None


@dataclasses.dataclass(frozen=True, slots=True)
class TokenEvent:
    """One token of one sequence, or its end without one.

    Attributes:
        index: which of the request's n samples.
        token_id: None where the sequence ends without another token (abort, error, max_tokens=0).
        text: what settled with it.
        finish_reason: set in a sequence's last event, and only there: "stop", "length", "abort" or "error".
        stop_reason: as in CompletionOutput; the message of an error.
        time_s: time.perf_counter() when the step ended.
        prompt_logprobs: as in RequestOutput, in the first event of sample 0.
    """

    index: int
    token_id: int | None
    text: str
    finish_reason: str | None
    stop_reason: str | int | None
    time_s: float
    logprobs: dict[int, Logprob] | None = None
    weight_version: int | None = None
    prompt_logprobs: list[dict[int, Logprob] | None] | None = None


def token_event(ticket: Ticket, seq: Sequence, now: float) -> TokenEvent:
    """What a sequence gained in a step."""
    has_token = seq.num_tokens > seq.prompt_len  # max_tokens=0 ends without one
    is_first = seq.num_tokens <= seq.prompt_len + 1
    assert ticket.request is not None, "it has run"
    return TokenEvent(
        index=seq.index,
        token_id=seq.token_ids[-1] if has_token else None,
        text="" if seq.detokenizer is None else seq.detokenizer.take(seq.is_finished),
        finish_reason=seq.finish_reason,
        stop_reason=seq.stop_reason,
        time_s=now,
        logprobs=seq.logprobs[-1] if has_token and seq.params.logprobs is not None else None,
        weight_version=seq.weight_versions[-1] if has_token else None,
        prompt_logprobs=ticket.request.prompt_logprobs if is_first and seq.index == 0 else None,
    )
