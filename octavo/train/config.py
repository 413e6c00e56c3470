"""The one configuration tree of a training run: what a TOML file may say, section by section."""

from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal, Self

from pydantic import (
    BeforeValidator,
    Field,
    NonNegativeFloat,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
    field_validator,
    model_validator,
)

from octavo.config import Config
from octavo.distributed.mesh import ParallelSection
from octavo.errors import ConfigError, RecipeError
from octavo.numerics import RECIPE_NAMES, Recipe, get_recipe
from octavo.run.sections import ModelSection, OptimizerSection


class DataSection(Config):
    """The text or the conversations, their tokenizer, and how they are cut into batches.

    Args:
        format: "text": language modelling, every token is a target. "chat": supervised fine-tuning on JSON lines of
            {"messages": [{"role", "content"}, ...]} or {"prompt", "completion"}; the assistant's answers alone are
            targets.
        path: a text file, a .jsonl file, a directory of either, or "stdlib": this Python's own sources. For "chat" a
            .jsonl file, a directory of them, or "tasks": small problems with their answers, made on the spot.
        suffixes: which files of a directory are read.
        text_field: the key of a JSON line that holds the text.
        validation_fraction: the share of documents, chosen by their hash, that is kept for validation.
        validation_path: separate validation text; validation_fraction then has no say.
        max_bytes: read no more than this much text; 0 reads all.
        tokenizer: a tokenizer.json or a directory that holds one; empty trains a byte-level BPE of vocab_size on
            the first tokenizer_bytes of training text (or takes model.path's).
        cache_dir: where tokens are kept, by the fingerprint of text and tokenizer.
        seq_len: tokens in a sequence. For "chat" the most: whole examples are packed into it, each seeing itself alone.
        batch_size: sequences in an optimizer step.
        micro_batch_size: sequences in one forward pass; batch_size must be a multiple. 0 for batch_size.
        mask_documents: attention and loss stop at document ends ("text" only; "chat" always does).
        chat_template: a Jinja file in Hugging Face's form; empty takes the tokenizer's own, or else
            octavo.models.chat.DEFAULT_CHAT_TEMPLATE. The checkpoint carries it.
        long_examples: a chat example of more than seq_len tokens: "skip" it, "cut" its end off, or stop with an
            "error"; what was skipped or cut is counted and said.
        num_tasks: how many problems "tasks" makes.
    """

    format: Literal["text", "chat"] = "text"
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
    chat_template: str = ""
    long_examples: Literal["skip", "cut", "error"] = "skip"
    num_tasks: PositiveInt = 20_000

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
        if self.format == "text" and (self.chat_template or self.path == "tasks"):
            raise ValueError("chat_template and path = 'tasks' go with format = 'chat', got format = 'text'")
        return self


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


class RecipeSection(Config):
    """A recipe and its fields, as octavo.get_recipe takes them; unset keeps the recipe's own.

    Args:
        recipe: one of octavo.numerics.RECIPE_NAMES.
        fp8_format: field of the FP8 recipes.
        backward: field of the FP8 recipes.
        scale_format: field of the FP8 recipes.
        amax_floor: field of the FP8 recipes.
        margin: field of "delayed".
        amax_history_len: field of "delayed".
        amax_compute_algo: field of "delayed".
        update_every: field of "delayed"; "step" where it is not set, so that micro-batches of a step share scales.
        high_precision_gemms: GEMMs of "output", "grad_input" and "grad_weight" that stay in high precision.
        fake_quant: operands are quantized and decoded, and the GEMMs run in high precision.
        saved_activations: "fp8" or "bf16": how the inputs of norms and activations are kept for the backward.
        scale_rounding: field of "mxfp8".
        stochastic_rounding: of "nvfp4".
        random_hadamard: of "nvfp4".
        square_weight_blocks: of "nvfp4".
    """

    recipe: str = "blockwise"
    fp8_format: Literal["hybrid", "e4m3"] | None = None
    backward: Literal["fp8", "bf16"] | None = None
    scale_format: Literal["fp32", "e8m0"] | None = None
    amax_floor: NonNegativeFloat | None = None
    margin: int | None = None
    amax_history_len: PositiveInt | None = None
    amax_compute_algo: Literal["max", "most_recent"] | None = None
    update_every: Literal["forward", "step"] | None = None
    high_precision_gemms: tuple[Literal["output", "grad_input", "grad_weight"], ...] | None = None
    fake_quant: bool | None = None
    saved_activations: Literal["fp8", "bf16"] | None = None
    scale_rounding: Literal["up", "down"] | None = None
    stochastic_rounding: bool | None = None
    random_hadamard: bool | None = None
    square_weight_blocks: bool | None = None

    def make_recipe(self) -> Recipe:
        """The recipe that this section describes; RecipeError where there is none."""
        fields = self.model_dump(include=set(RecipeSection.model_fields) - {"recipe"}, exclude_none=True)
        if self.recipe == "delayed":
            fields.setdefault("update_every", "step")
        return get_recipe(self.recipe, **fields)

    @model_validator(mode="after")
    def _check_recipe(self) -> Self:
        self.make_recipe()
        return self


