"""Which weights of a sharded model are gathered as FP8 codes, decided from what every rank sees alike."""

import collections
import dataclasses
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from octavo.distributed.torch_private import has_begun, param_groups
from octavo.errors import ConfigError
from octavo.models.export import reshard
from octavo.nn.grouped_linear import GroupedLinear
from octavo.nn.linear import Linear
from octavo.nn.transposed_linear import TransposedLinear
from octavo.nn.weights.gathered import GatheredWeight
from octavo.nn.weights.gathered_unit import GatheredUnit
from octavo.nn.weights.operands import row_ranges
from octavo.nn.weights.shared_scales import SharedScales
from octavo.nn.weights.version import ModelState
from octavo.parallel.sharded_weight import attach


@dataclasses.dataclass(frozen=True)
class GatheredBytes:
    """How one linear's weight is gathered.

    Attributes:
        name: of the linear.
        num_bytes: of the whole weight on the wire of one all-gather.
        reason: why it is gathered in high precision; "" for FP8 codes.
    """

    name: str
    num_bytes: int
    reason: str = ""

    def __str__(self) -> str:
        how = f"high precision ({self.reason})" if self.reason else "FP8 codes"
        return f"{self.name}: {how}, {self.num_bytes} bytes"


def gather_codes(model: nn.Module, units: list[nn.Module], param_dtype: torch.dtype | None) -> list[GatheredBytes]:
    """Let FSDP2 gather FP8 codes of every linear whose shards have whole blocks, and whose recipe reads codes alone.

    Args:
        model: sharded by fully_shard, layers and root, and never run since.
        units: the modules that fully_shard was applied to.
        param_dtype: what other parameters are cast to where they are gathered.
    Returns:
        One line a linear.
    Raises:
        ConfigError: the model has run.
    """
    groups = [group for unit in units for group in param_groups(unit)]
    if any(has_begun(group) for group in groups):
        raise ConfigError("FSDP2 asks for hooks before the first forward, and this model has run; shard it, then run")
    users = collections.Counter(id(p) for m in model.modules() for p in m._parameters.values() if p is not None)
    offloaded = {id(p.sharded_param) for group in groups for p in group.fsdp_params if p.offload_to_cpu}
    found, early, coded, steps = [], [], set(), ModelState(model)
    for name, linear in model.named_modules():
        if isinstance(linear, nn.Linear):
            size = linear.weight.numel() * (param_dtype or linear.weight.dtype).itemsize
            found.append(GatheredBytes(name, size, "octavo.convert has not made it a linear in FP8"))
        if not isinstance(linear, Linear) or linear.weight is None:
            continue
        reason = _why_not(linear)
        if not reason and users[id(linear.weight)] > 1:
            reason = "another module has the same weight"
        if not reason and id(linear.weight) in offloaded:
            reason = "it is offloaded to the CPU"
        itemsize = (param_dtype or linear.weight.dtype).itemsize
        if reason:
            found.append(GatheredBytes(name, linear.weight.numel() * itemsize, reason))
            continue
        source = GatheredWeight(linear.parts, linear.recipe, attach, linear.weight_version)  # type: ignore[arg-type]
        source.full_name, source.group, source.model = linear.full_name, linear.source.group, steps
        linear.source = source
        source.replace_weight(linear.weight)
        coded.add(linear)
        found.append(GatheredBytes(name, _code_bytes(linear)))
        if source.begins_early:
            early.append(linear)
    _join_units(groups, coded)
    if early:
        _begin_with(model, early)
    return found


def _why_not(linear: Linear) -> str:
    """Why this linear's weight must be gathered as it is; the same on all ranks."""
    recipe, weight = linear.recipe, linear.weight
    if recipe is None:
        return "it has no recipe of its own"
    scaling = recipe.weight
    if scaling is None:
        return f"recipe {recipe.name!r} quantizes no weight"
    if recipe.is_emulated or recipe.high_precision_gemms:
        return f"recipe {recipe.name!r} computes from the high-precision weight"
    if isinstance(linear, GroupedLinear):
        return "experts' codes are not gathered yet"
    if isinstance(linear, TransposedLinear):
        return "its parameter is stored as [K, N], whose shards have other blocks"
    if scaling.block_size[0] != scaling.block_size[1]:
        return f"the backward of {scaling.kind} reads codes of other scales, which would double the bytes"
    if linear.is_cut and scaling.is_per_tensor:
        return "its scale is of the slices of several tensor-parallel ranks"
    if recipe.delayed is not None and not weight.requires_grad:  # type: ignore[union-attr, operator]
        return "a frozen weight's delayed scale is made from the whole weight"
    reason = _why_not_cut(linear)
    if not reason and recipe.delayed is not None and not (recipe.delayed.reduce_amax and _agrees(linear)):
        return "delayed scales are not the same on all ranks"
    return reason


