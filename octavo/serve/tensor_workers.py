"""LLM(tensor_parallel_size=N): worker processes that repeat what the first rank's engine is asked, call by call.

An engine does the same for the same calls, so that every rank schedules, samples and ends sequences alike; the ranks
meet inside the model. tensor_worker.py is the other side.
"""

import contextlib
import dataclasses
import logging
import math
import os
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Callable
from multiprocessing.connection import Connection, Pipe
from pathlib import Path
from typing import Any, NoReturn, TypeVar

import torch

from octavo.distributed import local_job
from octavo.distributed.agreement import versions
from octavo.errors import BackendError, ConfigError, OctavoError, RequestError
from octavo.models import Decoder
from octavo.models.device import check_device
from octavo.models.tokenizer import Tokenizer, load_tokenizer
from octavo.nn.cut_linear import TensorMode, check_mode
from octavo.parallel import parallelize
from octavo.serve.engine import Engine, EngineConfig
from octavo.serve.engine.request import LostRankError, RequestState
from octavo.serve.engine.sequence import Sequence
from octavo.serve.model_choice import load_for_inference
from octavo.serve.rank_watch import OnLost, RankWatch, how_ended
from octavo.serve.tensor_updates import LeadingUpdate, UpdateChannel
from octavo.weights.update import RunningPolicy, WeightUpdate

T = TypeVar("T")

# a worker that has not loaded its checkpoint by then is given up
LOAD_S = 3600.0
_END_S = 5.0
_OF_ONE_RANK = (
    "changes the first rank's alone where tensor_parallel_size > 1, and the ranks no longer agree; make a new LLM, and "
    "call update_weights, which reaches all"
)

logger = logging.getLogger(__name__)


@dataclasses.dataclass(frozen=True)
class TensorParallel:
    """How many ranks compute together, and how.

    Args:
        size: ranks; 1 for this process alone.
        mode: parallelize's; None for its default.

    Raises:
        ConfigError: a size below 1, or of more GPUs than there are; an unknown mode.
    """

    size: int = 1
    mode: TensorMode | None = None

    def check(self, device: torch.device) -> None:
        """See Raises."""
        if self.mode is not None:
            check_mode(self.mode)
        if isinstance(self.size, bool) or not isinstance(self.size, int) or self.size < 1:
            raise ConfigError(f"tensor_parallel_size must be an integer of at least 1, got {self.size!r}")
        if self.size > 1 and device.type == "cuda" and torch.cuda.device_count() < self.size:
            raise ConfigError(
                f"tensor_parallel_size={self.size} takes a GPU a rank, and torch sees {torch.cuda.device_count()}; "
                "lower it, or set CUDA_VISIBLE_DEVICES"
            )
        if self.size > 1 and device.index not in (None, 0):
            raise ConfigError(
                f"with tensor_parallel_size={self.size} ranks take GPUs 0 to {self.size - 1}, got device='{device}'; "
                "choose by CUDA_VISIBLE_DEVICES"
            )


@dataclasses.dataclass(frozen=True)
class EngineOrder:
    """What every rank builds its engine of; it can be pickled. asked: load_for_inference's arguments, by name."""

    path: Path
    tokenizer: Any
    asked: dict[str, Any]
    config: EngineConfig
    eos_ids: tuple[int, ...]
    parallel: TensorParallel

    def load(self, rank: int, on_cut: Callable[[], None] = lambda: None) -> tuple[Decoder, Tokenizer | None]:
        """A rank's slices of the model, and the tokenizer; the ranks need not have met.

        Args:
            on_cut: called when the model is known to go among the ranks, before any of its values is read.
        """

        def cut(model: Decoder) -> None:
            report = parallelize(model, local_job.future_group(rank, self.parallel.size), mode=self.parallel.mode)
            on_cut()
            logger.info("%d tensor-parallel ranks: %s", self.parallel.size, report)

        model = load_for_inference(self.path, **self.asked | {"device": self.device(rank)}, cut=cut)
        return model, None if self.tokenizer is None else load_tokenizer(self.tokenizer)

    def check(self) -> None:
        """Refuse what does not go among the ranks, by the checkpoint's config and the names of its tensors.

        Raises:
            ConfigError: see parallelize; ShapeError and RecipeError too.
        """

        def stop() -> None:
            raise _FitsError

        with contextlib.suppress(_FitsError):
            self.load(0, stop)

    def device(self, rank: int) -> torch.device:
        """A rank's own."""
        return rank_device(chosen_device(self.asked["device"]), rank)


class _FitsError(Exception):
    """All that has to be known before values are read."""


