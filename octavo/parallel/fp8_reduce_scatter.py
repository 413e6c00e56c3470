"""Lets the gradients of a sharded model travel in FP8."""

from collections.abc import Iterable

from torch import nn

from octavo.distributed.reduced_in_fp8 import reduced_in_fp8
from octavo.distributed.reduction import OrderedReduceScatter
from octavo.distributed.reduction_q import Member, StochasticFP8ReduceScatter
from octavo.distributed.torch_private import param_groups, reducer_of
from octavo.errors import ConfigError

MIN_BYTES = 16 << 20  # as DDP's hook


def use_fp8_reduce_scatter(
    model: nn.Module, *, ignore: Iterable[str] = (), min_bytes: int = MIN_BYTES, seed: int = 0
) -> dict[str, StochasticFP8ReduceScatter]:
    """Let the matrices' gradients of a model under fully_shard travel in FP8; all others travel in fp32.

    Args:
        model: after fully_shard, sharded along the first dimension; parameters must not be frozen or freed later.
        ignore: modules or parameters to keep in fp32, as in reduced_in_fp8.
        min_bytes: a group whose matrices have less in their own dtype keeps FSDP2's reduce-scatter.
        seed: of the run.
    Returns:
        By the name of the sharded module; "" is the root.
    Raises:
        ConfigError: a name in `ignore` that means nothing, no group that takes part, or a model whose gradients are
            reduced in order.
    """
    from torch.distributed.fsdp import FSDPModule

    chosen, found = reduced_in_fp8(model, ignore), {}
    for name, module in model.named_modules():
        if not isinstance(module, FSDPModule):
            continue
        reducers = [reducer_of(group) for group in param_groups(module)]
        if any(isinstance(reducer, OrderedReduceScatter) for reducer, _ in reducers):
            raise ConfigError(
                "gradients are reduced in order or in FP8, and this model was sharded with reduction='ordered'; for "
                "FP8 shard it with reduction='sum' or 'mean'"
            )
        if any(num_ranks == 1 for _, num_ranks in reducers):
            continue  # FSDP2 scatters nothing there
        held = [param.sharded_param for group in param_groups(module) for param in group.fsdp_params]
        parameters = [p for p in held if p.requires_grad]
        if sum(p.numel() * p.element_size() for p in parameters if p in chosen) < max(min_bytes, 1):
            continue
        members = [Member(p.shape[0], p.shape[1:].numel(), p in chosen) for p in parameters]
        found[name] = StochasticFP8ReduceScatter(members, name, seed)
        module.set_custom_reduce_scatter(found[name])  # type: ignore[arg-type]
    if not found:
        raise ConfigError(
            f"no group under fully_shard has {min_bytes} bytes of gradients that may travel in FP8; apply fully_shard "
            "first, or lower min_bytes"
        )
    return found
