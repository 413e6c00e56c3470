"""The weights that a sampler has, kept while others are written over them: what fails is taken back."""

from itertools import compress

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
        self._last = 0  # where the last one went
        pieces = [piece for param in self._model.parameters() for piece, _ in pieces_of(param, param)]
        self._kept = [(piece, self._place_for(piece)) for piece in pieces]
        _copy_all([kept for _, kept in self._kept], pieces)

    @torch.no_grad()
    def restore(self) -> None:
        """Write the old weights back, where they were."""
        _copy_all([live for live, _ in self._kept], [kept for _, kept in self._kept])

    def release(self) -> None:
        """Give the cache its memory back, as it was allocated: its readers multiply what they leave out by zero."""
        self._kept.clear()
        if self._taken:
            torch._foreach_zero_(self._taken)

    def _place_for(self, piece: torch.Tensor) -> torch.Tensor:
        size = -(-piece.nbytes // _ALIGNMENT) * _ALIGNMENT
        if len(self._room[self._last]) < size:
            self._last = next((i for i, room in enumerate(self._room) if len(room) >= size), self._last)
        room = self._room[self._last]
        if len(room) < size:
            return torch.empty_like(piece, device="cpu")
        taken, self._room[self._last] = room[:size], room[size:]
        self._taken.append(taken)
        return taken[: piece.nbytes].view(piece.dtype).view(piece.shape)


def _copy_all(into: list[torch.Tensor], values: list[torch.Tensor]) -> None:
    """Few launches for what is on one device, for a host takes longer to launch a copy than most of them take."""
    is_here = [a.device == b.device for a, b in zip(into, values, strict=True)]
    for a, b, is_near in zip(into, values, is_here, strict=True):
        if not is_near:
            a.copy_(b)
    if any(is_here):
        torch._foreach_copy_(list(compress(into, is_here)), list(compress(values, is_here)))