class PrecisionSection(RecipeSection):
    """In which precision the linears compute: a recipe, and where another one is used.

    Args:
        dtype: parameters and activations; "fp32" is the yardstick, with recipe "bf16" only (all linears unquantized).
        num_layers_at_start_in_bf16: decoder layers left unquantized at the start.
        num_layers_at_end_in_bf16: decoder layers left unquantized at the end.
        modules: other recipes for single linears: name -> recipe, or name -> {recipe = ..., and its fields}. A name is
            a linear's full name, a prefix of it that ends at a dot, or one dotted part ("layers.0", "down_proj"); the
            most specific one decides. The resolved list is printed and saved.
    """

    dtype: Literal["bf16", "fp32"] = "bf16"
    num_layers_at_start_in_bf16: NonNegativeInt = 0
    num_layers_at_end_in_bf16: NonNegativeInt = 0
    modules: dict[str, str | RecipeSection] = {}

    def module_recipes(self) -> dict[str, Recipe]:
        """The recipes of `modules`, by the names given there."""
        return {
            name: (RecipeSection(recipe=value) if isinstance(value, str) else value).make_recipe()
            for name, value in self.modules.items()
        }

    @field_validator("modules", mode="before")
    @classmethod
    def _join_names(cls, value: Any) -> Any:
        """`layers.0.mlp = "bf16"`, unquoted in TOML or in --set, is a table in a table: the dotted name is meant."""
        return dict(_joined(value)) if isinstance(value, dict) else value

    @model_validator(mode="after")
    def _check(self) -> Self:
        recipes = [self.make_recipe(), *self.module_recipes().values()]
        if self.dtype == "fp32" and any(recipe.is_fp8 for recipe in recipes):
            name = next(recipe.name for recipe in recipes if recipe.is_fp8)
            raise ValueError(f"dtype 'fp32' goes with recipe 'bf16' (nothing quantized), got recipe {name!r}")
        return self


