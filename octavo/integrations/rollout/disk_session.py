"""Engines that take a checkpoint by its path and cannot take it back: checked before, distrusted after a failure."""

import abc
from collections.abc import Mapping

from octavo.integrations.rollout.http import RefusedError
from octavo.integrations.rollout.remote import RemoteEngine
from octavo.models import Decoder
from octavo.rl.engines.protocol import PauseMode
from octavo.weights.checksums import check_updated
from octavo.weights.disk import DiskStage
from octavo.weights.errors import EngineError
from octavo.weights.outgoing import choose_dialect

_NOT_FOUND = 404


class DiskEngine(RemoteEngine):
    """Base of vLLM's and SGLang's engines; see RemoteEngine.

    Attributes:
        stage: the checkpoint that the server holds, None before the first.
        their_checksums: of its weights as the server tells them, None where it does not.
    """

    stage: DiskStage | None = None
    their_checksums: Mapping[str, str] | None = None

    def begin_update(self, source: Decoder, version: int) -> "DiskSession":
        """See RolloutEngine."""
        return DiskSession(self, source, version)

    def checksums(self) -> Mapping[str, str] | None:
        """The server's own checksums of its weights; None from a server without that route."""
        try:
            return self.ask_checksums()
        except RefusedError as error:
            if error.status != _NOT_FOUND:
                raise
            return None

    def confirm(self, held: object, label: str) -> None:
        """Refuse a server that says another label than the one just given to it."""
        if held != label:
            raise EngineError(f"{self.name}: after the update it says weights {held!r}, not {label!r}")

    def close(self) -> None:
        """Delete the checkpoint that the server loaded last."""
        if self.stage is not None:
            self.stage.remove()

    @abc.abstractmethod
    def pause(self, mode: PauseMode) -> None:
        """See RolloutEngine."""

    @abc.abstractmethod
    def resume(self) -> None:
        """See RolloutEngine."""

    @abc.abstractmethod
    def ask_checksums(self) -> Mapping[str, str]:
        """Name -> checksum; RefusedError with status 404 where there is no such route."""

    @abc.abstractmethod
    def load(self, path: str, label: str) -> None:
        """Make the paused server load a checkpoint under a label, forget its KV, and confirm the label."""


class DiskSession:
    """Write, read back, audit; then pause, load, compare checksums, resume. See WeightSession.

    A load that fails leaves the server paused and marked: neither vLLM nor SGLang can take weights back.
    """

    def __init__(self, engine: DiskEngine, source: Decoder, version: int) -> None:
        self._engine, self._source, self._version = engine, source, version
        assert engine.section.weights_dir is not None, "the section has checked it"
        self._stage = DiskStage(engine.section.weights_dir, engine._label(version))
        self.num_bytes = 0

    def stage(self) -> None:
        """See WeightSession."""
        engine = self._engine
        self._stage.write(self._source, choose_dialect(engine.section.weights, self._source), engine.tokenizer)
        self.num_bytes = self._stage.num_bytes

    def commit(self) -> int:
        """See WeightSession."""
        engine, old = self._engine, self._engine.stage
        before = engine.their_checksums if engine.their_checksums is not None else engine.checksums()
        try:
            engine.pause(engine.section.running)
            engine.load(str(self._stage.path), engine._label(self._version))
            after = engine.checksums()
            if before is not None and after is not None and old is not None:
                check_updated(before, after, old.checksums, self._stage.checksums)
            engine.resume()
        except Exception as error:
            engine.broken = str(error)
            raise
        engine.stage, engine.their_checksums = self._stage, after
        engine.version, engine.broken = self._version, None
        if old is not None and old.path != self._stage.path:
            old.remove()
        return self._version

    def abort(self) -> None:
        """Delete the checkpoint, unless the server reads from it."""
        if self._engine.stage is None or self._engine.stage.path != self._stage.path:
            self._stage.remove()
