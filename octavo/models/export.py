"""ModelExport: a Decoder's checkpoint in high precision, written by all ranks that hold a shard of it.

save_model uses it for sharded models; the loops' checkpoints use it for copies of the parameters, in the background.
"""

import contextlib
import json
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, BinaryIO

import torch

from octavo.distributed.cut import Cut
from octavo.distributed.outcome import is_first, together
from octavo.distributed.shards import is_distributed, local, rows_of
from octavo.models.checkpoint import kv_scales, record
from octavo.models.checkpoint.atomic import shared_directory
from octavo.models.checkpoint.dialects import CONFIG_FILE
from octavo.models.checkpoint.names import ParameterNames, parameter_names
from octavo.models.checkpoint.rows_io import FileLayout, lay_out, write_rows
from octavo.models.checkpoint.safetensors_io import MAX_SHARD_BYTES, check_finite, split_into_files, write_index
from octavo.models.checkpoint.storage import writing
from octavo.models.decoder import Decoder
from octavo.models.tokenizer import Tokenizer
from octavo.nn import Linear, fp8_state_dict
from octavo.nn.cut_linear import parameter_cuts


class ModelExport:
    """What save_model(model, path) would write now. Of the parameters it holds no copy, of all else it does.

    Args:
        model: sharded by octavo.parallel.shard, cut by octavo.parallel.parallelize, both, or whole.
        tokenizer: as save_model's.
        max_shard_bytes: as save_model's.
        dtype: of the weights in the files; None for the model's own. Where fp32 parameters are masters, gathered in
            another dtype to compute with, it is that one.

    Attributes:
        tensors: octavo's name -> parameter, a DTensor where it is sharded.
        folder: the name that it has in a checkpoint of a run.
    """

    folder = "model"

    def __init__(
        self,
        model: Decoder,
        tokenizer: Tokenizer | None = None,
        *,
        max_shard_bytes: int = MAX_SHARD_BYTES,
        dtype: torch.dtype | None = None,
    ) -> None:
        reshard(model)
        self._parameters = parameter_names(model.config)
        self.tensors = {parameter.name: weight_of(model, parameter) for parameter in self._parameters}
        self._dtype, self._max_shard_bytes, self._tokenizer = dtype or model.dtype, max_shard_bytes, tokenizer
        self._config = {**model.config.to_hf(), "torch_dtype": str(self._dtype).removeprefix("torch.")}
        self._kv_scales = kv_scales.write(model.kv_scales, kv_scales.attention_modules(self._parameters))
        self._cuts = parameter_cuts(model)
        self._has_wholes = model.tensor_group is None or model.tensor_group.rank == 0
        state = {name: tensor.detach().cpu().clone() for name, tensor in fp8_state_dict(model).items()}
        self._record = (model.numerics, high_precision_linears(model), model.weight_version, state)

    @property
    def num_bytes(self) -> int:
        """Of the whole model's tensors in the files."""
        return sum(tensor.nbytes for tensor in self._described().values())

    def write(self, path: str | Path, tensors: Mapping[str, torch.Tensor] | None = None, group: Any = None) -> None:
        """Write the checkpoint; a collective of `group`.

        Args:
            path: as save_model's; the same on all ranks, on a file system that they share.
            tensors: copies of `tensors`, to be written instead; on any device.
            group: the process group of all ranks; None for one process.
        Raises:
            CheckpointError: on every rank, for a weight that is not finite on any; nothing is written.
            StorageError: on every rank, where a disk refuses a part; path is as it was.
        """
        values = self.tensors if tensors is None else tensors
        files = split_into_files(self._described(), self._max_shard_bytes)
        described = self._described()
        layouts = {name: lay_out({key: described[key] for key in keys}) for name, keys in files.items()}
        together(group, lambda: _check_finite(values))
        with shared_directory(path, record.is_ours, group) as directory:
            together(group, lambda: self._create(directory, files, layouts) if is_first(group) else None)
            together(group, lambda: self._write_rows(directory, layouts, values, is_first(group)))

    def _described(self) -> dict[str, torch.Tensor]:
        """Hugging Face's name -> shape and dtype, in the order in which checkpoints are written."""
        shapes = {name: shape for p in self._parameters for name, shape in p.part_shapes.items()}
        described = {name: torch.empty(shape, dtype=self._dtype, device="meta") for name, shape in shapes.items()}
        return described | {name: tensor.to("meta") for name, tensor in self._kv_scales.items()}

    def _create(self, directory: Path, files: Mapping[str, list[str]], layouts: Mapping[str, FileLayout]) -> None:
        """Everything but the tensors' values."""
        with writing(directory):
            (directory / CONFIG_FILE).write_text(json.dumps(self._config, indent=2) + "\n", encoding="utf-8")
            for name, layout in layouts.items():
                layout.create(directory / name)
            write_index(directory, files, self._described())
            if self._tokenizer is not None:
                self._tokenizer.save(directory)
            record.write(directory, *self._record)

    def _write_rows(
        self,
        directory: Path,
        layouts: Mapping[str, FileLayout],
        values: Mapping[str, torch.Tensor],
        is_first_rank: bool,
    ) -> None:
        """This rank's rows of every tensor."""
        pieces = [*self._pieces(values, is_first_rank)]
        if is_first_rank:
            pieces += [(name, 0, tensor, None) for name, tensor in self._kv_scales.items()]
        with writing(directory), contextlib.ExitStack() as stack:
            opened: dict[str, BinaryIO] = {}
            for file_name, layout in layouts.items():
                for name, first_row, rows, cut in pieces:
                    if name not in layout.starts:
                        continue
                    if file_name not in opened:
                        opened[file_name] = stack.enter_context((directory / file_name).open("r+b"))
                    # converted one at a time, where it is written: the share never exists twice
                    value = rows if name in self._kv_scales else rows.to(self._dtype)
                    write_rows(opened[file_name], layout.starts[name], first_row, value, cut)
            for file in opened.values():
                file.flush()
                os.fsync(file.fileno())

    def _pieces(
        self, values: Mapping[str, torch.Tensor], is_first_rank: bool
    ) -> Iterator[tuple[str, int, torch.Tensor, Cut | None]]:
        """(Hugging Face's name, first row, rows, their columns) of what this rank writes: its shards and slices; the
        first one, what is whole.
        """
        for parameter in self._parameters:
            value, cut = values[parameter.name], self._cuts.get(parameter.name)
            is_own = _is_first_copy(value) if is_distributed(value) else is_first_rank or cut is not None
            if not is_own or (cut is None and not self._has_wholes):
                continue
            held, (first, num, _) = local(value), rows_of(value)
            for begin, own in [(first, slice(0, num))] if cut is None else cut.pieces(first, num):
                for name, first_row, rows in parameter.overlaps(begin, own.stop - own.start):
                    yield name, first_row, held[own][rows], cut


