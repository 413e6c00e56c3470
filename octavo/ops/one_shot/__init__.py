"""Small messages among the GPUs of one host in one kernel: each rank writes into every other one's memory, and waits.

reference.py says what comes out; distributed.one_shot owns the memory and asks for the kernels.
"""

from typing import NamedTuple

import torch


class Places(NamedTuple):
    """What the ranks of a group share, as the kernels take it: see triton.py.

    Attributes:
        staging: [ranks] int64, each rank's address.
        flags: likewise.
        packets: likewise.
        counters: [programs] int32, this rank's own.
        rank: this one.
        world: how many there are.
    """

    staging: torch.Tensor
    flags: torch.Tensor
    packets: torch.Tensor
    counters: torch.Tensor
    rank: int
    world: int
