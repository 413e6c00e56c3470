"""torch's engines of distribution applied to a built model; the one folder, with distributed/, that imports them."""

from octavo.parallel.fsdp import ShardReport, shard
from octavo.parallel.gather import gathered, is_sharded

__all__ = ["ShardReport", "gathered", "is_sharded", "shard"]
