"""FSDP2 whose gradients travel in FP8: one shot, rounded stochastically, summed by the owner in the order of the ranks.

A sharded gradient has no place for a residual of the whole one, so errors are made to have the mean zero instead.
"""

import zlib
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from octavo.distributed.packed import Packed, num_blocks
from octavo.distributed.transport import check_dtype, check_group, start_exchange
from octavo.errors import ConfigError, ShapeError
from octavo.ops.packed import decode_pieces_, round_pieces_


class Member(NamedTuple):
    """A parameter of an FSDP2 group: [rows, row_numel], sharded by rows, in FP8 or as it is."""

    rows: int
    row_numel: int
    is_fp8: bool

    def shard_numel(self, world: int) -> int:
        """Elements of a rank's shard, what pads the last ones too."""
        return -(-self.rows // world) * self.row_numel


class StochasticFP8ReduceScatter:
    """A reduce-scatter for FSDP2: parallel.fp8_reduce_scatter makes one for each group and sets it.

    The random bits of an element follow from the seed, the group's name, the number of calls before, the sender's
    global rank, and the element's index in the group's parameters laid out whole, one after the other. So a call
    repeats itself: over gloo and NCCL, on CPU and GPU. What a rank sends of a matrix does not depend on how many
    ranks share the shards either, where shards are whole blocks of 128 elements (in_features a multiple of 128); the
    sum is then that of the same fp32 numbers, in the order of the ranks.

    Args:
        members: the group's trainable parameters, in FSDP2's order.
        name: of the group; the same on every layout.
        seed: of the run.

    Attributes:
        num_calls: reductions so far, one for each backward of the group; who resumes a run sets it.
    """

    def __init__(self, members: Sequence[Member], name: str, seed: int = 0) -> None:
        self._members, self._name, self._seed = tuple(members), name, seed
        self.num_calls = 0

    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        """As FSDP2 asks for its buffers."""
        return torch.empty(*size, dtype=dtype, device=device)

    @torch.no_grad()
    def __call__(
        self,
        output_tensor: torch.Tensor,
        input_tensor: torch.Tensor,
        group: Any,
        op: Any,
        async_op: bool = False,
    ) -> None:
        """Reduce a flat buffer of all ranks' shards into this rank's.

        Args:
            output_tensor: [n] fp32 or bf16, written.
            input_tensor: [ranks * n], the same dtype.
            group: the ranks that share the shards.
            op: SUM or AVG.
            async_op: must be False, as FSDP2 leaves it: it runs on a stream of FSDP2's own.
        Raises:
            ConfigError: another op, or async_op.
            ShapeError: the buffer is not one of the group's gradients.
        """
        world, _ = check_group(group)
        check_dtype(input_tensor)
        if async_op or op not in (dist.ReduceOp.SUM, dist.ReduceOp.AVG):
            raise ConfigError(
                f"an FP8 reduce-scatter sums or averages in the order of the stream, got {op} and async_op={async_op}; "
                "with a gradient divide factor call set_force_sum_reduction_for_comms(True) too"
            )
        sizes = [member.shard_numel(world) for member in self._members]
        if input_tensor.numel() != world * sum(sizes):
            raise ShapeError(
                f"gradients of group {self._name!r} must have {sum(sizes)} elements a rank, got "
                f"{input_tensor.numel() / world:g}; every trainable parameter of it needs a gradient in each backward, "
                "and none may be added or frozen later"
            )
        parts = input_tensor.view(world, -1).split(sizes, dim=1)
        work, received = start_exchange(self._pack(parts, input_tensor.device), group)
        work.wait()
        self.num_calls += 1
        total = self._unpack(received, sizes)
        if op == dist.ReduceOp.AVG:
            total /= torch.full((), world, dtype=torch.float32, device=total.device)
        output_tensor.copy_(total.view_as(output_tensor))

    def _pack(self, parts: Sequence[torch.Tensor], device: torch.device) -> Packed:
        both = list(zip(self._members, parts, strict=True))
        plain = [part for member, part in both if not member.is_fp8]
        widths = [part.shape[1] for member, part in both if member.is_fp8]
        num_plain = sum(part.shape[1] for part in plain)
        packed = Packed.empty(len(parts[0]), sum(map(num_blocks, widths)), device, num_plain)
        if plain:
            torch.cat(plain, dim=1, out=packed.plain)
        key = f"{self._seed}/{self._name}/{self.num_calls}/{dist.get_rank()}"
        seed = torch.full((), zlib.crc32(key.encode()) - (1 << 31), dtype=torch.int32, device=device)
        places, start = iter(packed.split(widths)), 0
        for member, part in both:
            if member.is_fp8:
                round_pieces_(part, *next(places), seed, start)
            start += member.rows * member.row_numel
        return packed

    def _unpack(self, received: Packed, sizes: list[int]) -> torch.Tensor:
        """The sums of this rank's shards, in the order of the members: [n] fp32."""
        plain = received.plain[0].clone()
        for piece in received.plain[1:]:
            plain += piece
        places = iter(
            received.split([size for member, size in zip(self._members, sizes, strict=True) if member.is_fp8])
        )
        total = torch.empty(sum(sizes), dtype=torch.float32, device=plain.device)
        for member, part in zip(self._members, total.split(sizes), strict=True):
            if member.is_fp8:
                decode_pieces_(*next(places), part[None])
            else:
                part.copy_(plain[: len(part)])
                plain = plain[len(part) :]
        return total
