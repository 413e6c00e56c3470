"""Profile: what steps were made of, as tables for people and as a document; times are those of one step."""

import dataclasses
import itertools
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from bench.profiling.kernels import Watched, busy_spans
from bench.profiling.kinds import kind_of
from bench.profiling.layer import Floor, Layer, format_floors
from bench.report import format_table

_GAP_ENDS_US = (0.5, 1.0, 1.5, 2.5, 5.0, 20.0, 200.0, float("inf"))
_NUM_ROWS, _NAME_LEN = 25, 88
_NOISE = re.compile(r"void |at::native::|\(anonymous namespace\)::|at::cuda::|<unnamed>::")


class Share(NamedTuple):
    """Kernels of one name or kind, or gaps of one length: of each step how many and milliseconds."""

    name: str
    number: float
    ms: float


@dataclasses.dataclass(frozen=True)
class Profile:
    """Steps of one case.

    Args:
        title: what they computed.
        watched: in a profiled block.
        num_steps: in it.
        figures: name with unit -> what was measured without the profiler, and what follows from it.
        layer: the kernels of an average layer.
        floors: what such a layer needs at least.
    """

    title: str
    watched: Watched
    num_steps: int = 1
    figures: Mapping[str, float] = dataclasses.field(default_factory=dict)
    layer: Layer | None = None
    floors: Sequence[Floor] = ()

    @property
    def wall_ms(self) -> float:
        return self.watched.wall_us / 1e3 / self.num_steps

    @property
    def sum_ms(self) -> float:
        """Of all kernels, those that ran beside each other counted each."""
        return sum(kernel.us for kernel in self.watched.kernels) / 1e3 / self.num_steps

    @property
    def busy_ms(self) -> float:
        """In which at least one kernel ran."""
        return sum(end - start for start, end in busy_spans(self.watched.kernels)) / 1e3 / self.num_steps

    def gaps(self) -> list[Share]:
        """Times without a kernel between the first and the last of all steps, by length."""
        lengths = [later[0] - earlier[1] for earlier, later in itertools.pairwise(busy_spans(self.watched.kernels))]
        found = []
        for low, high in itertools.pairwise((0.0, *_GAP_ENDS_US)):
            some = [us for us in lengths if low < us <= high]
            if some:
                name = f"{low:g} to {high:g} us" if high < float("inf") else f"over {low:g} us"
                found.append(Share(name, len(some) / self.num_steps, sum(some) / 1e3 / self.num_steps))
        return found

    def shares(self, key: Callable[[str], str]) -> list[Share]:
        """The kernels by what `key` makes of their names, the longest first."""
        groups: dict[str, list[float]] = {}
        for kernel in self.watched.kernels:
            groups.setdefault(key(kernel.name), []).append(kernel.us)
        found = [Share(n, len(us) / self.num_steps, sum(us) / 1e3 / self.num_steps) for n, us in groups.items()]
        return sorted(found, key=lambda share: -share.ms)

    def format(self, num_rows: int = _NUM_ROWS) -> str:
        """For people.

        Args:
            num_rows: kernels that are listed by name.
        """
        lines = [f"\n== {self.title}", *(f"{name}: {value:,.6g}" for name, value in self.figures.items())]
        num_launches = len(self.watched.kernels) / self.num_steps
        lines.append(
            f"profiled, a step of {self.num_steps}: wall {self.wall_ms:.3f} ms, busy {self.busy_ms:.3f} ms "
            f"({self.busy_ms / self.wall_ms:.1%}), sum of kernels {self.sum_ms:.3f} ms, {num_launches:.0f} launches"
        )
        tables = {"gaps": self.gaps(), "kind": self.shares(kind_of), "kernel": self.shares(str)}
        lines += [_format_shares(what, shares, num_rows) for what, shares in tables.items() if shares]
        if self.layer is not None:
            lines.append(self.layer.format(short))
        if self.floors:
            lines.append(format_floors(self.floors))
        return "\n".join(lines)

    def document(self) -> dict[str, Any]:
        """All of it, to be written as JSON."""
        fields = ("title", "num_steps", "wall_ms", "busy_ms", "sum_ms", "figures")
        found: dict[str, Any] = {field: getattr(self, field) for field in fields}
        found |= {"gaps": [gap._asdict() for gap in self.gaps()]}
        found |= {"kinds": [share._asdict() for share in self.shares(kind_of)]}
        found |= {"kernels": [share._asdict() | {"kind": kind_of(share.name)} for share in self.shares(str)]}
        layer = None if self.layer is None else dataclasses.asdict(self.layer)
        return found | {"layer": layer, "floors": [dataclasses.asdict(floor) for floor in self.floors]}


def short(name: str) -> str:
    """A kernel's name without its namespaces, cut."""
    return _NOISE.sub("", name)[:_NAME_LEN]


def _format_shares(what: str, shares: Sequence[Share], num_rows: int) -> str:
    total = sum(share.ms for share in shares)
    rows = [
        [short(s.name), f"{s.ms:.3f}", f"{s.number:.1f}", f"{s.ms / s.number * 1e3:.2f}", f"{s.ms / total:.1%}"]
        for s in shares[:num_rows]
    ]
    return format_table((what, "ms a step", "number", "us each", "share"), rows)
