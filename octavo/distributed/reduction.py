"""Gradients of several ranks added in the order in which one process would add its micro-batches.

FSDP2's own sum follows the backend's algorithm and the number of ranks. Here pieces travel unchanged and their owner
adds them, rank by rank, onto the sum of the micro-batches before: docs/adr/0022.
"""

import itertools
import math
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist

from octavo.distributed.collectives import all_gather_into
from octavo.distributed.shards import local
from octavo.distributed.torch_private import name_of, padded_numel
from octavo.errors import ShapeError


class OrderedReduceScatter:
    """The reduce-scatter of one FSDP2 parameter group (`set_custom_reduce_scatter`).

    The gradient itself is the running fp32 sum: it is taken from the parameters before a micro-batch's pieces are
    added where it lies, and FSDP2 puts it there again. Pieces travel in the dtype of the backward.

    Args:
        params: the group's FSDPParams: those that train at the time, all of which need a gradient in each backward.
        replicas: the process group of dp_replicate (HSDP), whose ranks' pieces are added too; None for none.
    """

    def __init__(self, params: Sequence[Any], replicas: Any = None) -> None:
        self._of_group, self._replicas = tuple(params), replicas

    @property
    def _params(self) -> list[Any]:
        return [param for param in self._of_group if param.sharded_param.requires_grad]

    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        """The buffer that FSDP2 asks for: of the input, then of the output, which is fp32."""
        is_output = math.prod(size) == sum(self._sizes())  # the input is as large for each rank
        if is_output and (sums := self._sums()) is not None:
            return sums
        return torch.empty(size, dtype=torch.float32 if is_output else dtype, device=device)

    def __call__(
        self,
        output_tensor: torch.Tensor,
        input_tensor: torch.Tensor,
        group: Any,
        op: Any = None,
        async_op: bool = False,
    ) -> None:
        """Add this micro-batch of all ranks onto the sum, in rank order.

        Args:
            output_tensor: [n] fp32, this rank's piece of the sum.
            input_tensor: [ranks * n], all pieces of this rank's gradients.
        Raises:
            ShapeError: a parameter of the group has no gradient, so that the pieces' places are not known.
        """
        if sum(self._sizes()) != output_tensor.numel():
            names = ", ".join(name_of(param) for param in self._params)
            raise ShapeError(
                f"an ordered reduction needs a gradient of every parameter that trains in each backward; of {names} "
                "some have none; freeze what the loss does not reach, or use reduction='sum'"
            )
        pieces = torch.empty_like(input_tensor)
        dist.all_to_all_single(pieces, input_tensor, group=group)
        if self._replicas is not None:
            theirs = pieces.new_empty(self._replicas.size() * pieces.numel())
            all_gather_into(theirs, pieces, group=self._replicas)
            pieces = theirs
        rows = pieces.view(-1, output_tensor.numel())  # [replicas * ranks, n]
        is_first = not self._take_sums(output_tensor)
        if is_first:
            output_tensor.copy_(rows[0])
        for row in rows[1:] if is_first else rows:
            output_tensor += row

    def _sizes(self) -> list[int]:
        """Elements of each parameter in a rank's piece, whose sizes FSDP2 knows once it has cut them."""
        return [padded_numel(param) for param in self._params]

    def _sums(self) -> torch.Tensor | None:
        """The buffer of the last micro-batch, where the parameters' gradients lie in it as FSDP2 has laid them out."""
        grads = [param.sharded_param.grad for param in self._params]
        if not grads or any(grad is None for grad in grads):
            return None
        locals_ = [local(grad) for grad in grads]
        storage, sizes = locals_[0].untyped_storage(), self._sizes()
        starts = [0, *itertools.accumulate(sizes)]
        is_laid_out = all(
            grad.dtype == torch.float32
            and grad.untyped_storage().data_ptr() == storage.data_ptr()
            and grad.storage_offset() == start
            for grad, start in zip(locals_, starts, strict=False)
        )
        if not is_laid_out or storage.nbytes() != 4 * starts[-1]:
            return None
        return torch.empty(0, dtype=torch.float32, device=locals_[0].device).set_(storage, 0, (starts[-1],))  # type: ignore[call-overload,no-any-return]

    def _take_sums(self, output: torch.Tensor) -> bool:
        """Move the parameters' gradients into a buffer laid out as FSDP2 does; returns whether there were any."""
        grads = [param.sharded_param.grad for param in self._params]
        if all(grad is None for grad in grads):
            return False
        sums = self._sums()
        if sums is not None and sums.data_ptr() == output.data_ptr():
            for param in self._params:
                param.sharded_param.grad = None
            return True
        for param, grad, place in zip(self._params, grads, output.split(self._sizes()), strict=True):
            if grad is None:
                place.zero_()
                continue
            local = grad.to_local()
            place[: local.numel()].copy_(local.reshape(-1))
            param.sharded_param.grad = None
        return True
