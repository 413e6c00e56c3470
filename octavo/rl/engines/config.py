"""Which engine samples, and where it is."""

from pathlib import Path
from typing import Any, Literal, Self
from urllib.parse import urlsplit

from pydantic import Field, NonNegativeInt, PositiveFloat, model_validator

from octavo.config import Config
from octavo.errors import ConfigError
from octavo.rl.engines.protocol import PauseMode

EngineName = Literal["embedded", "octavo-server", "vllm", "sglang"]


class EngineSection(Config):
    """Who samples. `engine = "embedded"` is short for a section with that name.

    Args:
        name: "embedded" (in this process, over the trainer's own tensors), "octavo-server" (`octavo serve`), "vllm",
            "sglang".
        url: of the server, such as "http://127.0.0.1:8000".
        model: the name under which the server serves the policy; empty for the server's own.
        api_key: empty for OCTAVO_API_KEY, else none.
        admin_key: empty for OCTAVO_ADMIN_KEY, else none.
        timeout_s: the longest wait for a batch of completions.
        update_timeout_s: the longest wait for any other answer.
        weights: what is sent: "fp8-block" (128 x 128 codes and raw fp32 scales), "bf16" (the server quantizes), "auto"
            (the first where rollout.recipe is "blockwise").
        weights_dir: of vLLM and SGLang: a folder that both see under this path; checkpoints are handed over in it.
        update: of vLLM: "reload" (worker call reload_weights) or "session" (start, update, finish; the server needs a
            weight-transfer backend that takes a path).
        running: what becomes of other clients' running requests at an update; SGLang has no "wait".
        bucket_bytes: of octavo-server: bytes in one request of an upload, at most what the server allows.
        probe_sequences: sequences of each batch whose logprobs are compared with the trainer's own; 0 for none.
        probe_tolerance: mean absolute difference, in nats, from which on the engine holds other weights.
    """

    name: EngineName = "embedded"
    url: str = ""
    model: str = ""
    api_key: str = ""
    admin_key: str = ""
    timeout_s: PositiveFloat = 1800.0
    update_timeout_s: PositiveFloat = 300.0
    weights: Literal["auto", "bf16", "fp8-block"] = "auto"
    weights_dir: Path | None = None
    update: Literal["reload", "session"] = "reload"
    running: PauseMode = "keep"
    bucket_bytes: int = Field(default=64 << 20, ge=1024)
    probe_sequences: NonNegativeInt = 4
    probe_tolerance: PositiveFloat = 0.5

    @property
    def is_remote(self) -> bool:
        """Whether it is a server."""
        return self.name != "embedded"

    @property
    def is_octavos(self) -> bool:
        """Whether it is octavo's own engine, in this process or behind a server."""
        return self.name in ("embedded", "octavo-server")

    def check_returns_experts(self) -> None:
        """Refuse an engine that does not say which experts a token was sent to.

        Raises:
            ConfigError: it does not say.
        """
        if not self.is_octavos:
            raise ConfigError(
                f"router_replay = true needs the experts of each token, and engine.name={self.name!r} does not return "
                "them; set router_replay = false, or engine.name = 'octavo-server' or 'embedded'"
            )

    @model_validator(mode="before")
    @classmethod
    def _read_name(cls, given: Any) -> Any:
        return {"name": given} if isinstance(given, str) else given

    @model_validator(mode="after")
    def _check(self) -> Self:
        if not self.is_remote:
            return self
        parts = urlsplit(self.url)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise ValueError(
                f"engine.name={self.name!r} needs engine.url, such as 'http://127.0.0.1:8000', got {self.url!r}"
            )
        if self.name in ("vllm", "sglang") and self.weights_dir is None:
            raise ValueError(
                f"engine.name={self.name!r} takes weights from a folder that trainer and server both see; name it in "
                "engine.weights_dir"
            )
        if self.name == "sglang" and self.running == "wait":
            raise ValueError("engine.running='wait': SGLang has no pause that waits; choose 'keep' or 'abort'")
        return self
