"""Slots: what a step needs of each running sequence and stays on the device between steps; only changes are sent."""

from collections.abc import Sequence as Rows
from typing import NamedTuple

import torch

from octavo.ops._runtime.to_device import send
from octavo.serve.engine.sequence import Sequence


class Controls(NamedTuple):
    """How rows are sampled, [B] each, as ops.sampling.sample takes them.

    Attributes:
        temperature: fp32.
        top_p: fp32.
        min_p: fp32.
        top_k: int64.
        seeds: int64.
    """

    temperature: torch.Tensor
    top_k: torch.Tensor
    top_p: torch.Tensor
    min_p: torch.Tensor
    seeds: torch.Tensor


class Slots:
    """Page tables, sampling parameters and newest tokens, a row for each sequence that has pages.

    Args:
        num_slots: sequences at a time; row num_slots belongs to none and takes what fills up a batch.
        max_pages: pages of the longest sequence.

    Attributes:
        tables: [num_slots + 1, max_pages] int32, page 0 behind a sequence's pages.
        last_token: [num_slots + 1] int64, the token that was sampled last.
    """

    def __init__(self, num_slots: int, max_pages: int, device: torch.device) -> None:
        self.num_slots, self.device = num_slots, device
        self.tables = torch.zeros(num_slots + 1, max_pages, dtype=torch.int32, device=device)
        self.last_token = torch.zeros(num_slots + 1, dtype=torch.int64, device=device)
        self._whole = torch.zeros(2, num_slots + 1, dtype=torch.int64, device=device)  # top_k, seed
        self._real = torch.zeros(3, num_slots + 1, dtype=torch.float32, device=device)  # temperature, top_p, min_p
        self._slots: dict[Sequence, int] = {}
        self._free = list(range(num_slots - 1, -1, -1))
        self._sent: dict[Sequence, tuple[list[int], int]] = {}  # its page table, and how much of it is in tables

    def place(self, sequences: Rows[Sequence]) -> list[int]:
        """The slots of these sequences, brought up to date."""
        slots = self._slots
        fresh = [seq for seq in sequences if seq not in slots]
        if len(fresh) > len(self._free):
            self._sweep()
        for seq in fresh:
            slots[seq] = self._free.pop()
        if fresh:
            self._send_sequences(fresh)
        self._send_pages(sequences)
        return [slots[seq] for seq in sequences]

    def controls(self, slots: torch.Tensor) -> Controls:
        """Sampling parameters of the sequences at slots [B] int64."""
        top_k, seeds = self._whole[:, slots]
        temperature, top_p, min_p = self._real[:, slots]
        return Controls(temperature, top_k, top_p, min_p, seeds)

    def _sweep(self) -> None:
        """Take back the slots of sequences that lost their pages: they ended or were preempted."""
        for seq in [seq for seq in self._slots if not seq.page_table]:
            self._free.append(self._slots.pop(seq))
            self._sent.pop(seq, None)

    def _send_sequences(self, sequences: Rows[Sequence]) -> None:
        params = [seq.params for seq in sequences]
        rows = send([self._slots[seq] for seq in sequences], torch.int64, self.device)
        self.last_token[rows] = send([seq.token_ids[-1] for seq in sequences], torch.int64, self.device)
        self._whole[:, rows] = send(
            [[p.top_k for p in params], [seq.seed for seq in sequences]], torch.int64, self.device
        )
        real = [[p.temperature for p in params], [p.top_p for p in params], [p.min_p for p in params]]
        self._real[:, rows] = send(real, torch.float32, self.device)

    def _send_pages(self, sequences: Rows[Sequence]) -> None:
        """Send the pages that came since the last step; a sequence that started over has another list."""
        places: list[int] = []
        pages: list[int] = []
        width = self.tables.shape[1]
        sent, unknown = self._sent, (None, 0)
        for seq in sequences:
            table = seq.page_table
            known, count = sent.get(seq, unknown)
            if known is not table:
                count = 0
            elif count == len(table):
                continue
            first = self._slots[seq] * width
            places += range(first + count, first + len(table))
            pages += table[count:]
            sent[seq] = (table, len(table))
        if places:
            changes = send([places, pages], torch.int64, self.device)  # one transfer
            self.tables.view(-1)[changes[0]] = changes[1].int()
