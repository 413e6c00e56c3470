"""Sizes of the models that the pretraining runs train; what else they differ in is pretraining_variants'."""

import dataclasses

from octavo.models import ModelConfig
from octavo.train.config import ScheduleSection


@dataclasses.dataclass(frozen=True)
class Size:
    """A Llama of one size and how it is trained.

    Args:
        learning_rate: peak, after warmup_steps; a cosine takes it to a tenth. At 1.5e-3 after 60 steps (50m) the first
            steps were chaotic: one weight moved by one ulp changed the final loss by 1.6 and 2.1 %, now by 0.1 %.
        steps: by default.
        eval_sequences: validation sequences during a run.
        final_sequences: validation sequences at its end.
        vocab_size: of the corpus's tokenizer.
        tuning_steps: of the fine-tuning.
        task_examples: held-out examples of each of its tasks.
    """

    name: str
    num_layers: int
    hidden_size: int
    intermediate_size: int
    num_heads: int
    num_kv_heads: int
    seq_len: int
    learning_rate: float
    steps: int
    warmup_steps: int
    eval_sequences: int = 256
    final_sequences: int = 2048
    vocab_size: int = 16384
    tuning_steps: int = 300
    task_examples: int = 1024

    def model_config(self, vocab_size: int) -> ModelConfig:
        """The architecture; embedding and lm_head are one."""
        return ModelConfig(
            family="llama",
            vocab_size=-(-vocab_size // 128) * 128,
            hidden_size=self.hidden_size,
            intermediate_size=self.intermediate_size,
            num_layers=self.num_layers,
            num_heads=self.num_heads,
            num_kv_heads=self.num_kv_heads,
            head_dim=self.hidden_size // self.num_heads,
            max_position_embeddings=self.seq_len,
            tie_word_embeddings=True,
        )

    def schedule(self, num_steps: int) -> ScheduleSection:
        """Warm-up and cosine."""
        return ScheduleSection(kind="cosine", warmup_steps=min(self.warmup_steps, num_steps // 4), min_ratio=0.1)


SIZES = {
    size.name: size
    for size in (
        Size("toy", 2, 128, 256, 2, 1, 32, 3e-3, 8, 2, 4, 8, vocab_size=384, tuning_steps=2, task_examples=8),
        # for studies on a CPU; deep enough for a share of the layers to stay in bf16
        Size("1m", 4, 128, 384, 2, 1, 64, 3e-3, 150, 20, 64, 512, vocab_size=1024, tuning_steps=50, task_examples=64),
        Size("50m", 8, 640, 2048, 10, 2, 1024, 8e-4, 1000, 200),
        Size("350m", 24, 1024, 3584, 16, 4, 1024, 4e-4, 1500, 300),
    )
}
