"""Per-tensor scales of an FP8 KV cache: one of K and one of V a layer, known before a token is written, or made then.

They change in place alone, so that CUDA graphs go on reading them where they are; each is stamped with the version of
the weights that it was made for. The cache itself keeps a scale a slot: a page never gets another meaning.

Legend: L layers, T tokens, KH kv heads, D head_dim.
"""

import dataclasses
from collections.abc import Mapping

import torch

from octavo.errors import StaleScaleError
from octavo.numerics.contract import EXPERIMENT_KV_SCALES, KV_SCALES
from octavo.numerics.scaling import Scaling

KNOWN_SCALING = Scaling.per_tensor(torch.float8_e4m3fn)
FP8_MAX = torch.finfo(torch.float8_e4m3fn).max
FLUSH_BOUND = 2.0**-10  # half of E4M3's smallest number: what is no larger rounds to zero

# Where scales come from that are not one a token and head, as octavo.Numerics.kv_scales names it.
SOURCES = (*KV_SCALES[1:], *EXPERIMENT_KV_SCALES)


@dataclasses.dataclass(frozen=True)
class LayerShares:
    """What one layer's scales did to the numbers written since the last look: shares of them, 0 to 1.

    Attributes:
        k_clipped: of K, beyond 448 times the scale.
        v_clipped: of V, beyond 448 times the scale.
        k_flushed: of K, not zero, and zero afterwards.
        v_flushed: of V, not zero, and zero afterwards.
    """

    k_clipped: float
    v_clipped: float
    k_flushed: float
    v_flushed: float


@dataclasses.dataclass(frozen=True, eq=False)
class LayerKVScales:
    """One layer's rows of a KVScaleTable: views, which see every change.

    Attributes:
        scale: [2] fp32, of K and of V.
        quant_scale: [2] fp32, of K and of V.
        counts: [2, 2] int64, clipped and flushed, of K and of V.
    """

    table: "KVScaleTable"
    index: int
    scale: torch.Tensor
    quant_scale: torch.Tensor
    counts: torch.Tensor

    @property
    def is_calibrating(self) -> bool:
        """Whether the next write makes the scales."""
        return self.table.is_calibrating

    def calibrate(self, k: torch.Tensor, v: torch.Tensor) -> None:
        """Make the scales from the numbers that are about to be written; waits for no device."""
        amax = torch.stack([_amax(k), _amax(v)])
        self.scale.copy_(scale_of(amax, self.table.margin))
        self.quant_scale.copy_(_reciprocal(self.scale))

    def count(self, k: torch.Tensor, v: torch.Tensor) -> None:
        """Add what clips and what is flushed."""
        for i, x in enumerate((k, v)):
            size = (x.float() * self.quant_scale[i]).abs()
            self.counts[i, 0] += (size > FP8_MAX).sum()
            self.counts[i, 1] += ((size <= FLUSH_BOUND) & (x != 0)).sum()


