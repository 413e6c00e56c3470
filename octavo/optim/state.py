"""What AdamW keeps of one parameter: names, shapes and dtypes, where its rows lie, and how it is loaded.

Of a sharded parameter the state is DTensors, cut as the parameter is. Where a cut would go through 128 elements that
share the scale of an 8-bit moment, as it may through a norm's weight, every rank holds the state whole instead.
"""

from collections.abc import Mapping, Sequence
from math import prod
from typing import Any, Literal

import torch

from octavo.distributed.cut import Cut
from octavo.distributed.shards import check_fits, fill, is_distributed, local, rows_of, shard_of, whole
from octavo.errors import CheckpointError
from octavo.ops.adamw import BLOCK, STATE_DTYPES

StateDtype = Literal["fp32", "bf16", "fp8"]
MasterWeights = Literal["fp32", "remainder"] | None
State = dict[str, torch.Tensor]
_SCALES = ("exp_avg_scale", "exp_avg_sq_scale")
_Described = dict[str, tuple[tuple[int, ...], torch.dtype]]


def make_state(param: torch.Tensor, group: Mapping[str, Any]) -> State:
    """The state before the first step: zeros, and the master. A collective where it is_kept_whole."""
    state = _zeros(param, group)
    if "master" in state:
        is_whole = is_kept_whole(param, group)
        local(state["master"]).copy_(whole([local(param)], [param])[0] if is_whole else local(param))
    return state


def fit_state(param: torch.Tensor, group: Mapping[str, Any], saved: Mapping[str, torch.Tensor]) -> State:
    """A copy of one parameter's saved state on its device, if it is what the group makes.

    Raises:
        CheckpointError: it is not, or is a DTensor that lies otherwise.
    """
    expected = described(param, group)
    saved = {name: by_rows(tensor, expected[name][0]) if name in expected else tensor for name, tensor in saved.items()}
    found = {name: (tuple(tensor.shape), tensor.dtype) for name, tensor in saved.items()}
    if found != expected:
        raise CheckpointError(
            f"the saved state of a parameter {tuple(param.shape)} {param.dtype} is {found}; with state_dtype="
            f"{group['state_dtype']!r} and master_weights={group['master_weights']!r} it must be {expected}"
        )
    state = _zeros(param, group)
    for name, tensor in state.items():
        check_fits(saved[name], tensor, f"the saved {name} of a parameter {tuple(param.shape)}")
    for name, tensor in state.items():
        fill(tensor, saved[name])
    return state


def by_rows(saved: torch.Tensor, shape: Sequence[int]) -> torch.Tensor:
    """Block scales as they are kept now, where they are saved flat, as once they were; anything else as it is."""
    is_flat = saved.dim() == 1 and len(shape) == 2 and saved.numel() == prod(shape)
    return saved.view(shape) if is_flat else saved


def described(param: torch.Tensor, group: Mapping[str, Any]) -> _Described:
    """Whole shape and dtype of each tensor of a parameter's state, by name."""
    shape, dtype = tuple(param.shape), STATE_DTYPES[group["state_dtype"]]
    state: _Described = {"step": ((), torch.float32), "exp_avg": (shape, dtype), "exp_avg_sq": (shape, dtype)}
    if group["state_dtype"] == "fp8":
        state["exp_avg_sq"] = (shape, torch.uint8)
        state |= dict.fromkeys(_SCALES, (_scale_shape(shape), torch.float32))
    if param.dtype != torch.float32 and group["master_weights"] == "fp32":
        state["master"] = (shape, torch.float32)
    elif param.dtype != torch.float32 and group["master_weights"] == "remainder":
        state["remainder"] = (shape, torch.int16)
    return state


def cut_of(key: str, cut: Cut) -> Cut | None:
    """Where a tensor of the state lies whose parameter is a tensor-parallel rank's slice; None where it lies nowhere.

    Args:
        key: the tensor's name in the state; scales go with the elements that share them.
        cut: of the parameter.
    Returns:
        None for scales of blocks that several ranks have parts of; on all ranks alike, whose slices are equally large.
    """
    if key not in _SCALES:
        return cut
    size, shape, begin = _row_size(cut.shape), _scale_shape(cut.shape), 0
    if size % BLOCK == 0:
        columns = cut.columns and slice(cut.columns.start // BLOCK, cut.columns.stop // BLOCK)
        is_whole = cut.columns is None or cut.columns.start % BLOCK == cut.columns.stop % BLOCK == 0
        return Cut(shape, cut.rows, columns) if is_whole else None
    blocks = []
    for rows in cut.rows:  # of a slice's blocks and of the whole's, which begin at its own first element
        first, stop, is_whole = rows.start * size, rows.stop * size, rows == slice(0, cut.shape[0])
        if cut.columns is not None or first % BLOCK or begin % BLOCK or (stop % BLOCK and not is_whole):
            return None
        blocks.append(slice(first // BLOCK, -(-stop // BLOCK)))
        begin += stop - first
    return Cut(shape, tuple(blocks))


def is_kept_whole(param: torch.Tensor, group: Mapping[str, Any]) -> bool:
    """Whether every rank holds a sharded parameter's state whole, since a cut goes through a block of an 8-bit moment.

    All ranks answer alike.
    """
    if group["state_dtype"] != "fp8" or not is_distributed(param):
        return False
    size = _row_size(tuple(param.shape))
    if size % BLOCK == 0:
        return False
    parts = [cutters.size() for cutters in rows_of(param).groups]
    if len(parts) > 1 and param.shape[0] % prod(parts):
        return True  # the last of several cuts is uneven in ways of its own
    num_rows, num_blocks = param.shape[0], _scale_shape(tuple(param.shape))[0]
    for num in parts:
        num_rows, num_blocks = -(-num_rows // num), -(-num_blocks // num)
    return bool(parts) and num_rows * size != num_blocks * BLOCK


def _zeros(param: torch.Tensor, group: Mapping[str, Any]) -> State:
    is_whole = is_kept_whole(param, group)
    num_rows, size = rows_of(param).num, _row_size(tuple(param.shape))
    state = {}
    for name, (shape, dtype) in described(param, group).items():
        here = shape
        if shape and is_distributed(param) and not is_whole:
            is_flat = name in _SCALES and size % BLOCK != 0
            here = (-(-num_rows * size // BLOCK) if is_flat else num_rows, *shape[1:])
        part = torch.zeros(here, dtype=dtype, device=param.device)
        state[name] = shard_of(part, param, shape, is_cut=not is_whole) if shape else part
    return state


def _scale_shape(shape: tuple[int, ...]) -> tuple[int, ...]:
    """One scale for each 128 elements: [rows, blocks of a row] where rows end with a block, so that rows can be cut."""
    size = _row_size(shape)
    return (shape[0], size // BLOCK) if size % BLOCK == 0 else (-(-prod(shape) // BLOCK),)


def _row_size(shape: tuple[int, ...]) -> int:
    return prod(shape[1:])
