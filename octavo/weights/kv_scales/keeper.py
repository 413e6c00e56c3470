"""The sampler's KV scales over a run: who recalibrates them, what they clip, and which layers fall back to bf16.

One scale a token and head, the default, needs nothing of this.
"""

import dataclasses
from collections.abc import Callable, Sequence

from octavo.models import Decoder
from octavo.models.calibration import calibrate
from octavo.ops.attention import KVScaleTable, LayerShares
from octavo.ops.attention.kv_scales import scale_of


@dataclasses.dataclass(frozen=True)
class FallbackRule:
    """When a layer's cache leaves FP8 for good; 0 switches a bound off.

    Attributes:
        clip_share: of a step's numbers of K or of V; a layer above it falls back.
        flush_share: the same.
    """

    clip_share: float = 1e-3
    flush_share: float = 0.05

    def reason(self, shares: LayerShares) -> str | None:
        """What is above its bound, or None."""
        for what, limit, values in (
            ("clipped", self.clip_share, {"K": shares.k_clipped, "V": shares.v_clipped}),
            ("flushed to zero", self.flush_share, {"K": shares.k_flushed, "V": shares.v_flushed}),
        ):
            role = max(values, key=lambda name: values[name])
            if limit and values[role] > limit:
                return f"{values[role]:.2%} of {role} was {what}, more than {limit:.2%}"
        return None


class KVScaleKeeper:
    """Keeps a sampler's per-tensor KV scales.

    Args:
        trainer: whose forward calibrates where the source is "trainer", in its own numerics.
        sampler: whose table it is; None in it makes every method do nothing.
        rule: when a layer falls back.
        margin: by how much an amax is raised.
        lay_out: has the engine allocate its cache again, after a fallback.
        say: shows a line to the user.
    """

    def __init__(
        self,
        trainer: Decoder,
        sampler: Decoder,
        *,
        rule: FallbackRule,
        margin: float,
        lay_out: Callable[[], None],
        say: Callable[[str], None],
    ) -> None:
        self._trainer, self._sampler, self._rule, self._lay_out, self._say = trainer, sampler, rule, lay_out, say
        if self.table is not None:
            self.table.margin = margin

    @property
    def table(self) -> KVScaleTable | None:
        """The sampler's scales."""
        return self._sampler.kv_table

    @property
    def needs_first_prompts(self) -> bool:
        """Whether no scales were made yet, and the first step's prompts must do."""
        table = self.table
        return table is not None and table.source == "trainer" and None in table.versions

    def calibrate(self, sequences: Sequence[Sequence[int]]) -> Callable[[], None]:
        """Trainer side: scales from these sequences under the trainer's weights of now, stamped with their version.

        Args:
            sequences: token ids, a training batch; before the first one, the first prompts.
        Returns:
            What hands them over, to be called together with the refit; it does nothing where no scales are needed.
        Raises:
            DataError: a layer whose K or V is zero throughout, or not finite.
        """
        table, version = self.table, self._trainer.weight_version
        if table is None or table.source != "trainer":
            return lambda: None
        found = calibrate(self._trainer, sequences, linears=False)
        found.kv_scales()  # DataError for what has no scale
        scales = {
            i: (scale_of(found.keys[i], table.margin), scale_of(found.values[i], table.margin)) for i in found.keys
        }
        return lambda: table.set(scales, version)

    def finish_step(self, weight_version: int) -> dict[str, float]:
        """Look at what was clipped and flushed since the last call, and let layers fall back by the rule.

        Args:
            weight_version: the newest that sampled the step's rollouts.
        Returns:
            kv/... metrics; none for one scale a token and head.
        """
        table = self.table
        if table is None:
            return {}
        config = self._sampler.config
        shares = table.take_shares(config.num_kv_heads * config.head_dim)
        metrics = _metrics(shares)
        fallen = {i: reason for i, found in shares.items() if (reason := self._rule.reason(found)) is not None}
        for index, reason in fallen.items():
            table.fall_back(index)
            self._say(f"layer {index}: the KV cache falls back from FP8 to bf16, for {reason}")
        if fallen:
            self._lay_out()
        known = [] if table.source == "_fixed" else [v for v in table.versions if v is not None]
        lag = [weight_version - version for version in known]
        return {
            **metrics,
            "kv/num_bf16_layers": float(len(table.high_precision)),
            "kv/scale_lag_max": float(max(lag, default=0)),
        }


def _metrics(shares: dict[int, LayerShares]) -> dict[str, float]:
    """Each layer's shares, and the largest."""
    if not shares:
        return {}
    rows = {i: dataclasses.asdict(found) for i, found in shares.items()}
    each = {f"kv/layer_{i}/{name}_share": value for i, row in rows.items() for name, value in row.items()}
    largest = {
        f"kv/{kind}_share_max": max(row[f"{role}_{kind}"] for row in rows.values() for role in "kv")
        for kind in ("clipped", "flushed")
    }
    return {**largest, **each}
