"""Logprobs of prompts: the model's rows scored against the tokens that follow, a slice of rows at a time."""

import torch

from octavo.models import Decoder
from octavo.serve.engine.sampler import score_tokens
from octavo.serve.engine.scheduler import Chunk
from octavo.serve.engine.sequence import Sequence
from octavo.serve.outputs import Logprob

# rows of [rows, vocabulary] logits that are held at a time
ROWS = 256


def score_prompts(model: Decoder, hidden: torch.Tensor, chunks: list[Chunk]) -> None:
    """Add to prompt_logprobs of the sequences that want them what this step's rows say.

    Args:
        hidden: [T, hidden_size], the rows of all chunks in order.
    """
    first_row = 0
    for chunk in chunks:
        if chunk.sequence.scores_prompt:
            _score(model, hidden[first_row : first_row + chunk.num_tokens], chunk)
        first_row += chunk.num_tokens


def _score(model: Decoder, hidden: torch.Tensor, chunk: Chunk) -> None:
    seq = chunk.sequence
    # recomputation after a preemption passes over what was scored before
    start = max(chunk.start, len(seq.prompt_logprobs))
    end = min(chunk.end, seq.prompt_len - 1)
    for low in range(start, end, ROWS):
        high = min(low + ROWS, end)
        rows = hidden[low - chunk.start : high - chunk.start]
        seq.prompt_logprobs += _score_rows(model, rows, seq, low, high)


def _score_rows(model: Decoder, rows: torch.Tensor, seq: Sequence, low: int, high: int) -> list[dict[int, Logprob]]:
    num_best = seq.params.prompt_logprobs
    assert num_best is not None, "the sequence wants its prompt scored"
    targets = torch.tensor(seq.token_ids[low + 1 : high + 1], dtype=torch.int64, device=rows.device)
    temperature = torch.full((high - low,), seq.params.temperature, dtype=torch.float32, device=rows.device)
    return score_tokens(model.logits(rows), targets, temperature, num_best)
