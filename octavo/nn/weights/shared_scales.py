"""SharedScales: one scale a sharded weight, the same on every rank, from amaxes that travel together."""

import weakref
from typing import Protocol

import torch

from octavo.distributed.amax import reduce_largest
from octavo.numerics.scaling import Scaling, compute_quant_scale


class Shard(Protocol):
    """A rank's rows of a weight with one scale."""

    scaling: Scaling

    @property
    def shard(self) -> torch.Tensor: ...
    def shard_state(self) -> tuple[int, ...]: ...
    def fold_amax(self, amax: torch.Tensor) -> None: ...


class SharedScales:
    """Scales of all weights of a model: the first that is asked for after a step makes all, in one all-reduce.

    Ranks that run one program ask alike, since what tells of new values counts alike on all.

    Args:
        group: process group of the ranks that share the weights.
    """

    def __init__(self, group: object) -> None:
        self._group = group
        self._members: list[weakref.ref[Shard]] = []
        self._made: weakref.WeakKeyDictionary[Shard, tuple[tuple[int, ...], torch.Tensor]]
        self._made = weakref.WeakKeyDictionary()

    def add(self, member: Shard) -> None:
        """Let a weight's amax travel along."""
        self._members.append(weakref.ref(member))

    def of(self, member: Shard) -> torch.Tensor:
        """[1] fp32: the quant_scale of a weight, as one process makes it of all rows."""
        made = self._made.get(member)
        if made is None or made[0] != member.shard_state():
            self._update()
        return self._made[member][1]

    @torch.inference_mode(False)  # training steps go on with what an evaluation made
    @torch.no_grad()
    def _update(self) -> None:
        self._members = [ref for ref in self._members if ref() is not None]
        members = [member for ref in self._members if (member := ref()) is not None]
        amaxes = torch.zeros(len(members), device=members[0].shard.device)
        for i, member in enumerate(members):
            member.fold_amax(amaxes[i : i + 1])
        reduce_largest(amaxes, self._group)
        # what is quantized is a weight's value in bf16
        made = {
            scaling: compute_quant_scale(amaxes, scaling, torch.bfloat16) for scaling in {m.scaling for m in members}
        }
        for i, member in enumerate(members):
            self._made[member] = member.shard_state(), made[member.scaling][i : i + 1]
