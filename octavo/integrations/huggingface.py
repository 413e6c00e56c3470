"""octavo inside transformers' Trainer, accelerate and TRL; parameters, checkpoints and their keys stay theirs."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from safetensors.torch import load_file, save_file
from torch import nn

import octavo.nn
from octavo.amp.levels import Level, Levels, check_level
from octavo.errors import CheckpointError, ConfigError
from octavo.integrations.other_fp8 import refuse_other_fp8
from octavo.integrations.tested import accelerates_fp8, require
from octavo.nn.conversion import DEFAULT_IGNORE, ConversionReport, require_module
from octavo.nn.fp8_state import agree_on_staged_amaxes
from octavo.nn.overrides import checked_names
from octavo.numerics.recipe import Recipe

try:
    from transformers import TrainerCallback
    from transformers.quantizers import HfQuantizer
    from transformers.quantizers.auto import register_quantization_config, register_quantizer
    from transformers.utils.quantization_config import QuantizationConfigMixin
except ImportError:
    require("huggingface", "transformers")  # says which version is needed
    raise
require("huggingface", "transformers")

_METHOD, _STATE_FILE = "octavo", "fp8.safetensors"
_ENGINES = ("DistributedDataParallel", "FullyShardedDataParallel", "FSDPModule", "DeepSpeedEngine")


def convert(model: nn.Module, recipe: Recipe | str, **options: Any) -> ConversionReport:
    """octavo.convert for a model that goes to Trainer or accelerator.prepare() next.

    Args:
        model: as transformers made or loaded it.
        recipe: as octavo.convert takes it, and so are the options.
    Returns:
        ConversionReport, which OctavoCallback prints.
    Raises:
        ConfigError: the model was prepared or is sharded, it is quantized already, or accelerate's own FP8 is on.
        RecipeError: see octavo.convert.
    """
    require_module(model, "convert")
    _refuse_prepared(model)
    _refuse_other_fp8(model)
    report = octavo.nn.convert(model, recipe, **options)
    # DDP would replace the amaxes that other ranks have staged by rank 0's
    vars(model)["_ddp_params_and_buffers_to_ignore"] = list(octavo.nn.fp8_state_dict(model))
    vars(model)["conversion_report"] = report
    return report


@register_quantization_config(_METHOD)
class OctavoConfig(QuantizationConfigMixin):  # type: ignore[misc]
    """from_pretrained(..., quantization_config=OctavoConfig(recipe="blockwise")) gives a converted, trainable model.

    The model is a plain one to transformers afterwards: it trains, is cast and is saved as if it had been loaded
    without, and config.json does not name octavo. Give the config again where a checkpoint is loaded to train on.

    Args:
        recipe: as octavo.convert takes it.
        ignore: as octavo.convert takes it.
        overrides: as octavo.convert takes them.
    """

    def __init__(
        self,
        recipe: Recipe | str = "blockwise",
        ignore: Sequence[str] = DEFAULT_IGNORE,
        overrides: Mapping[str, Recipe | str] | None = None,
        quant_method: str = _METHOD,
    ) -> None:
        self.quant_method = quant_method
        self.recipe, self.ignore, self.overrides = recipe, checked_names(ignore, "ignore"), overrides

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON values, as transformers prints them; a Recipe's own as Recipe.as_dict gives them."""
        overrides = {name: _plain(recipe) for name, recipe in (self.overrides or {}).items()}
        return {**vars(self), "recipe": _plain(self.recipe), "overrides": overrides or None}


@register_quantizer(_METHOD)
class OctavoQuantizer(HfQuantizer):  # type: ignore[misc]
    """What transformers calls for an OctavoConfig: it converts when all weights are there."""

    is_trainable = is_qat_trainable = True

    def is_serializable(self) -> bool:
        """A checkpoint has the weights themselves."""
        return True

    def validate_environment(self, *args: Any, device_map: Any = None, **kwargs: Any) -> None:
        """Refuse what accelerate spreads over several devices by hooks on the linears that would be replaced."""
        places = set(device_map.values()) if isinstance(device_map, Mapping) else {device_map}
        if len(places) > 1 or places & {"auto", "balanced", "balanced_low_0", "sequential", "disk"}:
            raise ConfigError(
                f"OctavoConfig converts models that lie on one device, got device_map={device_map!r}; leave it out and "
                "let Trainer or accelerate place the model"
            )

    def postprocess_model(self, model: nn.Module, **kwargs: Any) -> None:
        """Convert, and leave no mark of a quantized model."""
        self.remove_quantization_config(model)
        config = self.quantization_config
        convert(model, config.recipe, ignore=config.ignore, overrides=config.overrides)


