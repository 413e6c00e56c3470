"""The weights that a sampler has, kept while others are written over them: what fails is taken back."""

import torch

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
        self._kept = [(piece, self._keep(piece)) for piece in pieces]

    @torch.no_grad()
    def restore(self) -> None:
        """Write the old weights back, where they were."""
        for live, kept in self._kept:
            live.copy_(kept)

    def release(self) -> None:
        """Give the cache its memory back, as it was allocated: its readers multiply what they leave out by zero."""
        self._kept.clear()
        for taken in self._taken:
            taken.zero_()

    def _keep(self, piece: torch.Tensor) -> torch.Tensor:
        size = -(-piece.nbytes // _ALIGNMENT) * _ALIGNMENT
        place = next((i for i, room in enumerate(self._room) if len(room) >= size), None)
        if place is None:
            return piece.to("cpu", copy=True)
        taken, self._room[place] = self._room[place][:size], self._room[place][size:]
        self._taken.append(taken)
        kept = taken[: piece.nbytes].view(piece.dtype).view(piece.shape)
        return kept.copy_(piece)
