"""A sharded model's weights into a view that is cut among the ranks: each slice goes to its rank alone."""

import itertools
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import nn

from octavo.distributed.collectives import exchange, exchange_parts
from octavo.distributed.outcome import together
from octavo.distributed.shards import local, rows_of
from octavo.models.export import reshard
from octavo.nn.live_weights import slices_of
from octavo.parallel.equal import sum_of_bits

BUCKET_NUMEL = 512 << 20  # elements of whole parameters whose slices travel together


class Held(NamedTuple):
    """What a rank has of a parameter.

    Attributes:
        first: row of its shard.
        num: rows of its shard.
        rows: ranges of the whole that follow each other in its slice.
        columns: of the whole, in its slice.
        is_cut: whether ranks have different rows.
    """

    first: int
    num: int
    rows: tuple[slice, ...]
    columns: slice
    is_cut: bool


class Piece(NamedTuple):
    """So many rows of a shard that belong into a slice: where they begin in either, and which columns."""

    in_shard: int
    in_slice: int
    num: int
    columns: slice


def pieces(source: Held, owner: Held) -> Iterator[Piece]:
    """What a rank's shard has of another one's slice, in the slice's order."""
    in_slice = 0
    for rows in owner.rows:
        first, stop = max(rows.start, source.first), min(rows.stop, source.first + source.num)
        if first < stop:
            yield Piece(first - source.first, in_slice + first - rows.start, stop - first, owner.columns)
        in_slice += rows.stop - rows.start


class Bucket(NamedTuple):
    """Parameters whose slices travel together.

    Attributes:
        names: of parameters of one dtype in the view.
        leaving: of each parameter the pieces of this rank's shard, by the rank to which they go.
        places: where what comes is written, by the rank of which it comes.
    """

    names: list[str]
    leaving: list[list[list[Piece]]]
    places: list[list[torch.Tensor]]


