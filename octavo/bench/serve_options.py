"""What `octavo bench serve` was asked for beside the options of every benchmark, checked once."""

import dataclasses
from pathlib import Path

from octavo.errors import ConfigError

DEFAULT_RATE = 8.0


@dataclasses.dataclass(frozen=True)
class ServeOptions:
    """Options of `octavo bench serve`.

    Args:
        workloads: names of octavo.bench.serve.workloads; empty runs all. With a url only "online" can be run.
        arms: of every workload that has arms, instead of its own; empty for its own.
        scale: factor of the number of requests. num_requests: their number, whatever the workload says.
        time_limit_s: after which nothing more is run; what would not fit is left out, and said so.
        rate: requests a second of "online".
        url: of a server that runs already, for "online"; None starts octavo's.
        checkpoint: directory that "cold-start" loads; None writes one with random weights.

    Raises:
        ConfigError: a value out of range, or options that do not go together.
    """

    workloads: tuple[str, ...] = ()
    arms: tuple[str, ...] = ()
    scale: float = 1.0
    num_requests: int | None = None
    time_limit_s: float | None = None
    rate: float = DEFAULT_RATE
    url: str | None = None
    checkpoint: Path | None = None

    def __post_init__(self) -> None:
        if not 0 < self.scale <= 1:
            raise ConfigError(f"--scale must be in (0, 1], got {self.scale}")
        if self.num_requests is not None and self.scale != 1:
            raise ConfigError("--scale and --num-requests both set the number of requests; give one of them")
        for name, value in (("--time-limit", self.time_limit_s), ("--rate", self.rate)):
            if value is not None and not value > 0:
                raise ConfigError(f"{name} must be > 0, got {value}")
        if self.url is not None and self.workloads != ("online",):
            raise ConfigError("--url is a server for the workload online alone; add --workload online")
