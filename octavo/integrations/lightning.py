"""octavo as precision plug-in of Lightning's Trainer; optimizers, strategies and checkpoints stay Lightning's own."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch
from torch import nn

import octavo.nn
from octavo.errors import CheckpointError, ConfigError
from octavo.integrations.other_fp8 import refuse_other_fp8
from octavo.integrations.tested import require
from octavo.nn.conversion import DEFAULT_IGNORE, ConversionReport
from octavo.nn.fp8_state import agree_on_staged_amaxes
from octavo.nn.overrides import checked_names
from octavo.numerics.recipe import Recipe, get_recipe

try:
    from lightning.pytorch.plugins.precision import HalfPrecision, MixedPrecision, Precision
    from lightning.pytorch.utilities.rank_zero import rank_zero_info
except ImportError:
    require("lightning", "lightning")  # says which version is needed
    raise
require("lightning", "lightning")

_PRECISIONS = ("32-true", "bf16-true", "bf16-mixed")


class OctavoPrecision(Precision):  # type: ignore[misc]
    """For Trainer(plugins=[OctavoPrecision("blockwise")]), in place of Trainer(precision=...): linears run in FP8.

    Lightning has it convert the LightningModule in fit, validate, test and predict, after configure_model. Delayed
    scaling's state is in Lightning's checkpoints under this class's name; a Trainer without the plug-in leaves it
    there. The state dict's keys are the module's own.

    Args:
        recipe: as octavo.convert takes it.
        precision: what Trainer(precision=...) would be for all that is not in FP8: "32-true", "bf16-true" or
            "bf16-mixed".
        ignore: as octavo.convert takes it.
        overrides: as octavo.convert takes them.
        fp8_state: False to begin with empty amax histories where a checkpoint has none, one of a run in bf16 say.
    Raises:
        ConfigError: another precision.
        RecipeError: an unknown recipe.
    """

    def __init__(
        self,
        recipe: Recipe | str = "blockwise",
        *,
        precision: str = "32-true",
        ignore: Sequence[str] = DEFAULT_IGNORE,
        overrides: Mapping[str, Recipe | str] | None = None,
        fp8_state: bool = True,
    ) -> None:
        if precision not in _PRECISIONS:
            raise ConfigError(
                f"beside octavo's FP8 the rest runs in {', '.join(_PRECISIONS)}, got precision={precision!r}; take one "
                "of these"
            )
        self.precision = precision
        self.recipe = get_recipe(recipe)
        self.report: ConversionReport | None = None  # of the last conversion
        self._options: dict[str, Any] = {"ignore": checked_names(ignore, "ignore"), "overrides": overrides}
        self._needs_state = fp8_state
        self._rest: Any = Precision()
        if precision == "bf16-true":
            self._rest = HalfPrecision(precision)
        elif precision == "bf16-mixed":
            self._rest = MixedPrecision(precision, "cpu")  # the device is known when connect is called
        self._model: nn.Module | None = None
        self._last_step = ""

    def convert_module(self, module: nn.Module) -> nn.Module:
        """octavo.convert, before a strategy wraps the module.

        Raises:
            ConfigError: a layer of another FP8 library, or linears that configure_model has sharded before convert.
            RecipeError: see octavo.convert.
        """
        refuse_other_fp8(module)
        module = self._rest.convert_module(module)
        self.report = octavo.nn.convert(module, self.recipe, **self._options)
        rank_zero_info(str(self.report))
        self._model = module
        return module

    def connect(self, model: nn.Module, optimizers: list[Any], lr_schedulers: list[Any]) -> tuple[Any, list[Any], Any]:
        """Called when the model lies on its device, and in DDP where a strategy has it.

        Raises:
            ConfigError: DDP would give rank 0's amaxes to all.
        """
        if getattr(model, "broadcast_buffers", False) and self._state():
            raise ConfigError(
                "under delayed scaling DDP's broadcast_buffers must be off: at each forward rank 0's amaxes would "
                "replace the others'; give the Trainer strategy=DDPStrategy(broadcast_buffers=False)"
            )
        if isinstance(self._rest, MixedPrecision):
            self._rest.device = next(model.parameters()).device.type
        return super().connect(model, optimizers, lr_schedulers)  # type: ignore[no-any-return]

    def tensor_init_context(self) -> AbstractContextManager[None]:
        """As the rest's precision has it."""
        return self._rest.tensor_init_context()  # type: ignore[no-any-return]

    def module_init_context(self) -> AbstractContextManager[None]:
        """As the rest's precision has it."""
        return self._rest.module_init_context()  # type: ignore[no-any-return]

    def forward_context(self) -> AbstractContextManager[None]:
        """As the rest's precision has it: FP8 needs none."""
        return self._rest.forward_context()  # type: ignore[no-any-return]

    def convert_input(self, data: Any) -> Any:
        """As the rest's precision has it."""
        return self._rest.convert_input(data)

    def convert_output(self, data: Any) -> Any:
        """As the rest's precision has it."""
        return self._rest.convert_output(data)

    def train_step_context(self) -> AbstractContextManager[None]:
        """Around each micro-batch."""
        return self._step("train")

    def val_step_context(self) -> AbstractContextManager[None]:
        """Around each batch of a validation."""
        return self._step("val")

    def test_step_context(self) -> AbstractContextManager[None]:
        """Around each batch of a test."""
        return self._step("test")

    def predict_step_context(self) -> AbstractContextManager[None]:
        """Around each batch of a prediction."""
        return self._step("predict")

    @contextmanager
    def _step(self, kind: str) -> Iterator[None]:
        """Between steps of two kinds callbacks write weights: WeightAveraging through .data, which torch counts not."""
        if kind != self._last_step and self._model is not None:
            octavo.nn.mark_weights_updated(self._model)
        self._last_step = kind
        with self.forward_context():
            yield

    def state_dict(self) -> dict[str, torch.Tensor]:
        """Delayed scaling's state, of all ranks; empty for other recipes. Lightning calls it on every rank."""
        if self._model is not None:
            agree_on_staged_amaxes(self._model)  # the checkpoint has one rank's
        return {name: tensor.clone() for name, tensor in self._state().items()}

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Called before load_state_dict, which Lightning leaves out where a checkpoint has no state.

        Raises:
            CheckpointError: a recipe has state, and the checkpoint has none.
        """
        if self._needs_state and type(self).__qualname__ not in checkpoint and self._state():
            raise CheckpointError(
                "the checkpoint has no state of delayed scaling; resume from one that was saved with OctavoPrecision, "
                "or give it fp8_state=False to begin with empty amax histories"
            )

    def load_state_dict(self, state_dict: dict[str, torch.Tensor]) -> None:
        """Take state_dict's.

        Raises:
            CheckpointError: it is of another model.
        """
        if self._model is not None:
            octavo.nn.load_fp8_state_dict(self._model, state_dict)

    def _state(self) -> dict[str, torch.Tensor]:
        return {} if self._model is None else octavo.nn.fp8_state_dict(self._model)
