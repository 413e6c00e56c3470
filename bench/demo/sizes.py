"""How large the demo's model and batches are: small on a CPU, larger on a GPU, the same code."""

import dataclasses
from typing import Self

from octavo.run.sections import ModelSection
from octavo.train.config import DataSection

_WHOLE_TEXT_S = 120.0


@dataclasses.dataclass(frozen=True)
class Sizes:
    """What fits a machine.

    Attributes:
        model: the language model. Parts of its linears are multiples of 128, so that all of them can be exported as
            128 x 128 blocks.
        data: the corpus (this Python's own sources) and the batches.
        init_std: standard deviation of the initial matrices; narrow models begin sooner with more than the usual 0.02.
        lr: peak learning rate.
        eval_tokens: validation tokens of every comparison.
        prompts_per_step: groups of a reinforcement step.
        parallel: variants run side by side, in processes of their own.
    """

    model: ModelSection
    data: DataSection
    init_std: float
    lr: float
    eval_tokens: int
    prompts_per_step: int
    parallel: bool

    def within(self, seconds: float) -> Self:
        """Less text for a demo of less than two minutes: reading it takes as long however few steps follow."""
        share = min(1.0, seconds / _WHOLE_TEXT_S)
        less = {name: int(share * getattr(self.data, name)) for name in ("max_bytes", "tokenizer_bytes")}
        return dataclasses.replace(self, data=self.data.model_copy(update=less))


CPU = Sizes(
    model=ModelSection(
        hidden_size=128,
        intermediate_size=384,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=2,
        head_dim=64,
        max_position_embeddings=512,
    ),
    data=DataSection(max_bytes=6_000_000, tokenizer_bytes=1_500_000, vocab_size=1024, seq_len=256, batch_size=2),
    init_std=0.06,
    lr=3e-3,
    eval_tokens=16_384,
    prompts_per_step=32,
    parallel=True,
)

GPU = Sizes(
    model=ModelSection(
        hidden_size=1024,
        intermediate_size=3072,
        num_hidden_layers=8,
        num_attention_heads=16,
        num_key_value_heads=8,
        head_dim=64,
        max_position_embeddings=1024,
    ),
    data=DataSection(vocab_size=4096, seq_len=512, batch_size=32),
    init_std=0.02,
    lr=1e-3,
    eval_tokens=65_536,
    prompts_per_step=64,
    parallel=False,
)


def sizes_for(device: str) -> Sizes:
    """The sizes for a device's name."""
    return GPU if device.startswith("cuda") else CPU
