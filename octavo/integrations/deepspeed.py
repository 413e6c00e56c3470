"""DeepSpeed over a model that octavo.convert has seen: ZeRO, gradients, optimizer and checkpoints stay DeepSpeed's own.

Called by users in place of deepspeed.initialize, engine.save_checkpoint and engine.load_checkpoint.
"""

import contextlib
import dataclasses
import importlib
import importlib.util
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import nn

from octavo.env import torch_extensions_dir
from octavo.errors import BackendError, CheckpointError, ConfigError
from octavo.integrations.other_fp8 import conflict, refuse_other_fp8
from octavo.nn import Linear, fp8_state_dict, load_fp8_state_dict, mark_weights_updated, plan_fusion, update_scales
from octavo.nn.fp8_state import agree_on_staged_amaxes

_SERIES = (0, 19)  # of the version that the tests run
_STATE, _PLACE = "octavo_fp8", "_octavo"  # delayed scaling's in DeepSpeed's client_state; _Followed's in an engine


@dataclasses.dataclass
class _Followed:
    """What is known of an engine: its global_steps and micro_steps, and whether a state was loaded."""

    forward_at: int  # global_steps at the last forward
    scales_at: int = -1  # micro_steps at the last new scales; no checkpoint sets it back
    has_loaded: bool = False


def initialize(*, model: nn.Module, **options: Any) -> tuple[Any, Any, Any, Any]:
    """deepspeed.initialize with its own keywords and results, and `prepare` for its engine.

    Args:
        model: after octavo.convert.
    Raises:
        BackendError: DeepSpeed is missing or of another series, or an op's build was killed and would be waited for.
        ConfigError: see `prepare`.
    """
    deepspeed = _import()
    _check_model(model)
    _check_builds()
    made = deepspeed.initialize(model=model, **options)
    prepare(made[0])
    return made  # type: ignore[no-any-return]


def prepare(engine: Any) -> None:
    """Let octavo's linears follow an engine of deepspeed.initialize, through torch's own hooks; once is enough.

    Raises:
        BackendError: DeepSpeed is missing or of another series.
        ConfigError: the model was not converted, another FP8 backend is active, or the engine's steps cannot be
            followed.
    """
    _import()
    if _PLACE in vars(engine):
        return
    _check_model(engine.module)
    _check_engine(engine)
    plan_fusion(engine.module)  # ZeRO-3 has put hooks on every module
    vars(engine)[_PLACE] = followed = _Followed(engine.global_steps)

    def before_forward(engine: Any, _: object) -> None:
        if engine.global_steps != followed.forward_at:  # a universal checkpoint's weights come through .data
            followed.forward_at = engine.global_steps
            mark_weights_updated(engine.module)
        if engine.loaded_checkpoint_dp_world_size is not None and not followed.has_loaded and _stateful(engine.module):
            raise CheckpointError(
                "engine.load_checkpoint loads weights without delayed scaling's state; call "
                "octavo.integrations.deepspeed.load_checkpoint(engine, ...), with fp8_state=False if there is none"
            )

    def after_step(*_: object) -> None:
        # All ranks are here, outside of the backward. ZeRO calls it once a group of parameters.
        if followed.scales_at != engine.micro_steps:
            followed.scales_at = engine.micro_steps
            update_scales(engine.module)

    engine.register_forward_pre_hook(before_forward)
    if engine.basic_optimizer is not None:
        engine.basic_optimizer.register_step_post_hook(after_step)


def save_checkpoint(
    engine: Any, save_dir: str | os.PathLike[str], *, client_state: Mapping[str, Any] | None = None, **options: Any
) -> bool:
    """engine.save_checkpoint with its own keywords; delayed scaling's state is in its client_state. All ranks call."""
    agree_on_staged_amaxes(engine.module)  # the checkpoint has one rank's
    state = {name: tensor.cpu() for name, tensor in fp8_state_dict(engine.module).items()}
    kept = {**(client_state or {}), **({_STATE: state} if state else {})}
    return engine.save_checkpoint(os.fspath(save_dir), client_state=kept, **options)  # type: ignore[no-any-return]


