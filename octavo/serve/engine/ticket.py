"""What goes in and out of an EngineLoop: jobs, tickets of those admitted, events of their tokens, refusals."""

import dataclasses
import enum

from octavo.errors import BackendError
from octavo.serve.engine.grammar import CompiledSchema
from octavo.serve.engine.sequence import Request
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
