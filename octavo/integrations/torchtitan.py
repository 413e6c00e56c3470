"""octavo's FP8 as a quantization converter of torchtitan: it changes the model's config before torchtitan builds it."""

import dataclasses
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

import octavo.nn
from octavo.errors import ConfigError
from octavo.integrations.fp8_parts import FP8PartsState, linears_with_state
from octavo.integrations.other_fp8 import conflict
from octavo.integrations.tested import require
from octavo.nn.conversion import DEFAULT_IGNORE, is_ignored
from octavo.numerics.recipe import Recipe, get_recipe

try:
    from torchtitan.components.checkpoint import CheckpointManager
    from torchtitan.components.quantization import QuantizationConverter
    from torchtitan.models.common.linear import Linear
    from torchtitan.protocols.module import Module
    from torchtitan.tools.logging import logger
except ImportError:
    require("torchtitan", "torchtitan")  # says which version is needed
    raise
require("torchtitan", "torchtitan")

_STATE = "octavo_fp8"


class OctavoLinear(octavo.nn.Linear, Module):  # type: ignore[misc]
    """octavo.nn.Linear under torchtitan's protocol of modules: built from a config, initialized and sharded by it."""

    @dataclasses.dataclass(kw_only=True, slots=True)
    class Config(Linear.Config):  # type: ignore[misc]
        """Of torchtitan's Linear, field by field."""

    def __init__(self, config: Config) -> None:
        octavo.nn.Linear.__init__(
            self, config.in_features, config.out_features, config.bias, dtype=torch.get_default_dtype()
        )
        self.follows_autocast = True  # as the linear that it stands for


class OctavoConverter(QuantizationConverter):  # type: ignore[misc]
    """For model_registry(flavor, converters=[OctavoConverter.Config(recipe="blockwise")]): linears run in FP8.

    It swaps torchtitan's own Linear.Config; other kinds of linears, experts' grouped GEMMs too, stay as they are, and
    the report that is logged when the model is built says so. Parameters, keys and sharding are torchtitan's own.

    Args:
        config: its Config: recipe, ignore and overrides as octavo.convert takes them, over torchtitan's names.
    Raises:
        RecipeError: an unknown recipe.
    """

    @dataclasses.dataclass(kw_only=True, slots=True)
    class Config(QuantizationConverter.Config):  # type: ignore[misc]
        """What octavo.convert takes."""

        recipe: Recipe | str = "blockwise"
        ignore: tuple[str, ...] = DEFAULT_IGNORE
        overrides: Mapping[str, Recipe | str] | None = None

    def __init__(self, config: Config) -> None:
        self._recipe = get_recipe(config.recipe)
        self._options: dict[str, Any] = {"ignore": tuple(config.ignore), "overrides": config.overrides}

    def convert(self, model_config: Any) -> Any:
        """The config of a model whose linears are octavo's; it raises what octavo.convert does when it is built."""
        for name, linear, parent, field in list(model_config.traverse(Linear.Config)):
            if type(linear) is not Linear.Config or is_ignored(name, self._options["ignore"]):
                continue
            values = {each.name: getattr(linear, each.name) for each in dataclasses.fields(linear) if each.init}
            if isinstance(parent, list):
                parent[field] = OctavoLinear.Config(**values)
            else:
                setattr(parent, field, OctavoLinear.Config(**values))
        return self._converting(model_config)

    def _converting(self, model_config: Any) -> Any:
        """The root config, with octavo.convert at the end of its build."""
        kind, recipe, options = type(model_config), self._recipe, self._options

        class Converting(kind):  # type: ignore[misc, valid-type]
            """Stands for the kind in every check of torchtitan's."""

            def update_from_config(self, *, config: Any, **other: Any) -> None:
                _check_trainer(config)
                kind.update_from_config(self, config=config, **other)

            def build(self, **other: Any) -> Any:
                model = kind.build(self, **other)
                _refuse_other_backends(model)
                logger.info("octavo's FP8:\n%s", octavo.nn.convert(model, recipe, **options))
                return model

        Converting.__name__, Converting.__qualname__ = kind.__name__, kind.__qualname__
        fields = {each.name: getattr(model_config, each.name) for each in dataclasses.fields(kind) if each.init}
        return Converting(**fields)


class OctavoCheckpointManager(CheckpointManager):  # type: ignore[misc]
    """torchtitan's, with delayed scaling's state beside the rest; other recipes need none of it.

    For Trainer.Config(checkpoint=OctavoCheckpointManager.Config(...)). A run that has no such state yet is gone on with
    by exclude_from_loading=["octavo_fp8"].
    """

    @dataclasses.dataclass(kw_only=True, slots=True)
    class Config(CheckpointManager.Config):  # type: ignore[misc]
        """torchtitan's own."""

    def __init__(self, config: Config, *, model_parts: list[nn.Module], states: dict[str, Any], **options: Any) -> None:
        if any(linears_with_state(part) for part in model_parts):
            states[_STATE] = FP8PartsState(model_parts)
        super().__init__(config, model_parts=model_parts, states=states, **options)


def _refuse_other_backends(model: nn.Module) -> None:
    for name, module in model.named_modules():
        if any(kind.__module__.startswith("torchtitan.components.quantization.") for kind in type(module).__mro__):
            raise conflict(f"torchtitan's {type(module).__name__} ({name})")


def _check_trainer(config: Any) -> None:
    parallelism, training = config.parallelism, config.training
    refused = {
        f"parallelism.tensor_parallel_degree={parallelism.tensor_parallel_degree}, which cuts weights behind octavo": (
            parallelism.tensor_parallel_degree > 1
        ),
        "parallelism.pipeline_parallel_degree, which copies the model": parallelism.pipeline_parallel_degree > 1,
        "parallelism.spmd_backend='full_dtensor', whose inputs are DTensors": parallelism.spmd_backend
        == "full_dtensor",
        "CUDA graphs of the whole step; set training.disable_cuda_graphs": not training.disable_cuda_graphs,
    }
    for what, is_on in refused.items():
        if is_on:
            raise ConfigError(f"octavo's linears run under torchtitan's FSDP2 and HSDP, got {what}; turn that off")
