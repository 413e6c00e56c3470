"""A sharded Decoder from a Hugging Face checkpoint: each rank reads its own rows of the files, and no more."""

import functools
from collections.abc import Collection
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import torch

from octavo.distributed.outcome import everyone, together
from octavo.distributed.shards import local, rows_of
from octavo.errors import CheckpointError
from octavo.models.checkpoint import bf16, record
from octavo.models.checkpoint.dialects import newest_model
from octavo.models.checkpoint.names import parameter_names
from octavo.models.checkpoint.safetensors_io import check_finite
from octavo.models.checkpoint.stored import StoredWeights, read_stored
from octavo.models.decoder import Decoder
from octavo.nn import load_fp8_state_dict
from octavo.numerics import Numerics, Recipe, get_recipe
from octavo.ops._runtime.recipe_support import require_recipe
from octavo.parallel.fsdp import Reduction, shard

if TYPE_CHECKING:
    from octavo.distributed.mesh import Mesh


def load_sharded(
    path: str | Path,
    mesh: "Mesh",
    *,
    recipe: Recipe | str = "bf16",
    dtype: torch.dtype | None = None,
    reduction: Reduction = "mean",
    param_dtype: torch.dtype | None = None,
    reshard_after_forward: bool = True,
    all_gather_dtype: Literal["fp8"] | None = None,
    allow_unused: Collection[str] = (),
) -> Decoder:
    """A Decoder for training, sharded as octavo.parallel.shard does it; a collective.

    Its numbers are those of octavo.load_model(path, trainable=True) and shard, but no rank ever holds it whole.

    Args:
        path: as octavo.load_model's, in high precision; the same on all ranks.
        mesh: of this job; one process loads the whole model.
        recipe: of the linears.
        dtype: of parameters, torch.bfloat16 or torch.float32; None for the checkpoint's own.
        reduction: as shard's.
        param_dtype: as shard's.
        reshard_after_forward: as shard's.
        all_gather_dtype: as shard's.
        allow_unused: Hugging Face names, with wildcards, of tensors that may be left over in the files.
    Raises:
        CheckpointError: on all ranks, where one finds files that octavo.load_model would refuse, or FP8 codes.
        RecipeError: an unknown recipe.
        BackendError: the device does not have the recipe.
        ConfigError: as shard's.
        DtypeError: as shard's.
    """
    group, numerics = None if mesh.device_mesh is None else everyone(), Numerics(get_recipe(recipe))
    found: list[Any] = []

    def read() -> None:
        require_recipe(numerics.recipe, mesh.device)
        folder = newest_model(Path(path))
        state = record.read_recipe_state(folder) if numerics.recipe.has_state else None
        found.extend((read_stored(folder, allow_unused=allow_unused), record.read(folder), state))

    together(group, read)
    stored, known, state = found
    model = Decoder(stored.config, dtype=dtype or stored.dtype, device="meta")
    model.set_numerics(numerics, ignore=known.high_precision if known and numerics.recipe.is_fp8 else ())
    shard(
        model,
        mesh,
        reduction=reduction,
        param_dtype=param_dtype,
        reshard_after_forward=reshard_after_forward,
        all_gather_dtype=all_gather_dtype,
    )
    model.to_empty(device=mesh.device)
    together(group, lambda: _fill(model, stored))
    if state is not None:
        together(group, functools.partial(load_fp8_state_dict, model, state, strict=False))
    model.weight_version = known.weight_version if known else 0
    model.kv_scales = stored.kv_scales
    return model


def load_weights(model: Decoder, path: str | Path, *, allow_unused: Collection[str] = ()) -> None:
    """Replace a Decoder's parameters by a checkpoint's, in their own dtype; each rank reads its rows alone.

    Args:
        model: sharded or whole, with parameters on a device; "meta" ones need to_empty before.
        path: as octavo.load_model's, in high precision.
        allow_unused: as load_sharded's.
    Raises:
        CheckpointError: FP8 codes, another architecture, damaged files; after the last the model is half filled.
    """
    stored = read_stored(newest_model(Path(path)), allow_unused=allow_unused)
    _fill(model, stored)
    model.mark_weights_updated()


@torch.no_grad()
def _fill(model: Decoder, stored: StoredWeights) -> None:
    """This rank's rows of every parameter."""
    reader, parameters = stored.reader, parameter_names(stored.config)
    if stored.layout.weight is not None:
        raise CheckpointError(
            f"{reader.path} holds {stored.layout.dialect} codes, and a sharded model is trained from values in high "
            "precision; decode it first: octavo.load_model(path, trainable=True) and octavo.save_model in one process"
        )
    targets: dict[str, Any] = dict(model.named_parameters())
    for parameter in parameters:
        target = targets.get(parameter.name)
        if target is None or tuple(target.shape) != parameter.shape:
            raise CheckpointError(f"{reader.path} holds another architecture: {parameter.name} is {parameter.shape}")
        for name, shape in parameter.part_shapes.items():
            bf16.check_tensor(reader, name, shape)
    for parameter in parameters:
        target = targets[parameter.name]
        shape = parameter.shape[1:]
        size, held = torch.Size(shape).numel(), local(target)
        for name, first_row, rows in parameter.overlaps(*rows_of(target)[:2]):
            values = reader.load_flat(name, first_row * size, (rows.stop - rows.start) * size)
            check_finite(name, values, reader.path)
            held[rows].copy_(values.view(-1, *shape))
