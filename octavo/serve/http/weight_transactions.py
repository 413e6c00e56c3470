"""The one weight update that a server has under way: its bytes as they come, its expiry, its end, and who may go on."""

import asyncio
import contextlib
import functools
import itertools
import logging
import secrets
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from pathlib import Path

from octavo.errors import BackendError, CheckpointError, RequestError
from octavo.serve.engine.request import BusyError, LostRankError, UnavailableError
from octavo.serve.http.errors import ApiError
from octavo.serve.http.service import Service
from octavo.weights.disk import stage_checkpoint
from octavo.weights.kv_scales.handover import refuse_part
from octavo.weights.manifest import TensorSpec
from octavo.weights.update import RunningPolicy, WeightUpdate
from octavo.weights.wire import Upload

logger = logging.getLogger(__name__)

_NUM_REMEMBERED = 16  # ended transactions of which it is still known why


class Transaction:
    """A transaction's name and what it holds; upload is None while a checkpoint is read."""

    def __init__(self, upload: Upload | None) -> None:
        self.id = secrets.token_hex(8)
        self.upload = upload
        self.is_busy = upload is None


class WeightTransactions:
    """At most one transaction at a time, for each holds a whole copy of the weights.

    Args:
        service: whose engine gets the weights.
    """

    def __init__(self, service: Service) -> None:
        self._service = service
        self._current: Transaction | None = None
        self._ended: OrderedDict[str, str] = OrderedDict()
        self._expiry: asyncio.TimerHandle | None = None

    def get(self, transaction_id: str) -> Transaction:
        """The transaction of this name.

        Raises:
            ApiError: 410 for one that has ended, with the reason; 404 for one that never was.
        """
        if self._current is not None and self._current.id == transaction_id:
            return self._current
        if transaction_id in self._ended:
            raise ApiError(410, f"this weight update has ended: {self._ended[transaction_id]}", code="update_ended")
        raise ApiError(404, "there is no weight update of this id", code="update_not_found")

    async def begin(self, manifest: Mapping[str, TensorSpec], partial: Sequence[str], *, replace: bool) -> Transaction:
        """Start an upload.

        Raises:
            ApiError: 409 while another is open and not to be replaced; 400 for a manifest that does not fit the model.
        """
        with self._making_room(replace) as transaction:
            begin = self._service.engine.loop.engine.begin_update
            update = await asyncio.to_thread(begin, manifest=manifest, partial=partial)
            transaction.upload, transaction.is_busy = Upload(update, manifest), False
        self._postpone_expiry()
        return transaction

    async def feed(self, transaction_id: str, offset: int, read: Callable[[Upload], Awaitable[None]]) -> Upload:
        """Let `read` feed bytes that begin at this offset.

        Raises:
            ApiError: 409 for another offset than the number of bytes received; 400 for bad tensors; see get.
        """
        transaction = self.get(transaction_id)
        with self._working_on(transaction) as upload:
            if offset != upload.num_received:
                raise ApiError(
                    409,
                    f"the next byte is that at offset {upload.num_received}, got offset {offset}",
                    "offset",
                    "wrong_offset",
                )
            await read(upload)
        return upload

    async def verify(self, transaction_id: str) -> None:
        """Check that an upload is whole and fits: after this nothing but the copies is left to do.

        Raises:
            ApiError: 409 while bytes are missing; 400 for weights that do not fit; see get.
        """
        with self._working_on(self.get(transaction_id)) as upload:
            _check_whole(upload)
            await asyncio.to_thread(upload.update.verify)

    async def commit(self, transaction_id: str, running: RunningPolicy, *, keep_old: bool = False) -> int:
        """Put an upload's weights in the place of the live ones; the new weight version.

        Args:
            keep_old: the transaction stays open with the old weights in it: a second commit brings them back, and abort
                drops them.
        Raises:
            ApiError: 409 while bytes are missing; 500 where the writing failed and the old weights are back; see get.
        """
        transaction = self.get(transaction_id)
        with self._working_on(transaction) as upload:
            _check_whole(upload)
            if keep_old:
                await asyncio.to_thread(upload.update.keep_old)
            version = await self._commit(upload.update, running)
        if (reason := upload.update.ended) is not None:
            self._end(transaction, reason)
        return version

    def abort(self, transaction_id: str, reason: str = "it was aborted") -> None:
        """Drop a transaction and its memory."""
        transaction = self.get(transaction_id)
        _check_idle(transaction)
        self._end(transaction, reason)

    async def stage_from(
        self, path: str, checksums: Mapping[str, str] | None, partial: Sequence[str], *, replace: bool
    ) -> Transaction:
        """Read a checkpoint within the allowed folder into a transaction, which a commit takes over.

        Raises:
            ApiError: 403 for a path outside; else as begin.
        """
        root = self._service.config.weights_dir
        if root is None:
            raise ApiError(
                403, "updates from a path are off; start the server with --weights-dir FOLDER", code="path_forbidden"
            )
        directory = await asyncio.to_thread(confine, path, root)
        if partial:
            refuse_part(self._service.engine.loop.engine.model)
        with self._making_room(replace) as transaction:
            engine = self._service.engine.loop.engine
            stage = functools.partial(stage_checkpoint, engine.model, directory, begin=engine.begin_update)
            update = await asyncio.to_thread(stage, checksums=checksums, partial=partial)
            transaction.upload, transaction.is_busy = Upload(update, {}), False
        self._postpone_expiry()
        return transaction

    async def update_from(
        self,
        path: str,
        running: RunningPolicy,
        checksums: Mapping[str, str] | None,
        partial: Sequence[str],
        *,
        replace: bool,
    ) -> int:
        """stage_from and commit; the new weight version. Errors as theirs, and nothing is left open."""
        transaction = await self.stage_from(path, checksums, partial, replace=replace)
        try:
            return await self.commit(transaction.id, running)
        except Exception as error:
            if self._current is transaction:
                self._service.metrics.weight_update_failures.inc()
                self._end(transaction, f"it failed: {error}")
            raise

    async def _commit(self, update: WeightUpdate, running: RunningPolicy) -> int:
        version = await asyncio.wrap_future(self._service.engine.loop.update_weights(update, running))
        self._service.metrics.weight_updates.inc()
        logger.info("serving weight version %d", version)
        return version

    @contextlib.contextmanager
    def _making_room(self, replace: bool) -> Iterator[Transaction]:
        """A new transaction as the current one, which ends if the block fails."""
        if self._current is not None:
            _check_idle(self._current)
            if not replace:
                raise ApiError(
                    409,
                    f"the weight update {self._current.id} is open; commit or delete it, or send replace=true",
                    code="update_open",
                )
            self._end(self._current, "another update took its place")
        self._current = transaction = Transaction(None)
        with self._ending_at_error(transaction):
            yield transaction

    @contextlib.contextmanager
    def _working_on(self, transaction: Transaction) -> Iterator[Upload]:
        """An upload, for this request alone; it ends where the block spoils it."""
        _check_idle(transaction)
        upload = transaction.upload
        assert upload is not None, "only a path's has none, and it is busy"
        transaction.is_busy = True
        try:
            with self._ending_at_error(transaction):
                yield upload
        finally:
            transaction.is_busy = False
            self._postpone_expiry()

    @contextlib.contextmanager
    def _ending_at_error(self, transaction: Transaction) -> Iterator[None]:
        """End a transaction that can come to nothing, count it, and answer with what was wrong."""
        try:
            yield
        except BaseException as error:
            upload = transaction.upload
            if upload is None or upload.update.ended is not None:
                self._service.metrics.weight_update_failures.inc()
                logger.warning("a weight update came to nothing: %s", error)
                self._end(transaction, f"it failed: {error}")
            if isinstance(error, CheckpointError | RequestError):
                raise ApiError(400, str(error), code="invalid_weights") from error
            if isinstance(error, BackendError) and not isinstance(error, BusyError | UnavailableError | LostRankError):
                raise ApiError(500, str(error), code="update_failed") from error
            raise

    def _end(self, transaction: Transaction, reason: str) -> None:
        if transaction.upload is not None:
            transaction.upload.update.end(reason)
        transaction.upload = None
        self._ended[transaction.id] = reason
        for old in [*itertools.islice(self._ended, max(0, len(self._ended) - _NUM_REMEMBERED))]:
            del self._ended[old]
        if self._current is transaction:
            self._current = None

    def _postpone_expiry(self) -> None:
        """Drop an upload that has been idle for update_timeout_s."""
        if self._expiry is not None:
            self._expiry.cancel()
            self._expiry = None
        if self._current is not None:
            timeout_s = self._service.config.update_timeout_s
            self._expiry = asyncio.get_running_loop().call_later(timeout_s, self._expire, self._current)

    def _expire(self, transaction: Transaction) -> None:
        if self._current is transaction and not transaction.is_busy:
            self._end(transaction, f"nothing came for {self._service.config.update_timeout_s:g} s")


def confine(path: str, root: Path) -> Path:
    """A path within a folder, links resolved, the files' own too.

    Raises:
        ApiError: 403 for one that leads out of it; 400 for no path.
    """
    try:
        allowed = root.resolve()
        directory = (allowed / path).resolve()
        inside = directory.is_relative_to(allowed)
        files = directory.rglob("*") if inside and (directory / "config.json").is_file() else ()
        inside = inside and all(file.resolve().is_relative_to(allowed) for file in files)
    except (OSError, ValueError, RuntimeError) as error:
        raise ApiError(400, f"path: {error}", "path", "invalid_value") from None
    if not inside:
        raise ApiError(403, "path leads out of the folder that --weights-dir allows", "path", "path_forbidden")
    return directory


def _check_whole(upload: Upload) -> None:
    if upload.num_received < upload.num_bytes:
        raise ApiError(409, f"{upload.num_received} of {upload.num_bytes} bytes have come", code="update_incomplete")


def _check_idle(transaction: Transaction) -> None:
    if transaction.is_busy:
        raise ApiError(409, "another request is working on the weight update under way; wait", code="update_busy")
