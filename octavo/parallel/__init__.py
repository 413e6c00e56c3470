"""torch's engines of distribution applied to a built model; the one folder, with distributed/, that imports them."""

from octavo.parallel.fsdp import ShardReport, shard
from octavo.parallel.gather import gathered, is_sharded
from octavo.parallel.lend import lent, make_shell
from octavo.parallel.load import load_sharded, load_weights

__all__ = ["ShardReport", "gathered", "is_sharded", "lent", "load_sharded", "load_weights", "make_shell", "shard"]
