"""SharedScales: one scale a sharded weight, the same on every rank, from amaxes that travel together."""

import weakref
from typing import Protocol

import torch

from octavo.distributed.amax import reduce_largest
from octavo.numerics.infinity import note_infinity
from octavo.numerics.scaling import Scaling, compute_quant_scale


class Shards(Protocol):
    """A rank's rows of some weights with one scale each."""

    scaling: Scaling

    def shard_states(self) -> list[tuple[int, ...]]: ...
    def fold_amaxes(self) -> torch.Tensor: ...


class SharedScales:
    """Scales of all weights of a model: the first that is asked for after a step makes all, in one all-reduce.

    Ranks that run one program ask alike, since what tells of new values counts alike on all.

    Args:
        group: process group of the ranks that share the weights.
    """

    def __init__(self, group: object) -> None:
        self._group = group
        self._members: list[weakref.ref[Shards]] = []
        self._made: weakref.WeakKeyDictionary[Shards, tuple[list[tuple[int, ...]], torch.Tensor]]
        self._made = weakref.WeakKeyDictionary()

    def add(self, member: Shards) -> None:
        """Let some weights' amaxes travel along."""
        self._members.append(weakref.ref(member))

    def of(self, member: Shards) -> torch.Tensor:
        """[weights] fp32: the quant_scale of each of a member's weights, as one process makes it of all rows."""
        made = self._made.get(member)
        if made is None or made[0] != member.shard_states():
            self._update()
        return self._made[member][1]

    @torch.inference_mode(False)  # training steps go on with what an evaluation made
    @torch.no_grad()
    def _update(self) -> None:
        self._members = [ref for ref in self._members if ref() is not None]
        states = {member: member.shard_states() for ref in self._members if (member := ref()) is not None}
        members = [member for member, state in states.items() if state]  # the others' weights are no more
        found = [member.fold_amaxes() for member in members]
        amaxes = torch.cat(found)
        note_infinity(amaxes)
        reduce_largest(amaxes, self._group)
        # what is quantized is a weight's value in bf16
        made = {
            scaling: compute_quant_scale(amaxes, scaling, torch.bfloat16).split([len(each) for each in found])
            for scaling in {m.scaling for m in members}
        }
        for i, member in enumerate(members):
            self._made[member] = states[member], made[member.scaling][i]
