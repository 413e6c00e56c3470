"""The sampler: next tokens and their logprobs for the rows that sample, read back in one transfer.

Logprobs are of the model's own logits; penalties, biases and grammars act on a copy that is sampled from.
"""

from typing import NamedTuple

import torch

from octavo.ops.logprob import log_softmax, token_logprobs
from octavo.ops.sampling import sample
from octavo.serve.engine.logit_adjustment import adjust_logits
from octavo.serve.engine.paged_context import to_device
from octavo.serve.engine.sequence import Sequence
from octavo.serve.outputs import Logprob


class SampledToken(NamedTuple):
    """A sequence's next token; logprobs is None where the request asked for none."""

    token_id: int
    logprobs: dict[int, Logprob] | None


def sample_tokens(logits: torch.Tensor, sequences: list[Sequence]) -> list[SampledToken]:
    """Draw one token a sequence; a sequence's token and logprobs depend on its own row alone.

    Args:
        logits: [B, V] fp32, one row a sequence.
    """
    params = [seq.params for seq in sequences]
    temperature = _column([p.temperature for p in params], torch.float32, logits.device)  # [B]
    tokens = sample(
        adjust_logits(logits, sequences),
        temperature,
        _column([p.top_k for p in params], torch.int64, logits.device),
        _column([p.top_p for p in params], torch.float32, logits.device),
        _column([p.min_p for p in params], torch.float32, logits.device),
        _column([seq.seed for seq in sequences], torch.int64, logits.device),
        _column([seq.num_tokens for seq in sequences], torch.int64, logits.device),
    )  # [B]
    columns = [tokens[:, None].double()]
    num_best = max((p.logprobs for p in params if p.logprobs is not None), default=None)
    if num_best is not None:
        columns += _logprob_columns(logits, tokens, temperature, num_best)
    # ids and fp32 values are exact in fp64, so that one copy carries all
    rows = torch.cat(columns, dim=1).tolist()
    return [SampledToken(int(row[0]), _unpack(row, p.logprobs)) for row, p in zip(rows, params, strict=True)]


def score_tokens(
    logits: torch.Tensor, tokens: torch.Tensor, temperature: torch.Tensor, num_best: int
) -> list[dict[int, Logprob]]:
    """Logprobs of given tokens, and of the num_best best ones, with the bits that sample_tokens gives.

    Args:
        logits: [B, V] fp32. tokens: [B] int64. temperature: [B] fp32, 0 for greedy.
    """
    columns = [tokens[:, None].double(), *_logprob_columns(logits, tokens, temperature, num_best)]
    scores = [_unpack(row, num_best) for row in torch.cat(columns, dim=1).tolist()]
    return [score for score in scores if score is not None]


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


def _unpack(row: list[float], num_logprobs: int | None) -> dict[int, Logprob] | None:
    """Logprobs of a row: the token's id and its columns; None where none were asked for."""
    token_id = int(row[0])
    if num_logprobs is None:
        return None
    if num_logprobs == 0:
        return {token_id: Logprob(row[1])}
    num_best = (len(row) - 3) // 2
    ids, values = row[3 : 3 + num_best], row[3 + num_best :]
    best = zip(ids[:num_logprobs], values, range(1, num_logprobs + 1), strict=False)
    logprobs = {int(i): Logprob(value, rank) for i, value, rank in best}
    logprobs.setdefault(token_id, Logprob(row[1], int(row[2])))
    return logprobs


def _column(values: list, dtype: torch.dtype, device: torch.device) -> torch.Tensor:  # type: ignore[type-arg]
    return to_device(torch.tensor(values, dtype=dtype), device)
