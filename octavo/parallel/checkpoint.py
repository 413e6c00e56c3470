"""Named tensors of a job in one folder, by torch.distributed.checkpoint: each rank writes its shards, any number reads.

DTensors are saved by their shards, slices of tensor-parallel ranks by the rows and columns that they are of the whole,
and other tensors once, for they are equal on all ranks. A reader may have another number of ranks, or no process group;
the bits are the same. octavo.run.CheckpointStore makes the folder atomic.
"""

import warnings
from collections.abc import Callable, Mapping
from math import prod
from pathlib import Path
from typing import Any

import torch

from octavo.distributed.cut import Cut
from octavo.distributed.shards import is_distributed, local, rows_of
from octavo.errors import CheckpointError
from octavo.models.checkpoint.safetensors_io import SafetensorsReader
from octavo.models.checkpoint.storage import errno_of, storage_error

Cuts = Mapping[str, Cut]
UNCUT: Cuts = {}
_Stored = Mapping[str, tuple[tuple[int, ...], torch.dtype]]


def save_state(tensors: Mapping[str, torch.Tensor], folder: Path, group: Any, cuts: Cuts = UNCUT) -> None:
    """Write tensors; a collective of `group`, which raises the same on all its ranks.

    Args:
        tensors: name -> DTensor or plain tensor, of any dtype that torch saves; the same names on all ranks.
        folder: new, on a file system that all ranks share.
        group: a process group over gloo: NCCL's would put the ranks' plans on the GPUs, among training's collectives.
        cuts: of those that are slices.
    Raises:
        StorageError: a disk refuses a rank's part.
        RuntimeError: a rank failed in another way.
    """
    from torch.distributed.checkpoint.api import CheckpointException
    from torch.distributed.checkpoint.state_dict_saver import save

    from octavo.parallel.shard_files import ShardWriter

    try:
        # detached: of a Parameter torch would save the class as well
        detached = {name: tensor.detach() for name, tensor in tensors.items()}
        writer = ShardWriter(folder, has_gpu_tensors=any(tensor.is_cuda for tensor in map(local, detached.values())))
        save(_placed(detached, cuts), storage_writer=writer, process_group=group)
    except CheckpointException as failed:
        rank, (error, _) = min(failed.failures.items(), key=lambda item: item[0])
        number = errno_of(error)
        if number is None:
            raise RuntimeError(f"rank {rank}: {type(error).__name__}: {error}") from None
        refused = storage_error(folder, number, getattr(error, "filename", None))
        raise type(refused)(number, f"rank {rank}: {refused}") from None


def load_state(
    folder: Path, like: Mapping[str, torch.Tensor] | None = None, cuts: Cuts = UNCUT
) -> dict[str, torch.Tensor]:
    """Read what save_state wrote; each rank for itself, without a collective.

    Args:
        folder: as it was written, by any number of ranks.
        like: this run's tensors, DTensors or plain, on any device: their values are replaced in place, each rank
            reading its rows alone. Names that they lack are left out. None reads everything, whole, to the CPU.
        cuts: of those of `like` that are slices.
    Returns:
        name -> tensor, of `like` itself; a whole one that the folder has in another shape or dtype as it is there.
    Raises:
        CheckpointError: damaged or missing files; a sharded or cut tensor of another shape or dtype. Nothing is changed
            then, unless a file is damaged.
    """
    from torch.distributed.checkpoint.api import CheckpointException
    from torch.distributed.checkpoint.filesystem import FileSystemReader
    from torch.distributed.checkpoint.state_dict_loader import load

    try:
        reader = FileSystemReader(folder)
        rows: dict[str, Any] = reader.read_metadata().state_dict_metadata  # type: ignore[assignment]
        stored = {name: (tuple(row.size), row.properties.dtype) for name, row in rows.items()}
        found = _targets(folder, stored, like, cuts, _is_same)
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "torch.distributed is disabled")  # so it is asked to be
            detached = {name: tensor.detach() for name, tensor in found.items()}
            load(_placed(detached, cuts), storage_reader=reader, no_dist=True)
    except CheckpointError:
        raise
    except (Exception, CheckpointException) as error:  # damaged bytes fail in any way in torch's two unpicklers
        raise CheckpointError(f"{folder} cannot be read: {_cause(error)}") from None
    return found


def load_file(file: Path, like: Mapping[str, torch.Tensor], cuts: Cuts = UNCUT) -> dict[str, torch.Tensor]:
    """Read a safetensors file as load_state reads a folder: each rank its rows alone.

    Until 0.1 the scales of 8-bit moments were flat; they are taken into rows of as many elements.
    """
    reader = SafetensorsReader(file)
    stored = {name: (entry.shape, entry.dtype) for name, entry in reader.entries.items()}
    found = _targets(file, stored, like, cuts, _is_same_in_rows)
    for name, tensor in found.items():
        own = rows_of(tensor)
        cut = cuts.get(name) or Cut(tuple(tensor.shape), (slice(0, own.first + own.num),))
        size, held = prod(cut.shape[1:]), local(tensor)
        for first_row, rows in cut.pieces(own.first, own.num):
            num = rows.stop - rows.start
            values = reader.load_flat(name, first_row * size, num * size).view(num, size)
            values = values if cut.columns is None else values[:, cut.columns]
            with torch.no_grad():
                part = held[rows] if held.dim() else held
                part.copy_(values.reshape(part.shape))
    return found


def _placed(tensors: Mapping[str, torch.Tensor], cuts: Cuts) -> dict[str, torch.Tensor]:
    """Tensors as torch takes them: slices with their places."""
    if not cuts:
        return dict(tensors)
    from octavo.parallel.cut_tensor import CutTensor

    return {name: CutTensor(tensor, cuts[name]) if name in cuts else tensor for name, tensor in tensors.items()}


def _targets(
    place: Path,
    stored: _Stored,
    like: Mapping[str, torch.Tensor] | None,
    cuts: Cuts,
    fits: Callable[[tuple[int, ...], tuple[int, ...]], bool],
) -> dict[str, torch.Tensor]:
    """The tensors to fill, by name."""
    targets = {}
    for name, (shape, dtype) in stored.items():
        own = None if like is None else like.get(name)
        own_shape = cuts[name].shape if name in cuts else () if own is None else tuple(own.shape)
        if own is not None and own.dtype == dtype and fits(shape, own_shape):
            targets[name] = own
        elif own is not None and (name in cuts or is_distributed(own)):
            raise CheckpointError(
                f"{place}: {name} is {dtype} of shape {shape}, this run's is {own.dtype} of shape {own_shape}; "
                "it belongs to another architecture, or to other settings of the optimizer"
            )
        elif own is not None or like is None:
            targets[name] = torch.empty(shape, dtype=dtype)
    return targets


def _is_same(shape: tuple[int, ...], own: tuple[int, ...]) -> bool:
    return shape == own


def _is_same_in_rows(shape: tuple[int, ...], own: tuple[int, ...]) -> bool:
    return shape == own or (len(own) == 2 and shape == (prod(own),))


def _cause(error: BaseException) -> str:
    """One line of what torch says in many."""
    failures = getattr(error, "failures", None)
    inner = min(failures.items())[1][0] if failures else error
    return f"{type(inner).__name__}: {inner}"
