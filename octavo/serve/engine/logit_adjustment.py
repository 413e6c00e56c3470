"""What a request's parameters do to the logits that it samples from: biases, penalties, tokens not allowed yet.

Each sequence that needs it has a list of entries on the device, one for each token whose logit may change: its bias,
whether it may end the output, how often it was drawn. All rows' entries are gathered, computed and scattered together.
A drawn token is counted there without the host, so that a step can be launched before the last one is read; grammars
alone need its value.
"""

from collections import Counter
from collections.abc import Sequence as Rows
from itertools import chain
from typing import NamedTuple

import torch

from octavo.ops._runtime.to_device import send, to_device
from octavo.serve.engine.sequence import Sequence

SEEN, ENDS, BIASED = 1, 2, 4  # flags: in prompt or output; may not come before min_tokens; has a bias
ID, FLAGS, COUNT, BIAS = range(4)  # rows of a table; COUNT is of the output, BIAS the bits of an fp32
FEWEST = 64  # entries that a table has room for at first


class Plan(NamedTuple):
    """What is to be done to a step's logits.

    Attributes:
        where: [3, P] int64, of the rows with entries: row, slot, tokens before the one drawn; penalized ones first.
            None where no row has any.
        num_penalized: how many these are.
        num_entries: at least as many as any of the rows has.
        grammar_rows: [G] int64; None where there is no grammar.
        allowed: [G, ceil(V / 8)] uint8, one bit a token, the lowest of a byte first; None where there is no grammar.
    """

    where: torch.Tensor | None
    num_penalized: int
    num_entries: int
    grammar_rows: torch.Tensor | None
    allowed: torch.Tensor | None


class _Place(NamedTuple):
    """Where a sequence's entries are, and how many it had at how many tokens."""

    slot: int
    num_entries: int
    num_tokens: int


