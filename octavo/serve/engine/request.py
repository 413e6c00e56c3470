"""What goes into an engine and comes out: a request's input, its state, deltas of its sequences, refusals."""

import dataclasses
import enum

from octavo.errors import BackendError
from octavo.serve.engine.grammar import CompiledSchema
from octavo.serve.engine.sequence import Sequence
from octavo.serve.outputs import Logprob
from octavo.serve.sampling_params import SamplingParams


class BusyError(BackendError):
    """There is no room for more requests now; later there may be."""


class LostRankError(BackendError):
    """A rank that computes with this process has ended or hangs: no later step can succeed."""


class UnavailableError(BackendError):
    """The engine takes no requests: it starts, sleeps, drains, or has failed."""


class FailedError(UnavailableError):
    """The engine has failed, and takes no requests again."""


class Phase(enum.StrEnum):
    """What an EngineLoop is doing; requests are taken while it is SERVING alone."""

    STARTING = "starting"
    SERVING = "serving"
    SLEEPING = "asleep"
    DRAINING = "shutting down"
    STOPPED = "stopped"
    FAILED = "failed"


@dataclasses.dataclass(frozen=True)
class RequestInput:
    """A prompt with its parameters, checked: Engine.make_input makes it, and nothing checks it again.

    Args:
        prompt: its text; None where it came as token ids.
        schema: of params.json_schema; held here, it is not compiled again.
    """

    prompt_ids: list[int]
    params: SamplingParams
    prompt: str | None = None
    schema: CompiledSchema | None = None


@dataclasses.dataclass(eq=False)
class RequestState:
    """A request from its arrival to its end.

    Attributes:
        request_id: counts the engine's requests; None until the engine has admitted it.
        sequences: its samples; empty until the engine has admitted it.
        arrived_s: time.perf_counter() when a server took it in.
        started_s: when its first tokens were computed, behind a server.
        num_open: sequences whose end a server has not told of.
        prompt_logprobs_with_texts: set by the first output that has them all.
    """

    input: RequestInput
    request_id: int | None = None
    sequences: list[Sequence] = dataclasses.field(default_factory=list)
    arrived_s: float = 0.0
    started_s: float | None = None
    num_open: int = 0
    prompt_logprobs_with_texts: list[dict[int, Logprob] | None] | None = None

    @property
    def is_finished(self) -> bool:
        return all(seq.is_finished for seq in self.sequences)

    @property
    def prompt_logprobs(self) -> list[dict[int, Logprob] | None] | None:
        """One entry a token of the prompt, None for the first; None if they were not asked for."""
        first = self.sequences[0]
        return None if first.params.prompt_logprobs is None else [None, *first.prompt_logprobs]

    @property
    def num_cached_tokens(self) -> int:
        """Tokens of the prompt that the prefix cache had for the first sample."""
        return (self.sequences[0].num_cached_tokens or 0) if self.sequences else 0

    @property
    def num_output_tokens(self) -> int:
        return sum(seq.num_tokens - seq.prompt_len for seq in self.sequences)


@dataclasses.dataclass(slots=True)
class Delta:
    """What a sample gained: by one step, or by many where an answer adds them up.

    Attributes:
        index: which of the request's samples; which of the answer's choices once a server sends it.
        text: what settled with it.
        token_ids: none where the sample ends without another token (abort, error, max_tokens=0).
        logprobs: one entry a token, None for a prompt's first; empty where none were asked for.
        finish_reason: set in a sample's last delta, and only there: "stop", "length", "abort" or "error".
        stop_reason: as in CompletionOutput; the message of an error.
        time_s: time.perf_counter() when the step ended.
        prompt_logprobs: as in RequestOutput, in the first delta of sample 0.
        num_echoed: tokens of the prompt that it begins with, where that is echoed.
        echo_len: characters of the prompt that it begins with.
    """

    index: int
    text: str = ""
    token_ids: list[int] = dataclasses.field(default_factory=list)
    logprobs: list[dict[int, Logprob] | None] = dataclasses.field(default_factory=list)
    weight_versions: list[int] = dataclasses.field(default_factory=list)
    finish_reason: str | None = None
    stop_reason: str | int | None = None
    time_s: float = 0.0
    prompt_logprobs: list[dict[int, Logprob] | None] | None = None
    num_echoed: int = 0
    echo_len: int = 0

    @property
    def ends_by_token(self) -> bool:
        """Its last token, an end of sequence or a stop token, ended it and has no text."""
        return self.finish_reason == "stop" and not isinstance(self.stop_reason, str)

    def extend(self, later: "Delta") -> None:
        """Add what came next."""
        self.text += later.text
        self.token_ids += later.token_ids
        self.logprobs += later.logprobs
        self.weight_versions += later.weight_versions
        self.finish_reason, self.stop_reason = later.finish_reason, later.stop_reason


def delta_of(request: RequestState, seq: Sequence, now: float) -> Delta:
    """What a sequence gained in a step."""
    num_tokens = len(seq.token_ids) - seq.prompt_len  # none with max_tokens=0
    text = "" if seq.detokenizer is None else seq.detokenizer.take(seq.finish_reason is not None)
    delta = Delta(seq.index, text, [], [], [], seq.finish_reason, seq.stop_reason, now)
    if num_tokens:
        delta.token_ids.append(seq.token_ids[-1])
        delta.weight_versions.append(seq.weight_versions[-1])
        if seq.params.logprobs is not None:
            delta.logprobs.append(seq.logprobs[-1])
    if num_tokens <= 1 and seq.index == 0:
        delta.prompt_logprobs = request.prompt_logprobs
    return delta
