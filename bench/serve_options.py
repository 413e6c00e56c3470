"""What `octavo bench serve` was asked for beside the options of every benchmark, checked once."""

import dataclasses
from pathlib import Path

from octavo.errors import ConfigError

DEFAULT_RATE = 8.0
DEFAULT_READY_S = 300.0


@dataclasses.dataclass(frozen=True)
class ServeOptions:
    """Options of `octavo bench serve`.

    Args:
        workloads: names of bench.serve.workloads; empty runs all. With a url only "online" can be run.
        variants: of every workload that has variants, instead of its own; empty for its own.
        scale: factor of the number of requests.
        num_requests: their number, whatever the workload says.
        time_limit_s: after which nothing more is run; what would not fit is left out, and said so.
        rate: requests a second of "online".
        prompt_len: tokens of each request of "online"; None for the workload's own.
        output_len: the same.
        url: of a server that runs already, for "online"; None starts octavo's.
        api_key: sent to the server of url.
        ready_timeout_s: how long "online" waits for a server to be ready.
        checkpoint: directory that "cold-start" loads; None writes one with random weights.

    Raises:
        ConfigError: a value out of range, or options that do not go together.
    """

    workloads: tuple[str, ...] = ()
    variants: tuple[str, ...] = ()
    scale: float = 1.0
    num_requests: int | None = None
    time_limit_s: float | None = None
    rate: float = DEFAULT_RATE
    prompt_len: int | None = None
    output_len: int | None = None
    url: str | None = None
    api_key: str | None = None
    ready_timeout_s: float = DEFAULT_READY_S
    checkpoint: Path | None = None

    def __post_init__(self) -> None:
        if not 0 < self.scale <= 1:
            raise ConfigError(f"--scale must be in (0, 1], got {self.scale}")
        if self.num_requests is not None and self.scale != 1:
            raise ConfigError("--scale and --num-requests both set the number of requests; give one of them")
        positive = {
            "--time-limit": self.time_limit_s,
            "--rate": self.rate,
            "--prompt-len": self.prompt_len,
            "--output-len": self.output_len,
            "--ready-timeout": self.ready_timeout_s,
        }
        for name, value in positive.items():
            if value is not None and not value > 0:
                raise ConfigError(f"{name} must be > 0, got {value}")
        if self.checkpoint is not None and not (self.checkpoint / "config.json").is_file():
            raise ConfigError(f"--checkpoint must be a checkpoint's folder, and {self.checkpoint} has no config.json")
        if self.api_key is not None and self.url is None:
            raise ConfigError("--api-key goes with --url: octavo's own server of the benchmark wants none")
        if (self.prompt_len or self.output_len) and self.workloads != ("online",):
            raise ConfigError("--prompt-len and --output-len are of the workload online; add --workload online")
        if self.url is not None and self.workloads != ("online",):
            raise ConfigError("--url is a server for the workload online alone; add --workload online")
