"""One quantized weight in the files: its codes, its scale and the scale of its input, read and written by a Layout."""

import dataclasses
import math
from collections.abc import Collection, Iterable, Iterator

import torch

from octavo.errors import CheckpointError
from octavo.models.checkpoint import bf16
from octavo.models.checkpoint.layout import Layout
from octavo.models.checkpoint.safetensors_io import Place, SafetensorsReader, TensorEntry
from octavo.nn.weights.slices import scales_of
from octavo.numerics import QuantizedTensor, Scaling
from octavo.numerics.scaling import floor_to_power_of_two


def scale_names(weight_name: str, suffixes: tuple[str, ...]) -> tuple[str, ...]:
    """Names that a scale beside a weight may have.

    Args:
        weight_name: Hugging Face's, which ends with ".weight".
    """
    module = weight_name.removesuffix("weight")
    return tuple(f"{module}{suffix}" for suffix in suffixes)


def find_scale(entries: Collection[str], weight_name: str, suffixes: tuple[str, ...]) -> str | None:
    """The name among entries of a scale beside a weight, None where there is none.

    Raises:
        CheckpointError: two spellings of one scale.
    """
    found = [name for name in scale_names(weight_name, suffixes) if name in entries]
    if len(found) > 1:
        raise CheckpointError(f"{found[0]} and {found[1]} are two scales of {weight_name}; the files are inconsistent")
    return found[0] if found else None


def read(
    reader: SafetensorsReader,
    name: str,
    shape: tuple[int, ...],
    layout: Layout,
    device: torch.device | str = "cpu",
    place: Place | None = None,
) -> torch.Tensor | QuantizedTensor:
    """Read one weight: codes with their scale, or a tensor in high precision where the file left it so.

    Args:
        shape: of the whole weight.
        place: which of its rows and columns are wanted, at the beginning of blocks; None for all.
    Returns:
        QuantizedTensor [N, K] with the layout's scaling, or [shape] bf16, fp16 or fp32.
    Raises:
        CheckpointError: a missing tensor, codes without a scale or of a module that config.json keeps out of FP8, a
            scale of another shape or dtype, not finite or not positive, a scale without codes.
    """
    bf16.check_shape(reader, name, shape)
    scaling = layout.weight
    assert scaling is not None, f"{layout.dialect} quantizes nothing"
    scale, dtype = find_scale(reader.entries, name, layout.weight_scale), reader.entries[name].dtype
    if dtype != scaling.dtype:
        if scale is not None:
            raise CheckpointError(
                f"{reader.path}: {scale} comes with {name}, which is {dtype}; only {scaling.dtype} codes have a scale"
            )
        return bf16.read(reader, name, shape, device, place)
    if scale is None:
        wanted = scale_names(name, layout.weight_scale)[0]
        raise CheckpointError(f"{reader.path}: {name} holds FP8 codes, but its scale {wanted} is missing")
    if layout.is_ignored(name.removesuffix(".weight")):
        raise CheckpointError(f"{reader.path}: {name} holds FP8 codes, but config.json keeps its module out of FP8")
    allowed = scale_shapes(scaling, shape)
    if reader.entries[scale].shape not in allowed:
        raise CheckpointError(
            f"{reader.path}: {scale} has shape {reader.entries[scale].shape}; {name} {shape} with {scaling.kind} "
            f"scales needs {' or '.join(map(str, allowed))}"
        )
    scales = read_scale(reader, scale, layout).reshape(allowed[0])
    if scaling.scale_format == "e8m0" and not torch.equal(floor_to_power_of_two(scales), scales):
        raise CheckpointError(f"{reader.path}: {scale} is no power of two, as scale_fmt in config.json promises")
    if place is not None:
        scales = scales_of(scales, scaling, *place)
    return QuantizedTensor(reader.load(name, device, place), scales.to(device), scaling)


def read_scale(reader: SafetensorsReader, name: str, layout: Layout) -> torch.Tensor:
    """One tensor of scales, whatever it scales.

    Returns:
        fp32 of the file's shape, exactly the file's values.
    Raises:
        CheckpointError: of a dtype that the dialect does not have, or a scale that is not finite or not positive.
    """
    if problem := next(scale_misfits(reader.entries[name], layout), None):
        raise CheckpointError(f"{reader.path}: {problem}")
    scale = reader.load(name)
    scale = scale.float()
    num_bad = int((scale <= 0).sum())
    if num_bad:
        raise CheckpointError(
            f"{reader.path}: {name} holds {num_bad} scales of {scale.numel()} that are zero or negative"
        )
    return scale


