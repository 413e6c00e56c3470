"""`octavo serve` in another process: weights as bytes with a manifest and checksums, committed whole or not at all.

Routes: octavo's own, docs/serving.md ("New weights").
"""

import contextlib
import dataclasses
import functools
from typing import Any

from octavo.errors import ConfigError
from octavo.integrations.rollout.http import HttpClient, RefusedError, read_counters
from octavo.integrations.rollout.remote import RemoteEngine, read_choices
from octavo.models import Decoder, ModelConfig
from octavo.models.tokenizer import Tokenizer
from octavo.numerics import Numerics
from octavo.rl.engines.config import EngineSection
from octavo.rl.engines.protocol import Completion, PauseMode, SamplingSpec
from octavo.weights.errors import EngineError, WeightAuditError
from octavo.weights.kv_scales.handover import scale_tensors, stamp
from octavo.weights.kv_scales.server import PATH, ServerKVScales, check_state
from octavo.weights.outgoing import OutgoingWeights, choose_dialect
from octavo.weights.wire import buckets, field, manifest_json

_UNAVAILABLE = 503


class OctavoServerEngine(RemoteEngine):
    """A server of `octavo serve --admin-key KEY`; see RemoteEngine.

    Args:
        router_replay: ask for the experts of each token (the server needs --enable-return-routed-experts).

    Attributes:
        server_version: the server's count of the weights that were committed last.
        kv_scales: keeps the sampler's table of KV scales equal to the server's; None where there is no such table.

    Raises:
        ConfigError: there is no admin key.
    """

    name = "octavo-server"
    probe_path, probe_field = "/health", "status"  # it answers while the server still loads its model
    probe_remedy = "look at its log and restart it"

    def __init__(
        self, section: EngineSection, tokenizer: Tokenizer, config: ModelConfig, *, router_replay: bool = False
    ) -> None:
        _check_admin_key(section)
        super().__init__(section, tokenizer, config)
        self.server_version = -1
        self.kv_scales: ServerKVScales | None = None
        self._router_replay = router_replay
        self._versions: dict[int, int] = {}  # the server's -> the trainer's, of all that were committed

    @classmethod
    def check_reachable(cls, section: EngineSection) -> None:
        """See RemoteEngine.

        Raises:
            ConfigError: there is no admin key.
        """
        _check_admin_key(section)
        super().check_reachable(section)

    @classmethod
    def check_kv_scales(cls, section: EngineSection, numerics: Numerics) -> None:
        """Ask a server that is ready by what it makes its KV scales; one that still loads is asked at the first refit.

        Args:
            section: with its keys.
            numerics: the sampler's, with per-tensor scales.
        Raises:
            ConfigError: not by what the config says.
            EngineError: it has no such route.
        """
        client = HttpClient(cls.name, section.url, key=section.admin_key, timeout_s=section.update_timeout_s)
        try:
            state = client.get(PATH)
        except RefusedError as error:
            if error.status != _UNAVAILABLE:
                raise
            return
        check_state(state, numerics, None, cls.name)

    def _complete(self, ids: list[list[int]], spec: SamplingSpec) -> list[Completion]:
        version = self._committed()
        if self.kv_scales is not None:
            self.kv_scales.send_fallen()
        body = {
            "model": self.section.model or None,
            "prompt": ids,
            "n": spec.samples_per_prompt,
            "max_tokens": spec.max_tokens,
            "temperature": spec.temperature,
            "stop": spec.stop,
            "logprobs": 0,
            "return_token_ids": True,
            **({"return_routed_experts": True} if self._router_replay else {}),
        }
        answer = self.client.post("/v1/completions", body, timeout_s=self.section.timeout_s)
        found = read_choices(answer, {self.server_version: version}, with_routed_experts=self._router_replay)
        if self.kv_scales is not None:
            self.kv_scales.take_over(self.server_version, self._versions)
        return found

    def begin_update(self, source: Decoder, version: int) -> "OctavoServerSession":
        """See RolloutEngine; a failed commit too leaves the server with its old weights.

        Raises:
            ConfigError: the server makes its KV scales otherwise than the source's numerics say.
        """
        if source.kv_table is None:
            self.kv_scales = None
        elif self.kv_scales is None or self.kv_scales.table is not source.kv_table:
            ask = functools.partial(self.client.get, key=self.section.admin_key)
            self.kv_scales = ServerKVScales(self.name, source, ask, self.admin)
        if self.kv_scales is not None:
            self.kv_scales.begin_update()
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
        return read_counters(self.client.get_text("/metrics"))

    def admin(self, path: str, body: Any = None) -> Any:
        """POST to an /admin route."""
        return self.client.post(path, body, key=self.section.admin_key)

    def note_committed(self, server_version: int, version: int) -> None:
        """Sample from these weights from now on.

        Args:
            server_version: in the server's count.
            version: in the trainer's.
        """
        self.server_version, self.version, self.broken = server_version, version, None
        self._versions[server_version] = version


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
        """Audit, declare every tensor with its SHA-256, upload, with the trainer's KV scales. See WeightSession.

        Raises:
            StaleScaleError: KV scales that were never made, or are of other weights.
        """
        engine = self._engine
        outgoing = OutgoingWeights.of(self._source, choose_dialect(engine.section.weights, self._source))
        outgoing.audit()
        scales = scale_tensors(self._source, self._version)
        outgoing = dataclasses.replace(outgoing, tensors={**outgoing.tensors, **scales})
        tensors = manifest_json(outgoing.tensors, outgoing.checksums())
        fields = {"tensors": tensors, "replace": True, **stamp(self._source, self._version)}
        begun = engine.admin("/admin/weight_update", fields)
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
        engine.note_committed(field(answer, "weight_version"), self._version)
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