class OctavoCallback(TrainerCallback):  # type: ignore[misc]
    """For Trainer(callbacks=[OctavoCallback()]): the report at the start, FP8 state in checkpoints, statistics in logs.

    A run that is resumed from a checkpoint of args.output_dir goes on with the same bits, under delayed scaling too.

    Args:
        statistics: a TensorStatistics of the model, whose scalars join the logs; None for none.
        schedule: (first step, level) pairs: "O1" computes in FP8, "O2" in bf16 (see octavo.amp). None for FP8 always.
        fp8_state: False to begin with empty amax histories where a checkpoint has none, one of a run in bf16 say.
    """

    def __init__(
        self,
        *,
        statistics: octavo.nn.TensorStatistics | None = None,
        schedule: Sequence[tuple[int, str]] | None = None,
        fp8_state: bool = True,
    ) -> None:
        self._statistics, self._needs_state = statistics, fp8_state
        self._schedule = [(first, check_level(level)) for first, level in schedule or ()]
        self._levels: Levels | None = None
        self._found: dict[str, float] = {}

    def on_train_begin(self, args: Any, state: Any, control: Any, model: nn.Module, **kwargs: Any) -> None:
        """Print what runs in FP8, and take the state of a run that is resumed."""
        _refuse_other_fp8(model)
        if self._levels is not None:  # an earlier train() may have ended in O2
            self._levels.set("O1")
        linears = [module for module in model.modules() if isinstance(module, octavo.nn.Linear)]
        if not any(linear.recipe and linear.recipe.is_fp8 for linear in linears):
            raise ConfigError(
                "OctavoCallback found no linear in FP8; load the model with quantization_config=OctavoConfig(...), or "
                "call convert(model, recipe) of octavo.integrations.huggingface before the Trainer is made"
            )
        self._levels = Levels(model, None) if self._schedule else None
        if state.is_world_process_zero:
            print(getattr(model, "conversion_report", f"{len(linears)} linears are octavo's"))
        if state.global_step > 0 and octavo.nn.fp8_state_dict(model):
            if (path := _state_path(args, state)).is_file():
                octavo.nn.load_fp8_state_dict(model, load_file(path))
            elif self._needs_state:
                raise CheckpointError(
                    f"{path} is missing, which delayed scaling needs to go on; resume from a checkpoint of output_dir "
                    "that a Trainer with OctavoCallback has saved, or give it fp8_state=False for empty amax histories"
                )

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Put the step's level in force."""
        if self._levels is not None:
            level: Level = next((level for first, level in self._schedule[::-1] if first <= state.global_step), "O1")
            if level != self._levels.level:
                self._levels.set(level)

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """End the step of the statistics."""
        if self._statistics is not None:
            self._statistics.step()
            for row in self._statistics.rows():
                self._found |= dict(row.scalars())

    def on_train_end(self, args: Any, state: Any, control: Any, model: nn.Module, **kwargs: Any) -> None:
        """Take the state of the checkpoint that load_best_model_at_end has taken the weights of."""
        if args.load_best_model_at_end and state.best_model_checkpoint is not None:
            path = Path(state.best_model_checkpoint, _STATE_FILE)
            if octavo.nn.fp8_state_dict(model) and path.is_file():
                octavo.nn.load_fp8_state_dict(model, load_file(path))

    def on_log(self, args: Any, state: Any, control: Any, logs: dict[str, float] | None = None, **kwargs: Any) -> None:
        """Add the newest statistics to the Trainer's own row of the log."""
        for row in (logs or {}, *state.log_history[-1:]):
            row |= self._found
        self._found = {}

    def on_save(self, args: Any, state: Any, control: Any, model: nn.Module, **kwargs: Any) -> None:
        """Write delayed scaling's state beside the checkpoint, the same on all ranks."""
        agree_on_staged_amaxes(model)
        if (found := octavo.nn.fp8_state_dict(model)) and state.is_world_process_zero:
            save_file(found, _state_path(args, state))


def _state_path(args: Any, state: Any) -> Path:
    return Path(args.output_dir, f"checkpoint-{state.global_step}", _STATE_FILE)


def _plain(recipe: Recipe | str) -> Any:
    return recipe.as_dict() if isinstance(recipe, Recipe) else recipe


def _refuse_prepared(model: nn.Module) -> None:
    if engine := next((base.__name__ for base in type(model).__mro__ if base.__name__ in _ENGINES), None):
        raise ConfigError(
            f"this model is a {engine} already, and convert comes before accelerator.prepare(): "
            "convert(model, recipe), then model, optimizer = accelerator.prepare(model, optimizer)"
        )


def _refuse_other_fp8(model: nn.Module) -> None:
    """Refuse a model that is quantized, has another FP8 library's linears, or will get them from accelerate."""
    if getattr(model, "is_quantized", False):
        method = getattr(model, "quantization_method", "another method")
        raise ConfigError(
            f"this model is quantized by {getattr(method, 'value', method)} already; load a bf16 checkpoint of it, or "
            "call model.dequantize() first"
        )
    refuse_other_fp8(model)
    if where := accelerates_fp8():
        raise ConfigError(f"accelerate's own FP8 is on ({where}) beside octavo's; set mixed_precision to bf16 or no")
