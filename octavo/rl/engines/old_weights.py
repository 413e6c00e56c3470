"""The weights that a sampler has, kept while others are written over them: what fails is taken back."""

from collections.abc import Iterator
from itertools import chain, groupby, islice

import torch

from octavo.parallel.slice_copies import copy_all
from octavo.serve.engine import Engine
from octavo.weights.exchange import pieces_of

_ALIGNMENT = 16


class OldWeights:
    """A copy of the parameters of an engine's model, in the memory of its KV cache, which is idle meanwhile.

    What does not fit there waits on the host. Cached prompts are forgotten.

    Args:
        engine: without unfinished requests.
    """

    @torch.no_grad()
    def __init__(self, engine: Engine) -> None:
        assert not engine.has_unfinished, "no request runs between two batches"
        engine.reset_prefix_cache()
        self._model = engine.model
        caches = [cache for layer in engine.model_runner.layers for cache in (layer.k, layer.v)]
        self._room = [cache.view(-1).view(torch.uint8) for cache in caches]
        self._taken: list[torch.Tensor] = []
        pieces = [piece for param in self._model.parameters() for piece, _ in pieces_of(param, param)]
        pieces.sort(key=lambda piece: piece.nbytes, reverse=True)  # the small ones fill what large ones leave
        places = [self._places_for(size, list(group)) for size, group in groupby(pieces, _aligned_bytes)]
        self._kept = list(zip(pieces, chain.from_iterable(places), strict=True))
        copy_all([kept for _, kept in self._kept], pieces)

    @torch.no_grad()
    def restore(self) -> None:
        """Write the old weights back, where they were."""
        copy_all([live for live, _ in self._kept], [kept for _, kept in self._kept])

    def release(self) -> None:
        """Give the cache its memory back, as it was allocated: its readers multiply what they leave out by zero."""
        self._kept.clear()
        if self._taken:
            torch._foreach_zero_(self._taken)

    def _places_for(self, size: int, pieces: list[torch.Tensor]) -> Iterator[torch.Tensor]:
        """For pieces of so many bytes each; on the host where none is left in the cache."""
        waiting = iter(pieces)
        for i, room in enumerate(self._room):
            for piece in islice(waiting, len(room) // size):
                taken, self._room[i] = self._room[i].split([size, len(self._room[i]) - size])
                self._taken.append(taken)
                yield taken[: piece.nbytes].view(piece.dtype).view(piece.shape)
        yield from (torch.empty_like(piece, device="cpu") for piece in waiting)


def _aligned_bytes(piece: torch.Tensor) -> int:
    return -(-piece.nbytes // _ALIGNMENT) * _ALIGNMENT
