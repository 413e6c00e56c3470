"""octavo.amp as mixed precision of ColossalAI's booster: O1 in FP8, O2 in bf16, under Torch DDP or low-level ZeRO.

Users give `OctavoMixedPrecision` to a Booster, or `OctavoLowLevelZeroPlugin`. All else stays ColossalAI's.
"""

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

import octavo.amp
from octavo.distributed.fp8_hook import FP8HookState, fp8_hook
from octavo.errors import CheckpointError, ConfigError
from octavo.integrations.other_fp8 import conflict, refuse_other_fp8
from octavo.integrations.tested import require
from octavo.nn import Linear, update_scales
from octavo.nn.fp8_state import agree_on_staged_amaxes

try:
    from colossalai.booster.mixed_precision import MixedPrecision
    from colossalai.booster.plugin import LowLevelZeroPlugin
    from colossalai.booster.plugin.low_level_zero_plugin import LowLevelZeroModel
    from colossalai.booster.plugin.torch_ddp_plugin import TorchDDPModel
    from colossalai.interface import ModelWrapper, OptimizerWrapper
except ImportError:
    require("colossalai", "colossalai")  # says which version is needed
    raise
require("colossalai", "colossalai")


class OctavoMixedPrecision(MixedPrecision):  # type: ignore[misc]
    """For Booster(mixed_precision=OctavoMixedPrecision("O1"), plugin=TorchDDPPlugin()); one for each boost.

    Args:
        opt_level: "O1" computes linears in FP8, "O2" in bf16; `handle.switch` changes it during the run.
        fp8_communication: gradients of DDP travel in FP8, by octavo.distributed; a mapping has FP8HookState's options.
        options: of octavo.amp.initialize (recipe, ignore, overrides, schedule, fallback, max_skips, on_event).
    Raises:
        ConfigError: dtype or grad_scaler among the options.
    """

    def __init__(
        self, opt_level: str = "O1", *, fp8_communication: bool | Mapping[str, Any] = False, **options: Any
    ) -> None:
        if other := {"dtype", "grad_scaler"} & set(options):
            raise ConfigError(f"O2 is bf16 here and scales no loss, got {min(other)}; leave it out, or use octavo.amp")
        self._opt_level, self._fp8_communication, self._options = opt_level, fp8_communication, options
        self._model: nn.Module | None = None
        self._handle: octavo.amp.Handle | None = None
        self._hook: FP8HookState | None = None

    @property
    def handle(self) -> octavo.amp.Handle:
        """octavo.amp's: level, switch, events; ConfigError before a boost."""
        if self._handle is None:
            raise ConfigError("this OctavoMixedPrecision has no model yet; give it to a Booster and call boost first")
        return self._handle

    def configure(self, model: nn.Module, optimizer: Any = None, criterion: Any = None) -> tuple[nn.Module, Any, Any]:
        """Called by Booster.boost, after its plug-in.

        Raises:
            ConfigError: another plug-in or FP8 backend, an option that the plug-in has no hook for, no optimizer, or a
                second boost.
            RecipeError: see octavo.amp.initialize.
            DtypeError: see octavo.amp.initialize.
        """
        inner = _unwrapped(model)
        refuse_other_fp8(inner)
        if optimizer is None:
            raise ConfigError(
                "levels change at an optimizer's steps, got no optimizer; give boost one, or call octavo.convert alone "
                "for a model that is not trained"
            )
        if self._handle is not None:
            raise ConfigError("this OctavoMixedPrecision has a model already; make one for each boost")
        is_sharded = isinstance(model, LowLevelZeroModel)
        self._check_options(model)
        own = optimizer.optim if isinstance(optimizer, OptimizerWrapper) else optimizer
        octavo.amp.initialize(inner, own, self._opt_level, **self._options)
        _check_buffers(model, inner)
        if self._fp8_communication:
            self._hook = _reduce_in_fp8(model.module, self._fp8_communication)
        self._model, self._handle = inner, octavo.amp.handle(own)
        if is_sharded:  # its optimizer holds shards, which octavo does not know as the model's parameters
            own.register_step_post_hook(lambda *_: update_scales(inner))
            return model, optimizer, criterion
        return model, _NotingOptimizer(own, self._handle), criterion

    def state_dict(self) -> dict[str, Any]:
        """What a checkpoint needs beside booster.save_model and save_optimizer; every rank calls it.

        Plain values, alike on all ranks; with fp8_communication also residuals, of which each rank saves its own.
        """
        handle = self.handle
        assert self._model is not None, "the booster configures it before it has a state"
        agree_on_staged_amaxes(self._model)
        state = handle.state_dict()
        return state if self._hook is None else {**state, "fp8_communication": self._hook.state_dict()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from state_dict's values, after booster.load_model and load_optimizer.

        Raises:
            CheckpointError: the state is of another model, or has no residuals of FP8 communication.
            ConfigError: see octavo.amp.Handle.load_state_dict.
        """
        self.handle.load_state_dict(state)
        if self._hook is not None:
            if "fp8_communication" not in state:
                raise CheckpointError(
                    "the state has no residuals of FP8 communication; save state_dict() on every rank of a run that "
                    "has it, or go on with fp8_communication=False"
                )
            self._hook.load_state_dict(state["fp8_communication"])

    def _check_options(self, model: nn.Module) -> None:
        if isinstance(model, LowLevelZeroModel) and self._options.get("fallback") is not None:
            raise ConfigError(
                "fallback's rules read the loss, and low-level ZeRO's backward has no hook that shows it; use schedule "
                "or handle.switch, or TorchDDPPlugin"
            )
        if self._fp8_communication and not isinstance(model, TorchDDPModel):
            raise ConfigError(
                "fp8_communication is a hook of DDP, and low-level ZeRO has none (its own option falls back to plain "
                "reductions); use TorchDDPPlugin"
            )


class OctavoLowLevelZeroPlugin(LowLevelZeroPlugin):  # type: ignore[misc]
    """LowLevelZeroPlugin in FP8; a Booster ignores a mixed_precision beside this plug-in, so it is given here.

    Args:
        mixed_precision: octavo's.
        options: LowLevelZeroPlugin's; `precision` is "bf16" or "fp32".
    """

    def __init__(self, mixed_precision: OctavoMixedPrecision, **options: Any) -> None:
        super().__init__(**options)
        self._mixed_precision = mixed_precision

    def configure(self, model: nn.Module, *others: Any, **named: Any) -> tuple[Any, ...]:
        """Called by Booster.boost."""
        model, optimizer, criterion, *rest = super().configure(model, *others, **named)
        return *self._mixed_precision.configure(model, optimizer, criterion), *rest


class _NotingOptimizer(OptimizerWrapper):  # type: ignore[misc]
    """ColossalAI's wrapper, which shows the loss to octavo.amp."""

    def __init__(self, optimizer: torch.optim.Optimizer, handle: octavo.amp.Handle) -> None:
        super().__init__(optimizer)
        self._handle = handle

    def backward(self, loss: torch.Tensor, *others: Any, **named: Any) -> None:
        with self._handle.scale_loss(loss) as same:
            super().backward(same, *others, **named)


def _unwrapped(model: nn.Module) -> nn.Module:
    """The user's model, below ColossalAI's wrapper and DDP's."""
    if isinstance(model, TorchDDPModel):
        return model.module.module  # type: ignore[no-any-return]
    if isinstance(model, LowLevelZeroModel):
        if model.use_fp8:
            raise conflict("ColossalAI's own FP8 (use_fp8=True)")
        if model.overlap_allgather:
            raise ConfigError(
                "overlap_allgather=True waits for weights in torch's operators, which octavo's linears do not call; "
                "leave it out"
            )
        return model.module  # type: ignore[no-any-return]
    if isinstance(model, ModelWrapper):
        raise ConfigError(
            f"octavo runs under TorchDDPPlugin and LowLevelZeroPlugin, got a {type(model).__name__}; use one of the two"
        )
    return model


def _check_buffers(model: nn.Module, inner: nn.Module) -> None:
    linears = [module for module in inner.modules() if isinstance(module, Linear)]
    has_state = any(linear.recipe is not None and linear.recipe.has_state for linear in linears)
    if isinstance(model, TorchDDPModel) and has_state and model.module.broadcast_buffers:
        raise ConfigError(
            "under delayed scaling a broadcast of rank 0's buffers would replace the other ranks' amaxes; use "
            "TorchDDPPlugin(broadcast_buffers=False)"
        )


def _reduce_in_fp8(ddp: Any, options: bool | Mapping[str, Any]) -> FP8HookState:
    state = FP8HookState(ddp, **(options if isinstance(options, Mapping) else {}))
    try:
        ddp.register_comm_hook(state, fp8_hook)
    except RuntimeError as error:  # DDP takes one
        raise conflict("ColossalAI's hook (TorchDDPPlugin(fp8_communication=True))") from error
    return state
