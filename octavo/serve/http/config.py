"""ServerConfig: names, keys and limits of a server, checked once."""

import dataclasses
from pathlib import Path

from octavo.errors import ConfigError
from octavo.serve.keywords import former_name_of, takes_foreign_fields

_LOWEST = {
    "max_num_waiting": 0,
    "max_body_bytes": 1024,
    "max_n": 1,
    "max_prompts": 1,
    "max_stop": 0,
    "max_schema_bytes": 1024,
    "schema_timeout_s": 0.001,
    "max_schema_memory_bytes": 1 << 28,  # a worker with a large vocabulary has half of it
    "step_timeout_s": 0.001,
    "head_timeout_s": 0.001,
    "body_timeout_s": 0.001,
    "write_timeout_s": 0.001,
    "max_unfinished": 1,
    "drain_timeout_s": 0,
    "max_bucket_bytes": 1024,
    "update_timeout_s": 0.001,
}


@takes_foreign_fields({"max_queue": former_name_of("max_num_waiting")})
@dataclasses.dataclass(frozen=True)
class ServerConfig:
    """What a server is called, whom it serves, and how much of it one request may take.

    Args:
        model_names: names under which clients ask for the model; the first is what answers say.
        api_keys: keys of which /v1, /tokenize, /detokenize and /tokenizer_info want one; none for no check.
        admin_key: key of the /admin routes; None for no such routes.
        max_num_waiting: sequences that may wait beside those that run; more are refused with 429.
        max_body_bytes: of a request.
        max_n: samples of a prompt.
        max_prompts: of a request.
        max_stop: stop strings, and stop token ids.
        max_schema_bytes: of a JSON schema, as json.dumps writes it.
        schema_timeout_s: time that a new schema may take to compile.
        max_schema_memory_bytes: address space of the process in which it is tried.
        step_timeout_s: age of a step from which on the server calls itself unhealthy, and ends tensor-parallel ranks
            that it waits for.
        head_timeout_s: time that a client may take to send its request's head.
        body_timeout_s: time that it may take to send the body.
        write_timeout_s: time for which a client may read nothing of its answer.
        max_unfinished: connections that wait for a whole request, idle ones too; of more the oldest is cut off.
        drain_timeout_s: time that admitted requests have to finish after a SIGTERM.
        weights_dir: folder of which checkpoints may be taken over by /admin/update_weights; None for none.
        max_bucket_bytes: of a weight upload's request.
        update_timeout_s: time after which an upload that does not go on is dropped.
        access_log: log a line for every request that ended (see AccessLog).

    Raises:
        ConfigError: no name, a key that is empty or that no header can hold, or a limit below its least value.
    """

    model_names: tuple[str, ...]
    api_keys: tuple[str, ...] = ()
    admin_key: str | None = None
    max_num_waiting: int = 1024
    max_body_bytes: int = 8 << 20
    max_n: int = 128
    max_prompts: int = 1024
    max_stop: int = 16
    max_schema_bytes: int = 64 << 10  # ten times what the tools of a large agent take
    schema_timeout_s: float = 10.0  # usual schemas take milliseconds, the largest that fit a tenth of a second
    max_schema_memory_bytes: int = 1 << 30  # a worker takes 160 MiB with a vocabulary of 150,000, usual schemas 1 more
    step_timeout_s: float = 120.0
    head_timeout_s: float = 10.0
    body_timeout_s: float = 60.0
    write_timeout_s: float = 60.0
    max_unfinished: int = 512
    drain_timeout_s: float = 300.0
    weights_dir: Path | None = None
    max_bucket_bytes: int = 256 << 20
    update_timeout_s: float = 600.0
    access_log: bool = False

    def __post_init__(self) -> None:
        if not self.model_names or not all(self.model_names):
            raise ConfigError(f"a server needs names for its model, none of them empty, got {self.model_names!r}")
        for name, keys in (("api_keys", self.api_keys), ("admin_key", (self.admin_key,))):
            if any(key is not None and key != (key.strip() or None) for key in keys):
                text = "must not be empty, nor begin or end with whitespace, which a header would lose"
                raise ConfigError(f"{name} {text}; leave it out for no key")
        if self.weights_dir is not None and not (self.weights_dir.is_dir() and self.admin_key):
            raise ConfigError(
                f"weights_dir must be a folder, and goes with an admin key, got {str(self.weights_dir)!r} "
                f"and {'a' if self.admin_key else 'no'} key"
            )
        for name, low in _LOWEST.items():
            if not getattr(self, name) >= low:
                raise ConfigError(f"{name} must be at least {low}, got {getattr(self, name)}")