def _why_not_cut(linear: Linear) -> str:
    """Why shards of a weight are no operands."""
    weight, scaling = linear.weight, linear.recipe.weight  # type: ignore[union-attr, operator]
    sharded = [dim for dim, p in enumerate(getattr(weight, "placements", ())) if type(p).__name__ != "Replicate"]
    if len(sharded) != 1 or not weight.placements[sharded[0]].is_shard(0):  # type: ignore[union-attr, operator]
        return "it is not sharded along its rows alone"
    num_ranks, num_rows = weight.device_mesh.size(sharded[0]), weight.shape[0]  # type: ignore[union-attr, operator]
    if num_ranks == 1:
        return "one rank has all of it"
    if len(row_ranges(linear.parts, scaling)) > 1:  # type: ignore[arg-type]
        return f"its parts {linear.parts} " + (
            "have a scale each, its backward one for all" if scaling.is_per_tensor else "end inside blocks"  # type: ignore[union-attr, operator]
        )
    block_rows = max(1, scaling.block_size[0])  # type: ignore[union-attr, operator]
    if num_rows % (num_ranks * block_rows):
        return f"{num_rows} rows are no multiple of {num_ranks} ranks x {block_rows}"
    return ""


def _shard_group(linear: Linear) -> Any:
    """The ranks that each have some rows of a weight."""
    weight = linear.weight
    dim = next(i for i, p in enumerate(weight.placements) if p.is_shard())  # type: ignore[union-attr, operator]
    return weight.device_mesh.get_group(dim)  # type: ignore[union-attr, operator]


def _agrees(linear: Linear) -> bool:
    """Whether all of them agree on delayed scaling's amaxes."""
    group = linear.source.group
    if group is None:
        return True
    return set(dist.get_process_group_ranks(group)) >= set(dist.get_process_group_ranks(_shard_group(linear)))


def _join_units(groups: list[Any], coded: set[Linear]) -> None:
    """Let the weights that FSDP2 gathers together, of one scaling, be quantized together."""
    scales: dict[Any, SharedScales] = {}
    units: dict[Any, list[Linear]] = {}
    for group in groups:
        for param in group.fsdp_params:
            linear, name = param._module_info.module, param._module_info.param_name
            if linear in coded and name == "weight":
                key = id(group), linear.source.scaling, linear.source.begins_early, linear.weight.dtype
                units.setdefault(key, []).append(linear)
    for (_, scaling, has_history, _), linears in units.items():
        shared = None
        if scaling.is_per_tensor and not has_history:
            ranks = _shard_group(linears[0])
            shared = scales.setdefault(ranks, SharedScales(ranks))
        GatheredUnit(linears, shared)


def _code_bytes(linear: Linear) -> int:
    scaling, weight = linear.recipe.weight, linear.weight  # type: ignore[union-attr, operator]
    rows, cols = scaling.scale_shape(*weight.shape)  # type: ignore[union-attr, operator]
    return weight.numel() + (0 if scaling.is_per_tensor else 4 * rows * cols)  # type: ignore[union-attr, operator]


def _begin_with(model: nn.Module, linears: list[Linear]) -> None:
    """Let the model's forward, before anything is gathered, turn what the last step staged into scales."""

    @torch._dynamo.disable(recursive=True)
    def begin(*_: Any) -> None:
        if any(linear.source.is_lent for linear in linears):  # type: ignore[union-attr]
            return  # the codes at hand are of the scales that there are
        for linear in linears:
            # another recipe is refused where the linear runs
            if linear.source.begins_early and linear.recipe == linear.source.recipe:  # type: ignore[union-attr]
                linear.begin_early(linear.source.recipe)  # type: ignore[union-attr, operator]
        if any(linear.source.begins_early and linear.source.lacks_amax for linear in linears):  # type: ignore[union-attr]
            reshard(model)  # kept, or of its root: what is gathered again stages its amax

    model.register_forward_pre_hook(begin, prepend=True)
