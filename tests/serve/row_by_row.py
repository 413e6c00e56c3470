"""What parameters do to logits, a row at a time from tokens that are all known: the reference of logit_adjustment."""

from collections import Counter

import torch

from octavo.serve.engine.sequence import Sequence

INF = float("inf")


def adjust_row_by_row(logits: torch.Tensor, sequences: list[Sequence]) -> torch.Tensor:
    """[B, V] fp32, one row a sequence, adjusted in the order that SamplingParams names."""
    adjusted = logits.clone()
    for row, seq in zip(adjusted, sequences, strict=True):
        _adjust_row(row, seq)
    return adjusted


def _adjust_row(logits: torch.Tensor, seq: Sequence) -> None:
    params = seq.params
    for token, bias in (params.logit_bias or {}).items():
        logits[token] += torch.tensor(bias, dtype=torch.float32)
    if params.min_tokens > seq.num_tokens - seq.prompt_len:
        for token in seq.stop_token_ids:
            logits[token : token + 1] = -INF
    if params.repetition_penalty != 1:
        ids = torch.tensor(sorted(set(seq.token_ids)), device=logits.device)
        seen = logits[ids]
        penalty = torch.tensor(params.repetition_penalty, dtype=torch.float32, device=logits.device)
        logits[ids] = torch.where(seen > 0, seen / penalty, seen * penalty)
    for token, count in Counter(seq.output_token_ids).items():
        # one rounding to fp32 of what is taken off
        taken = params.frequency_penalty * count + params.presence_penalty
        if params.presence_penalty or params.frequency_penalty:
            logits[token] -= torch.tensor(taken, dtype=torch.float32)
    allowed = None if seq.grammar is None else seq.grammar.allowed_tokens()
    if allowed is not None:
        for token in range(logits.shape[0]):
            if not (token // 8 < len(allowed) and allowed[token // 8] >> token % 8 & 1):
                logits[token] = -INF
