"""Which recipes a device has: natively, emulated or not at all, and why. convert and `octavo doctor` ask.

The rules are those of torch's scaled_mm over cuBLASLt and CUTLASS, and of Triton's FP8 casts; octavo is measured on
Hopper (9.0) alone.
"""

import dataclasses
from typing import Literal

import torch

from octavo.errors import BackendError
from octavo.numerics.recipe import EMULATED_RECIPES, RECIPE_NAMES, Recipe, get_recipe

Capability = tuple[int, int]
_FP8_TENSOR_CORES: Capability = (8, 9)
_HOPPER: Capability = (9, 0)
_BLOCK_GEMM_CUDA = (12, 9)


@dataclasses.dataclass(frozen=True)
class RecipeSupport:
    """How a device runs a recipe.

    Attributes:
        recipe: its name.
        how: "native", "emulated" (operands are quantized to the bit, products are of decoded values) or "none".
        reason: why, in words.
    """

    recipe: str
    how: Literal["native", "emulated", "none"]
    reason: str


def recipe_support(device: torch.device) -> tuple[RecipeSupport, ...]:
    """Every recipe, as the device has it."""
    if device.type == "cuda":
        capability: Capability | None = torch.cuda.get_device_capability(device)
        cuda = tuple(int(part) for part in (torch.version.cuda or "0.0").split(".")[:2])
        return support_by_capability(capability, cuda)
    if device.type in ("cpu", "meta"):
        return support_by_capability(None, ())
    reason = f"octavo has no {device.type} backend"
    return tuple(RecipeSupport(name, "native" if name == "bf16" else "none", reason) for name in RECIPE_NAMES)


def support_by_capability(capability: Capability | None, cuda: tuple[int, ...]) -> tuple[RecipeSupport, ...]:
    """recipe_support by what it depends on.

    Args:
        capability: (major, minor) of an NVIDIA GPU; None for a CPU.
        cuda: (major, minor) of the CUDA that torch was built with.
    """
    return tuple(_one(name, capability, cuda) for name in RECIPE_NAMES)


def require_recipe(recipe: Recipe, device: torch.device) -> None:
    """Refuse a recipe that the device lacks, or whose backward it would decode.

    Raises:
        BackendError: naming the reason, and the recipes that the device has or the other ways.
    """
    if not recipe.is_fp8 or device.type in ("cpu", "meta"):
        return
    if recipe.decodes_backward:
        raise decoded_backward(recipe)
    known = recipe_support(device)
    needed = EMULATED_RECIPES[0] if recipe.is_emulated else recipe.name  # decoded operands need no FP8 GEMM
    support = next((s for s in known if s.recipe == needed), None)
    if support is not None and support.how == "none":
        name = torch.cuda.get_device_name(device) if device.type == "cuda" else device.type
        raise BackendError(refusal(support, known, name))


def decoded_backward(recipe: Recipe) -> BackendError:
    """What to raise on a GPU for a recipe that decodes_backward."""
    return BackendError(
        f"recipe {recipe.name!r} with fp8_format='hybrid' is for CPUs: no GPU library multiplies E5M2 gradients under "
        "block scales, so that both operands of each backward GEMM would be decoded, slower than bf16; use "
        "fp8_format='e4m3' or backward='bf16', or recipe 'rowwise', 'tensorwise' or 'delayed', which take hybrid"
    )


def refusal(support: RecipeSupport, known: tuple[RecipeSupport, ...], device_name: str) -> str:
    """What to tell someone who asked for a recipe that a device lacks."""
    native = [s.recipe for s in known if s.how == "native"]
    emulated = [s.recipe for s in known if s.how == "emulated"]
    has = ", ".join(native) + (f"; emulated: {', '.join(emulated)}" if emulated else "")
    return f"{device_name} does not have recipe {support.recipe!r}: {support.reason}; it has {has}"


def _one(name: str, capability: Capability | None, cuda: tuple[int, ...]) -> RecipeSupport:
    if name == "bf16":
        return RecipeSupport(name, "native", "no FP8 needed")
    if capability is None:
        return RecipeSupport(name, "emulated", "the same codes as on a GPU; products are of decoded values")
    version = ".".join(map(str, capability))
    if capability < _FP8_TENSOR_CORES:
        return RecipeSupport(name, "none", f"FP8 needs compute capability 8.9 or later, this is {version}")
    if name in EMULATED_RECIPES:
        return RecipeSupport(name, "emulated", "octavo decodes its operands and multiplies in high precision")
    scaling = get_recipe(name).input
    if scaling is None or scaling.block_size[1] == -1:
        return RecipeSupport(name, "native", "FP8 tensor cores through torch's scaled_mm")
    if capability != _HOPPER:
        return RecipeSupport(name, "none", f"the libraries' 128-wide block GEMM is Hopper's (9.0), this is {version}")
    if cuda < _BLOCK_GEMM_CUDA:
        built = ".".join(map(str, cuda))
        return RecipeSupport(name, "none", f"the block GEMM came with CUDA 12.9, torch is built with {built}")
    return RecipeSupport(name, "native", "FP8 tensor cores through cuBLASLt's block GEMM")
