"""Which recipes this machine has, tried out: one linear, forward and backward, under each that it should have."""

import dataclasses

import torch

from octavo.doctor.machine import describe
from octavo.errors import BackendError, RecipeError
from octavo.nn import Linear
from octavo.numerics.analysis import sqnr
from octavo.numerics.recipe import RECIPE_NAMES, get_recipe
from octavo.ops._runtime.recipe_support import RecipeSupport, recipe_support, refusal

_TOKENS, _WIDTH = 192, 256
# two operands of 25 dB (E5M2) at worst, or of 4 bits (nvfp4, some 18 dB)
_EXPECTED_DB = {"bf16": 40.0, "nvfp4": 12.0}
_EXPECTED_FP8_DB = 20.0


@dataclasses.dataclass(frozen=True)
class RecipeCheck:
    """A recipe on this machine.

    Attributes:
        support: natively, emulated or not at all, and why.
        sqnr_db: of the worst of output, dgrad and wgrad against fp32; None where it was not tried or failed.
        problem: why it does not work though it should; empty where it does.
    """

    support: RecipeSupport
    sqnr_db: float | None
    problem: str

    @property
    def name(self) -> str:
        """The recipe's name."""
        return self.support.recipe


def check_recipes(device: torch.device) -> list[RecipeCheck]:
    """Every recipe; those that the device should have are run."""
    return [_check(support, device) for support in recipe_support(device)]


def require_here(name: str, device: torch.device) -> RecipeSupport:
    """How this machine has a recipe.

    Raises:
        RecipeError: no such recipe.
        BackendError: the machine lacks it; the text says which ones it has.
    """
    if name not in RECIPE_NAMES:
        raise RecipeError(f"unknown recipe {name!r}; known: {', '.join(RECIPE_NAMES)}")
    known = recipe_support(device)
    support = next(s for s in known if s.recipe == name)
    if support.how == "none":
        device_name = torch.cuda.get_device_name(device) if device.type == "cuda" else device.type
        raise BackendError(refusal(support, known, device_name))
    return support


def _check(support: RecipeSupport, device: torch.device) -> RecipeCheck:
    if support.how == "none":
        return RecipeCheck(support, None, "")
    try:
        db = _measure(support.recipe, device)
    except Exception as error:  # whatever a library or a driver may raise is the finding
        return RecipeCheck(support, None, describe(error))
    expected = _EXPECTED_DB.get(support.recipe, _EXPECTED_FP8_DB)
    problem = "" if db >= expected else f"its GEMMs keep {db:.1f} dB, {expected:g} expected"
    return RecipeCheck(support, db, problem)


def _measure(name: str, device: torch.device) -> float:
    """The worst SQNR of a linear's results against fp32; delayed scaling has had a step to learn its scales."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(_TOKENS, _WIDTH, generator=generator).to(device, torch.bfloat16).requires_grad_()
    grad = torch.randn(_TOKENS, _WIDTH, generator=generator).to(device, torch.bfloat16)
    layer = Linear(_WIDTH, _WIDTH, device=device)
    layer.recipe = get_recipe(name)
    for _ in range(2 if layer.recipe.has_state else 1):
        layer.weight.grad = x.grad = None  # type: ignore[union-attr]
        out = layer(x)
        out.backward(grad)
    assert layer.weight is not None and layer.weight.grad is not None and x.grad is not None, "it was just trained"
    inputs, weight, incoming = x.detach().float(), layer.weight.detach().float(), grad.float()
    expected = (inputs @ weight.t(), incoming @ weight, incoming.t() @ inputs)
    return min(sqnr(e, got.detach()) for e, got in zip(expected, (out, x.grad, layer.weight.grad), strict=True))
