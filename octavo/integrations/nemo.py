"""octavo's FP8 as a quantizer of NeMo AutoModel, which runs it on a model before FSDP2 or DDP takes it."""

import logging
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from torch import nn

import octavo.nn
from octavo.errors import CheckpointError, ConfigError
from octavo.integrations.fp8_parts import FP8PartsState, linears_with_state
from octavo.integrations.other_fp8 import refuse_other_fp8
from octavo.integrations.tested import require
from octavo.nn.conversion import DEFAULT_IGNORE
from octavo.nn.overrides import checked_names
from octavo.numerics.recipe import Recipe, get_recipe

try:
    from nemo_automodel.components.distributed.activation_checkpointing import is_selective_activation_checkpointing
    from nemo_automodel.components.distributed.config import MegatronFSDPConfig
    from nemo_automodel.components.distributed.parallelizer import ModelParallelizer
    from nemo_automodel.components.models.common.hf_checkpointing_mixin import HFCheckpointingMixin
except ImportError:
    require("nemo", "nemo-automodel")  # says which version is needed
    raise
require("nemo", "nemo-automodel")

_STATE = "octavo_fp8"
_logger = logging.getLogger(__name__)


class NemoQuantizer:
    """For qat.qat_config of a recipe's YAML, or from_pretrained(qat_config=NemoQuantizer("blockwise")): FP8 linears.

    NeMo calls it before it shards the model, on the meta device where it does so. Parameters, sharding, optimizers,
    checkpoints and their keys stay NeMo's own. Delayed scaling's state is an item of NeMo's checkpoints, "octavo_fp8".

    Args:
        recipe: as octavo.convert takes it.
        ignore: as octavo.convert takes it, over NeMo's names of modules.
        overrides: as octavo.convert takes them.
        fp8_state: False to begin with empty amax histories where a checkpoint has none, one of a run in bf16 say.
    Raises:
        RecipeError: an unknown recipe.
    """

    def __init__(
        self,
        recipe: Recipe | str = "blockwise",
        *,
        ignore: Sequence[str] = DEFAULT_IGNORE,
        overrides: Mapping[str, Recipe | str] | None = None,
        fp8_state: bool = True,
    ) -> None:
        self._recipe = get_recipe(recipe)
        self._options: dict[str, Any] = {"ignore": checked_names(ignore, "ignore"), "overrides": overrides}
        self._needs_state = fp8_state

    def create_quantizer(self) -> "NemoQuantizer":
        """What NeMo asks a qat_config for."""
        return self

    def prepare(self, model: nn.Module) -> nn.Module:
        """octavo.convert, whose report goes to the log; the same model.

        Raises:
            ConfigError: NeMo's LoRA or another FP8 library has the linears already, or they are sharded.
            RecipeError: see octavo.convert.
        """
        refuse_other_fp8(model)
        _refuse_lora(model)
        _logger.info("octavo's FP8:\n%s", octavo.nn.convert(model, self._recipe, **self._options))
        model.__class__ = _converted(type(model))
        if linears_with_state(model):
            model.__class__ = _with_state(type(model), self._needs_state)
        return model


def _converted(kind: Any) -> type[nn.Module]:
    """A model's class, whose weights are made and which is sharded with octavo in mind."""

    class Converted(kind):  # type: ignore[misc]
        parallelizer = _CheckedParallelizer(getattr(kind, "parallelizer", None) or ModelParallelizer())

        if hasattr(kind, "initialize_weights"):

            def initialize_weights(self, *args: Any, **options: Any) -> Any:
                """NeMo calls it when the model has left the meta device; it knows torch's linears alone."""
                with _torch_linears(self):
                    return super().initialize_weights(*args, **options)

    return _named_as(kind, Converted)


def _with_state(kind: Any, is_needed: bool) -> type[nn.Module]:
    """The class of a model with delayed scaling: NeMo's recipes save and load their model by these methods."""
    if not issubclass(kind, HFCheckpointingMixin):
        raise ConfigError(
            f"delayed scaling has state, and NeMo saves a {kind.__name__} without asking it; build the model by "
            "NeMoAutoModelForCausalLM, or take a recipe without state"
        )

    class WithState(kind):  # type: ignore[misc]
        def save_pretrained(self, save_directory: str, checkpointer: Any = None, **options: Any) -> None:
            super().save_pretrained(save_directory, checkpointer=checkpointer, **options)
            checkpointer.save_distributed_state(FP8PartsState([self]), _STATE, save_directory)

        def load_pretrained(self, folder: str, checkpointer: Any) -> None:
            if hasattr(kind, "load_pretrained"):
                super().load_pretrained(folder, checkpointer=checkpointer)
            else:
                checkpointer.load_model(self, str(Path(folder, "model")))
            if Path(folder, _STATE).is_dir():
                checkpointer.load_distributed_state(FP8PartsState([self]), _STATE, folder)
            elif is_needed:
                raise CheckpointError(
                    f"{folder} has no state of delayed scaling; resume from a checkpoint that was saved with "
                    "NemoQuantizer, or give it fp8_state=False to begin with empty amax histories"
                )

    return _named_as(kind, WithState)


def _named_as(kind: type, made: Any) -> type[nn.Module]:
    """NeMo and transformers know a class by its name and module."""
    made.__name__, made.__qualname__, made.__module__ = kind.__name__, kind.__qualname__, kind.__module__
    return made  # type: ignore[no-any-return]


class _CheckedParallelizer:
    """A model's own, but for what octavo's linears do not take."""

    def __init__(self, own: Any) -> None:
        self._own = own

    def parallelize(self, model: nn.Module, mesh: Any, /) -> Any:
        refused = {
            f"tp_size={mesh.tp_size}, which cuts torch.nn.Linear alone": mesh.tp_size > 1,
            f"pp_size={mesh.pp_size}, which copies the model": mesh.pp_size > 1,
            "Megatron-FSDP, which keeps weights in buffers of its own": isinstance(
                mesh.strategy_config, MegatronFSDPConfig
            ),
            "selective activation checkpointing, whose order of ops octavo's codes change; full works": (
                is_selective_activation_checkpointing(mesh.activation_checkpointing)
            ),
        }
        for what, is_on in refused.items():
            if is_on:
                raise ConfigError(f"octavo's linears run under NeMo's FSDP2 and DDP, got {what}; turn that off")
        return self._own.parallelize(model, mesh)


@contextmanager
def _torch_linears(model: nn.Module) -> Iterator[None]:
    """torch's linears in the places of octavo's, with the same parameters."""
    places = [
        (parent, name, child)
        for parent in model.modules()
        for name, child in parent.named_children()
        if isinstance(child, octavo.nn.Linear)
    ]
    for parent, name, linear in places:
        plain = nn.Linear(linear.in_features, linear.out_features, linear.bias is not None, device="meta")
        for key, parameter in linear.named_parameters(recurse=False):
            plain.register_parameter(key, parameter)
        parent.register_module(name, plain)
    try:
        yield
    finally:
        for parent, name, linear in places:
            parent.register_module(name, linear)


def _refuse_lora(model: nn.Module) -> None:
    for name, module in model.named_modules():
        if any(kind.__module__.startswith("nemo_automodel.components._peft.") for kind in type(module).__mro__):
            raise ConfigError(
                f"{name} has NeMo's adapters already ({type(module).__name__}), which octavo would convert too; train "
                "without peft, or without octavo"
            )