def _joined(table: dict[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for key, value in table.items():
        if isinstance(value, dict) and "recipe" not in value and value:
            yield from _joined(value, f"{prefix}{key}.")
        else:
            yield prefix + key, value


def _as_tuple(value: Any) -> Any:
    """pydantic's strict mode takes no list for a tuple once a validator has seen it, as a file's are."""
    return (value,) if isinstance(value, str) else tuple(value) if isinstance(value, list) else value


class LoraSection(Config):
    """Low-rank adapters beside the linears of model.path, whose own weights stay as they are; needs that key.

    Args:
        rank: r of A [r, in] and B [out, r].
        alpha: the product B A counts alpha / rank times.
        target_modules: which linears get a pair, by Hugging Face's names as PEFT matches them: a module's full name, or
            the end of it after a dot ("q_proj", "mlp.down_proj"), one or a list. "all-linear" is every one but lm_head.
        keep_codes_only: of the base's linears in FP8 hold the codes alone, for less memory ("blockwise" and recipes of
            one scale a tensor).
    """

    other_names: ClassVar[Mapping[str, str]] = {
        **dict.fromkeys(("r", "lora_r", "lora_rank", "lora_dim"), "rank"),
        "lora_alpha": "alpha",
        **dict.fromkeys(("targets", "lora_target_modules", "lora_target"), "target_modules"),
    }

    rank: int = Field(default=16, ge=1)
    alpha: PositiveFloat = 32.0
    target_modules: Annotated[tuple[str, ...], BeforeValidator(_as_tuple)] = ("all-linear",)
    keep_codes_only: bool = False

    @model_validator(mode="before")
    @classmethod
    def _refuse_unbuilt(cls, values: Any) -> Any:
        for key in ("use_dora", "dropout", "lora_dropout", "use_rslora"):
            if isinstance(values, dict) and key in values:
                raise ValueError(
                    f"octavo train has plain LoRA, got {key}; leave it out, or use octavo.integrations.peft, whose "
                    "LoraConfig has it"
                )
        return values


class CheckpointSection(Config):
    """When a checkpoint is written besides the last step's, and how many stay.

    Args:
        every: optimizer steps between checkpoints; 0 writes the last step's alone.
        keep: the newest ones that stay on disk.
        async_mode: "async": training goes on while a copy of the state in the host's memory is written; "disabled": it
            waits.
    """

    every: NonNegativeInt = 100
    keep: PositiveInt = 2
    async_mode: Literal["disabled", "async"] = "disabled"


class MetricsSection(Config):
    """What is measured and where it is written.

    Args:
        log_every: optimizer steps between rows of metrics.
        eval_every: optimizer steps between validations; 0 validates after the last step alone.
        eval_tokens: validation tokens used each time, from the start of the validation text; 0 uses all.
        tensorboard: write TensorBoard events beside metrics.jsonl.
        wandb: log to W&B too, under a project of this name (needs the wandb package); empty for not.
        mlflow: log to MLflow too, under an experiment of this name (needs the mlflow package); empty for not.
    """

    log_every: PositiveInt = 1
    eval_every: NonNegativeInt = 100
    eval_tokens: NonNegativeInt = 65_536
    tensorboard: bool = True
    wandb: str = ""
    mlflow: str = ""


class StatisticsSection(Config):
    """Per-layer statistics of a run, under TransformerEngine's names; see octavo.nn.TensorStatistics.

    Args:
        every: optimizer steps between measurements; 0 measures nothing and costs nothing.
        start_step: the first step that is measured.
        end_step: the first that no longer is; 0 for no end.
        layers: linears by full name or a part of it; empty for all.
        tensors: of "activation", "gradient", "weight", "output", "wgrad", "dgrad"; empty for all.
        stats: such as "underflows%", "overflows%", "scale_inv_min", "mse"; empty for all.
    """

    every: NonNegativeInt = 0
    start_step: NonNegativeInt = 0
    end_step: NonNegativeInt = 0
    layers: tuple[str, ...] = ()
    tensors: tuple[str, ...] = ()
    stats: tuple[str, ...] = ()


class RunSection(Config):
    """The run itself.

    Args:
        dir: where checkpoints and metrics go.
        steps: optimizer steps in all.
        seed: of the weights and of the order of the data.
        device: "cpu", "cuda", "cuda:1"; empty takes a GPU where there is one.
        recompute: "full" keeps a decoder layer's input alone and runs the layer again in the backward: less memory
            for a third more work, and the same bits. "none" keeps what every layer needs.
        recompute_num_layers: how many layers, from the first, "full" applies to; 0 for all.
        deterministic: on a GPU, attention's backward adds in a fixed order too, more slowly: a run then has the same
            bits each time, and with parallel.reduction = "ordered" those of one GPU. A CPU's runs have them anyway.
    """

    dir: Path = Path("runs/train")
    steps: PositiveInt = 200
    seed: int = Field(default=0, ge=0, lt=2**64)
    device: str = ""
    recompute: Literal["none", "full"] = "none"
    recompute_num_layers: NonNegativeInt = 0
    deterministic: bool = False


class TrainConfig(Config):
    """Everything that `octavo train` reads from a TOML file."""

    model: ModelSection = ModelSection()
    data: DataSection = DataSection()
    optimizer: OptimizerSection = OptimizerSection()
    schedule: ScheduleSection = ScheduleSection()
    precision: PrecisionSection = PrecisionSection()
    lora: LoraSection | None = None
    checkpoint: CheckpointSection = CheckpointSection()
    metrics: MetricsSection = MetricsSection()
    statistics: StatisticsSection = StatisticsSection()
    parallel: ParallelSection = ParallelSection()
    run: RunSection = RunSection()

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.parallel.reduction == "ordered" and self.optimizer.master_weights != "fp32":
            raise ValueError(
                "parallel.reduction = 'ordered' adds gradients onto fp32 masters, got optimizer.master_weights = "
                f"{self.optimizer.master_weights!r}; set it to 'fp32', or parallel.reduction = 'sum'"
            )
        if self.lora is not None and not self.model.path:
            raise ValueError("[lora] trains adapters of a checkpoint's weights, got no model.path; set it")
        if self.schedule.warmup_steps >= self.run.steps:
            raise ValueError(
                f"schedule.warmup_steps={self.schedule.warmup_steps} must be below run.steps={self.run.steps}; "
                f"raise run.steps, or set both: --set run.steps={self.run.steps} --set "
                f"schedule.warmup_steps={(self.run.steps - 1) // 10}"
            )
        return self

    @classmethod
    def drop_displaced(cls, data: dict[str, Any], file: Mapping[str, Any], overridden: Collection[str]) -> list[str]:
        """Where --set names another recipe, the fields of the file's own that the new one does not have go with it."""
        if "precision.recipe" not in overridden or "precision" in overridden:
            return []
        new, section = data["precision"]["recipe"], file.get("precision", {})
        old = section.get("recipe", RecipeSection.model_fields["recipe"].default)
        fields = {key: section[key] for key in section if key in RecipeSection.model_fields and key != "recipe"}
        if new == old or new not in RECIPE_NAMES or not _fits(old, fields):
            return []  # what is wrong with a section in itself is for its own check to say
        dropped = [key for key in fields if f"precision.{key}" not in overridden and not _fits(new, {key: fields[key]})]
        for key in dropped:
            del data["precision"][key]
        named = ", ".join(f"precision.{key} = {fields[key]!r}" for key in dropped)
        return [f"dropped {named}: recipe {new!r}, which --set names, has no such field"] if named else []


def _fits(recipe: str, fields: Mapping[str, Any]) -> bool:
    """Whether a recipe takes these fields."""
    try:
        RecipeSection(recipe=recipe, **fields)
    except (ConfigError, RecipeError):
        return False
    return True
