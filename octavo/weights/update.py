"""WeightUpdate: new weights for a model that serves, as a transaction. Staged, checked, written in place, or nothing.

Until `write` no byte of the live weights changes; if writing fails, what was written is taken back.
Engine.commit_update says what becomes of the running requests and of the prefix cache.
"""

import contextlib
import dataclasses
import hashlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Literal

import torch

from octavo.errors import BackendError, CheckpointError, RequestError
from octavo.models import Decoder, ModelConfig
from octavo.models.checkpoint import record
from octavo.models.checkpoint.dialects import read_config, read_layout
from octavo.models.checkpoint.kv_scales import KVScales
from octavo.models.checkpoint.layout import Layout
from octavo.models.checkpoint.safetensors_io import SafetensorsReader, TensorEntry
from octavo.nn.live_weights import adopt_codes, live_tensors
from octavo.weights.exchange import LostWeightsError, exchange_all
from octavo.weights.staging import Staged, WeightStaging

# What becomes of the requests that run when new weights are committed.
RunningPolicy = Literal["abort", "wait", "keep"]
POLICIES: tuple[RunningPolicy, ...] = ("abort", "wait", "keep")


@dataclasses.dataclass(frozen=True)
class TensorSpec:
    """What a manifest says of a tensor: dtype, shape, and the SHA-256 of its bytes in hex, None for no check."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    sha256: str | None = None


def tensor_sha256(tensor: torch.Tensor) -> str:
    """SHA-256 in hex of a tensor's elements in row-major order, little-endian, as safetensors stores them."""
    flat = tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8)
    return hashlib.sha256(flat.numpy().data).hexdigest()


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
        self.model, self.manifest, self.base_version = model, manifest, model.weight_version
        self.ended: str | None = None
        self._staging: WeightStaging | None = WeightStaging(
            model, layout=layout, partial=partial, device=staging_device
        )
        self._staged: Staged | None = None
        if manifest is not None:
            self._staging.declare(
                TensorEntry(name, spec.dtype, spec.shape, Path("manifest")) for name, spec in manifest.items()
            )

    def stage(self, name: str, tensor: torch.Tensor) -> None:
        """Check one tensor and take it in; it may be changed afterwards.

        Raises:
            CheckpointError: name, shape, dtype or checksum are not the manifest's or the model's, or it is not finite.
                The transaction ends with it.
            RequestError: the transaction has ended.
        """
        staging = self._open()
        with self._ending_at_error():
            self._check_manifest(name, tensor)
            staging.add(name, tensor)

    def verify(self) -> None:
        """Check that everything came; after this nothing but the copies is left to do.

        Raises:
            CheckpointError: something is missing, or the model changed under the update. The transaction ends with it.
            RequestError: the transaction has ended.
        """
        staging = self._open()
        with self._ending_at_error():
            if staging.is_partial and self.model.weight_version != self.base_version:
                raise CheckpointError(
                    f"the weights changed from version {self.base_version} to {self.model.weight_version} since this "
                    "partial update began; begin again"
                )
            lost = [name for name in self.manifest or () if name not in staging.seen]
            if lost:
                raise CheckpointError(f"{len(lost)} tensors of the manifest have not come, such as {lost[0]}")
            self._staged = staging.finish()
            if self._hands_scales_over:
                _pairs_of(self._staged.kv_scales, self.model.config.num_layers)

    def write(self) -> int:
        """Write the verified weights over the live ones, in place: every tensor keeps its address.

        To be called by Engine.commit_update, between two steps.

        Returns:
            The model's new weight version.
        Raises:
            BackendError: writing failed; the old weights are back, bit for bit. LostWeightsError: they are not.
        """
        self._open()
        staged = self._staged
        assert staged is not None, "verify comes first"
        live = live_tensors(self.model)
        try:
            exchange_all([(live[name], tensor) for name, tensor in staged.tensors.items()])
        except BaseException as error:
            self.end(f"it failed while it was written: {error}")
            adopt_codes(self.model)  # restored with the weights that they were made of
            if isinstance(error, LostWeightsError) or not isinstance(error, Exception):
                raise
            raise BackendError(f"the update failed while it was written ({error}); the old weights are back") from error
        self.model.mark_weights_updated()
        adopt_codes(self.model)
        self.model.kv_scales = staged.kv_scales
        if self._hands_scales_over and self.model.kv_table is not None:
            pairs = _pairs_of(staged.kv_scales, self.model.config.num_layers)
            self.model.kv_table.set(pairs, self.model.weight_version)
        self.end("it was committed")
        return self.model.weight_version

    def end(self, reason: str = "it was aborted") -> None:
        """Take nothing more and free what was staged; the live weights stay as they are."""
        if self.ended is None:
            self.ended, self._staging, self._staged = reason, None, None

    @property
    def _hands_scales_over(self) -> bool:
        """Whether KV scales must come with the weights; those of a part are of no use to the rest."""
        return self.model.numerics.kv_scales == "trainer" and self._staging is not None and not self._staging.is_partial

    def _open(self) -> WeightStaging:
        if self._staging is None:
            raise RequestError(f"this weight update takes nothing more: {self.ended}; begin another")
        return self._staging

    def _check_manifest(self, name: str, tensor: torch.Tensor) -> None:
        if self.manifest is None:
            return
        spec = self.manifest.get(name)
        if spec is None:
            raise CheckpointError(f"{name} is not in the update's manifest")
        if (tensor.dtype, tuple(tensor.shape)) != (spec.dtype, spec.shape):
            raise CheckpointError(
                f"{name} is {tensor.dtype} {tuple(tensor.shape)}, but the manifest says {spec.dtype} {spec.shape}"
            )
        if spec.sha256 is not None and tensor_sha256(tensor) != spec.sha256.lower():
            raise CheckpointError(f"{name}: the bytes do not have the manifest's SHA-256; they were damaged on the way")

    @contextlib.contextmanager
    def _ending_at_error(self) -> Iterator[None]:
        try:
            yield
        except BaseException as error:
            self.end(f"it failed: {error}")
            raise


