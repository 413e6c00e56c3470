"""Which experts each cached token was sent to: kept beside the KV cache, in the very slots of its keys and values.

So what shares pages (a prefix, a preempted sequence's second run) shares its choices too, and a CUDA graph of a step
records them with no more than a copy. The model runner owns one where EngineConfig asks for it.
"""

import contextlib
import functools
from collections.abc import Iterator
from typing import NamedTuple

import torch

from octavo.errors import ConfigError
from octavo.models import Decoder
from octavo.nn.router_watch import sparse_blocks
from octavo.ops._runtime.to_device import to_device
from octavo.ops.attention import PAGE_SIZE

_MAX_IN_BYTES = 256  # experts that one byte tells apart


class RoutedExpertsFuture(NamedTuple):
    """Choices on their way to the host: [T, L, S]; ready is None on a CPU."""

    host: torch.Tensor
    ready: "torch.cuda.Event | None"

    def wait(self) -> torch.Tensor:
        """[T, L, S] once it is there, in plain memory."""
        if self.ready is None:
            return self.host
        self.ready.synchronize()
        return self.host.clone()


class RoutedExpertsRecorder:
    """The choices of all layers with experts.

    Args:
        model: with experts.
        num_pages: of the KV cache.

    Attributes:
        table: [L, num_pages * PAGE_SIZE + 1, S] uint8, or int16 for more than 256 experts; the last row is for padding.

    Raises:
        ConfigError: a model without experts.
    """

    def __init__(self, model: Decoder, num_pages: int) -> None:
        self._blocks = sparse_blocks(model)
        if not self._blocks:
            raise ConfigError(
                "enable_return_routed_experts asks for the experts of each token, and this model has none; leave it out"
            )
        self._device, self._dtype = model.device, choice_dtype(model.config.num_experts)
        self.table = self._make_table(num_pages)

    @contextlib.contextmanager
    def recording(self, slot_mapping: torch.Tensor) -> Iterator[None]:
        """Within, a forward pass records.

        Args:
            slot_mapping: [T] int64, the slot of each token; -1 for a padding row.
        """
        for layer, block in enumerate(self._blocks):
            block.recorder = functools.partial(self._record, layer, slot_mapping)
        try:
            yield
        finally:
            for block in self._blocks:
                block.recorder = None

    def read(self, page_table: list[int], num_tokens: int) -> RoutedExpertsFuture:
        """The choices of a sequence's first tokens as they are after the steps under way, not waited for."""
        pages = torch.tensor(page_table, dtype=torch.int64)
        slots = (pages[:, None] * PAGE_SIZE + torch.arange(PAGE_SIZE)).flatten()[:num_tokens]
        found = self.table[:, to_device(slots, self._device)].transpose(0, 1).contiguous()
        if not found.is_cuda:
            return RoutedExpertsFuture(found, None)
        host = torch.empty(found.shape, dtype=found.dtype, pin_memory=True)
        host.copy_(found, non_blocking=True)
        ready = torch.cuda.Event()
        ready.record()
        return RoutedExpertsFuture(host, ready)

    def release(self) -> None:
        """Let go of the memory."""
        self.table = self._make_table(0)

    def allocate(self, num_pages: int) -> None:
        """Take memory for a cache of so many pages; nothing is recorded yet."""
        self.table = self._make_table(num_pages)

    def _make_table(self, num_pages: int) -> torch.Tensor:
        shape = (len(self._blocks), num_pages * PAGE_SIZE + 1, self._blocks[0].num_experts_per_tok)
        return torch.zeros(shape, dtype=self._dtype, device=self._device)

    def _record(self, layer: int, slot_mapping: torch.Tensor, experts: torch.Tensor) -> None:
        self.table[layer].index_put_((slot_mapping,), experts.to(self._dtype))  # -1 is the last row


def choice_dtype(num_experts: int) -> torch.dtype:
    """The smallest dtype that holds every expert's index."""
    return torch.uint8 if num_experts <= _MAX_IN_BYTES else torch.int16


def choice_page_bytes(model: Decoder) -> int:
    """Bytes of the choices of one page over all layers."""
    config = model.config
    row_bytes = config.num_experts_per_tok * choice_dtype(config.num_experts).itemsize
    return len(sparse_blocks(model)) * row_bytes * PAGE_SIZE