class LogitsProcessor:
    """Entries of the sequences that have pages, a row for each slot; no memory while none of them needs any.

    Args:
        num_slots: sequences at a time.
        vocab_size: the model's.
    """

    def __init__(self, num_slots: int, vocab_size: int, device: torch.device) -> None:
        self.num_slots, self.vocab_size, self.device = num_slots, vocab_size, device
        self._places: dict[Sequence, _Place] = {}
        self._table: torch.Tensor  # [4, num_slots, entries] int32
        self._num_entries: torch.Tensor  # [num_slots] int64
        self._controls: torch.Tensor  # [4, num_slots] fp64: the penalties, repetition first, and where it may end
        self._empty()

    @property
    def num_bytes(self) -> int:
        """Memory that is held on the device."""
        return sum(x.nbytes for x in (self._table, self._num_entries, self._controls))

    def place(self, sequences: Rows[Sequence], slots: Rows[int]) -> None:
        """Send what is new of these sequences, whose slots these are; all tokens of a new one must be known."""
        self.release()
        fresh = [
            (seq, slot)
            for seq, slot in zip(sequences, slots, strict=True)
            if seq.params.adjusts_logits and (seq not in self._places or self._places[seq].slot != slot)
        ]
        entries = [(seq, slot, self._entries(seq)) for seq, slot in fresh]
        entries = [entry for entry in entries if entry[2]]
        if entries:
            self._send(entries)

    def release(self) -> None:
        """Forget the sequences that lost their pages: they ended or start over. The last one takes the memory along."""
        if not self._places:
            return
        for seq in [seq for seq in self._places if not seq.page_table]:
            del self._places[seq]
        if not self._places:
            self._empty()

    def plan(self, sequences: Rows[Sequence]) -> Plan | None:
        """What is to be done to the logits of these rows; None for nothing."""
        rows = [row for row, seq in enumerate(sequences) if seq in self._places and _acts(seq)] if self._places else []
        masks = {row: seq.grammar.allowed_tokens() for row, seq in enumerate(sequences) if seq.grammar is not None}
        allowed = {row: mask for row, mask in masks.items() if mask is not None}
        if not rows and not allowed:
            return None
        rows.sort(key=lambda row: not sequences[row].params.has_penalties)
        acting = [sequences[row] for row in rows]
        where = [rows, [self._places[seq].slot for seq in acting], [seq.num_tokens_ahead for seq in acting]]
        return Plan(
            send(where, torch.int64, self.device) if rows else None,
            sum(seq.params.has_penalties for seq in acting),
            max(map(self._bound, acting), default=0),
            send(list(allowed), torch.int64, self.device) if allowed else None,
            self._pack(list(allowed.values())) if allowed else None,
        )

    def apply(self, logits: torch.Tensor, plan: Plan) -> torch.Tensor:
        """Logits to sample from, in the order that SamplingParams names; a row depends on its own sequence alone.

        Args:
            logits: [B, V] fp32, one row a sequence of the plan; left as they are.
        Returns:
            [B, V] fp32.
        """
        adjusted = logits.clone(memory_format=torch.contiguous_format)
        if plan.where is not None:
            self._apply_entries(adjusted, plan.where, plan.num_entries)
        if plan.grammar_rows is not None and plan.allowed is not None:
            allowed = _unpack(plan.allowed, logits.shape[1])  # [G, V]
            adjusted[plan.grammar_rows] = adjusted[plan.grammar_rows].masked_fill_(~allowed, float("-inf"))
        return adjusted

    def count(self, tokens: torch.Tensor, plan: Plan) -> None:
        """Count the tokens [B] int64 that were drawn after apply."""
        if plan.where is None or not plan.num_penalized:
            return
        rows, slots, _ = plan.where[:, : plan.num_penalized]
        self._reserve(plan.num_entries + 1)
        drawn = tokens[rows].int()
        num = self._num_entries[slots]
        fresh = torch.zeros(4, len(rows), dtype=torch.int32, device=self.device)
        fresh[ID] = drawn
        self._table[:, slots, num] = fresh  # behind the last entry, which counts only if no earlier one is the token's
        column = torch.arange(plan.num_entries + 1, device=self.device)
        ids = self._table[ID, slots, : plan.num_entries + 1]  # [P, entries]
        is_same = (ids == drawn[:, None]) & (column <= num[:, None])
        place = torch.where(is_same, column, num[:, None]).amin(dim=1)
        self._table[FLAGS, slots, place] |= SEEN
        self._table[COUNT, slots, place] += 1
        self._num_entries[slots] = torch.maximum(num, place + 1)

    def _apply_entries(self, adjusted: torch.Tensor, where: torch.Tensor, num_entries: int) -> None:
        rows, slots, num_tokens = where
        column = torch.arange(num_entries, device=self.device)
        # Places behind the last entry repeat the first: the same value is written to the same logit again.
        place = torch.where(column < self._num_entries[slots][:, None], column, 0)  # [P, entries]
        fields = self._table[:, slots, :num_entries].gather(2, place.expand(4, -1, -1))
        ids, flags, counts, bias = fields.unbind()
        repetition, frequency, presence, min_len = self._controls[:, slots, None]  # [P, 1] fp64
        flat, index = adjusted.view(-1), rows[:, None] * adjusted.shape[1] + ids
        x = flat[index]  # [P, entries]
        x = torch.where(flags & BIASED != 0, x + bias.view(torch.float32), x)
        x = x.masked_fill((flags & ENDS != 0) & (num_tokens[:, None] < min_len), float("-inf"))
        penalty = repetition.float()
        x = torch.where(flags & SEEN != 0, torch.where(x > 0, x / penalty, x * penalty), x)
        # one rounding to fp32 of what is taken off
        taken = (frequency * counts + presence).float()
        flat[index] = torch.where(counts > 0, x - taken, x)

    def _bound(self, seq: Sequence) -> int:
        _, num_entries, num_tokens = self._places[seq]
        return num_entries + (seq.num_tokens_ahead - num_tokens if seq.params.has_penalties else 0)

    def _entries(self, seq: Sequence) -> list[list[float]]:
        """(ids, flags, counts, biases), at least one entry; empty where nothing ever changes."""
        params = seq.params
        bias = params.logit_bias or {}
        ends = sorted(i for i in seq.stop_token_ids if i < self.vocab_size) if params.min_tokens else []
        if not (bias or ends or params.has_penalties):
            return []
        seen = seq.token_ids if params.repetition_penalty != 1 else seq.output_token_ids if params.has_penalties else []
        flags = dict.fromkeys(seen, SEEN)
        for ids, flag in ((bias, BIASED), (ends, ENDS)):
            for i in ids:
                flags[i] = flags.get(i, 0) | flag
        if not flags:
            flags[seq.token_ids[0]] = 0  # a first entry is there in any case: it fills up the row
        counts = Counter(seq.output_token_ids if params.has_penalties else [])
        return [list(flags), list(flags.values()), [counts.get(i, 0) for i in flags], [bias.get(i, 0.0) for i in flags]]

    def _send(self, entries: list[tuple[Sequence, int, list[list[float]]]]) -> None:
        assert not any(seq.num_pending for seq, *_ in entries), "a sequence gets its slot with all tokens known"
        lengths = [len(columns[ID]) for *_, columns in entries]
        self._reserve(max(lengths))
        width = self._table.shape[2]
        ids, flags, counts, bias = (list(chain.from_iterable(c[i] for *_, c in entries)) for i in range(4))
        starts = [slot * width for _, slot, _ in entries]
        places = torch.cat([torch.arange(n) + start for start, n in zip(starts, lengths, strict=True)])
        fields = torch.cat([torch.tensor([ids, flags, counts], dtype=torch.int32), _bits_of(bias)[None]])
        self._table.view(4, -1)[:, to_device(places, self.device)] = to_device(fields, self.device)
        slots = send([slot for _, slot, _ in entries], torch.int64, self.device)
        self._num_entries[slots] = send(lengths, torch.int64, self.device)
        controls = [_controls(seq) for seq, *_ in entries]
        self._controls[:, slots] = send(controls, torch.float64, self.device).T
        for (seq, slot, _), length in zip(entries, lengths, strict=True):
            self._places[seq] = _Place(slot, length, seq.num_tokens)

    def _reserve(self, num_entries: int) -> None:
        """Make room for so many entries a sequence."""
        width = self._table.shape[2]
        if not width:
            self._num_entries = torch.zeros(self.num_slots, dtype=torch.int64, device=self.device)
            self._controls = torch.zeros(4, self.num_slots, dtype=torch.float64, device=self.device)
        if num_entries > width:
            wider = max(FEWEST, 1 << (num_entries - 1).bit_length())
            table = torch.zeros(4, self.num_slots, wider, dtype=torch.int32, device=self.device)
            table[:, : self._table.shape[1], :width] = self._table
            self._table = table

    def _empty(self) -> None:
        self._table = torch.empty(4, 0, 0, dtype=torch.int32, device=self.device)
        self._num_entries = torch.empty(0, dtype=torch.int64, device=self.device)
        self._controls = torch.empty(4, 0, dtype=torch.float64, device=self.device)

    def _pack(self, masks: list[bytes]) -> torch.Tensor:
        """[G, ceil(V / 8)] uint8, in one transfer; tokens beyond a mask's end are not allowed."""
        num_bytes = -(-self.vocab_size // 8)
        packed = b"".join(mask[:num_bytes].ljust(num_bytes, b"\0") for mask in masks)
        return to_device(torch.frombuffer(bytearray(packed), dtype=torch.uint8).view(len(masks), -1), self.device)


def _acts(seq: Sequence) -> bool:
    """Whether a sequence's entries change anything at its next token."""
    params = seq.params
    is_short = params.min_tokens > seq.num_tokens_ahead - seq.prompt_len
    return params.has_penalties or bool(params.logit_bias) or is_short


def _controls(seq: Sequence) -> tuple[float, float, float, float]:
    """Repetition, frequency and presence penalty, and the tokens, prompt included, before which it may not end."""
    params = seq.params
    min_len = min(seq.prompt_len + params.min_tokens, seq.max_len)
    return params.repetition_penalty, params.frequency_penalty, params.presence_penalty, min_len


def _bits_of(values: Rows[float]) -> torch.Tensor:
    """[n] int32, the bits of fp32 numbers."""
    return torch.tensor(values, dtype=torch.float32).view(torch.int32)


def _unpack(packed: torch.Tensor, num_tokens: int) -> torch.Tensor:
    """[G, num_tokens] bool of [G, bytes] uint8."""
    shifts = torch.arange(8, dtype=torch.uint8, device=packed.device)
    return ((packed[:, :, None] >> shifts) & 1).flatten(1)[:, :num_tokens].bool()
