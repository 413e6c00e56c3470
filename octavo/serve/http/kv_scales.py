"""A served model's per-tensor KV scales over HTTP: what they are and did, and the stamp of those that are uploaded.

The /admin routes call it. One scale a token and head, the default, needs nothing of this.
"""

from collections.abc import Collection, Sequence
from typing import Any

from octavo.errors import RequestError, StaleScaleError
from octavo.models import Decoder
from octavo.models.checkpoint import kv_scales
from octavo.models.checkpoint.names import parameter_names
from octavo.ops.attention import KVScaleTable
from octavo.serve.engine import Engine
from octavo.serve.http.errors import UNAVAILABLE_RETRY_S, ApiError
from octavo.serve.http.tensor_json import tensor_json
from octavo.weights.update import tensor_sha256


def describe(engine: Engine) -> dict[str, Any]:
    """The answer of GET /admin/kv_scales; to be called between two steps.

    Returns:
        "source" and "weight_version"; where the source is not "per_token_head" also the table: "versions" of the
        weights that each layer's scales were made for (null: never), "scale" ([layers, 2] fp32, of K and of V, with the
        SHA-256 of its bytes), "margin", "is_calibrating", "high_precision" (layers whose cache left FP8), and what the
        scales did since the server's start: "num_values" written to each layer's K (and V), "counts" ([layers][K, V]
        [clipped, flushed]) and their shares.
    """
    table = engine.model.kv_table
    head = {"source": engine.numerics.kv_scales, "weight_version": engine.weight_version}
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


def fall_back(engine: Engine, layers: Sequence[int]) -> dict[str, Any]:
    """Keep these layers' caches in high precision from now on; to be called between two steps.

    Returns:
        As describe.
    Raises:
        RequestError: requests are unfinished. ApiError: 400 for layers without per-tensor scales.
    """
    table = _table(engine)
    if bad := [layer for layer in layers if not 0 <= layer < table.num_layers]:
        raise ApiError(400, f"layers: there is no layer {bad[0]}, of {table.num_layers}", "layers", "invalid_value")
    if fallen := sorted({*layers} - table.high_precision):
        if engine.has_unfinished:
            raise RequestError("layers can fall back to high precision only while nothing runs; try again later")
        for layer in fallen:
            table.fall_back(layer)
        engine.lay_out_cache()
    return describe(engine)


def check_stamp(
    model: Decoder,
    names: Collection[str],
    *,
    is_partial: bool,
    weight_version: int | None,
    kv_scales_version: int | None,
) -> None:
    """Refuse an upload whose KV scales are missing, or are not of the weights that they come with.

    Args:
        names: of the manifest. weight_version: the sender's own, of its weights. kv_scales_version: the sender's
            version of the weights that its KV scales were made under.
    Raises:
        ApiError: 400 `missing_kv_scale` or `stale_kv_scale`, or scales for a server that makes its own.
    """
    source = model.numerics.kv_scales
    if source != "trainer":
        if kv_scales_version is not None:
            text = f"kv_scales_version: this server's kv_scales are {source!r} and none are taken over"
            raise ApiError(400, f"{text}; start it with --kv-scales trainer", "kv_scales_version", "invalid_value")
        return
    if is_partial:
        refuse_part(model)
    found = kv_scales.find_names(names, model.config.num_layers).scales
    modules = kv_scales.attention_modules(parameter_names(model.config))
    for layer, module in enumerate(modules):
        for role in "kv":
            if (layer, role) not in found:
                text = f"{module}.{role}_scale: kv_scales='trainer' wants it with each update of the weights"
                raise ApiError(400, f"{text}; send it", "tensors", "missing_kv_scale")
    if kv_scales_version is None or kv_scales_version != weight_version:
        raise ApiError(
            400,
            f"the KV scales were made for the sender's weight version {kv_scales_version}, but the weights are version "
            f"{weight_version}: a stale KV scale; send weight_version and kv_scales_version, and make the scales anew "
            "after each update",
            "kv_scales_version",
            "stale_kv_scale",
        )


def refuse_part(model: Decoder) -> None:
    """Refuse an update of a part of the weights where that would leave the KV scales behind.

    Raises:
        ApiError: 400 `missing_kv_scale`.
    """
    if model.numerics.kv_scales == "trainer":
        text = "partial: under kv_scales='trainer' every update brings the KV scales of its weights, so it is whole"
        raise ApiError(400, text, "partial", "missing_kv_scale")


def check_usable(engine: Engine) -> None:
    """Refuse requests that would be computed under no scales, or older weights'.

    Raises:
        ApiError: 503, naming the layer.
    """
    table, version = engine.model.kv_table, engine.weight_version
    # while an update is committed the scales are ahead of the version for a moment, and no request starts then
    if table is None or all(found is not None and found >= version for found in table.versions):
        return
    try:
        table.check(version)
    except StaleScaleError as error:
        retry = {"Retry-After": str(UNAVAILABLE_RETRY_S)}
        raise ApiError(503, str(error), code="stale_kv_scale", headers=retry) from error


def _table(engine: Engine) -> KVScaleTable:
    table = engine.model.kv_table
    if table is None:
        text = "this server's KV cache has a scale a token and head, which nothing falls back from"
        raise ApiError(400, f"{text}; see --kv-scales", code="no_kv_scales")
    return table