class TensorWorkers:
    """The processes of ranks 1 to N - 1; they end with this object, and with this process.

    Args:
        order: for each of them.

    Attributes:
        watch: of their processes, from join on.
        updates: brings them new weights; after join.
    """

    updates: UpdateChannel

    def __init__(self, order: EngineOrder) -> None:
        self.size, self._device = order.parallel.size, order.device(0)
        self._store = local_job.open_store()
        self._ends: list[Connection] = []
        self._processes: list[subprocess.Popen[bytes]] = []
        self._is_closing = threading.Event()
        self._update_ends: list[Connection] = []
        for rank in range(1, self.size):
            (own, theirs), (own_updates, their_updates) = Pipe(), Pipe()
            fds = theirs.fileno(), their_updates.fileno()
            command = [sys.executable, "-m", "octavo.serve.tensor_worker"]
            command += map(str, (*fds, rank, self._store.port, os.getpid()))
            # a session of its own: Ctrl-C in a terminal is for rank 0, which ends its workers
            process = subprocess.Popen(command, pass_fds=fds, start_new_session=True)
            theirs.close()
            their_updates.close()
            self._ends.append(own)
            self._update_ends.append(own_updates)
            self._processes.append(process)
        self.watch = RankWatch(self._processes, self._is_closing, self._device.type == "cuda")
        ends = [*self._ends, *self._update_ends]
        self._finalizer = weakref.finalize(self, _end, ends, self._processes, self._is_closing)
        try:
            self.tell(versions())
            self.tell(order)
        except Exception:
            self.close()
            raise

    def wait_until_loaded(self) -> None:
        """Until every worker has its checkpoint.

        Raises:
            BackendError: one has failed; the text is its own.
        """
        deadline = time.monotonic() + LOAD_S
        for rank, end in enumerate(self._ends, 1):
            while not end.poll(0.2):
                if (code := self._processes[rank - 1].poll()) is not None:
                    raise BackendError(f"tensor-parallel rank {rank} {how_ended(code)} while it loaded the checkpoint")
                if time.monotonic() > deadline:
                    raise BackendError(f"tensor-parallel rank {rank} has not loaded its checkpoint in {LOAD_S:.0f} s")
            kind, text = self._receive(rank, end)
            if kind != "loaded":
                raise BackendError(f"tensor-parallel rank {rank}: {text}")

    def join(self) -> None:
        """Let all ranks meet."""
        local_job.join(self._store, 0, self.size, self._device)
        self.updates = UpdateChannel(self._update_ends, local_job.new_host_group(), self.explain)
        self.watch.start()

    def tell(self, *call: Any) -> None:
        """Send a call to all; a rank that is gone is an error.

        Raises:
            LostRankError: one has ended.
        """
        for end in self._ends:
            try:
                end.send(call)
            except OSError as error:
                self.explain(error)

    def explain(self, error: BaseException) -> NoReturn:
        """Raise what a failure of rank 0 comes from, where another rank's end is the reason.

        Raises:
            LostRankError: always.
        """
        self.raise_if_lost(error)
        raise self.watch.end_silent(error) from error

    def raise_if_lost(self, error: BaseException) -> None:
        """Raise what a failure of rank 0 comes from, where a worker has ended.

        Raises:
            LostRankError: one has.
        """
        deadline = time.monotonic() + 1.0  # a process's end takes its time to be seen
        while time.monotonic() < deadline:
            if (lost := self.watch.find_ended()) is not None:
                raise lost from error
            time.sleep(0.05)

    def close(self) -> None:
        """End the workers and the job."""
        self._finalizer()
        local_job.leave()

    def _receive(self, rank: int, end: Connection) -> tuple[str, str]:
        try:
            return end.recv()  # type: ignore[no-any-return]
        except (EOFError, ConnectionResetError):  # the latter where it has not read its order
            return "failed", f"it {how_ended(self._processes[rank - 1].wait())} while it loaded the checkpoint"


