"""From configuration to objects: device, architecture, model and its numerics."""

import functools

import torch

from octavo.distributed.mesh import Mesh, ParallelSection
from octavo.distributed.tensor_group import TensorGroup
from octavo.errors import ConfigError
from octavo.models import Decoder, load_model
from octavo.models.config import ModelConfig
from octavo.nn import Linear, convert
from octavo.nn.checkpoint import checkpoint
from octavo.nn.cut_linear import CutLinear
from octavo.numerics import Numerics
from octavo.parallel import CutReport, parallelize
from octavo.run.build import build_model_config, watch_routers
from octavo.train.config import PrecisionSection, RunSection, TrainConfig
from octavo.train.lora import add_adapters

DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32}


def check_seq_len(seq_len: int, architecture: ModelConfig) -> None:
    """Raise a ConfigError where a run's sequences are longer than its model takes."""
    if seq_len > architecture.max_position_embeddings:
        raise ConfigError(
            f"data.seq_len={seq_len} is more than the model's "
            f"max_position_embeddings={architecture.max_position_embeddings}"
        )


def build_model(config: TrainConfig, vocab_size: int, eos_id: int | None, device: torch.device) -> Decoder:
    """The model at step 0, in the run's numerics: random weights by run.seed, or model.path's, with [lora]'s adapters.

    Raises:
        CheckpointError: model.path cannot be read.
        ConfigError: it does not fit the tokenizer or data.seq_len; see add_adapters.
    """
    dtype = DTYPES[config.precision.dtype]
    if config.model.path:
        model = load_model(config.model.path, device=device, dtype=dtype, trainable=True)
        _check_vocabulary(model, config, vocab_size)
    else:
        architecture = build_model_config(config.model, vocab_size, eos_id, config.data.seq_len)
        model = Decoder(architecture, dtype=dtype, device=device, seed=config.run.seed)
    check_seq_len(config.data.seq_len, model.config)
    watch_routers(model, config.model).scale(1.0 / config.data.num_micro_batches)  # each adds its gradient
    if config.lora is not None:
        add_adapters(model, config.lora, config.run.seed)
    set_precision(model, config.precision)
    recompute_layers(model, config.run)
    return model


def set_precision(model: Decoder, precision: PrecisionSection) -> None:
    """Give a model the numerics of a [precision] section; its conversion_report says what every linear became.

    Raises:
        ConfigError: layers or names that the model does not have.
        RecipeError: the same.
        BackendError: a recipe that its device lacks.
    """
    numerics = Numerics(precision.make_recipe())
    ignore = high_precision_layers(precision, model)
    model.set_numerics(numerics, ignore=ignore)
    if precision.modules:
        model.conversion_report = convert(model, numerics.recipe, ignore=ignore, overrides=precision.module_recipes())


def cut_linears(model: Decoder, ranks: Mesh | TensorGroup, parallel: ParallelSection) -> CutReport:
    """Cut a model among ranks as a [parallel] section says.

    Raises:
        ConfigError: the model is not one that these ranks can cut and train.
        RecipeError: its recipe does not go with the mode.
        ShapeError: the ranks do not divide it.
    """
    mode, sequence_parallel = parallel.tensor_parallel_mode, parallel.sequence_parallel
    report = parallelize(model, ranks, mode=mode, sequence_parallel=sequence_parallel)
    for module in model.modules():
        if isinstance(module, CutLinear):
            module.check()
    return report


def recompute_layers(model: Decoder, run: RunSection) -> None:
    """Under run.recompute = "full", let the first layers keep their inputs alone and run again in the backward.

    Raises:
        ConfigError: more layers than the model has.
    """
    if run.recompute_num_layers > len(model.layers):
        raise ConfigError(
            f"run.recompute_num_layers={run.recompute_num_layers} is more than the model's {len(model.layers)} layers; "
            "0 means all"
        )
    if run.recompute == "full":
        for layer in list(model.layers)[: run.recompute_num_layers or None]:
            layer.forward = functools.partial(checkpoint, layer.forward)  # type: ignore[method-assign]


def high_precision_layers(precision: PrecisionSection, model: Decoder) -> tuple[str, ...]:
    """Full names of the linears that a [precision] section leaves unquantized (lm_head always is one)."""
    num_layers = model.config.num_layers
    start, end = precision.num_layers_at_start_in_bf16, precision.num_layers_at_end_in_bf16
    if start + end > num_layers:
        raise ConfigError(
            f"precision leaves {start} + {end} layers in bf16, the model has {num_layers}; for no FP8 at all set "
            "precision.recipe = 'bf16'"
        )
    layers = {f"layers.{i}" for i in (*range(start), *range(num_layers - end, num_layers))}
    linears = (name for name, module in model.named_modules() if isinstance(module, Linear))
    return ("lm_head", *(name for name in linears if ".".join(name.split(".")[:2]) in layers))


def _check_vocabulary(model: Decoder, config: TrainConfig, vocab_size: int) -> None:
    if vocab_size > model.config.vocab_size:
        raise ConfigError(
            f"the tokenizer has {vocab_size} tokens, {config.model.path} embeds {model.config.vocab_size}; leave "
            "data.tokenizer empty to take the checkpoint's own"
        )
