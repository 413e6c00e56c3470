"""What a request's parameters do to the logits that it samples from: biases, penalties, tokens not allowed yet."""

from collections import Counter
from collections.abc import Iterable

import torch

from octavo.serve.engine.paged_context import to_device
from octavo.serve.engine.sequence import Sequence


def adjust_logits(logits: torch.Tensor, sequences: list[Sequence]) -> torch.Tensor:
    """Logits to sample from; a row depends on its own sequence alone.

    Args:
        logits: [B, V] fp32, one row a sequence; left as they are.
    Returns:
        [B, V] fp32; the same tensor where nothing is to be changed.
    """
    rows = [row for row, seq in enumerate(sequences) if seq.params.adjusts_logits]
    if not rows:
        return logits
    adjusted = logits.clone()
    for row in rows:
        _adjust_row(adjusted[row], sequences[row])
    return adjusted


def _adjust_row(logits: torch.Tensor, seq: Sequence) -> None:
    """Change one row [V] in place, in the order that SamplingParams names."""
    params = seq.params
    if params.logit_bias:
        logits[_ids(params.logit_bias, logits)] += _values(params.logit_bias.values(), logits)
    if params.min_tokens > seq.num_tokens - seq.prompt_len:
        logits[_ids((i for i in seq.stop_token_ids if i < logits.shape[0]), logits)] = float("-inf")
    if params.has_penalties:
        _penalize(logits, seq)
    allowed = None if seq.grammar is None else seq.grammar.allowed_tokens()
    if allowed is not None:
        logits.masked_fill_(~_bits(allowed, logits), float("-inf"))


def _penalize(logits: torch.Tensor, seq: Sequence) -> None:
    params = seq.params
    if params.repetition_penalty != 1:
        ids = _ids(sorted(set(seq.token_ids)), logits)
        seen = logits[ids]
        penalty = torch.tensor(params.repetition_penalty, dtype=torch.float32, device=logits.device)
        logits[ids] = torch.where(seen > 0, seen / penalty, seen * penalty)
    counts = Counter(seq.output_token_ids)
    if counts and (params.presence_penalty or params.frequency_penalty):
        # one rounding to fp32 of what is taken off
        taken = [params.frequency_penalty * count + params.presence_penalty for count in counts.values()]
        logits[_ids(counts, logits)] -= _values(taken, logits)


def _bits(packed: bytes, logits: torch.Tensor) -> torch.Tensor:
    """[V] bool of one bit a token, the lowest bit of a byte first; tokens beyond are False."""
    packed_bits = to_device(torch.frombuffer(bytearray(packed), dtype=torch.uint8), logits.device)
    shifts = torch.arange(8, dtype=torch.uint8, device=logits.device)
    bits = ((packed_bits[:, None] >> shifts) & 1).flatten().bool()[: logits.shape[0]]
    return torch.nn.functional.pad(bits, (0, logits.shape[0] - bits.shape[0]))


def _ids(values: Iterable[int], logits: torch.Tensor) -> torch.Tensor:
    return to_device(torch.tensor(list(values), dtype=torch.int64), logits.device)


def _values(values: Iterable[float], logits: torch.Tensor) -> torch.Tensor:
    return to_device(torch.tensor(list(values), dtype=torch.float32), logits.device)
