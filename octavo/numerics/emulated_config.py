"""Switches of the emulated recipes, on in NVIDIA's recipes of the same names."""

import dataclasses
from typing import Literal

from octavo.errors import RecipeError

ScaleRounding = Literal["up", "down"]
SCALE_ROUNDINGS = ("up", "down")


def check_scale_rounding(value: str) -> None:
    """Refuse what is no rounding of an E8M0 scale.

    Raises:
        RecipeError: it is none.
    """
    if value not in SCALE_ROUNDINGS:
        raise RecipeError(f"scale_rounding must be 'up' (nothing saturates) or 'down' (OCP's rule), got {value!r}")


@dataclasses.dataclass(frozen=True)
class Mxfp8Config:
    """Parameters of "mxfp8".

    Args:
        scale_rounding: which power of two a block's scale becomes: "up", the least at which its largest value does not
            saturate (TransformerEngine; arXiv 2506.08027), or "down", OCP's, at which it may by up to an eighth.
    """

    scale_rounding: ScaleRounding = "up"

    def __post_init__(self) -> None:
        check_scale_rounding(self.scale_rounding)


@dataclasses.dataclass(frozen=True)
class Nvfp4Config:
    """Parameters of "nvfp4"; each False is one of TransformerEngine's NVFP4BlockScaling(disable_...=True).

    Args:
        stochastic_rounding: of grad_output, for both backward GEMMs (disable_stochastic_rounding).
        random_hadamard: both operands of the grad_weight GEMM are transformed along the tokens (disable_rht).
        square_weight_blocks: 16 x 16 blocks for weights, so that both GEMMs that read one see the same values; else
            1 x 16 along what each sums over (disable_2d_quantization).
    """

    stochastic_rounding: bool = True
    random_hadamard: bool = True
    square_weight_blocks: bool = True

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            if not isinstance(value, bool):
                raise RecipeError(f"{field.name} must be True or False, got {value!r}")


EmulationConfig = Mxfp8Config | Nvfp4Config
CONFIG_OF: dict[str, type[Mxfp8Config] | type[Nvfp4Config]] = {"mxfp8": Mxfp8Config, "nvfp4": Nvfp4Config}
