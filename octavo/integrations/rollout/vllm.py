"""A vLLM server. It must run with VLLM_SERVER_DEV_MODE=1 (on a private network: its routes ask for no key) and with
`--logprobs-mode processed_logprobs`, without which its logprobs leave the temperature out.

Routes, of vLLM's vllm/entrypoints/serve/dev/rlhf/api_router.py: POST /pause?mode=, /resume, /start_weight_update,
/update_weights, /finish_weight_update, /update_weight_version, /weight_checker, /init_weight_transfer_engine, GET
/weight_info; of its cache and rpc routers POST /reset_prefix_cache and /collective_rpc (worker method `reload_weights`
with `weights_path`: vLLM's documentation, "Layerwise (Re)loading"); /v1/completions with `return_token_ids`, /metrics.

vLLM stamps no version on a request: /weight_info is asked before and after each batch instead.
"""

from collections.abc import Mapping
from typing import Any

from octavo.integrations.rollout.disk_session import DiskEngine
from octavo.integrations.rollout.http import read_counters
from octavo.integrations.rollout.remote import read_choices
from octavo.rl.engines.protocol import Completion, PauseMode, SamplingSpec
from octavo.weights.errors import EngineAnswerError, EngineError
from octavo.weights.wire import field

# A model's generation_config.json would set these otherwise.
_UNTRUNCATED = {"top_p": 1.0, "top_k": -1, "min_p": 0.0, "repetition_penalty": 1.0}


class VllmEngine(DiskEngine):
    """A vLLM server; see DiskEngine."""

    name = "vllm"
    probe_path, probe_field = "/weight_info", "weight_version"
    probe_remedy = "start it with VLLM_SERVER_DEV_MODE=1"
    _has_session = False

    def _complete(self, ids: list[list[int]], spec: SamplingSpec) -> list[Completion]:
        body = {
            **({"model": self.section.model} if self.section.model else {}),
            **({"stop": spec.stop} if spec.stop is not None else {}),
            **_UNTRUNCATED,
            "prompt": ids,
            "n": spec.samples_per_prompt,
            "max_tokens": spec.max_tokens,
            "temperature": spec.temperature,
            "logprobs": 0,
            "return_token_ids": True,
        }
        version = self._committed()
        self._check_label(self._weight_version(), version, "before the batch")
        answer = self.client.post("/v1/completions", body, timeout_s=self.section.timeout_s)
        self._check_label(self._weight_version(), version, "after the batch")
        _check_prompts(answer, ids, spec.samples_per_prompt)
        return read_choices(answer, version)

    def pause(self, mode: PauseMode) -> None:
        """POST /pause."""
        self.client.order(f"/pause?mode={mode}")

    def resume(self) -> None:
        """POST /resume."""
        self.client.order("/resume")

    def reset_prefix_cache(self) -> None:
        """POST /reset_prefix_cache; running requests compute their keys and values again."""
        answer = self.client.post("/reset_prefix_cache?reset_running_requests=true")
        if isinstance(answer, dict) and answer.get("success") is False:
            raise EngineError(f"{self.name}: the prefix cache was not emptied, so old keys and values would be used")

    def stats(self) -> dict[str, float]:
        """See RolloutEngine."""
        return read_counters(self.client.get_text("/metrics"))

    def ask_checksums(self) -> Mapping[str, str]:
        """POST /weight_checker."""
        found: dict[str, str] = field(self.client.post("/weight_checker", {"action": "checksum"}), "checksums")
        return found

    def load(self, path: str, label: str) -> None:
        """See DiskEngine; by a worker call, or by a session of a transfer backend that takes {"path": ...}."""
        if self.section.update == "session":
            self._load_in_session(path, label)
        else:
            self.client.post("/collective_rpc", {"method": "reload_weights", "kwargs": {"weights_path": path}})
            self.client.post("/update_weight_version", {"new_version": label})
        self.reset_prefix_cache()
        self.confirm(self._weight_version(), label)

    def _load_in_session(self, path: str, label: str) -> None:
        if not self._has_session:
            self.client.post("/init_weight_transfer_engine", {"init_info": {}})
            self._has_session = True
        self.client.post("/start_weight_update")
        self.client.post("/update_weights", {"update_info": {"path": path}})
        self.client.post("/finish_weight_update", {"weight_version": label})

    def _weight_version(self) -> Any:
        return field(self.client.get("/weight_info"), "weight_version")


def _check_prompts(answer: Any, ids: list[list[int]], samples_per_prompt: int) -> None:
    """Refuse an answer to other prompts, where it names them."""
    for choice in field(answer, "choices"):
        prompt, index = choice.get("prompt_token_ids"), field(choice, "index")
        if prompt is not None and prompt != ids[min(index // samples_per_prompt, len(ids) - 1)]:
            raise EngineAnswerError(f"vllm: choice {index} continues another prompt than the one of its place")
