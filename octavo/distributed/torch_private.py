"""Names of torch.distributed that torch does not promise and octavo cannot do without, as torch 2.11 to 2.13 have them.

All that FSDP2 keeps of a sharded module is read here, so that a new torch is looked at in one place: its test asks
each name. What FSDP2 calls is public: fully_shard, unshard, reshard and their setters.
"""

import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from datetime import timedelta
from typing import Any

import torch.distributed as dist


def param_groups(module: Any) -> list[Any]:
    """FSDP2's parameter groups of a sharded module: its state has a list since torch 2.12, one or None before."""
    state = module._get_fsdp_state()
    if hasattr(state, "_fsdp_param_groups"):
        return list(state._fsdp_param_groups)
    return [] if state._fsdp_param_group is None else [state._fsdp_param_group]


def sharded_parameters(model: Any) -> Iterator[Any]:
    """What an optimizer holds of a model under FSDP2, also while its modules have whole parameters in their place."""
    if has_fsdp():
        from torch.distributed.fsdp import FSDPModule

        modules = (module for module in model.modules() if isinstance(module, FSDPModule))
        yield from (p.sharded_param for module in modules for group in param_groups(module) for p in group.fsdp_params)


def is_unsharded(module: Any) -> bool:
    """Whether a sharded module's own parameters are whole."""
    return all(group.is_unsharded for group in param_groups(module))


def keep_reshard_rule(module: Any) -> Callable[[], None]:
    """Note whether a sharded module frees its parameters after a forward and a backward, whose setters know no "as it
    was".

    Returns:
        What makes it so again.
    """
    state = module._get_fsdp_state()
    is_automatic = state._auto_reshard_after_forward
    rules = [(group, group.post_forward_mesh_info, group.reshard_after_backward) for group in param_groups(module)]

    def restore() -> None:
        state._auto_reshard_after_forward = is_automatic
        for group, mesh_info, after_backward in rules:
            group.post_forward_mesh_info, group.reshard_after_backward = mesh_info, after_backward

    return restore


def has_begun(group: Any) -> bool:
    """Whether a parameter group has looked for its parameters' hooks, which it does at its first forward."""
    return bool(group._reset_sharded_params)


def gatherer_of(group: Any) -> tuple[Any, Any]:
    """(what gathers a parameter group's parameters, the process group it does so over)."""
    return group._all_gather_comm, group._all_gather_process_group


def set_gatherer(group: Any, gatherer: Any) -> None:
    """As FSDPModule.set_custom_all_gather, of one parameter group."""
    group._all_gather_comm = gatherer


def reducer_of(group: Any) -> tuple[Any, int]:
    """(what reduces and scatters a parameter group's gradients, over how many ranks)."""
    return group._reduce_scatter_comm, group._reduce_scatter_process_group.size()


def padded_numel(param: Any) -> int:
    """Elements of a parameter of a group in a rank's piece of the gradients, once FSDP2 has cut it."""
    return int(param.padded_sharded_param_size.numel())


def name_of(param: Any) -> str:
    """Full name of a parameter of a group; "None" before the first forward."""
    return str(param._param_fqn)


def has_fsdp() -> bool:
    """Whether FSDP2 is loaded; without it nothing is sharded, and importing it takes a second."""
    return "torch.distributed.fsdp._fully_shard" in sys.modules


def default_store() -> Any:
    """A clone of the store of the default process group."""
    return dist.distributed_c10d._get_default_store().clone()  # type: ignore[attr-defined]


def set_timeout(limit: timedelta, group: Any) -> None:
    """How long a process group's collectives wait; new groups have a default of torch's own."""
    dist.distributed_c10d._set_pg_timeout(limit, group)


def forget_group_names() -> None:
    """Count process groups from 0 again, as destroy_process_group does, after a failed init_process_group too: ranks
    meet under that number.
    """
    dist.distributed_c10d._world.group_count = 0


def outside_modes() -> AbstractContextManager[Any]:
    """Within, no TorchDispatchMode of the caller sees what is done."""
    from torch.utils._python_dispatch import _disable_current_modes

    return _disable_current_modes()  # type: ignore[no-any-return]
