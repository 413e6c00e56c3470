"""The model runner: turns a step's chunks into tensors, runs the model over the paged cache, samples."""

import torch

from octavo.models import Decoder
from octavo.ops.attention import PagedKVLayer
from octavo.serve.engine.paged_context import PagedContext, to_device
from octavo.serve.engine.prompt_logprobs import score_prompts
from octavo.serve.engine.sampler import SampledToken, sample_tokens
from octavo.serve.engine.scheduler import Chunk


class ModelRunner:
    """Owns the model and the cache's tensors; knows nothing of requests.

    Args:
        model: in eval or train mode alike; its numerics decide the bits.
        layers: the cache, one entry a layer.
    """

    def __init__(self, model: Decoder, layers: list[PagedKVLayer]) -> None:
        self.model = model
        self.layers = layers

    # no_grad, not inference_mode: the 8-bit weights made here are the trainer's too
    @torch.no_grad()
    def run(self, chunks: list[Chunk]) -> list[SampledToken]:
        """Compute a step.

        Args:
            chunks: at least one.
        Returns:
            One token for each chunk with is_last, in order.
        """
        token_ids = [t for chunk in chunks for t in chunk.sequence.token_ids[chunk.start : chunk.end]]
        context = PagedContext.build(
            [(chunk.start, chunk.end) for chunk in chunks],
            [chunk.sequence.block_table for chunk in chunks],
            self.layers,
            self.model.numerics.exact,
            self.model.device,
        )
        hidden = self.model(self._tensor(token_ids), context)  # [T, hidden_size]
        score_prompts(self.model, hidden, chunks)
        sampling = [chunk.sequence for chunk in chunks if chunk.is_last]
        if not sampling:
            return []
        logits = self.model.logits(hidden[self._tensor(_last_rows(chunks))])  # [B, V] fp32
        return sample_tokens(logits, sampling)

    def _tensor(self, values: list[int]) -> torch.Tensor:
        return to_device(torch.tensor(values, dtype=torch.int64), self.model.device)


def _last_rows(chunks: list[Chunk]) -> list[int]:
    """Row of the last token of each chunk that samples."""
    rows, end = [], 0
    for chunk in chunks:
        end += chunk.num_tokens
        if chunk.is_last:
            rows.append(end - 1)
    return rows
