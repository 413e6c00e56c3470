"""Tensors of a weight update that have come from files or a network, as a checkpoint's reader gives them."""

from collections.abc import Iterable
from pathlib import Path

import torch

from octavo.models.checkpoint.safetensors_io import SafetensorsReader, TensorEntry


class ArrivedTensors(SafetensorsReader):
    """The tensors that have come and are still needed, read like those of a checkpoint's files."""

    def __init__(self) -> None:
        self.path = Path("weight update")
        self.entries: dict[str, TensorEntry] = {}
        self._held: dict[str, torch.Tensor] = {}

    def put(self, name: str, tensor: torch.Tensor) -> None:
        """Hold a tensor."""
        self._held[name] = tensor
        self.entries[name] = TensorEntry(name, tensor.dtype, tuple(tensor.shape), self.path)

    def load(self, name: str, device: torch.device | str = "cpu") -> torch.Tensor:
        """The tensor itself, where it is; add has checked it."""
        return self._held[name]

    def drop(self, names: Iterable[str]) -> None:
        """Let tensors go."""
        for name in names:
            self.entries.pop(name, None)
            self._held.pop(name, None)
