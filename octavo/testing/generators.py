"""Seeded inputs that bring out what 8-bit formats do badly; a generator's values do not depend on the device."""

import math
from collections.abc import Callable

import torch

from octavo.errors import ConfigError, did_you_mean

Maker = Callable[[tuple[int, ...], torch.dtype, torch.Generator], torch.Tensor]


def generate(
    name: str, shape: tuple[int, ...], dtype: torch.dtype = torch.float32, seed: int = 0, device: str = "cpu"
) -> torch.Tensor:
    """The input called `name`, a key of GENERATORS.

    Args:
        shape: of the result.
        dtype: float32, bfloat16 or float16; values too large or small for it become what its cast makes of them.
        seed: of a generator of its own; torch's global one is left alone.
        device: where the result goes; values are drawn on the CPU.
    Returns:
        shape, dtype.
    Raises:
        ConfigError: no generator of this name.
    """
    if name not in GENERATORS:
        raise ConfigError(f"no generator {name!r}; there are {', '.join(GENERATORS)}{did_you_mean(name, GENERATORS)}")
    return GENERATORS[name](shape, dtype, torch.Generator().manual_seed(seed)).to(device)


def normal(shape: tuple[int, ...], dtype: torch.dtype, generator: torch.Generator) -> torch.Tensor:
    """Standard normal."""
    return torch.randn(shape, generator=generator).to(dtype)


def heavy_tailed(shape: tuple[int, ...], dtype: torch.dtype, generator: torch.Generator) -> torch.Tensor:
    """Magnitudes spread over many powers of two (log-normal), as in activations with outliers."""
    spread = torch.exp(3.0 * torch.randn(shape, generator=generator))
    return (torch.randn(shape, generator=generator) * spread).to(dtype)


def half_zero(shape: tuple[int, ...], dtype: torch.dtype, generator: torch.Generator) -> torch.Tensor:
    """Normal, with the first half of the rows and every other element zero, some of them -0.0."""
    x = torch.randn(shape, generator=generator)
    x[: (shape[0] + 1) // 2] = 0.0
    keep = torch.rand(shape, generator=generator) < 0.5
    return (x * keep).to(dtype)


def zeros(shape: tuple[int, ...], dtype: torch.dtype, generator: torch.Generator) -> torch.Tensor:
    """All zero."""
    return torch.zeros(shape, dtype=dtype)


def near_tiny(shape: tuple[int, ...], dtype: torch.dtype, generator: torch.Generator) -> torch.Tensor:
    """Around the dtype's smallest normal value: quant_scale overflows in some blocks."""
    return (torch.randn(shape, generator=generator).double() * torch.finfo(dtype).tiny).to(dtype)


def subnormal(shape: tuple[int, ...], dtype: torch.dtype, generator: torch.Generator) -> torch.Tensor:
    """The dtype's subnormal numbers only."""
    info = torch.finfo(dtype)
    steps = torch.randint(-64, 65, shape, generator=generator)
    return (steps.double() * info.tiny * info.eps).to(dtype)


def format_max(shape: tuple[int, ...], dtype: torch.dtype, generator: torch.Generator) -> torch.Tensor:
    """The largest finite values of dtype, E4M3 and E5M2, their negatives, and values just beside them."""
    info = torch.finfo(dtype)
    values = torch.tensor([info.max, info.max / 2, 448.0, 464.0, 57344.0, 61440.0], dtype=torch.float64)
    values = torch.cat([values, -values, values * (1 - 2 * info.eps)])
    return values[torch.randint(len(values), shape, generator=generator)].to(dtype)


def with_inf_nan(shape: tuple[int, ...], dtype: torch.dtype, generator: torch.Generator) -> torch.Tensor:
    """Normal, with about one element in a hundred each of inf, -inf, NaN and negative NaN."""
    x = torch.randn(shape, generator=generator)
    draw = torch.rand(shape, generator=generator)
    negative_nan = torch.full((), math.nan).copysign(torch.tensor(-1.0))
    for place, value in enumerate(
        [torch.tensor(math.inf), torch.tensor(-math.inf), torch.tensor(math.nan), negative_nan]
    ):
        x = torch.where((draw >= place / 100) & (draw < (place + 1) / 100), value, x)
    return x.to(dtype)


def ties(shape: tuple[int, ...], dtype: torch.dtype, generator: torch.Generator) -> torch.Tensor:
    """Small multiples of 1/16 under an amax of 448: many products fall midway between two codes."""
    x = torch.randint(-7168, 7169, shape, generator=generator) / 16
    x.view(-1)[:: max(1, min(64, x.numel()))] = 448.0
    return x.to(dtype)


GENERATORS: dict[str, Maker] = {
    "normal": normal,
    "heavy_tailed": heavy_tailed,
    "half_zero": half_zero,
    "zeros": zeros,
    "near_tiny": near_tiny,
    "subnormal": subnormal,
    "format_max": format_max,
    "with_inf_nan": with_inf_nan,
    "ties": ties,
}
