"""shard: torch's FSDP2 over a model, layer by layer, with gradients added as octavo's loops or one's own need it."""

import collections
import dataclasses
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import nn

from octavo.distributed.reduction import OrderedReduceScatter
from octavo.distributed.shards import local
from octavo.distributed.torch_private import param_groups
from octavo.errors import ConfigError, DtypeError
from octavo.nn import plan_fusion
from octavo.parallel.copy_engine_gather import gather_by_copy_engines
from octavo.parallel.equal import check_equal
from octavo.parallel.fp8_all_gather import GatheredBytes, gather_codes
from octavo.parallel.gather import is_sharded
from octavo.parallel.replaced import note_replaced

if TYPE_CHECKING:
    from octavo.distributed.mesh import Mesh  # a config section, whose library takes a while to import

Reduction = Literal["mean", "sum", "ordered"]
_REDUCTIONS = ("mean", "sum", "ordered")


@dataclasses.dataclass(frozen=True)
class ShardReport:
    """What shard made of a model.

    Attributes:
        units: names of the modules whose parameters are gathered together; the model itself, "", comes last.
        num_params: of the whole model.
        num_local_bytes: of the parameters that this rank keeps.
        reduction: how gradients are added.
        gathers: with all_gather_dtype="fp8": how each linear's weight is gathered.
        by_copy_engines: layers are gathered by the GPUs' copy engines.
    """

    units: tuple[str, ...]
    num_params: int
    num_local_bytes: int
    reduction: Reduction
    gathers: tuple[GatheredBytes, ...] = ()
    by_copy_engines: bool = False

    @property
    def summary(self) -> str:
        """One line, without the linears' names."""
        line = (
            f"{self.num_params / 1e6:.2f}M parameters in {len(self.units)} units, "
            f"{self.num_local_bytes / 2**20:.1f} MiB on this rank; gradients: {self.reduction}"
            f"{'; gathered by copy engines' if self.by_copy_engines else ''}"
        )
        if not self.gathers:
            return line
        reasons = [gather.reason for gather in self.gathers if gather.reason]
        others = f" ({', '.join(dict.fromkeys(reasons))})" if reasons else ""
        coded = len(self.gathers) - len(reasons)
        return f"{line}; all-gather: {coded} linears as FP8 codes, {len(reasons)} in high precision{others}"

    def __str__(self) -> str:
        return "\n".join([self.summary, *(f"all-gather of {line}" for line in self.gathers)])


def shard(
    model: nn.Module,
    mesh: "Mesh",
    *,
    reduction: Reduction = "mean",
    param_dtype: torch.dtype | None = None,
    reshard_after_forward: bool = True,
    all_gather_dtype: Literal["fp8"] | None = None,
    reduce_dtype: torch.dtype | None = torch.float32,
    copy_engines: bool = True,
) -> ShardReport:
    """Shard a model over the ranks of a mesh, in place: each layer of its ModuleLists is a unit, the rest is one.

    Call it after octavo.convert or set_numerics, and before the optimizer is made. A layer that shares a parameter with
    another module belongs to the rest; of members without a forward, lists in lists say, the layers within are units.

    Args:
        model: a Decoder or any module, with the same values on all ranks.
        mesh: of this job. On one of a single process nothing happens.
        reduction: gradients of the ranks: "mean" as torch's FSDP2, for a loss that is a mean over the rank's own
            targets; "sum" for a loss that is divided by all ranks' targets; "ordered": the sum, added in the order of
            the global micro-batch in fp32, which has the bits of one process with as many micro-batches (it needs fp32
            parameters).
        param_dtype: what fp32 parameters are rounded to where they are gathered, for forward and backward; None keeps
            their own.
        reshard_after_forward: free a layer's parameters after its forward and gather them again for its backward.
        all_gather_dtype: "fp8" to gather the codes of FP8 linears, which a rank makes of its rows, wherever these
            have whole blocks and scales; the report says where not. The model then runs under its own recipes alone.
        reduce_dtype: what gradients are cast to before they travel and are added; None leaves them as the backward gave
            them, half the bytes in bf16. An ordered reduction adds in fp32 whatever travels, and takes no notice of it.
        copy_engines: where the GPUs of one host can reach each other's memory, layers are gathered by their copy
            engines in place of NCCL's kernels, which take time of the units that compute. It keeps two buffers of a
            layer's gathered size, which torch's allocator does not count. No bit differs.
    Returns:
        What was sharded.
    Raises:
        ConfigError: an unknown reduction or all_gather_dtype; the model is sharded already; one process and a
            param_dtype that is not the parameters', which only a gather would round; "ordered" over replicas alone;
            ranks whose parameters differ (on the device "meta" nothing is compared).
        DtypeError: "ordered" with parameters that are not fp32, whose sums would be rounded at each micro-batch.
    """
    if reduction not in _REDUCTIONS:
        raise ConfigError(f"reduction must be one of {_REDUCTIONS}, got {reduction!r}")
    if all_gather_dtype not in (None, "fp8"):
        raise ConfigError(f"all_gather_dtype must be 'fp8' or None, got {all_gather_dtype!r}")
    if is_sharded(model):
        raise ConfigError("the model is sharded already; shard it once, after convert and before the optimizer")
    params = dict(model.named_parameters())
    if reduction == "ordered":
        _check_fp32(params)
        if mesh.num_replicas > 1 and mesh.num_shards == 1:
            raise ConfigError(
                f"an ordered reduction adds where FSDP2 scatters, and over one shard it does not: got "
                f"{mesh.num_replicas} replicas of 1; set parallel.data_parallel_replicate_degree = 1"
            )
    other = next((name for name, p in params.items() if param_dtype not in (None, p.dtype)), None)
    if mesh.device_mesh is None and other is not None:
        raise ConfigError(
            f"param_dtype rounds parameters where ranks gather them, and this is one process: {other} is "
            f"{params[other].dtype}, not {param_dtype}; keep the model in {param_dtype} there"
        )
    num_params, units = sum(p.numel() for p in params.values()), dict(_units(model))
    if mesh.device_mesh is not None:
        check_equal(params, mesh.data_host_group, mesh.device)
        _wrap(model, units, mesh, reduction, (param_dtype, reduce_dtype), reshard_after_forward)
        note_replaced(params.values(), model.parameters())
        plan_fusion(model)
    is_coded = all_gather_dtype is not None and mesh.device_mesh is not None
    gathers = gather_codes(model, list(units.values()), param_dtype) if is_coded else []
    layers = [unit for unit in units.values() if unit is not model]  # what is left may be large, and is gathered once
    transport = gather_by_copy_engines(layers) if copy_engines and mesh.device.type == "cuda" else "not asked for"
    num_local_bytes = sum(local(p).nbytes for p in model.parameters())
    return ShardReport(tuple(units), num_params, num_local_bytes, reduction, tuple(gathers), not transport)


