"""What the pretraining runs differ in: the model's size, the arm (numerics and optimizer), the seed."""

import dataclasses
import re
from typing import Literal

from octavo.errors import ConfigError
from octavo.models import ModelConfig
from octavo.numerics.recipe import RECIPE_NAMES
from octavo.train.config import OptimizerSection, ScheduleSection

_ARM = re.compile(r"(?P<recipe>\w+?)(-to-(?P<later>\w+?))?(?P<optimizer>\+fp8-optimizer)?(?P<nudged>\+nudged)?")
GRAMMAR = "RECIPE[-to-RECIPE][+fp8-optimizer][+nudged]"


@dataclasses.dataclass(frozen=True)
class Size:
    """A Llama of one size and how it is trained.

    Args:
        learning_rate: peak, after warmup_steps; a cosine takes it to a tenth. At 1.5e-3 after 60 steps (50m) the first
            steps were chaotic: one weight moved by one ulp changed the final loss by 1.6 and 2.1 %, now by 0.1 %.
        steps: by default.
        eval_sequences, final_sequences: validation sequences during a run and at its end.
        vocab_size: of the corpus's tokenizer.
        tuning_steps, task_examples: of the fine-tuning, and held-out examples of each of its tasks.
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
        Size("50m", 8, 640, 2048, 10, 2, 1024, 8e-4, 1000, 200),
        Size("350m", 24, 1024, 3584, 16, 4, 1024, 4e-4, 1500, 300),
    )
}


@dataclasses.dataclass(frozen=True)
class Arm:
    """In which numerics a run computes, and what its optimizer keeps.

    Args:
        name: see GRAMMAR.
        recipe: of every linear but lm_head.
        later: the recipe from the middle of the run on; None for the same throughout.
        optimizer: "fp32" moments and masters, or "fp8" moments with 16-bit remainders of the masters.
        nudged: one weight starts an ulp away: what rounding alone makes of a run.
    """

    name: str
    recipe: str
    later: str | None = None
    optimizer: Literal["fp32", "fp8"] = "fp32"
    nudged: bool = False

    @property
    def parent(self) -> str | None:
        """The arm whose first half this one shares."""
        return self.name.replace(f"-to-{self.later}", "") if self.later else None

    @property
    def final_recipe(self) -> str:
        """The recipe at the end of the run."""
        return self.later or self.recipe

    def optimizer_section(self, learning_rate: float) -> OptimizerSection:
        """AdamW with decay 0.1 and clipping at 1."""
        if self.optimizer == "fp8":
            return OptimizerSection(lr=learning_rate, state_dtype="fp8", master_weights="remainder")
        return OptimizerSection(lr=learning_rate)


def parse_arm(name: str) -> Arm:
    """An arm by its name.

    Raises:
        ConfigError: no arm's name.
    """
    match = _ARM.fullmatch(name)
    recipes = () if match is None else tuple(filter(None, (match["recipe"], match["later"])))
    if match is None or any(recipe not in RECIPE_NAMES for recipe in recipes):
        raise ConfigError(f"an arm is {GRAMMAR} with recipes of {', '.join(RECIPE_NAMES)}, got {name!r}")
    optimizer: Literal["fp32", "fp8"] = "fp8" if match["optimizer"] else "fp32"
    return Arm(name, match["recipe"], match["later"], optimizer, bool(match["nudged"]))