class SliceCopies:
    """Writes a sharded model's weights, rounded to the view's dtypes, into the view's slices, where they lie.

    Made and called by all ranks of the group over which the model is sharded.

    Args:
        model: its parameters are sharded along dim 0 over one group, or whole.
        view: with memory of its own, which stays, for the same parameters by name.
        group: torch's process group.
    """

    def __init__(self, model: nn.Module, view: nn.Module, group: Any) -> None:
        self._model, self._view, self._group = model, view, group
        self._rank, self._world = dist.get_rank(group), dist.get_world_size(group)
        by_rank = together(group, self._held)
        held = {name: [of_rank[name] for of_rank in by_rank] for name in by_rank[0]}
        self._buckets = [self._plan(names, held) for names in self._names()]

    def _held(self) -> dict[str, Held]:
        theirs, found = dict(self._model.named_parameters()), {}
        for name, _ in self._view.named_parameters():
            param, slices = theirs[name], slices_of(self._view, name)
            shard, columns = rows_of(param), slice(None)
            rows: tuple[slice, ...] = (slice(0, len(param)),)
            if slices is not None:
                rows, columns = slices.rows, slices.columns if param.dim() > 1 else columns  # a bias has no columns
            found[name] = Held(shard.first, shard.num, rows, columns, bool(shard.groups))
        return found

    def _names(self) -> Iterator[list[str]]:
        """Of parameters of one dtype in the view, a bucket at a time: the same on all ranks."""
        theirs, own = dict(self._model.named_parameters()), dict(self._view.named_parameters())
        for dtype in dict.fromkeys(param.dtype for param in own.values()):
            names, numel = list[str](), 0
            for name in (name for name, param in own.items() if param.dtype == dtype):
                if numel and numel + theirs[name].numel() > BUCKET_NUMEL:
                    yield names
                    names, numel = [], 0
                names.append(name)
                numel += theirs[name].numel()
            yield names

    def _plan(self, names: list[str], held: dict[str, list[Held]]) -> Bucket:
        me, bucket = self._rank, Bucket(names, [], [[] for _ in range(self._world)])
        for name in names:
            own, ranks = _matrix(self._view.get_parameter(name)), held[name]
            peers = range(self._world) if ranks[me].is_cut else (me,)
            bucket.leaving.append(
                [list(pieces(ranks[me], ranks[peer])) if peer in peers else [] for peer in range(self._world)]
            )
            for peer in peers:
                coming = pieces(ranks[peer], ranks[me])
                bucket.places[peer].extend(own[p.in_slice : p.in_slice + p.num] for p in coming)
        return bucket

    @torch.no_grad()
    def __call__(self) -> list[str]:
        """Copy the weights as they are now; see weight_copies for what is returned."""
        reshard(self._model)  # what is gathered already may be codes
        theirs = dict(self._model.named_parameters())
        sums = [self._copy(bucket, [_matrix(local(theirs[name])) for name in bucket.names]) for bucket in self._buckets]
        came, sent = (torch.stack(each, 1) for each in zip(*sums, strict=True))  # [ranks, buckets]
        is_whole = (came == exchange(sent, self._group)).all(0).tolist()
        return [
            name for each, is_well in zip(self._buckets, is_whole, strict=True) if not is_well for name in each.names
        ]

    def _copy(self, bucket: Bucket, shards: list[torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
        """Of each parameter this rank's shard into the slices of all, and those of all into this rank's slice.

        Returns:
            The sums of the bits that came of each rank and that went to it: two of [ranks] int64.
        """
        sent: list[list[torch.Tensor]] = [[] for _ in range(self._world)]
        for shard, leaving in zip(shards, bucket.leaving, strict=True):
            for to_peer, of_peer in zip(sent, leaving, strict=True):
                to_peer += [shard[p.in_shard : p.in_shard + p.num, p.columns] for p in of_peer]
        places = list(bucket.places)
        like = next(place for each in places for place in each)
        copy_all(places[self._rank], sent[self._rank])
        sent[self._rank] = places[self._rank] = []
        message, parts = _laid_out(sent, like)
        copy_all(parts, list(itertools.chain(*sent)))
        answer, parts = _laid_out(places, like)
        exchange_parts(answer, message, _sizes(places), _sizes(sent), self._group)
        copy_all(list(itertools.chain(*places)), parts)
        return _sums(answer, places), _sums(message, sent)


def copy_all(into: list[torch.Tensor], values: list[torch.Tensor]) -> None:
    """Few launches for what is on one device, for a host takes longer to launch a copy than most of them take."""
    is_here = [a.device == b.device for a, b in zip(into, values, strict=True)]
    for a, b, is_near in zip(into, values, is_here, strict=True):
        if not is_near:
            a.copy_(b)
    if any(is_here):
        torch._foreach_copy_(list(itertools.compress(into, is_here)), list(itertools.compress(values, is_here)))


def _sizes(parts: Sequence[Sequence[torch.Tensor]]) -> list[int]:
    return [sum(part.numel() for part in each) for each in parts]


def _sums(message: torch.Tensor, parts: Sequence[Sequence[torch.Tensor]]) -> torch.Tensor:
    return torch.stack([sum_of_bits(part) for part in message.split(_sizes(parts))])


def _matrix(x: torch.Tensor) -> torch.Tensor:
    """[rows, *] as [rows, n]."""
    return x.detach().reshape(len(x), -1)


def _laid_out(parts: Sequence[Sequence[torch.Tensor]], like: torch.Tensor) -> tuple[torch.Tensor, list[torch.Tensor]]:
    """New memory for matrices that travel one after the other, and each one's place in it."""
    shapes = [part.shape for each in parts for part in each]
    memory = like.new_empty(sum(shape.numel() for shape in shapes))
    return memory, [x.view(shape) for x, shape in zip(memory.split([s.numel() for s in shapes]), shapes, strict=True)]