def reshard(model: torch.nn.Module) -> None:
    """Free what FSDP2 has gathered and keeps, as of its root after a forward without a backward: rounded copies."""
    for module in model.modules():
        if hasattr(module, "reshard"):
            module.reshard()  # type: ignore[operator]


def has_dtensors(model: Decoder) -> bool:
    """Whether a model's parameters are DTensors."""
    return any(is_distributed(parameter) for parameter in model.parameters())


def high_precision_linears(model: Decoder) -> tuple[str, ...]:
    """Linears that the model's FP8 recipe leaves out; none where the recipe is high precision (then all may go)."""
    if model.conversion_report is None or not model.numerics.recipe.is_fp8:
        return ()
    return tuple(row.name for row in model.conversion_report.rows if row.recipe is None)


def weight_of(model: Decoder, parameter: ParameterNames) -> torch.Tensor:
    """A parameter in high precision, decoded where the model holds codes only."""
    module = model.get_submodule(parameter.name.rpartition(".")[0])
    if parameter.is_linear_weight and isinstance(module, Linear) and module.weight is None:
        return torch.cat([q.dequantize(model.dtype) for q in module.quantized_weight(module.recipe)])
    return model.get_parameter(parameter.name).detach()


def _check_finite(values: Mapping[str, torch.Tensor]) -> None:
    for name, value in values.items():
        check_finite(name, local(value), "the model")


def _is_first_copy(value: Any) -> bool:
    """Whether no rank before this one holds the same rows of a DTensor."""
    coordinate = value.device_mesh.get_coordinate()
    return all(place == 0 for place, how in zip(coordinate, value.placements, strict=True) if how.is_replicate())
