"""octavo.amp: mixed precision for any training loop by two levels, O1 in FP8 and O2 in bf16 or fp16.

A thin layer over recipes: `initialize` gives the linears both, and the handle chooses between them at each step.
"""

from octavo.amp.fallback import Fallback
from octavo.amp.frontend import handle, initialize, scale_loss
from octavo.amp.grad_scaler import GradScaler
from octavo.amp.handle import Event, Handle, master_params
from octavo.amp.levels import LEVELS, Levels

__all__ = [
    "LEVELS",
    "Event",
    "Fallback",
    "GradScaler",
    "Handle",
    "Levels",
    "handle",
    "initialize",
    "master_params",
    "scale_loss",
]
