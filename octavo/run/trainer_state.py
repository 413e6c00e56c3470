"""Every tensor that a loop needs to go on from a checkpoint bit for bit, and how it is put back."""

from collections.abc import Mapping
from math import prod

import torch

from octavo.models import Decoder
from octavo.models.export import ModelExport
from octavo.nn import HISTORY_BUFFER, Linear, Router, fp8_state_dict, load_fp8_state_dict, update_scales
from octavo.numerics import Recipe, get_recipe
from octavo.run.checkpoint_store import BUFFER
from octavo.run.optimizer import MasterAdamW

_RNG = "rng."


def trainer_state(model: Decoder, optimizer: MasterAdamW) -> dict[str, torch.Tensor]:
    """Every tensor that a run needs to go on bit for bit, parameters aside, which are bf16(master)."""
    buffers = {BUFFER + name: buffer for name, buffer in fp8_state_dict(model).items()}
    random = {f"{_RNG}cpu": torch.get_rng_state()}
    if model.device.type == "cuda":
        random[f"{_RNG}cuda"] = torch.cuda.get_rng_state(model.device)
    return {**optimizer.state_dict(), **buffers, **random}


def num_checkpoint_bytes(model: Decoder, optimizer: MasterAdamW, export: ModelExport) -> int:
    """What a checkpoint of all ranks takes at least; before the first step there are no moments yet."""
    state, cuts = trainer_state(model, optimizer), optimizer.state_cuts()
    shapes = {name: cuts[name].shape if name in cuts else tensor.shape for name, tensor in state.items()}
    return export.num_bytes + sum(prod(shapes[name]) * tensor.itemsize for name, tensor in state.items())


def restore(
    model: Decoder, optimizer: MasterAdamW, state: Mapping[str, torch.Tensor], weight_version: int
) -> list[str]:
    """Put a trainer_state back.

    Args:
        weight_version: what describe said.
    Returns:
        What a person should know: state that is of no use to this run's recipe.
    Raises:
        CheckpointError: the optimizer's tensors do not fit.
    """
    optimizer.load_state_dict(state)
    torch.set_rng_state(state[f"{_RNG}cpu"])
    if model.device.type == "cuda" and f"{_RNG}cuda" in state:
        torch.cuda.set_rng_state(state[f"{_RNG}cuda"], model.device)
    buffers = {key.removeprefix(BUFFER): tensor for key, tensor in state.items() if key.startswith(BUFFER)}
    usable = {name: tensor for name, tensor in buffers.items() if _is_usable(model, name, buffers)}
    load_fp8_state_dict(model, usable, strict=False)
    update_scales(model)  # a run with update_every="forward" leaves its last step staged
    model.weight_version = weight_version
    if len(usable) < 2 * sum(_recipe_of(model, row.name).has_state for row in model.conversion_report.rows):  # type: ignore[union-attr]
        return ["the checkpoint has no amax history for this recipe: delayed scaling starts with an empty one"]
    return []


def _is_usable(model: Decoder, name: str, buffers: Mapping[str, torch.Tensor]) -> bool:
    """Whether an amax history, or its scales, belongs to a linear that is under delayed scaling of that length."""
    linear = name.rpartition(".")[0]
    delayed = _recipe_of(model, linear).delayed
    return delayed is not None and len(buffers[f"{linear}.{HISTORY_BUFFER}"]) == delayed.amax_history_len


def _recipe_of(model: Decoder, linear: str) -> Recipe:
    """The recipe that a linear computes with; a router has none."""
    module = model.get_submodule(linear)
    assert isinstance(module, Linear | Router), linear
    own = module.recipe if isinstance(module, Linear) else None
    return own or get_recipe("bf16")
