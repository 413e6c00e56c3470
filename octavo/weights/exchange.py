"""Exchanging the contents of tensors that stay where they are: all or none. A weight update's last step."""

from collections.abc import Iterator, Sequence

import torch

from octavo.distributed.tensor_group import TensorGroup
from octavo.errors import LostWeightsError

# bytes that are exchanged at a time, and so all that writing needs on the model's device
EXCHANGE_BYTES = 64 << 20


@torch.inference_mode()  # so that tensors made under it can be written too
def exchange_all(pairs: Sequence[tuple[torch.Tensor, torch.Tensor]]) -> None:
    """Exchange the contents of live and staged tensors, all or none; every tensor stays where it is.

    Args:
        pairs: (live, staged) of one shape and dtype, on any devices.
    Raises:
        Exception: whatever a copy raises, after everything was undone.
        LostWeightsError: where undoing failed too.
    """
    pieces = [piece for live, staged in pairs for piece in pieces_of(live, staged)]
    sizes = [live.nbytes for live, _ in pieces]
    scratch = torch.empty(max(sizes, default=0), dtype=torch.uint8, device=pairs[0][0].device if pairs else None)
    saved: list[torch.Tensor] = []
    num_done = 0
    try:
        for live, staged in pieces:
            old = scratch[: live.nbytes].view(live.dtype).view(live.shape)
            old.copy_(live)
            saved = [old]
            copy_piece(live, staged)
            copy_piece(staged, old)
            saved = []
            num_done += 1
        _wait_for(scratch.device)
    except BaseException as error:
        _undo(pieces[: num_done + 1], saved, num_done, error)
        raise


def exchange_on_all(group: TensorGroup | None, pairs: Sequence[tuple[torch.Tensor, torch.Tensor]]) -> None:
    """exchange_all on every rank of a group; where it fails on one, it is undone on all; a collective.

    Args:
        group: None for one process.
        pairs: of this rank.
    Raises:
        Exception: what exchange_all raises, of the first rank that failed; or that the ranks could not talk.
        LostWeightsError: this rank's old weights are not back, or not those of the first rank that failed.
    """
    if group is None:
        return exchange_all(pairs)
    done: list[bool] = []

    def exchange() -> None:
        exchange_all(pairs)
        done.append(True)

    try:
        group.together(exchange)
    except BaseException as error:
        if done:
            _exchange_back(pairs, error)
        if isinstance(error.__cause__, LostWeightsError):  # this rank's own, where an earlier one failed otherwise
            raise error.__cause__ from None
        raise


def _exchange_back(pairs: Sequence[tuple[torch.Tensor, torch.Tensor]], error: BaseException) -> None:
    try:
        exchange_all(pairs)
    except BaseException as second:
        raise _lost(error, second) from error


def copy_piece(target: torch.Tensor, source: torch.Tensor) -> None:
    """Copy at most EXCHANGE_BYTES."""
    target.copy_(source)


def _undo(
    pieces: Sequence[tuple[torch.Tensor, torch.Tensor]], saved: list[torch.Tensor], num_done: int, error: BaseException
) -> None:
    """Bring the live tensors back: the piece under way from where it was saved, the others from the staged ones."""
    try:
        if saved:
            pieces[num_done][0].copy_(saved[0])
        for live, staged in pieces[:num_done]:
            live.copy_(staged)
        _wait_for(pieces[0][0].device)
    except BaseException as second:
        raise _lost(error, second) from error


def _lost(error: BaseException, second: BaseException) -> LostWeightsError:
    return LostWeightsError(
        f"a weight update failed while it was written ({error}), and the old weights could not be brought back "
        f"({second}): load the model again"
    )


def pieces_of(live: torch.Tensor, staged: torch.Tensor) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Rows of two tensors of one shape, so many that they take EXCHANGE_BYTES at most, or one."""
    if live.dim() == 0 or live.nbytes <= EXCHANGE_BYTES:
        yield live, staged
        return
    num_rows = max(1, EXCHANGE_BYTES * live.shape[0] // live.nbytes)
    yield from zip(live.split(num_rows), staged.split(num_rows), strict=True)


def _wait_for(device: torch.device) -> None:
    """Until the copies are done, and their errors known."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
