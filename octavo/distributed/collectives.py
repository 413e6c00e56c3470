"""torch's collectives over one tensor, which have other names from torch 2.13 on."""

from collections.abc import Callable
from typing import Any

import torch.distributed as dist

# (output [ranks * n], input [n], group=...)
all_gather_into: Callable[..., Any] = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
# (output [n], input [ranks * n], op=..., group=...)
reduce_scatter_into: Callable[..., Any] = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
