"""torch's engines of distribution applied to a built model; the one folder, with distributed/, that imports them."""

from octavo.parallel.fsdp import ShardReport, shard
from octavo.parallel.gather import gathered, is_sharded, kept, set_last_backward
from octavo.parallel.lend import give_memory, lent, make_shell, weight_copies
from octavo.parallel.load import load_sharded, load_weights
from octavo.parallel.tensor_parallel import CutReport, parallelize

__all__ = [
    "CutReport",
    "ShardReport",
    "gathered",
    "give_memory",
    "is_sharded",
    "kept",
    "lent",
    "load_sharded",
    "load_weights",
    "make_shell",
    "parallelize",
    "set_last_backward",
    "shard",
    "weight_copies",
]
