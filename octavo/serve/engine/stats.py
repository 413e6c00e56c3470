"""EngineStats: what the engine did, counted since its start or the last reset. Pure Python."""

import dataclasses


@dataclasses.dataclass
class EngineStats:
    """Counters of the engine.

    Attributes:
        num_steps: forward passes.
        num_requests: requests that came in.
        num_preemptions: times that a sequence lost its pages and had to start over.
        num_recomputed_tokens: tokens computed a second time after a preemption.
        num_prefix_query_tokens: tokens of sequences that were looked up in the prefix cache.
        num_prefix_hit_tokens: tokens not computed because their page was in the prefix cache.
        num_prefill_chunks: chunks of prefills, those after a preemption included.
        num_multi_chunk_prompts: prefills that took more than one chunk.
        num_computed_tokens: tokens that went through the model.
        output_tokens: tokens sampled.
        seconds: time spent in steps.
        num_kv_pages: pages of the cache.
        num_kv_pages_used: held now.
        num_kv_pages_peak: held at most.
    """

    num_steps: int = 0
    num_requests: int = 0
    num_preemptions: int = 0
    num_recomputed_tokens: int = 0
    num_prefix_query_tokens: int = 0
    num_prefix_hit_tokens: int = 0
    num_prefill_chunks: int = 0
    num_multi_chunk_prompts: int = 0
    num_computed_tokens: int = 0
    output_tokens: int = 0
    seconds: float = 0.0
    num_kv_pages: int = 0
    num_kv_pages_used: int = 0
    num_kv_pages_peak: int = 0

    @property
    def output_tokens_per_s(self) -> float:
        return self.output_tokens / self.seconds if self.seconds else 0.0

    def note_pages(self, num_used: int) -> None:
        """Record the pages held."""
        self.num_kv_pages_used = num_used
        self.num_kv_pages_peak = max(self.num_kv_pages_peak, num_used)

    def reset(self) -> None:
        """Count from zero again; the cache's size and the pages held now stay known."""
        for field in dataclasses.fields(self):
            if not field.name.startswith("num_kv_pages"):
                setattr(self, field.name, field.default)
        self.num_kv_pages_peak = self.num_kv_pages_used
