"""WeightUpdate: new weights for a model that serves, as a transaction. Staged, checked, written in place, or nothing.

Until `write` no byte of the live weights changes; if writing fails, what was written is taken back.
Engine.commit_update says what becomes of the running requests and of the prefix cache.
"""

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Literal

import torch

from octavo.errors import BackendError, CheckpointError, LostWeightsError, RequestError
from octavo.models import Decoder
from octavo.models.checkpoint.kv_scales import KVScales
from octavo.models.checkpoint.layout import Layout
from octavo.models.checkpoint.safetensors_io import TensorEntry
from octavo.nn.live_weights import adopt_codes, live_tensors
from octavo.weights.exchange import exchange_on_all
from octavo.weights.kv_scales.handover import KVPairs, pairs_of
from octavo.weights.manifest import TensorSpec
from octavo.weights.staging import Staged, WeightStaging

# What becomes of the requests that run when new weights are committed.
RunningPolicy = Literal["abort", "wait", "keep"]
POLICIES: tuple[RunningPolicy, ...] = ("abort", "wait", "keep")


def check_policy(running: RunningPolicy) -> None:
    """Before anything is staged for it.

    Raises:
        RequestError: it is none of POLICIES.
    """
    if running not in POLICIES:
        raise RequestError(f"running must be one of {', '.join(POLICIES)}, got {running!r}")


