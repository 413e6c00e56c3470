"""`octavo serve` in another process: weights as bytes with a manifest and checksums, committed whole or not at all.

Routes: octavo's own, docs/serving.md ("New weights").
"""

import contextlib
from collections.abc import Iterator, Mapping
from typing import Any

import torch

from octavo.errors import ConfigError
from octavo.models import Decoder, ModelConfig
from octavo.models.tokenizer import Tokenizer
from octavo.rl.engines.config import EngineSection
from octavo.rl.engines.errors import EngineError, WeightAuditError
from octavo.rl.engines.http import RefusedError, read_counters
from octavo.rl.engines.outgoing import OutgoingWeights, choose_dialect
from octavo.rl.engines.protocol import Completion, PauseMode, SamplingSpec
from octavo.rl.engines.remote import RemoteEngine, field, read_choices

_COUNTERS = {
    "vllm:num_preemptions_total": "num_preemptions",
    "vllm:prefix_cache_queries_total": "num_prefix_query_tokens",
    "vllm:prefix_cache_hits_total": "num_prefix_hit_tokens",
}


class OctavoServerEngine(RemoteEngine):
    """A server of `octavo serve --admin-key KEY`; see RemoteEngine.

    Raises:
        ConfigError: there is no admin key.
    """

    name = "octavo-server"
    probe_path, probe_field = "/health", "status"  # it answers while the server still loads its model
    probe_remedy = "look at its log and start it anew"

    def __init__(self, section: EngineSection, tokenizer: Tokenizer, config: ModelConfig) -> None:
        _check_admin_key(section)
        super().__init__(section, tokenizer, config)
        self.server_version = -1

    @classmethod
    def check_reachable(cls, section: EngineSection) -> None:
        """See RemoteEngine.

        Raises:
            ConfigError: there is no admin key.
        """
        _check_admin_key(section)
        super().check_reachable(section)

    def _complete(self, ids: list[list[int]], spec: SamplingSpec) -> list[Completion]:
        body = {
            "model": self.section.model or None,
            "prompt": ids,
            "n": spec.samples_per_prompt,
            "max_tokens": spec.max_tokens,
            "temperature": spec.temperature,
            "stop": spec.stop,
            "logprobs": 0,
            "return_token_ids": True,
        }
        answer = self.client.post("/v1/completions", body, timeout_s=self.section.timeout_s)
        return read_choices(answer, {self.server_version: self._committed()})

    def begin_update(self, source: Decoder, version: int) -> "OctavoServerSession":
        """See RolloutEngine; a failed commit too leaves the server with its old weights."""
        return OctavoServerSession(self, source, version)

    def pause(self, mode: PauseMode) -> None:
        """Finish what was admitted, refuse what comes.

        Raises:
            EngineError: for another mode than "wait".
        """
        if mode != "wait":
            raise EngineError(f"{self.name}: pause takes 'wait' alone (POST /admin/sleep), got {mode!r}")
        self.admin("/admin/sleep")

    def resume(self) -> None:
        """See RolloutEngine."""
        self.admin("/admin/wake")

    def reset_prefix_cache(self) -> None:
        """See RolloutEngine."""
        self.admin("/admin/reset_prefix_cache")

    def stats(self) -> dict[str, float]:
        """See RolloutEngine."""
        return read_counters(self.client.get_text("/metrics"), _COUNTERS)

    def admin(self, path: str, body: Any = None) -> Any:
        """POST to an /admin route."""
        return self.client.post(path, body, key=self.section.admin_key)


def _check_admin_key(section: EngineSection) -> None:
    if not section.admin_key:
        raise ConfigError(
            "engine.name='octavo-server' hands weights over by the server's /admin routes; give its --admin-key as "
            "OCTAVO_ADMIN_KEY or engine.admin_key"
        )


class OctavoServerSession:
    """One upload; see WeightSession."""

    def __init__(self, engine: OctavoServerEngine, source: Decoder, version: int) -> None:
        self._engine, self._source, self._version = engine, source, version
        self._id = ""
        self.num_bytes = 0

    def stage(self) -> None:
        """Audit, declare every tensor with its SHA-256, upload. See WeightSession."""
        engine = self._engine
        outgoing = OutgoingWeights.of(self._source, choose_dialect(engine.section, self._source))
        outgoing.audit()
        begun = engine.admin("/admin/weight_update", {"tensors": _manifest(outgoing), "replace": True})
        self._id, self.num_bytes = field(begun, "id"), outgoing.num_bytes
        size, sent = min(engine.section.bucket_bytes, field(begun, "max_bucket_bytes")), 0
        for bucket in buckets(outgoing.tensors, size):
            sent = self._send(bucket, sent)

    def commit(self) -> int:
        """See WeightSession."""
        engine = self._engine
        try:
            answer = engine.admin(f"/admin/weight_update/{self._id}/commit", {"running": engine.section.running})
        except RefusedError:
            raise  # the old weights are there, all of them
        except EngineError as error:
            engine.broken = str(error)  # it may have committed, or may yet
            raise
        engine.server_version, engine.version, engine.broken = field(answer, "weight_version"), self._version, None
        return self._version

    def abort(self) -> None:
        """See WeightSession; what the server already dropped is no error."""
        if self._id:
            # the failure that brought us here is the one to tell
            with contextlib.suppress(EngineError):
                self._engine.client.delete(f"/admin/weight_update/{self._id}", key=self._engine.section.admin_key)

    def _send(self, bucket: bytes, offset: int) -> int:
        path = f"/admin/weight_update/{self._id}/bytes?offset={offset}"
        try:
            return int(field(self._engine.client.send(path, bucket, key=self._engine.section.admin_key), "received"))
        except RefusedError as error:
            if "SHA-256" not in error.detail:
                raise
            name = error.detail.partition(":")[0]
            raise WeightAuditError("corrupted bytes", name, f"the server refused the upload: {error.detail}") from error


def buckets(tensors: Mapping[str, torch.Tensor], size: int) -> Iterator[bytes]:
    """The tensors' bytes one after the other, in pieces of `size`, the last maybe smaller."""
    waiting = bytearray()
    for tensor in tensors.values():
        flat = tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data
        for start in range(0, len(flat), size):
            waiting += flat[start : start + size]
            while len(waiting) >= size:
                yield bytes(waiting[:size])
                del waiting[:size]
    if waiting:
        yield bytes(waiting)


def _manifest(outgoing: OutgoingWeights) -> dict[str, dict[str, Any]]:
    checksums = outgoing.checksums()
    return {
        name: {
            "dtype": str(tensor.dtype).removeprefix("torch."),
            "shape": list(tensor.shape),
            "sha256": checksums[name],
        }
        for name, tensor in outgoing.tensors.items()
    }