def scale_misfits(entry: TensorEntry, layout: Layout) -> Iterator[str]:
    """What is wrong with the dtype of a scale, by its header."""
    if entry.dtype not in layout.scale_dtypes:
        known = " or ".join(str(known).removeprefix("torch.") for known in layout.scale_dtypes)
        yield f"{entry.name} is {entry.dtype}; {layout.dialect} scales are {known}"


def input_scale_misfits(entry: TensorEntry, layout: Layout) -> Iterator[str]:
    """What is wrong with the shape and dtype of an input's scale, by its header."""
    if math.prod(entry.shape) != 1:
        yield f"{entry.name} has shape {entry.shape}; the scale of an input is one number"
    yield from scale_misfits(entry, layout)


def read_input_scale(reader: SafetensorsReader, name: str, layout: Layout) -> torch.Tensor:
    """The known scale of a linear's input.

    Returns:
        [1] fp32, decodes.
    Raises:
        CheckpointError: it is no single number; see also read_scale.
    """
    if problem := next(input_scale_misfits(reader.entries[name], layout), None):
        raise CheckpointError(f"{reader.path}: {problem}")
    return read_scale(reader, name, layout).reshape(1)


def shared_input_scale(reader: SafetensorsReader, names: Iterable[str], layout: Layout) -> torch.Tensor | None:
    """The known scale of one input that several weights see (q, k and v; gate and up): the largest of theirs.

    Returns:
        [1] fp32; None where one of the weights has none.
    """
    found = [find_scale(reader.entries, name, layout.input_scale) for name in names]
    parts = [read_input_scale(reader, name, layout) for name in found if name is not None]
    return torch.cat(parts).amax(dim=0, keepdim=True) if len(parts) == len(found) else None


def fit(codes: QuantizedTensor, scaling: Scaling) -> QuantizedTensor | None:
    """The same codes and values under another scaling, or None where that takes another rounding.

    A scale of the whole tensor is a scale of each row; equal scales of the rows are one of the whole tensor.
    """
    held = codes.scaling
    if (held.dtype, held.scale_format) != (scaling.dtype, scaling.scale_format):
        return None
    if held.block_size == scaling.block_size:
        return codes
    if {held.kind, scaling.kind} != {"per_tensor", "per_row"}:
        return None
    as_rows = dataclasses.replace(held, block_size=scaling.block_size)
    if held.is_per_tensor:
        return QuantizedTensor(codes.qdata, codes.scale.expand(codes.shape[0], 1).contiguous(), as_rows)
    if not torch.equal(codes.scale, codes.scale[:1].expand_as(codes.scale)):
        return None
    return QuantizedTensor(codes.qdata, codes.scale[:1], as_rows)


def write(
    name: str, codes: QuantizedTensor, input_scale: torch.Tensor | None, layout: Layout
) -> dict[str, torch.Tensor]:
    """The file's tensors of one quantized weight.

    Args:
        name: Hugging Face's name of the weight.
        codes: of the layout's scaling, whose scales its first dtype holds.
        input_scale: [1] fp32, of the layouts with static input scales.
    """
    assert layout.weight is not None and codes.scaling.block_size == layout.weight.block_size, codes.scaling
    scale = codes.scale.reshape(()) if codes.scaling.is_per_tensor else codes.scale
    tensors = {name: codes.qdata, scale_names(name, layout.weight_scale)[0]: scale.to(layout.scale_dtypes[0])}
    if layout.input == "static":
        assert input_scale is not None, f"{name} has no input scale"
        tensors[scale_names(name, layout.input_scale)[0]] = input_scale.reshape(()).clone()
    return tensors


def scale_shapes(scaling: Scaling, shape: tuple[int, ...]) -> list[tuple[int, ...]]:
    """Shapes that dialects give to a weight's scale; the first is QuantizedTensor's."""
    rows, cols = scaling.scale_shape(*shape)
    if scaling.is_per_tensor:
        return [(1, 1), (1,), ()]
    return [(rows, 1), (rows,)] if scaling.kind == "per_row" else [(rows, cols), (rows, 1, cols, 1)]