class WeightUpdate:
    """One transaction on one model's weights. Whole models, unless `partial` names a part.

    Names are the checkpoint's (Hugging Face's). Tensors are bf16, fp16 or fp32, or, where the model holds FP8 codes
    alone, such codes with their scales (`weight_scale_inv` or `weight_scale`, `input_scale` for static inputs); a model
    under delayed scaling wants its amax histories and scales too, by octavo's names, as octavo's checkpoints have them.
    Everything is quantized while it is staged; committing is copies alone.

    Memory: one copy of the live weights (parameters, codes and scales) on staging_device; beside it the tensors of the
    parameters under way, and while writing 64 MiB on the model's device. The old weights wait in the staged copy's
    place until all is written.

    Args:
        model: it is only read before write().
        manifest: every tensor that will come; checked against the model now, and each tensor against it as it comes.
            None: names are checked as they come, completeness at the end.
        layout: how codes are stored; None for as the model's recipe holds them.
        partial: names or patterns of what will come where that is not the whole model; a fused parameter's tensors (q,
            k and v; gate and up; all experts of a layer) come together.
        staging_device: None for the CPU.

    Attributes:
        base_version: the model's weight version at the start.
        ended: why it takes nothing more ("it was committed", say), None while it does.

    Raises:
        CheckpointError: a manifest that does not fit the model.
    """

    def __init__(
        self,
        model: Decoder,
        *,
        manifest: Mapping[str, TensorSpec] | None = None,
        layout: Layout | None = None,
        partial: Sequence[str] = (),
        staging_device: torch.device | str | None = None,
    ) -> None:
        self.model, self.base_version = model, model.weight_version
        self.manifest: Mapping[str, TensorSpec] | None = None
        self.ended: str | None = None
        self._staging: WeightStaging | None = WeightStaging(
            model, layout=layout, partial=partial, device=staging_device
        )
        self._staged: Staged | None = None
        self._keeps_old = False
        self._old_kv_scales: tuple[KVScales, ...] | None = None  # of the old weights, where these are staged
        self._kv_pairs: KVPairs | None = None
        if manifest is not None:
            self.declare(manifest)

    @property
    def staging(self) -> WeightStaging:
        """What has come.

        Raises:
            RequestError: the transaction has ended.
        """
        if self._staging is None:
            raise RequestError(f"this weight update takes nothing more: {self.ended}; begin another")
        return self._staging

    def declare(self, manifest: Mapping[str, TensorSpec]) -> None:
        """Say what will come, before the first tensor does.

        Raises:
            CheckpointError: a manifest that does not fit the model. The transaction ends with it.
        """
        where = Path("manifest")
        entries = [TensorEntry(name, spec.dtype, spec.shape, where) for name, spec in manifest.items()]
        staging = self.staging
        with self.ending_at_error():
            staging.declare(entries)
        self.manifest = manifest

    def stage(self, name: str, tensor: torch.Tensor) -> None:
        """Check one tensor and take it in; it may be changed afterwards.

        Raises:
            CheckpointError: name, shape, dtype or checksum are not the manifest's or the model's, or it is not finite.
                The transaction ends with it.
            RequestError: the transaction has ended.
        """
        staging = self.staging
        with self.ending_at_error():
            if self.manifest is not None:
                if name not in self.manifest:
                    raise CheckpointError(f"{name} is not in the update's manifest")
                self.manifest[name].check(name, tensor)
            staging.add(name, tensor)

    def keep_old(self) -> None:
        """Let write leave the transaction open, with the old weights in the staged copy: a second write, under another
        version, brings them back.

        Raises:
            RequestError: the transaction has ended, or its KV scales are of the new weights alone.
        """
        _ = self.staging
        if self.model.numerics.kv_scales == "trainer":
            raise RequestError("kv_scales='trainer' come with one update, and old weights would be without theirs")
        self._keeps_old = True

    def verify(self) -> None:
        """Check that everything came; after this nothing but the copies is left to do.

        Raises:
            CheckpointError: something is missing, or the model changed under the update. The transaction ends with it.
            RequestError: the transaction has ended.
        """
        staging = self.staging
        if self._old_kv_scales is not None:  # the old weights are as they were
            return
        with self.ending_at_error():
            if staging.is_partial and self.model.weight_version != self.base_version:
                raise CheckpointError(
                    f"the weights changed from version {self.base_version} to {self.model.weight_version} since this "
                    "partial update began; begin again"
                )
            lost = [name for name in self.manifest or () if name not in staging.seen]
            if lost:
                raise CheckpointError(f"{len(lost)} tensors of the manifest have not come, such as {lost[0]}")
            self._staged = staging.finish()
            # those of a part are of no use to the rest
            if self.model.numerics.kv_scales == "trainer" and not staging.is_partial:
                self._kv_pairs = pairs_of(self._staged.kv_scales, self.model.config.num_layers)

    def write(self) -> int:
        """Write the verified weights over the live ones, in place: every tensor keeps its address.

        To be called by Engine.commit_update, between two steps; of a model that is cut among ranks by all of them.

        Returns:
            The model's new weight version.
        Raises:
            BackendError: writing failed, on any rank; the old weights are back, bit for bit, on all.
            LostWeightsError: they are not.
        """
        live, staged = live_tensors(self.staging.model), self._staged
        assert staged is not None, "verify comes first"
        try:
            pairs = [(live[name], tensor) for name, tensor in staged.tensors.items()]
            exchange_on_all(self.model.tensor_group, pairs)
        except BaseException as error:
            self.end(f"it failed while it was written: {error}")
            adopt_codes(self.model)  # restored with the weights that they were made of
            if isinstance(error, LostWeightsError) or not isinstance(error, Exception):
                raise
            raise BackendError(f"the update failed while it was written ({error}); the old weights are back") from error
        self.model.mark_weights_updated()
        adopt_codes(self.model)
        is_undone, old_kv_scales = self._old_kv_scales is not None, self.model.kv_scales
        self.model.kv_scales = staged.kv_scales if self._old_kv_scales is None else self._old_kv_scales
        if self._kv_pairs is not None and self.model.kv_table is not None:
            self.model.kv_table.set(self._kv_pairs, self.model.weight_version)
        if self._keeps_old and not is_undone:
            self._old_kv_scales = old_kv_scales
        else:
            self.end("its old weights are back" if is_undone else "it was committed")
        return self.model.weight_version

    def end(self, reason: str = "it was aborted") -> None:
        """Take nothing more and free what was staged; the live weights stay as they are."""
        if self.ended is None:
            self.ended, self._staging, self._staged = reason, None, None

    @contextlib.contextmanager
    def ending_at_error(self) -> Iterator[None]:
        """End the transaction, and free what was staged, where the block fails."""
        try:
            yield
        except BaseException as error:
            self.end(f"it failed: {error}")
            raise
