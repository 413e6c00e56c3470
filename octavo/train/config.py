"""The one configuration tree of a training run: what a recipe file may say, section by section."""

from pathlib import Path
from typing import Any, Literal, Self

from pydantic import Field, NonNegativeFloat, NonNegativeInt, PositiveFloat, PositiveInt, model_validator

from octavo.config import Config
from octavo.numerics import Recipe, get_recipe


class ModelSection(Config):
    """The decoder, by Hugging Face's names, or a checkpoint to continue from.

    Args:
        path: a checkpoint directory whose weights, architecture and tokenizer are taken; the other keys then
            have no say. Empty: a new model with random weights.
        family: "qwen3" (norms on queries and keys) or "llama".
        head_dim: 0 for hidden_size / num_attention_heads.
        max_position_embeddings: 0 for data.seq_len; the longest text that the model may later sample.
    """

    path: str = ""
    family: Literal["qwen3", "llama"] = "qwen3"
    hidden_size: PositiveInt = 128
    intermediate_size: PositiveInt = 384
    num_hidden_layers: PositiveInt = 4
    num_attention_heads: PositiveInt = 4
    num_key_value_heads: PositiveInt = 2
    head_dim: NonNegativeInt = 0
    max_position_embeddings: NonNegativeInt = 0
    rope_theta: PositiveFloat = 10_000.0
    tie_word_embeddings: bool = True


class DataSection(Config):
    """The text, its tokenizer, and how it is cut into batches.

    Args:
        path: a text file, a .jsonl file, a directory of either, or "stdlib": this Python's own sources.
        suffixes: which files of a directory are read.
        text_field: the key of a JSON line that holds the text.
        validation_fraction: the share of documents, chosen by their hash, that is kept for validation.
        validation_path: separate validation text; validation_fraction then has no say.
        max_bytes: read no more than this much text; 0 reads all.
        tokenizer: a tokenizer.json or a directory that holds one; empty trains a byte-level BPE of vocab_size on
            the first tokenizer_bytes of training text (or takes model.path's).
        cache_dir: where tokens are kept, by the fingerprint of text and tokenizer.
        seq_len: tokens in a sequence.
        batch_size: sequences in an optimizer step.
        micro_batch_size: sequences in one forward pass; batch_size must be a multiple. 0 for batch_size.
        mask_documents: attention and loss stop at document ends.
    """

    path: str = "stdlib"
    suffixes: tuple[str, ...] = (".txt", ".md", ".py", ".rst", ".jsonl")
    text_field: str = "text"
    validation_fraction: float = Field(default=0.05, gt=0.0, lt=1.0)
    validation_path: str = ""
    max_bytes: NonNegativeInt = 0
    tokenizer: str = ""
    vocab_size: int = Field(default=1024, ge=257)
    tokenizer_bytes: PositiveInt = 2_000_000
    cache_dir: Path = Path("runs/cache")
    seq_len: int = Field(default=256, ge=2)
    batch_size: PositiveInt = 16
    micro_batch_size: NonNegativeInt = 0
    mask_documents: bool = True

    @property
    def num_micro_batches(self) -> int:
        """Forward passes in an optimizer step."""
        return self.batch_size // (self.micro_batch_size or self.batch_size)

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.micro_batch_size and self.batch_size % self.micro_batch_size:
            raise ValueError(
                f"batch_size={self.batch_size} must be a multiple of micro_batch_size={self.micro_batch_size}"
            )
        return self


class OptimizerSection(Config):
    """AdamW over fp32 masters; max_grad_norm 0 turns clipping off."""

    lr: PositiveFloat = 3e-3
    beta1: float = Field(default=0.9, ge=0.0, lt=1.0)
    beta2: float = Field(default=0.95, ge=0.0, lt=1.0)
    eps: PositiveFloat = 1e-8
    weight_decay: NonNegativeFloat = 0.1
    max_grad_norm: NonNegativeFloat = 1.0


