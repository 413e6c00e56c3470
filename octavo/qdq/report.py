"""What `fuse` did: every fused site, every step that moved a pair, and every Q or DQ that is left, with why."""

import dataclasses


@dataclasses.dataclass(frozen=True)
class FusedSite:
    """One fused op.

    Attributes:
        name: of the node in the rewritten graph.
        op: what runs there.
        absorbed: names of the nodes that it replaces.
    """

    name: str
    op: str
    absorbed: tuple[str, ...]


@dataclasses.dataclass(frozen=True)
class LeftOver:
    """A Q or DQ that still runs as a kernel of its own.

    Attributes:
        name: of the node.
        op: "Q" or "DQ".
        runs_as: the op that runs.
        reason: why it is left.
        remedy: what to change.
    """

    name: str
    op: str
    runs_as: str
    reason: str
    remedy: str


@dataclasses.dataclass
class Report:
    """The outcome of `fuse`; print it.

    Attributes:
        fused: in the order of the graph.
        left_over: the same.
        moved: one line a step that moved, shared, cancelled or folded a pair, or rewrote a spelled-out op, in the order
            in which they were done.
    """

    fused: list[FusedSite] = dataclasses.field(default_factory=list)
    left_over: list[LeftOver] = dataclasses.field(default_factory=list)
    moved: list[str] = dataclasses.field(default_factory=list)

    def count(self, op: str) -> int:
        """How many fused sites run an op."""
        return sum(site.op == op for site in self.fused)

    def __str__(self) -> str:
        lines = [f"{len(self.fused)} fused sites, {len(self.left_over)} left over, {len(self.moved)} steps before"]
        lines += [f"  fused  {site.name}: {site.op} <- {', '.join(site.absorbed)}" for site in self.fused]
        for left in self.left_over:
            lines.append(f"  left   {left.name} ({left.op}, runs as {left.runs_as}): {left.reason}; {left.remedy}")
        return "\n".join(lines)
