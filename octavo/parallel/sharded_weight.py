"""ShardedWeight: a rank's rows of a weight, of which FSDP2 gathers FP8 codes. octavo's one subclass of torch.Tensor."""

import inspect
from typing import Any

import torch

from octavo.nn.weights.gathered import GatheredWeight


class ShardedWeight(torch.Tensor):
    """The local tensor of a sharded parameter, with FSDP2's hooks around its all-gather.

    It has its own memory and is nothing but a name for it: all that is computed from it, detached or saved is a plain
    tensor, so that neither a checkpoint nor an optimizer knows of it. The codes are the module's GatheredWeight's.
    """

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    def __reduce_ex__(self, protocol: Any) -> Any:
        return self.detach().__reduce_ex__(protocol)

    @staticmethod
    def fsdp_pre_all_gather(
        mesh: Any, outer_size: torch.Size, outer_stride: tuple[int, ...], module: Any, mp_policy: Any
    ) -> tuple[tuple[torch.Tensor, ...], GatheredWeight]:
        """What this rank sends, and who takes what comes; on FSDP2's copy-in stream."""
        source: GatheredWeight = module.source
        return source.unit.send(module), source

    @staticmethod
    def fsdp_post_all_gather(
        all_gather_outputs: tuple[torch.Tensor, ...],
        metadata: GatheredWeight,
        param_dtype: torch.dtype,
        *,
        out: torch.Tensor | None = None,
    ) -> tuple[torch.Tensor, tuple[torch.Tensor, ...]] | None:
        """Give the source what was gathered. The parameter, made the first time, has no values and no memory."""
        metadata.receive(all_gather_outputs)
        return (metadata.hollow(param_dtype), ()) if out is None else None


# FSDP2 asks for it at every gather; working it out each time, or leaving out a method's first parameter, takes longer
# than a small kernel
ShardedWeight.fsdp_pre_all_gather.__signature__ = inspect.signature(  # type: ignore[attr-defined]
    ShardedWeight.fsdp_pre_all_gather
)


def attach(parameter: Any) -> None:
    """Give a sharded parameter (a DTensor) the hooks; FSDP2 looks for them before its first forward."""
    local = parameter._local_tensor
    if type(local) is not ShardedWeight:
        parameter._local_tensor = local.as_subclass(ShardedWeight)