class ScheduleSection(Config):
    """The shape of the learning rate over a run.

    Args:
        kind: what follows the warm-up: "cosine" or "linear" decay to min_ratio of the peak, or "constant".
        warmup_steps: steps of linear warm-up; the first step already learns.
        min_ratio: the last step's learning rate as a share of the peak.
    """

    kind: Literal["cosine", "linear", "constant"] = "cosine"
    warmup_steps: NonNegativeInt = 20
    min_ratio: float = Field(default=0.1, ge=0.0, le=1.0)


class PrecisionSection(Config):
    """In which precision the linears compute: a recipe and its fields, as octavo.get_recipe takes them.

    Args:
        recipe: "bf16", "delayed", "tensorwise", "rowwise" or "blockwise".
        fp8_format, backward, scale_format, amax_floor: fields of every FP8 recipe; unset keeps the recipe's own.
        margin, amax_history_len, amax_compute_algo: fields of "delayed".
        dtype: parameters and activations; "fp32" is the yardstick, with recipe "bf16" only (all linears unquantized).
        num_layers_at_start_in_bf16, num_layers_at_end_in_bf16: decoder layers left unquantized.
    """

    recipe: str = "blockwise"
    fp8_format: Literal["hybrid", "e4m3"] | None = None
    backward: Literal["fp8", "bf16"] | None = None
    scale_format: Literal["fp32", "e8m0"] | None = None
    amax_floor: NonNegativeFloat | None = None
    margin: int | None = None
    amax_history_len: PositiveInt | None = None
    amax_compute_algo: Literal["max", "most_recent"] | None = None
    dtype: Literal["bf16", "fp32"] = "bf16"
    num_layers_at_start_in_bf16: NonNegativeInt = 0
    num_layers_at_end_in_bf16: NonNegativeInt = 0

    def make_recipe(self) -> Recipe:
        """The recipe that this section describes; RecipeError where there is none."""
        return get_recipe(self.recipe, **self._overrides())

    def _overrides(self) -> dict[str, Any]:
        own = {"recipe", "dtype", "num_layers_at_start_in_bf16", "num_layers_at_end_in_bf16"}
        return self.model_dump(exclude=own, exclude_none=True)

    @model_validator(mode="after")
    def _check(self) -> Self:
        recipe = self.make_recipe()
        if self.dtype == "fp32" and recipe.is_fp8:
            raise ValueError(f"dtype 'fp32' goes with recipe 'bf16' (nothing quantized), got recipe {self.recipe!r}")
        return self


class CheckpointSection(Config):
    """When a checkpoint is written besides the last step's, and how many stay.

    Args:
        every: optimizer steps between checkpoints; 0 writes the last step's alone.
        keep: the newest ones that stay on disk.
    """

    every: NonNegativeInt = 100
    keep: PositiveInt = 2


class MetricsSection(Config):
    """What is measured and where it is written.

    Args:
        log_every: optimizer steps between rows of metrics.
        eval_every: optimizer steps between validations; 0 validates after the last step alone.
        eval_tokens: validation tokens used each time, from the start of the validation text; 0 uses all.
        tensorboard: write TensorBoard events beside metrics.jsonl.
    """

    log_every: PositiveInt = 1
    eval_every: NonNegativeInt = 100
    eval_tokens: NonNegativeInt = 65_536
    tensorboard: bool = True


class RunSection(Config):
    """The run itself.

    Args:
        dir: where checkpoints and metrics go.
        steps: optimizer steps in all.
        seed: of the weights and of the order of the data.
        device: "cpu", "cuda", "cuda:1"; empty takes a GPU where there is one.
    """

    dir: Path = Path("runs/train")
    steps: PositiveInt = 200
    seed: NonNegativeInt = 0
    device: str = ""


class TrainConfig(Config):
    """Everything that `octavo train` reads from a TOML file."""

    model: ModelSection = ModelSection()
    data: DataSection = DataSection()
    optimizer: OptimizerSection = OptimizerSection()
    schedule: ScheduleSection = ScheduleSection()
    precision: PrecisionSection = PrecisionSection()
    checkpoint: CheckpointSection = CheckpointSection()
    metrics: MetricsSection = MetricsSection()
    run: RunSection = RunSection()

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.schedule.warmup_steps >= self.run.steps:
            raise ValueError(
                f"schedule.warmup_steps={self.schedule.warmup_steps} must be below run.steps={self.run.steps}"
            )
        return self
