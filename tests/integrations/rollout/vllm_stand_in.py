"""vLLM's routes under VLLM_SERVER_DEV_MODE=1, of vllm/entrypoints/serve/dev/rlhf/api_router.py and its neighbours."""

from typing import Any

from tests.integrations.rollout.stand_in import HttpError, StandIn


class VllmStandIn(StandIn):
    session: str | None = None  # None, "ready", "open", "loaded"

    def post_v1_completions(
        self,
        prompt: list[list[int]],
        n: int,
        max_tokens: int,
        temperature: float,
        logprobs: int,
        return_token_ids: bool,
        top_p: float,
        top_k: int,
        min_p: float,
        repetition_penalty: float,
        model: str = "",
        stop: str | None = None,
    ) -> Any:
        rows = self.sample(prompt, n=n, max_tokens=max_tokens, temperature=temperature, stop=stop)
        choices: list[dict[str, Any]] = [
            {
                "index": index,
                "text": completion.text,
                "token_ids": completion.token_ids,
                "prompt_token_ids": ids,
                "logprobs": {"token_logprobs": told},
                "finish_reason": completion.finish_reason,
                "stop_reason": completion.stop_reason,
            }
            for index, (ids, completion, told) in enumerate(rows)
        ]
        return {"object": "text_completion", "choices": choices[::-1]}  # their order is promised by the index alone

    def post_pause(self, mode: str) -> Any:
        if mode not in ("abort", "wait", "keep"):
            raise HttpError(400, {"error": mode})
        self.is_paused = True
        return {"status": "paused"}

    def post_resume(self) -> Any:
        self.is_paused = False
        return {"status": "resumed"}

    def get_weight_info(self) -> Any:
        return {"weight_version": self.version}

    def post_collective_rpc(self, method: str, kwargs: dict[str, str]) -> Any:
        if method != "reload_weights" or set(kwargs) != {"weights_path"} or not self.is_paused:
            raise HttpError(500, {"error": {"message": method}})
        self.load(kwargs["weights_path"])
        return {"results": [None]}

    def post_update_weight_version(self, new_version: str) -> Any:
        self.version = new_version
        return {"success": True, "new_version": new_version}

    def post_init_weight_transfer_engine(self, init_info: dict[str, Any]) -> Any:
        return self._step(None, "ready")

    def post_start_weight_update(self) -> Any:
        return self._step("ready", "open")

    def post_update_weights(self, update_info: dict[str, str]) -> Any:
        self.load(update_info["path"])
        return self._step("open", "loaded")

    def post_finish_weight_update(self, weight_version: str) -> Any:
        self.version = weight_version
        return self._step("loaded", "ready")

    def post_weight_checker(self, action: str) -> Any:
        return {f"{action}s": dict(self.checksums)}

    def post_reset_prefix_cache(self, reset_running_requests: str) -> Any:
        return ""

    def get_metrics(self) -> str:
        return (
            "# TYPE vllm:num_preemptions counter\n"
            'vllm:num_preemptions_total{engine="0",model_name="m"} 3.0\n'
            'vllm:num_preemptions_total{engine="1",model_name="m"} 4.0\n'
            'vllm:num_requests_running{engine="0"} 9.0\n'
        )

    def _step(self, wanted: str | None, then: str) -> Any:
        if self.session != wanted:
            raise HttpError(500, {"detail": f"the session is {self.session}"})
        self.session = then
        return {"message": then}
