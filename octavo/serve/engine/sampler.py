"""The sampler: next tokens and their logprobs for the rows that sample, read back in one transfer.

Logprobs are of the model's own logits; penalties, biases and grammars act on a copy that is sampled from.
"""

import torch

from octavo.ops.logprob import log_softmax, token_logprobs
from octavo.serve.engine.sequence import Sequence
from octavo.serve.outputs import Logprob

# a number for the sampled token's alone; what a sequence did not ask for is not read
Scores = float | dict[int, Logprob] | None


def report(
    logits: torch.Tensor, tokens: torch.Tensor, temperature: torch.Tensor | None, num_best: int | None
) -> torch.Tensor:
    """What the host is to know of sampled or given tokens: see read.

    Args:
        logits: [B, V] fp32.
        tokens: [B] int64.
        temperature: [B] fp32, 0 for greedy; not needed for the tokens alone.
        num_best: None for the tokens alone; 0 for their logprobs, too; else also the best tokens and theirs.
    Returns:
        [B, columns] fp64, in which ids and fp32 values are exact, so that one copy carries all.
    """
    columns = [tokens[:, None].double()]
    if num_best is not None:
        assert temperature is not None, "logprobs have one"
        columns += _logprob_columns(logits, tokens, temperature, num_best)
    return torch.cat(columns, dim=1)


def most_logprobs(sequences: list[Sequence]) -> int | None:
    """The most that any of these asks for."""
    return max({seq.params.logprobs for seq in sequences} - {None}, default=None)  # type: ignore[type-var]


def read(rows: torch.Tensor, sequences: list[Sequence]) -> tuple[list[int], list[Scores]]:
    """A report on the host: each sequence's next token, and its logprobs in the number that the request asked for."""
    token_ids = rows[:, 0].long().tolist()
    if rows.shape[1] == 1:
        return token_ids, [None] * len(token_ids)
    if rows.shape[1] == 2:  # no request asked for more than the token's own
        return token_ids, rows[:, 1].tolist()
    pairs = zip(rows.tolist(), sequences, strict=True)
    return token_ids, [_unpack(row, seq.params.logprobs) if seq.params.logprobs else row[1] for row, seq in pairs]


def score_tokens(
    logits: torch.Tensor, tokens: torch.Tensor, temperature: torch.Tensor, num_best: int
) -> list[dict[int, Logprob]]:
    """Logprobs of given tokens, and of the num_best best ones, with the bits that sampled ones have; waits.

    Args:
        logits: [B, V] fp32.
        tokens: [B] int64.
        temperature: [B] fp32, 0 for greedy.
    """
    rows = report(logits, tokens, temperature, num_best)
    return [_unpack(row, num_best) for row in rows.tolist()]


def _logprob_columns(
    logits: torch.Tensor, tokens: torch.Tensor, temperature: torch.Tensor, num_best: int
) -> list[torch.Tensor]:
    """fp64 columns: the sampled token's logprob; for num_best > 0 also its rank, the best ids, their logprobs."""
    temperature = torch.where(temperature == 0, 1.0, temperature)  # greedy reports the logprob of temperature 1
    num_best = min(num_best, logits.shape[1])
    sampled = token_logprobs(logits, tokens, temperature)[:, None]  # [B, 1]
    if num_best == 0:
        return [sampled.double()]
    all_logprobs = log_softmax(logits, temperature)  # [B, V]
    rank = (all_logprobs > sampled).sum(dim=-1, keepdim=True) + 1
    best, ids = all_logprobs.topk(num_best, dim=-1)  # [B, num_best]
    return [column.double() for column in (sampled, rank, ids, best)]


def _unpack(row: list[float], num_logprobs: int) -> dict[int, Logprob]:
    """Logprobs of a row: the token's id and its columns."""
    token_id = int(row[0])
    if num_logprobs == 0:
        return {token_id: Logprob(row[1])}
    num_best = (len(row) - 3) // 2
    ids, values = row[3 : 3 + num_best], row[3 + num_best :]
    best = zip(ids[:num_logprobs], values, range(1, num_logprobs + 1), strict=False)
    logprobs = {int(i): Logprob(value, rank) for i, value, rank in best}
    logprobs.setdefault(token_id, Logprob(row[1], int(row[2])))
    return logprobs