class KVScaleTable:
    """The scales of all layers of one model.

    Args:
        num_layers: L.
        source: "engine" (each weight version's first batch makes them), "trainer" (the trainer hands them over with
            the weights), "_calibrated_once" (the first batch of all makes them), or "_fixed" (1, or as they are set).
        margin: by how much an amax is raised before it becomes a scale.

    Attributes:
        scale: [L, 2] fp32, decode scales of K and of V.
        quant_scale: their reciprocals.
        versions: of the weights that each layer's scales were made for; None where they were never made.
        high_precision: layers whose cache is not FP8 any more.
        generation: grows with every change, for caches of what was written under older scales.
        is_calibrating: the writes of the next batch make the scales.
        num_written: tokens written since take_shares.
    """

    def __init__(
        self, num_layers: int, source: str, device: torch.device | str = "cpu", *, margin: float = 1.0
    ) -> None:
        assert source in SOURCES, f"{source!r} is none of {SOURCES}"
        self.source, self.margin = source, margin
        self.scale = torch.ones(num_layers, 2, device=device)
        self.quant_scale = torch.ones(num_layers, 2, device=device)
        self.counts = torch.zeros(num_layers, 2, 2, dtype=torch.int64, device=device)
        self.versions: list[int | None] = [0 if source == "_fixed" else None] * num_layers
        self.high_precision: set[int] = set()
        self.generation = 0
        self.num_written = 0
        self.is_calibrating = self.is_own

    @property
    def num_layers(self) -> int:
        return len(self.versions)

    @property
    def is_own(self) -> bool:
        """Whether the engine makes the scales itself."""
        return self.source in ("engine", "_calibrated_once")

    @property
    def follows_weights(self) -> bool:
        """Whether scales of other weights than those that write are an error."""
        return self.source in ("engine", "trainer")

    def layer(self, index: int) -> LayerKVScales | None:
        """One layer's scales; None where its cache is in high precision."""
        if index in self.high_precision:
            return None
        return LayerKVScales(self, index, self.scale[index], self.quant_scale[index], self.counts[index])

    def set(self, scales: Mapping[int, tuple[torch.Tensor, torch.Tensor]], weight_version: int) -> None:
        """Take over decode scales, in place.

        Args:
            scales: layer -> (of K, of V), one fp32 number each, finite and positive. Layers that are missing keep
                theirs, and their old version with it.
            weight_version: of the weights that they were made for.
        Raises:
            StaleScaleError: a scale that is none.
        """
        layers = list(scales)
        flat = [x.detach().float().reshape(()).to(self.scale.device) for pair in scales.values() for x in pair]
        values = torch.stack(flat).view(-1, 2)
        is_bad = ~((values > 0) & torch.isfinite(values)).all(dim=1)
        if is_bad.any():
            index = int(is_bad.nonzero()[0])
            raise StaleScaleError(
                f"the KV scales of layer {layers[index]} must be finite and positive, got {values[index].tolist()}; "
                "none was taken"
            )
        self.scale[layers] = values
        self.quant_scale.copy_(_reciprocal(self.scale))
        for index in layers:
            self.versions[index] = weight_version
        self.is_calibrating = False
        self.generation += 1

    def note_new_weights(self) -> None:
        """The weights changed: an engine's own scales are made again by the next batch."""
        if self.source == "engine":
            self.is_calibrating = True
            self.generation += 1

    def end_calibration(self, weight_version: int) -> None:
        """The batch that made the scales has been launched, under these weights."""
        if self.is_calibrating:
            self.versions = [weight_version] * self.num_layers
            self.is_calibrating = False

    def check(self, weight_version: int) -> None:
        """Refuse scales that are not of these weights.

        Raises:
            StaleScaleError: naming the first layer whose scales were never set, or are of other weights.
        """
        if self.is_calibrating:
            return
        for index, version in enumerate(self.versions):
            if index in self.high_precision:
                continue
            if version is None:
                raise StaleScaleError(
                    f"the KV scales of layer {index} were never set, so they would be 1 by omission; hand them over "
                    "with the weights (KVScaleTable.set), or set kv_scales = 'per_token_head', which needs none"
                )
            if self.follows_weights and version != weight_version:
                raise StaleScaleError(
                    f"the KV scales of layer {index} were made for weight version {version}, but the weights are "
                    f"version {weight_version}: a stale KV scale; recalibrate after each update (kv_scales = 'engine' "
                    "does it by itself), or set kv_scales = 'per_token_head'"
                )

    def fall_back(self, index: int) -> None:
        """Keep a layer's cache in high precision from now on; the engine must allocate its cache again."""
        self.high_precision.add(index)
        self.generation += 1

    def take_shares(self, num_per_token: int) -> dict[int, LayerShares]:
        """Each FP8 layer's shares since the last call, which start over; waits for the device. {} without a token.

        Args:
            num_per_token: numbers in one token's K: KH * D.
        """
        total = self.num_written * num_per_token
        counts = self.counts.tolist()
        self.counts.zero_()
        self.num_written = 0
        if not total:
            return {}
        return {
            i: LayerShares(k[0] / total, v[0] / total, k[1] / total, v[1] / total)
            for i, (k, v) in enumerate(counts)
            if i not in self.high_precision
        }

    def state_dict(self) -> dict[str, torch.Tensor]:
        """All of it as plain tensors; versions are -1 where none."""
        return {
            "scale": self.scale.clone(),
            "versions": torch.tensor([-1 if v is None else v for v in self.versions]),
            "high_precision": torch.tensor(sorted(self.high_precision), dtype=torch.int64),
            "is_calibrating": torch.tensor(self.is_calibrating),
        }

    def load_state_dict(self, state: Mapping[str, torch.Tensor]) -> None:
        """Take a state_dict back, in place."""
        self.scale.copy_(state["scale"])
        self.quant_scale.copy_(_reciprocal(self.scale))
        self.versions = [None if v < 0 else v for v in state["versions"].tolist()]
        self.high_precision = set(state["high_precision"].tolist())
        self.is_calibrating = bool(state["is_calibrating"])
        self.generation += 1


def scale_of(amax: torch.Tensor, margin: float = 1.0) -> torch.Tensor:
    """The decode scale of an amax: amax * margin / 448, one correctly rounded division; 1 for zero and infinity."""
    raised = amax.float() * margin
    scale = raised / torch.full_like(raised, FP8_MAX)  # tensor / number multiplies by a rounded reciprocal on a GPU
    return torch.where((scale > 0) & torch.isfinite(scale), scale, 1.0)


def _reciprocal(scale: torch.Tensor) -> torch.Tensor:
    """1 / scale, correctly rounded, and the largest finite number where that overflows."""
    return (torch.ones_like(scale) / scale).clamp_max(torch.finfo(torch.float32).max)


def _amax(x: torch.Tensor) -> torch.Tensor:
    """max|x| as a fp32 scalar, NaN ignored."""
    return x.detach().abs().float().nan_to_num(nan=0.0, posinf=float("inf")).amax()