class LeadingEngine(Engine):
    """The first rank's engine: what it is asked, the workers' engines are asked before."""

    workers: TensorWorkers
    _update: WeightUpdate | None = None

    @classmethod
    def start(cls, order: EngineOrder) -> "LeadingEngine":
        """Load the first rank's slices of the model, start the workers meanwhile, and build the engines.

        Workers start when the model is known to go among them, so that what does not is refused before.

        Raises:
            ConfigError: see TensorParallel, parallelize and Engine.
            ShapeError: see parallelize.
            BackendError: a worker has failed.
        """
        started: list[TensorWorkers] = []
        try:
            model, tokenizer = order.load(0, lambda: started.append(TensorWorkers(order)))
            (workers,) = started
            workers.wait_until_loaded()
            workers.join()
            engine = cls(model, tokenizer, order.config, order.eos_ids)
        except BaseException as error:
            try:
                if started and isinstance(error, RuntimeError) and not isinstance(error, OctavoError):
                    started[0].raise_if_lost(error)  # of a collective
                raise
            finally:
                for workers in started:
                    workers.close()
        engine.workers = workers
        return engine

    def watch_ranks(self, on_lost: OnLost, limit_s: float) -> None:
        self.workers.watch.on_lost = on_lost
        self.workers.watch.limit_s = None if math.isinf(limit_s) else limit_s
        if (lost := self.workers.watch.error) is not None:
            on_lost(lost, False)

    def kill_ranks(self) -> None:
        self.workers.watch.end_with_server()

    def close(self) -> None:
        self.model_runner.drop_cache()  # NCCL's communicator waits for the graphs that it is in
        self.workers.close()

    @contextlib.contextmanager
    def _all_ranks(self, *call: Any) -> Any:
        try:
            with self.workers.watch.calling(call[0]):
                self.workers.tell(*call)
                yield
        except OctavoError:
            raise
        except RuntimeError as error:  # of a collective
            self.workers.explain(error)

    def admit(self, request: RequestState, keep_text: bool = False) -> RequestState:
        given = request.input
        with self._all_ranks("admit", given.prompt_ids, given.params, given.prompt, keep_text):
            return super().admit(request, keep_text)

    def step(self) -> list[Sequence]:
        with self._all_ranks("step"):
            return super().step()

    def collect_pending(self) -> list[Sequence]:
        with self._all_ranks("collect_pending"):
            return super().collect_pending()

    def prepare_next(
        self,
        num_seqs: int | None = None,
        max_len: int | None = None,
        least_seqs: int = 1,
        sparse: bool = False,
    ) -> bool:
        with self._all_ranks("prepare_next", num_seqs, max_len, least_seqs, sparse):
            return super().prepare_next(num_seqs, max_len, least_seqs, sparse)

    def abort(self, request: RequestState) -> None:
        if any(not seq.is_finished for seq in request.sequences):
            with contextlib.suppress(LostRankError):  # where a rank is gone, the request is ended here all the same
                self.workers.tell("abort", request.request_id)
        super().abort(request)

    def abort_all(self) -> None:
        with contextlib.suppress(LostRankError):
            self.workers.tell("abort_all")
        super().abort_all()

    def reset_prefix_cache(self) -> None:
        with self._all_ranks("reset_prefix_cache"):
            super().reset_prefix_cache()

    def sleep(self) -> None:
        with self._all_ranks("sleep"):
            super().sleep()

    def wake(self) -> None:
        with self._all_ranks("wake"):
            super().wake()

    def begin_update(self, **given: Any) -> WeightUpdate:
        """See Engine; of several updates the newest goes on."""
        if self._update is not None:
            self._update.end("another update took its place")
        self._update = LeadingUpdate(self.workers.updates, self.model, **given)
        return self._update

    def on_all_ranks(self, work: Callable[[], T]) -> T:
        """See Engine; a LeadingUpdate tells the others by itself."""
        return work()

    def commit_update(self, update: WeightUpdate, running: RunningPolicy = "wait") -> int:
        """See Engine: on all ranks or on none.

        Raises:
            LostRankError: a rank has ended.
        """
        self._check_policy(running)
        if update is not self._update:
            raise RequestError("the update is none that this engine began, or another took its place; begin it here")
        update.verify()
        if running == "abort":
            self.abort_all()
        self._collect_all()
        try:
            with self._all_ranks("commit_update", "keep"):  # to them there is nothing left to abort
                return super().replace_weights(update.write, "keep")
        except BackendError as error:
            self.workers.raise_if_lost(error)
            raise

    def replace_weights(self, *_: Any, **__: Any) -> int:
        raise ConfigError(f"replace_weights {_OF_ONE_RANK}")

    def reallocate_kv_cache(self) -> None:
        self._collect_all()
        with self._all_ranks("reallocate_kv_cache"):
            super().reallocate_kv_cache()

    def _collect_all(self) -> None:
        while self.has_pending:
            self.collect_pending()

    def _on_weights_written(self, weight_version: int) -> None:
        raise ConfigError(f"writing into the model's weights {_OF_ONE_RANK}")


def rank_device(device: torch.device, rank: int) -> torch.device:
    """A rank's own."""
    return torch.device("cuda", rank) if device.type == "cuda" else device


def chosen_device(device: Any) -> torch.device:
    """LLM's `device` as it will be."""
    return check_device(device or ("cuda" if torch.cuda.is_available() else "cpu"))


def _end(ends: list[Connection], processes: list["subprocess.Popen[bytes]"], is_closing: threading.Event) -> None:
    """Hang up, which ends a worker that waits for a call, and then kill what is left."""
    is_closing.set()
    for end in ends:
        end.close()
    deadline = time.monotonic() + _END_S
    for process in processes:
        try:
            process.wait(max(deadline - time.monotonic(), 0.05))
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
