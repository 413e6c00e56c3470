"""A weight update on its way from the first rank to the workers: each tensor whole, of which each keeps its slices.

It has a connection, a gloo group and, in each worker, a thread of its own, so that the engines step meanwhile. Only the
commit goes with the engines' calls.
"""

import contextlib
import functools
import threading
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any, NoReturn, TypeVar

import torch

from octavo.distributed.pieces import broadcast_in_pieces
from octavo.errors import BackendError, CheckpointError
from octavo.models import Decoder
from octavo.serve.engine.request import LostRankError
from octavo.weights.manifest import TensorSpec, tensor_sha256
from octavo.weights.update import WeightUpdate

T = TypeVar("T")

# a worker that has not staged a tensor by then is given up
_ANSWER_S = 600.0
_NO_DATA = torch.empty(0, dtype=torch.uint8)


class UpdateChannel:
    """The first rank's end.

    Args:
        ends: connections to the workers' threads.
        group: over gloo, of all ranks.
        explain: raises what a failed connection comes from.
    """

    def __init__(self, ends: list[Connection], group: Any, explain: Callable[[BaseException], NoReturn]) -> None:
        self._ends, self._group, self._explain = ends, group, explain
        self._lock = threading.RLock()
        self._lost: BaseException | None = None  # from then on answers may be of older orders

    def tell(self, *order: Any) -> None:
        """Send an order that is not answered.

        Raises:
            LostRankError: a worker has ended.
        """
        with self._lock, self._explained():
            if self._lost is not None:
                raise self._lost
            for end in self._ends:
                end.send(order)

    def ask(self, *order: Any, data: torch.Tensor | None = None, meanwhile: Callable[[], T]) -> T:
        """Send an order, do this rank's part of it, and wait for the others.

        Args:
            data: bytes that go with it, [n] uint8 on the CPU.
            meanwhile: what it raises comes before the workers' failures, which follow from the same.
        Raises:
            LostRankError: a worker has ended, or does not answer.
            CheckpointError: a worker refuses the weights.
            BackendError: a worker failed otherwise.
        """
        with self._lock:
            if data is not None:  # a rank without memory for it would leave the others alone in the broadcast
                self.ask("expect", data.numel(), meanwhile=lambda: None)
            self.tell(*order)
            if data is not None:
                with self._explained():
                    broadcast_in_pieces(data, self._group)
            try:
                done = meanwhile()
            except BaseException:
                self._take_answers()
                raise
            for rank, failure in enumerate(self._take_answers(), 1):
                if failure is not None:
                    is_refusal, text = failure
                    raise (CheckpointError if is_refusal else BackendError)(f"tensor-parallel rank {rank}: {text}")
            return done

    def _take_answers(self) -> list[tuple[bool, str] | None]:
        with self._explained():
            return [_answer_of(end) for end in self._ends]

    @contextlib.contextmanager
    def _explained(self) -> Any:
        try:
            yield
        except (OSError, EOFError, RuntimeError) as error:
            self._lost = error
            self._explain(error)


class LeadingUpdate(WeightUpdate):
    """The first rank's update: what it is given, the workers' are given too, with the SHA-256 of each tensor.

    Args:
        channel: to them. The rest is WeightUpdate's.
    """

    def __init__(self, channel: UpdateChannel, model: Decoder, **given: Any) -> None:
        self._channel = channel
        super().__init__(model, **given)
        theirs = {name: given.get(name) for name in ("layout", "staging_device")}
        with self.ending_at_error():
            channel.ask("begin", {**theirs, "partial": tuple(given.get("partial", ()))}, meanwhile=lambda: None)

    def stage(self, name: str, tensor: torch.Tensor) -> None:
        """See WeightUpdate.

        Raises:
            BackendError: a worker failed; the transaction ends with it.
        """
        _ = self.staging  # of an update that has ended the workers hear nothing
        known = None if self.manifest is None or name not in self.manifest else self.manifest[name].sha256
        data = tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8)
        spec = TensorSpec(tensor.dtype, tuple(tensor.shape), known or tensor_sha256(data))
        own = functools.partial(super().stage, name, tensor)
        with self.ending_at_error():
            self._channel.ask("stage", name, spec, data=data, meanwhile=own)

    def keep_old(self) -> None:
        """See WeightUpdate; on all ranks."""
        self._channel.ask("keep_old", meanwhile=super().keep_old)

    def verify(self) -> None:
        """See WeightUpdate; on all ranks."""
        _ = self.staging
        with self.ending_at_error():
            self._channel.ask("verify", meanwhile=super().verify)

    def end(self, reason: str = "it was aborted") -> None:
        """See WeightUpdate."""
        if self.ended is None:
            with contextlib.suppress(LostRankError):  # a rank that is gone holds nothing
                self._channel.tell("end")
        super().end(reason)


class UpdateFollower:
    """A worker's end, for a thread of its own.

    Args:
        model: of this rank.
        group: as UpdateChannel's.
        place: makes a staging_device this rank's own.

    Attributes:
        update: under way, or None; the commit takes it from here.
    """

    def __init__(self, model: Decoder, group: Any, place: Callable[[torch.device], torch.device]) -> None:
        self._model, self._group, self._place = model, group, place
        self._data = _NO_DATA
        self.update: WeightUpdate | None = None

    def run(self, orders: Connection) -> None:
        """Until the first rank hangs up."""
        if self._model.device.type == "cuda":
            torch.cuda.set_device(self._model.device)  # a thread begins at the first one
        while True:
            try:
                name, *arguments = orders.recv()
            except (EOFError, OSError):
                return
            if name == "end":
                self.update, self._data = None, _NO_DATA
                continue
            failure = None
            try:
                getattr(self, f"_{name}")(*arguments)
            except Exception as error:
                failure = isinstance(error, CheckpointError), str(error) or type(error).__name__
            with contextlib.suppress(OSError):  # it has hung up
                orders.send(failure)

    def _begin(self, given: dict[str, Any]) -> None:
        if given["staging_device"] is not None:
            given["staging_device"] = self._place(torch.device(given["staging_device"]))
        self.update = None  # an older one is freed first
        self.update = WeightUpdate(self._model, **given)

    def _expect(self, num_bytes: int) -> None:
        self._data = torch.empty(num_bytes, dtype=torch.uint8)

    def _stage(self, name: str, spec: TensorSpec) -> None:
        data, self._data = self._data, _NO_DATA
        broadcast_in_pieces(data, self._group)
        tensor = data.view(spec.dtype).view(spec.shape)
        spec.check(name, tensor)
        self._current().stage(name, tensor)

    def _verify(self) -> None:
        self._current().verify()

    def _keep_old(self) -> None:
        self._current().keep_old()

    def _current(self) -> WeightUpdate:
        assert self.update is not None, "an update begins first"
        return self.update


def _answer_of(end: Connection) -> tuple[bool, str] | None:
    if not end.poll(_ANSWER_S):
        raise TimeoutError(f"no answer in {_ANSWER_S:.0f} s")
    return end.recv()  # type: ignore[no-any-return]
