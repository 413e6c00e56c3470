"""ColwiseParallel and RowwiseParallel: torch's styles of these names, which cut octavo's linears too.

torch's own know torch.nn.Linear alone, and raise before any code of octavo's runs. Plans for torch's parallelize_module
take these in their place. A module of its own, since torch's tensor-parallel package takes seconds to import.
"""

from typing import Any

from torch import nn
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor import parallel as torch_styles

from octavo.distributed.tensor_group import TensorGroup
from octavo.errors import ConfigError
from octavo.nn.cut_linear import ColumnLinear, CutLinear, RowLinear, TensorMode
from octavo.nn.linear import Linear
from octavo.parallel.equal import check_equal
from octavo.parallel.gather import is_sharded
from octavo.parallel.replaced import note_replaced
from octavo.parallel.tensor_parallel import check_plan, cut_linear, own_range, own_ranges


class ColwiseParallel(torch_styles.ColwiseParallel):
    """torch's style of this name; an octavo.nn.Linear becomes a ColumnLinear in place, in mode "gather" where it is
    exact, else "reduce". It takes the whole input on each rank, and gives the rank's columns, as plain tensors.

    Raises:
        ConfigError: other layouts; a linear that is cut or sharded already, or is of a subclass; ranks whose values
            differ.
        RecipeError: an exact linear under delayed scaling.
        ShapeError: the ranks do not divide a part of out_features, or would cut FP8 blocks.
    """

    def _apply(self, module: nn.Module, device_mesh: Any) -> nn.Module:
        if not isinstance(module, Linear):
            return super()._apply(module, device_mesh)
        _check(self, module, Replicate(), Shard(-1))
        return _cut_in_place(module, TensorGroup.of(device_mesh.get_group()), ColumnLinear)


class RowwiseParallel(torch_styles.RowwiseParallel):
    """torch's style of this name; an octavo.nn.Linear becomes a RowLinear in place, as ColwiseParallel says. It takes a
    rank's columns, and gives the whole output on each rank.

    Raises:
        ConfigError: as ColwiseParallel.
        RecipeError: the same.
        ShapeError: the ranks do not divide in_features, or out_features of an exact one, or would cut FP8 blocks.
    """

    def _apply(self, module: nn.Module, device_mesh: Any) -> nn.Module:
        if not isinstance(module, Linear):
            return super()._apply(module, device_mesh)
        _check(self, module, Shard(-1), Replicate())
        return _cut_in_place(module, TensorGroup.of(device_mesh.get_group()), RowLinear)


def _check(style: Any, linear: Linear, input_layout: Any, output_layout: Any) -> None:
    if type(linear) is not Linear or is_sharded(linear):
        what = f"a {type(linear).__name__}" + (" that is sharded" if is_sharded(linear) else "")
        raise ConfigError(
            f"{type(style).__name__} cuts an octavo.nn.Linear that is whole, got {what}; cut it once, and before shard"
        )
    layouts = (style.input_layouts, style.output_layouts, style.use_local_output)
    if layouts != ((input_layout,), (output_layout,), True):
        raise ConfigError(
            f"{type(style).__name__} of an octavo.nn.Linear takes plain tensors {input_layout} and gives plain tensors "
            f"{output_layout}, got input_layouts={layouts[0]}, output_layouts={layouts[1]}, "
            f"use_local_output={layouts[2]}; leave these out, or build the model of octavo.nn.ColumnLinear "
            "(gather_output=True gives all columns) and RowLinear"
        )


def _cut_in_place(linear: Linear, group: TensorGroup, kind: type[CutLinear]) -> Linear:
    """Let a linear hold this rank's slices; parallelize_module wants the same object, whose hooks stay."""
    if group.size == 1:
        return linear
    mode: TensorMode = "gather" if linear.exact else "reduce"
    whole = dict(linear.named_parameters())
    if whole:  # else of codes alone
        check_equal(whole, group.group, next(iter(whole.values())).device)
    name, columns = linear.full_name or "a linear", slice(0, linear.in_features)
    if kind is ColumnLinear:
        rows = own_ranges(linear.parts, group, name)
    elif mode == "gather":
        rows = (own_range(linear.out_features, group, name),)
    else:
        rows, columns = (slice(0, linear.out_features),), own_range(linear.in_features, group, name)
    check_plan(linear, rows, columns, mode)
    made = cut_linear(linear, rows, columns, kind, group, mode)
    linear.__class__ = type(made)
    vars(linear).update({key: value for key, value in vars(made).items() if "_hooks" not in key})
    note_replaced(whole.values(), linear.parameters())
    return linear
