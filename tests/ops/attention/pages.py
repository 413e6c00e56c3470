"""Paged caches of several sequences: shuffled pages, and the slots of some of their tokens."""

from collections.abc import Sequence

import torch

from octavo.ops.attention import PAGE_SIZE

Span = tuple[int, int, int]  # sequence, and its tokens [start, end)


def shuffled_tables(lengths: Sequence[int], first_page: int, generator: torch.Generator) -> tuple[torch.Tensor, int]:
    """(block tables [sequences, most pages] int32, pages that are needed); pages before the first are not used."""
    counts = [-(-n // PAGE_SIZE) for n in lengths]
    order = torch.randperm(sum(counts), generator=generator) + first_page
    tables = torch.zeros(len(lengths), max(counts), dtype=torch.int32)
    for row, pages in zip(tables, order.split(counts), strict=True):
        row[: len(pages)] = pages.int()
    return tables, sum(counts) + first_page


def tokens_and_slots(tables: torch.Tensor, starts: Sequence[int], spans: list[Span]) -> tuple[torch.Tensor, ...]:
    """(places of the tokens among those of all sequences, their slots in the cache)."""
    index = torch.cat([torch.arange(starts[i] + a, starts[i] + b) for i, a, b in spans])
    places = [(i, torch.arange(a, b)) for i, a, b in spans]
    return index, torch.cat([tables[i, at // PAGE_SIZE].long() * PAGE_SIZE + at % PAGE_SIZE for i, at in places])
