"""Per-tensor KV scales that travel with the weights (kv_scales="trainer"): how they are sent, declared and checked.

One scale a token and head, the default, needs nothing of this.
"""

from collections.abc import Collection, Sequence

import torch

from octavo.errors import CheckpointError, OctavoError
from octavo.models import Decoder
from octavo.models.checkpoint.kv_scales import KVScales, attention_modules, find_names, write
from octavo.models.checkpoint.names import parameter_names

KVPairs = dict[int, tuple[torch.Tensor, torch.Tensor]]  # layer -> scales of K and V, one fp32 number each


class RefusedScalesError(OctavoError, ValueError):
    """A request about KV scales that a server refuses: missing, unwanted, or of other weights than they come with.

    Attributes:
        field: of the request; None for none.
        code: a word for programs.
    """

    def __init__(self, message: str, field: str | None, code: str) -> None:
        super().__init__(message)
        self.field, self.code = field, code


def scale_tensors(source: Decoder, version: int) -> dict[str, torch.Tensor]:
    """The scales that are sent with the weights: [1] fp32 each, by a checkpoint's names; none but under "trainer".

    Args:
        version: of the weights, in the trainer's count.
    Raises:
        StaleScaleError: naming the first layer whose scales were never made, or are of other weights.
    """
    table = source.kv_table
    if table is None or table.source != "trainer":
        return {}
    table.check(version)
    pairs = table.scale.detach().float().cpu()
    scales = tuple(KVScales(k.reshape(1).clone(), v.reshape(1).clone()) for k, v in pairs)
    return write(scales, _modules(source))


def stamp(source: Decoder, version: int) -> dict[str, int]:
    """What the upload's first request says of these scales, for check_stamp on the other side; {} but under "trainer".

    Args:
        version: see scale_tensors.
    """
    table = source.kv_table
    if table is None or table.source != "trainer":
        return {}
    versions = [v for i, v in enumerate(table.versions) if i not in table.high_precision and v is not None]
    return {"weight_version": version, "kv_scales_version": min(versions, default=version)}


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
        names: of the manifest.
        weight_version: the sender's own, of its weights.
        kv_scales_version: the sender's version of the weights that its KV scales were made under.
    Raises:
        RefusedScalesError: `missing_kv_scale` or `stale_kv_scale`, or scales for a server that makes its own.
    """
    source = model.numerics.kv_scales
    if source != "trainer":
        if kv_scales_version is not None:
            text = f"kv_scales_version: this server's kv_scales are {source!r} and none are taken over"
            raise RefusedScalesError(f"{text}; start it with --kv-scales trainer", "kv_scales_version", "invalid_value")
        return
    if is_partial:
        refuse_part(model)
    found = find_names(names, model.config.num_layers).scales
    for layer, module in enumerate(_modules(model)):
        for role in "kv":
            if (layer, role) not in found:
                text = f"{module}.{role}_scale: kv_scales='trainer' wants it with each update of the weights"
                raise RefusedScalesError(f"{text}; send it", "tensors", "missing_kv_scale")
    if kv_scales_version is None or kv_scales_version != weight_version:
        raise RefusedScalesError(
            f"the KV scales were made for the sender's weight version {kv_scales_version}, but the weights are version "
            f"{weight_version}: a stale KV scale; send weight_version and kv_scales_version, and make the scales again "
            "after each update",
            "kv_scales_version",
            "stale_kv_scale",
        )


def refuse_part(model: Decoder) -> None:
    """Refuse an update of a part of the weights where that would leave the KV scales behind.

    Raises:
        RefusedScalesError: `missing_kv_scale`.
    """
    if model.numerics.kv_scales == "trainer":
        text = "partial: under kv_scales='trainer' every update brings the KV scales of its weights, so it is whole"
        raise RefusedScalesError(text, "partial", "missing_kv_scale")


def pairs_of(scales: Sequence[KVScales], num_layers: int) -> KVPairs:
    """The scales of an update, one number of K and of V a layer; nothing stands for one that did not come.

    Raises:
        CheckpointError: naming the first that is missing or is more than one number.
    """
    pairs: KVPairs = {}
    for layer in range(num_layers):
        found = scales[layer] if layer < len(scales) else KVScales(None, None)
        for role, scale in (("k", found.k_scale), ("v", found.v_scale)):
            if scale is None or scale.numel() != 1:
                got = "none came" if scale is None else f"got {scale.numel()} numbers"
                raise CheckpointError(
                    f"model.layers.{layer}.self_attn.{role}_scale: kv_scales='trainer' wants one number with each "
                    f"update of the weights, {got}; send it, or serve with kv_scales='engine' or 'per_token_head'"
                )
        assert found.k_scale is not None and found.v_scale is not None, "looked at above"
        pairs[layer] = found.k_scale, found.v_scale
    return pairs


def _modules(model: Decoder) -> list[str]:
    return attention_modules(parameter_names(model.config))
