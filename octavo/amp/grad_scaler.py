"""Dynamic gradient scaling: the loss is multiplied so that small gradients survive fp16, and the scale finds itself."""

import dataclasses
import math
from collections.abc import Iterable
from typing import Any

import torch

from octavo.errors import ConfigError


@dataclasses.dataclass
class GradScaler:
    """The loss scale and its rule: halve it on overflow, double it after growth_interval steps without one.

    Args:
        init_scale: the first scale. Powers of two scale gradients without rounding, and FP8 codes not at all.
        growth_factor: what it is multiplied by after growth_interval good steps.
        backoff_factor: what it is multiplied by after an overflow.
        growth_interval: steps in a row without overflow before it grows.
        min_scale: the lowest scale.
        max_scale: the highest scale.

    Attributes:
        scale: the current one, on the host: the loop reads one number a step anyway.
        num_good: steps without overflow since it last changed.
        num_overflows: steps that overflowed, in all.

    Raises:
        ConfigError: for values with which the rule makes no sense.
    """

    init_scale: float = 2.0**16
    growth_factor: float = 2.0
    backoff_factor: float = 0.5
    growth_interval: int = 2000
    min_scale: float = 2.0**-14
    max_scale: float = 2.0**24
    scale: float = dataclasses.field(init=False)
    num_good: int = dataclasses.field(init=False, default=0)
    num_overflows: int = dataclasses.field(init=False, default=0)

    def __post_init__(self) -> None:
        if not (0.0 < self.min_scale <= self.init_scale <= self.max_scale < math.inf):
            raise ConfigError(
                f"init_scale={self.init_scale} must lie between min_scale={self.min_scale} > 0 and "
                f"max_scale={self.max_scale}"
            )
        if self.growth_factor < 1.0 or not 0.0 < self.backoff_factor < 1.0 or self.growth_interval < 1:
            raise ConfigError(
                "growth_factor must be >= 1, backoff_factor between 0 and 1, growth_interval >= 1; got "
                f"{self.growth_factor}, {self.backoff_factor}, {self.growth_interval}"
            )
        self.scale = self.init_scale

    def scale_loss(self, loss: torch.Tensor) -> torch.Tensor:
        """loss * scale, in fp32: 65536 is beyond fp16."""
        return loss.float() * self.scale

    def unscale_(self, gradients: Iterable[torch.Tensor]) -> None:
        """Divide gradients by the scale, in place."""
        gradients = list(gradients)
        if gradients and self.scale != 1.0:
            torch._foreach_mul_(gradients, 1.0 / self.scale)

    def rescale_(self, gradients: Iterable[torch.Tensor]) -> None:
        """Undo unscale_, so that a further backward adds to gradients of its own scale."""
        gradients = list(gradients)
        if gradients and self.scale != 1.0:
            torch._foreach_mul_(gradients, self.scale)

    def update(self, *, overflowed: bool) -> None:
        """Choose the next step's scale."""
        if overflowed:
            self.num_overflows += 1
            self.num_good = 0
            self.scale = max(self.scale * self.backoff_factor, self.min_scale)
            return
        self.num_good += 1
        if self.num_good >= self.growth_interval:
            self.num_good = 0
            self.scale = min(self.scale * self.growth_factor, self.max_scale)

    def state_dict(self) -> dict[str, Any]:
        """What a checkpoint needs, as plain values."""
        return {"scale": self.scale, "num_good": self.num_good, "num_overflows": self.num_overflows}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from state_dict's values; the rule's own parameters stay this object's."""
        self.scale = float(state["scale"])
        self.num_good, self.num_overflows = int(state["num_good"]), int(state["num_overflows"])
