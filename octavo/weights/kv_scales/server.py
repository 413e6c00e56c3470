"""Per-tensor KV scales of octavo's server: what it tells of its table, and the table of a trainer held equal to it.

Under "trainer" the trainer's table is the origin: its scales go with the weights, in the same transaction. Where the
engine makes the scales the server's is, and is taken over after each batch, before the trainer scores it. What was
clipped and flushed there is added to the counts here; layers that fall back to high precision do so on both sides.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

import torch

from octavo.errors import ConfigError, RequestError, StaleScaleError
from octavo.models import Decoder
from octavo.numerics import Numerics
from octavo.ops.attention import KVScaleTable
from octavo.weights.errors import EngineAnswerError, StaleVersionError
from octavo.weights.kv_scales.handover import RefusedScalesError
from octavo.weights.manifest import tensor_sha256
from octavo.weights.wire import field, read_tensor, tensor_json

PATH = "/admin/kv_scales"


class ServingEngine(Protocol):
    """What is asked of a serving engine; see octavo.serve.engine.Engine."""

    model: Decoder
    weight_version: int

    @property
    def has_unfinished(self) -> bool: ...

    def reallocate_kv_cache(self) -> None: ...


def describe(engine: ServingEngine) -> dict[str, Any]:
    """The answer of GET /admin/kv_scales; to be called between two steps.

    Returns:
        "source" and "weight_version"; where the source is not "per_token_head" also the table: "versions" of the
        weights that each layer's scales were made for (null: never), "scale" ([layers, 2] fp32, of K and of V, with the
        SHA-256 of its bytes), "margin", "is_calibrating", "high_precision" (layers whose cache left FP8), and what the
        scales did since the server's start: "num_values" written to each layer's K (and V), "counts" ([layers][K, V]
        [clipped, flushed]) and their shares.
    """
    table = engine.model.kv_table
    head = {"source": engine.model.numerics.kv_scales, "weight_version": engine.weight_version}
    if table is None:
        return head
    config = engine.model.config
    num_values, counts = table.num_written * config.num_kv_heads * config.head_dim, table.counts.tolist()
    return {
        **head,
        "versions": list(table.versions),
        "scale": {**tensor_json(table.scale), "sha256": tensor_sha256(table.scale)},
        "margin": table.margin,
        "is_calibrating": table.is_calibrating,
        "high_precision": sorted(table.high_precision),
        "num_values": num_values,
        "counts": counts,
        "shares": {
            f"{role}_{what}": [layer[i][j] / num_values if num_values else 0.0 for layer in counts]
            for i, role in enumerate("kv")
            for j, what in enumerate(("clipped", "flushed"))
        },
    }


def fall_back(engine: ServingEngine, layers: Sequence[int]) -> dict[str, Any]:
    """Keep these layers' caches in high precision from now on; to be called between two steps.

    Returns:
        As describe.
    Raises:
        RequestError: requests are unfinished.
        RefusedScalesError: layers without per-tensor scales.
    """
    table = engine.model.kv_table
    if table is None:
        text = "this server's KV cache has a scale a token and head, which nothing falls back from; see --kv-scales"
        raise RefusedScalesError(text, None, "no_kv_scales")
    if bad := [layer for layer in layers if not 0 <= layer < table.num_layers]:
        text = f"layers: there is no layer {bad[0]}, of {table.num_layers}"
        raise RefusedScalesError(text, "layers", "invalid_value")
    if fallen := sorted({*layers} - table.high_precision):
        if engine.has_unfinished:
            raise RequestError("layers can fall back to high precision only while nothing runs; try again later")
        for layer in fallen:
            table.fall_back(layer)
        engine.reallocate_kv_cache()
    return describe(engine)


def check_usable(engine: ServingEngine) -> None:
    """Refuse requests that would be computed under no scales, or older weights'.

    Raises:
        StaleScaleError: naming the layer.
    """
    table, version = engine.model.kv_table, engine.weight_version
    # while an update is committed the scales are ahead of the version for a moment, and no request starts then
    if table is not None and any(found is None or found < version for found in table.versions):
        table.check(version)


def check_state(state: Any, numerics: Numerics, margin: float | None, name: str) -> None:
    """Refuse a server that makes its scales otherwise than the config says.

    Args:
        state: the server's answer.
        numerics: the sampler's.
        margin: None for any.
    Raises:
        ConfigError: with the option that the server needs.
    """
    if (theirs := field(state, "source")) != numerics.kv_scales:
        raise ConfigError(
            f"rollout.kv_scales={numerics.kv_scales!r}, and the {name} makes its KV scales by {theirs!r}; start it "
            f"with --kv-cache-dtype {numerics.kv_cache_dtype} --kv-scales {numerics.kv_scales}, or fix the config"
        )
    if theirs not in ("trainer", "_fixed") and margin is not None and (held := field(state, "margin")) != margin:
        raise ConfigError(
            f"rollout.kv_scale_margin={margin:g}, and the {name} raises an amax by {held:g}; start it with "
            f"--kv-scale-margin {margin:g}"
        )


class ServerKVScales:
    """Keeps a sampler's table equal to a server's.

    Args:
        name: of the engine, for messages.
        source: the sampler, whose table it is.
        ask: GET.
        order: POST of a body to an /admin route.
    """

    def __init__(self, name: str, source: Decoder, ask: Callable[[str], Any], order: Callable[[str, Any], Any]) -> None:
        assert source.kv_table is not None, "its numerics have known scales"
        self.table: KVScaleTable = source.kv_table
        self._name, self._numerics, self._ask, self._order = name, source.numerics, ask, order
        self._num_per_token = source.config.num_kv_heads * source.config.head_dim
        self._fallen: set[int] = set()
        self._seen: tuple[torch.Tensor, int] | None = None  # the server's counts, which begin at its start

    def begin_update(self) -> None:
        """Look at what the server is and holds, and have the layers that fell back here do so there.

        Raises:
            ConfigError: see check_state.
        """
        state = self._ask(PATH)
        check_state(state, self._numerics, self.table.margin, self._name)
        counts = self._read_counts(state)
        if self._seen is None or counts[1] < self._seen[1]:  # what others wrote before us; a server that was restarted
            self._seen = counts
        self._take_fallen(state)
        self.send_fallen()

    def send_fallen(self) -> None:
        """Have the layers that fell back here do so there too."""
        if self.table.high_precision - self._fallen:
            self._take_fallen(self._order(f"{PATH}/fall_back", {"layers": sorted(self.table.high_precision)}))

    def take_over(self, server_version: int, versions: Mapping[int, int]) -> None:
        """After a batch: the scales that it was sampled under, and what they clipped and flushed.

        Args:
            server_version: that answered.
            versions: the server's versions -> the trainer's.
        Raises:
            StaleVersionError: the server holds other weights by now.
            StaleScaleError: scales of other weights, or other ones than were handed over.
            EngineAnswerError: an answer that is no table.
        """
        state = self._ask(PATH)
        if (theirs := field(state, "weight_version")) != server_version:
            raise StaleVersionError(
                f"{self._name}: after the batch it holds weight version {theirs}, and {server_version} sampled it: it "
                "was updated by another client"
            )
        scale = read_tensor(field(state, "scale"), (torch.float32,), f"{self._name}: the KV scales")
        stamps, wanted = field(state, "versions"), tuple(self.table.scale.shape)
        if tuple(scale.shape) != wanted or len(stamps) != len(scale):
            raise EngineAnswerError(
                f"{self._name}: KV scales of {tuple(scale.shape)} and {len(stamps)} versions came; {wanted} are the "
                "policy's"
            )
        self._take_fallen(state)
        layers = [i for i in range(len(scale)) if i not in self.table.high_precision]
        if self.table.source != "_fixed":
            for layer in layers:
                self._check_stamp(layer, stamps[layer], server_version, versions)
        if self.table.source == "trainer":
            self._compare(scale, layers)
        elif self.table.source != "_fixed":
            self._take_scales(scale, {layer: versions[stamps[layer]] for layer in layers})
        self._take_counts(state)

    def _check_stamp(self, layer: int, stamp: int | None, server_version: int, versions: Mapping[int, int]) -> None:
        if stamp not in versions or (self.table.follows_weights and stamp != server_version):
            made = "never made" if stamp is None else f"made for its weight version {stamp}"
            raise StaleScaleError(
                f"{self._name}: the KV scales of layer {layer} were {made}, and version {server_version} sampled the "
                "batch: a stale KV scale, or one of before this run; restart the server"
            )

    def _compare(self, scale: torch.Tensor, layers: list[int]) -> None:
        ours = self.table.scale.detach().float().cpu()
        for layer in layers:
            if not torch.equal(ours[layer], scale[layer]):
                raise StaleScaleError(
                    f"{self._name}: the KV scales of layer {layer} are {scale[layer].tolist()} there, and "
                    f"{ours[layer].tolist()} were handed over: a stale KV scale; refit again"
                )

    def _take_scales(self, scale: torch.Tensor, stamps: Mapping[int, int]) -> None:
        """Take over these layers' scales, where they are new."""
        held = self.table.scale.detach().float().cpu()
        new = [
            i for i, stamp in stamps.items() if self.table.versions[i] != stamp or not torch.equal(held[i], scale[i])
        ]
        for version in sorted({stamps[i] for i in new}):
            self.table.set({i: (scale[i, 0], scale[i, 1]) for i in new if stamps[i] == version}, version)

    def _take_fallen(self, state: Any) -> None:
        self._fallen = {*field(state, "high_precision")}
        for layer in sorted(self._fallen - self.table.high_precision):
            self.table.fall_back(layer)

    def _take_counts(self, state: Any) -> None:
        assert self._seen is not None, "an update came before"
        (counts, num_values), (old_counts, old_values) = self._read_counts(state), self._seen
        self.table.counts += (counts - old_counts).to(self.table.counts.device)
        self.table.num_written += (num_values - old_values) // self._num_per_token
        self._seen = counts, num_values

    def _read_counts(self, state: Any) -> tuple[torch.Tensor, int]:
        try:
            counts = torch.tensor(field(state, "counts"), dtype=torch.int64).view(self.table.counts.shape)
            return counts, int(field(state, "num_values"))
        except (TypeError, ValueError, RuntimeError) as error:
            raise EngineAnswerError(f"{self._name}: counts of clipped and flushed numbers: {error}") from error