def _wrap(
    model: nn.Module,
    units: dict[str, nn.Module],
    mesh: "Mesh",
    reduction: Reduction,
    dtypes: tuple[torch.dtype | None, torch.dtype | None],
    reshard_after_forward: bool,
) -> None:
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    is_ordered = reduction == "ordered"
    # an ordered reduction adds the replicas' pieces itself
    is_flat = is_ordered or mesh.num_replicas == 1
    torch_mesh = mesh.device_mesh["dp_shard"] if is_flat else mesh.device_mesh["dp_replicate", "dp_shard"]
    policy = MixedPrecisionPolicy(
        param_dtype=dtypes[0], reduce_dtype=None if is_ordered else dtypes[1], cast_forward_inputs=False
    )
    for unit in units.values():
        # what belongs to no layer is needed from the first to the last: the loss reads the head's weight itself
        fully_shard(
            unit, mesh=torch_mesh, mp_policy=policy, reshard_after_forward=reshard_after_forward and unit is not model
        )
    for unit in units.values():
        if reduction != "mean":
            unit.set_gradient_divide_factor(1.0)  # type: ignore[operator]
            unit.set_force_sum_reduction_for_comms(True)  # type: ignore[operator]
        if is_ordered:
            unit.set_requires_gradient_sync = _keep_sync  # type: ignore[assignment]
            replicas = mesh.group("dp_replicate") if mesh.num_replicas > 1 else None
            for group in param_groups(unit):
                unit.set_custom_reduce_scatter(OrderedReduceScatter(group.fsdp_params, replicas))  # type: ignore[operator]


def _keep_sync(requires_gradient_sync: bool, *, recurse: bool = True) -> None:
    """FSDP2's, of a unit whose gradients are added in order."""
    if not requires_gradient_sync:
        raise ConfigError(
            "an ordered reduction adds every rank's micro-batches one by one, and without gradient sync a rank would "
            "add its own first: other bits; leave set_requires_gradient_sync(False) out, or use reduction='sum'"
        )


def _units(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """What is gathered together: each layer that shares no parameter with another one, then the model with the rest."""
    users = collections.Counter(id(p) for m in model.modules() for p in m._parameters.values() if p is not None)
    layers = {layer: name for name, layer in _layers(model, "")}  # one that is listed twice is one
    for layer, name in layers.items():
        own = collections.Counter(id(p) for m in layer.modules() for p in m._parameters.values() if p is not None)
        if own and all(users[key] == num for key, num in own.items()):
            yield name, layer
    yield "", model


def _layers(module: nn.Module, prefix: str) -> Iterator[tuple[str, nn.Module]]:
    """Members of the outermost ModuleLists; of a member that is never called itself, those within."""
    for name, child in module.named_children():
        if isinstance(module, nn.ModuleList) and type(child).forward is not nn.Module.forward:
            yield f"{prefix}{name}", child
        else:
            yield from _layers(child, f"{prefix}{name}.")


def _check_fp32(params: dict[str, Any]) -> None:
    for name, param in params.items():
        if param.requires_grad and param.dtype != torch.float32:
            raise DtypeError(
                f"an ordered reduction keeps fp32 sums and needs fp32 parameters, got {name} in {param.dtype}; call "
                "model.float() before and give param_dtype=torch.bfloat16"
            )