def stage_checkpoint(
    model: Decoder,
    path: str | Path,
    *,
    checksums: Mapping[str, str] | None = None,
    partial: Sequence[str] = (),
    staging_device: torch.device | str | None = None,
) -> WeightUpdate:
    """A checkpoint directory as a staged update: what load_model would make of it under the model's numerics.

    Args:
        checksums: name -> SHA-256 in hex, for every tensor that is read; None for no check. The rest is as in
            WeightUpdate; with partial the files' other tensors are not read.
    Raises:
        CheckpointError: another architecture, damaged files, or see WeightUpdate.stage.
    """
    fields = read_config(path)
    layout = read_layout(path, fields)
    _check_config(model.config, ModelConfig.from_hf(fields), path)
    readers = [SafetensorsReader(path)]
    if model.numerics.recipe.has_state and (state := record.state_file(Path(path))) is not None:
        readers.append(SafetensorsReader(state))
    update = WeightUpdate(model, layout=layout, partial=partial, staging_device=staging_device)
    staging = update._open()
    found = {name: reader for reader in readers for name in reader.entries if not partial or staging.wants(name)}
    staging.declare(reader.entries[name] for name, reader in found.items())
    update.manifest = _manifest(found, checksums)
    for name in sorted(found, key=staging.position):
        update.stage(name, found[name].load(name))
    return update


def manifest_of(tensors: Mapping[str, torch.Tensor], checksums: Mapping[str, str]) -> dict[str, TensorSpec]:
    """A manifest from checksums alone: of each tensor as it is.

    Raises:
        CheckpointError: the checksums are of other tensors.
    """
    _check_same_names(tensors, checksums)
    return {name: TensorSpec(t.dtype, tuple(t.shape), checksums[name]) for name, t in tensors.items()}


def _manifest(found: Mapping[str, SafetensorsReader], checksums: Mapping[str, str] | None) -> dict[str, TensorSpec]:
    if checksums is not None:
        _check_same_names(found, checksums)
    entries = {name: reader.entries[name] for name, reader in found.items()}
    return {
        name: TensorSpec(entry.dtype, entry.shape, None if checksums is None else checksums[name])
        for name, entry in entries.items()
    }


def _check_same_names(names: Iterable[str], checksums: Mapping[str, str]) -> None:
    odd = sorted({*names} ^ {*checksums})
    if odd:
        raise CheckpointError(
            f"checksums must name the tensors that come, no more and no less; {odd[0]} is in one alone"
        )


def _pairs_of(scales: Sequence[KVScales], num_layers: int) -> dict[int, tuple[torch.Tensor, torch.Tensor]]:
    """Layer -> scales of K and V, one number each; nothing stands for one that did not come."""
    pairs: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
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


def _check_config(ours: ModelConfig, theirs: ModelConfig, path: str | Path) -> None:
    fields = [f.name for f in dataclasses.fields(ours) if getattr(ours, f.name) != getattr(theirs, f.name)]
    if fields:
        name = fields[0]
        raise CheckpointError(
            f"{path}: {name} is {getattr(theirs, name)!r}, but the model that serves has {getattr(ours, name)!r}; an "
            "update brings new weights of the same architecture"
        )
