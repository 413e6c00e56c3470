"""An SGLang server.

Routes, of SGLang's python/sglang/srt/entrypoints/http_server.py (fields: managers/io_struct.py): POST /generate with
`return_logprob`, /pause_generation, /continue_generation, /begin_weight_update and /end_weight_update (servers without
them answer 404 and load without a session), /update_weights_from_disk, /flush_cache, /weights_checker; GET
/get_model_info.

Every answer of /generate names its weight_version.
"""

from collections.abc import Mapping
from typing import Any

from octavo.integrations.rollout.disk_session import DiskEngine
from octavo.integrations.rollout.http import RefusedError
from octavo.rl.engines.protocol import Completion, PauseMode, SamplingSpec
from octavo.weights.errors import EngineAnswerError, EngineError
from octavo.weights.wire import field

# keys and values are computed again after a retraction; "in_place" would keep old ones
_MODES = {"keep": "retract", "abort": "abort"}


class SglangEngine(DiskEngine):
    """An SGLang server; see DiskEngine."""

    name = "sglang"
    probe_path, probe_field = "/get_model_info", "weight_version"
    probe_remedy = "look at its log, give its --api-key as engine.api_key"
    _num_retractions = 0.0

    def _complete(self, ids: list[list[int]], spec: SamplingSpec) -> list[Completion]:
        params: dict[str, Any] = {
            "temperature": spec.temperature,
            "max_new_tokens": spec.max_tokens,
            "top_p": 1.0,
            "top_k": -1,
            "min_p": 0.0,
            **({"stop": [spec.stop]} if spec.stop is not None else {}),
        }
        # a prompt n times, for their order is then the request's; their prefix is computed once
        every = [prompt for prompt in ids for _ in range(spec.samples_per_prompt)]
        body = {"input_ids": every, "sampling_params": params, "return_logprob": True, "stream": False}
        answer = self.client.post("/generate", body, timeout_s=self.section.timeout_s)
        if not isinstance(answer, list):
            raise EngineAnswerError(f"sglang: /generate answered a batch with no list: {str(answer)[:200]}")
        return [self._read(row) for row in answer]

    def _read(self, row: Any) -> Completion:
        version = self._committed()
        meta = field(row, "meta_info")
        self._check_label(field(meta, "weight_version"), version, "at a completion's end")
        entries = field(meta, "output_token_logprobs")
        token_ids = list(field(row, "output_ids"))
        if (said := [field(entry, 1) for entry in entries]) != token_ids:
            place = next((i for i, (a, b) in enumerate(zip(said, token_ids, strict=False)) if a != b), len(said))
            raise EngineAnswerError(
                f"sglang: {len(said)} logprobs are not those of the {len(token_ids)} tokens (they differ from place "
                f"{place}): off by one, or of another request"
            )
        reason = field(meta, "finish_reason")
        self._num_retractions += float(meta.get("num_retractions", meta.get("total_retractions", 0)))
        return Completion(
            field(row, "text"),
            token_ids,
            [float("nan") if field(entry, 0) is None else float(entry[0]) for entry in entries],
            [version] * len(token_ids),
            field(reason, "type"),
            reason.get("matched"),
        )

    def pause(self, mode: PauseMode) -> None:
        """POST /pause_generation; "keep" takes requests back into the queue.

        Raises:
            EngineError: for "wait", which SGLang has not.
        """
        if mode not in _MODES:
            raise EngineError(f"sglang: pause takes 'keep' or 'abort', got {mode!r}")
        self.client.order("/pause_generation", {"mode": _MODES[mode]})

    def resume(self) -> None:
        """POST /continue_generation."""
        self.client.order("/continue_generation", {})

    def reset_prefix_cache(self) -> None:
        """POST /flush_cache."""
        self.client.order("/flush_cache")

    def stats(self) -> dict[str, float]:
        """ "num_preemptions": retractions that the answers so far told."""
        return {"num_preemptions": self._num_retractions}

    def ask_checksums(self) -> Mapping[str, str]:
        """POST /weights_checker; names are prefixed with the place in the list of ranks."""
        ranks = field(self._ok("/weights_checker", {"action": "checksum"}), "ranks")
        return {
            f"{rank}:{name}": checksum
            for rank, row in enumerate(ranks)
            for name, checksum in field(row, "checksums").items()
        }

    def load(self, path: str, label: str) -> None:
        """See DiskEngine; within a session where the server has such."""
        has_session = self._begin()
        self._ok("/update_weights_from_disk", {"model_path": path, "weight_version": label, "flush_cache": True})
        if has_session:
            self._ok("/end_weight_update", {})
        self.confirm(field(self.client.get("/get_model_info"), "weight_version"), label)

    def _begin(self) -> bool:
        try:
            self._ok("/begin_weight_update", {"selector": "all"})
        except RefusedError as error:
            if error.status != 404:
                raise
            return False
        return True

    def _ok(self, path: str, body: dict[str, Any]) -> Any:
        """POST, and refuse an answer that says it was no success."""
        answer = self.client.post(path, body)
        if not isinstance(answer, dict) or answer.get("success") is not True:
            raise EngineError(f"sglang: {path} did not succeed: {str(answer)[:300]}")
        return answer