def load_checkpoint(
    engine: Any, load_dir: str | os.PathLike[str], *, fp8_state: bool = True, **options: Any
) -> tuple[str | None, dict[str, Any] | None]:
    """engine.load_checkpoint with its own keywords and results; the run then goes on with the same bits.

    Args:
        fp8_state: False to leave delayed scaling's state out; the amax histories stay as they are.
    Raises:
        CheckpointError: a recipe has state, and the checkpoint has none, or another model's.
    """
    prepare(engine)
    path, client_state = engine.load_checkpoint(os.fspath(load_dir), **options)
    if path is None or client_state is None:
        return path, client_state
    mark_weights_updated(engine.module)
    state = client_state.pop(_STATE, None)
    if fp8_state and _stateful(engine.module):
        if state is None:
            raise CheckpointError(
                f"{path} has no state of delayed scaling; save by octavo.integrations.deepspeed.save_checkpoint, or "
                "load with fp8_state=False to begin with empty amax histories"
            )
        load_fp8_state_dict(engine.module, state)
    vars(engine)[_PLACE].has_loaded = True
    return path, client_state


def _import() -> Any:
    wanted = f"octavo is tested with {_SERIES[0]}.{_SERIES[1]}; run pip install -r ecosystem/deepspeed.txt"
    if importlib.util.find_spec("deepspeed") is None:
        raise BackendError(f"DeepSpeed is not installed; {wanted}")
    deepspeed = importlib.import_module("deepspeed")
    series = tuple(int(part) for part in deepspeed.__version__.split(".")[:2])
    if series != _SERIES:
        raise BackendError(f"DeepSpeed {deepspeed.__version__} is too {'old' if series < _SERIES else 'new'}; {wanted}")
    return deepspeed


def _check_model(model: nn.Module) -> None:
    if not any(isinstance(module, Linear) and module.recipe for module in model.modules()):
        raise ConfigError(
            "no linear of the model has a recipe of octavo's; call octavo.convert(model, recipe) first, then "
            "octavo.integrations.deepspeed.initialize"
        )
    refuse_other_fp8(model)


def _check_engine(engine: Any) -> None:
    for section, other in {"fp8": "the config's section 'fp8'", "msamp": "MS-AMP (section 'msamp')"}.items():
        if isinstance(engine.config, Mapping) and (engine.config.get(section) or {}).get("enabled", False):
            raise conflict(other)
    not_followed = {
        "a pipeline": engine.pipeline_parallelism,
        "a hybrid engine": type(engine).__name__ == "DeepSpeedHybridEngine",
        "ZenFlow, whose optimizer steps in another process": engine.zenflow,
        "super_offload, whose optimizer steps in another process": engine.super_offload(),
        "tensor_parallel, which cuts torch.nn.Linear": engine.autotp_size() > 1,
    }
    for what, is_on in not_followed.items():
        if is_on:
            raise ConfigError(f"octavo's linears run under ZeRO 0 to 3, and this engine has {what}; turn that off")


def _check_builds() -> None:
    """DeepSpeed builds ops at their first use, waits for others' builds, and cannot tell that one was killed."""
    from torch.utils.cpp_extension import get_default_build_root

    root = torch_extensions_dir() or Path(get_default_build_root())
    locks = [path for pattern in ("*/lock", "*/*/lock") for path in root.glob(pattern)]
    held = set()
    for file in Path("/proc").glob("[0-9]*/fd/*") if locks else ():
        with contextlib.suppress(OSError):  # a process that has ended, or is not ours
            held.add(os.readlink(file))
    for lock in locks:
        if held and os.path.realpath(lock) not in held and lock.exists():  # a build keeps its lock open
            raise BackendError(
                f"{lock} is of a build that was killed, and DeepSpeed would wait for it for ever; remove it, unless "
                "another user, host or container builds in this folder right now"
            )


def _stateful(model: nn.Module) -> list[Linear]:
    linears = (module for module in model.modules() if isinstance(module, Linear))
    return [linear for linear in linears if linear.recipe is not None and linear.recipe.has_state]
