"""vLLM's routes under VLLM_SERVER_DEV_MODE=1, of vllm/entrypoints/serve/dev/rlhf/api_router.py and its neighbours."""

from typing import Any

from octavo.models import Tokenizer
from tests.integrations.rollout.stand_in import HttpError, StandIn, logprobs_of, refuse_unknown

_COMPLETION = {"model", "prompt", "n", "max_tokens", "temperature", "stop", "logprobs", "return_token_ids"}
_COMPLETION |= {"top_p", "top_k", "min_p", "repetition_penalty"}


class VllmStandIn(StandIn):
    routes = {
        "POST /v1/completions": "completions",
        "POST /pause": "pause",
        "POST /resume": "resume",
        "GET /weight_info": "weight_info",
        "POST /collective_rpc": "collective_rpc",
        "POST /update_weight_version": "update_weight_version",
        "POST /init_weight_transfer_engine": "init_transfer",
        "POST /start_weight_update": "start_update",
        "POST /update_weights": "update",
        "POST /finish_weight_update": "finish_update",
        "POST /weight_checker": "weight_checker",
        "POST /reset_prefix_cache": "reset_prefix_cache",
        "GET /metrics": "metrics",
    }

    def __init__(self, tokenizer: Tokenizer) -> None:
        super().__init__(tokenizer)
        self.version = "default"
        self.is_paused = False
        self.session: str | None = None  # None, "ready", "open", "loaded"

    def completions(self, body: dict[str, Any], _: str) -> Any:
        refuse_unknown(body, _COMPLETION)
        if self.is_paused:
            raise HttpError(503, {"error": {"message": "paused"}})
        stop = {"stop": body["stop"]} if "stop" in body else {}
        sampled = self.sample(
            body["prompt"], n=body["n"], max_tokens=body["max_tokens"], temperature=body["temperature"], **stop
        )
        choices: list[dict[str, Any]] = [
            {
                "index": place * body["n"] + completion.index,
                "text": completion.text,
                "token_ids": completion.token_ids,
                "prompt_token_ids": prompt,
                "logprobs": {"token_logprobs": logprobs_of(completion)},
                "finish_reason": completion.finish_reason,
                "stop_reason": completion.stop_reason,
            }
            for place, (prompt, outputs) in enumerate(zip(body["prompt"], sampled, strict=True))
            for completion in outputs
        ]
        return {"object": "text_completion", "choices": choices[::-1]}  # their order is promised by the index alone

    def pause(self, _: Any, query: str) -> Any:
        if query not in ("mode=abort", "mode=wait", "mode=keep"):
            raise HttpError(400, {"error": query})
        self.is_paused = True
        return {"status": "paused"}

    def resume(self, *_: Any) -> Any:
        self.is_paused = False
        return {"status": "resumed"}

    def weight_info(self, *_: Any) -> Any:
        return {"weight_version": self.version}

    def collective_rpc(self, body: dict[str, Any], _: str) -> Any:
        if body["method"] != "reload_weights" or set(body["kwargs"]) != {"weights_path"} or not self.is_paused:
            raise HttpError(500, {"error": {"message": str(body)}})
        self.load(body["kwargs"]["weights_path"])
        return {"results": [None]}

    def update_weight_version(self, body: dict[str, Any], _: str) -> Any:
        self.version = body["new_version"]
        return {"success": True, "new_version": self.version}

    def init_transfer(self, body: dict[str, Any], _: str) -> Any:
        if self.session is not None or body != {"init_info": {}}:
            raise HttpError(500, {"detail": "initialized before"})
        self.session = "ready"
        return {"message": "Weight transfer initialized"}

    def start_update(self, *_: Any) -> Any:
        return self._step("ready", "open", "Weight update started")

    def update(self, body: dict[str, Any], _: str) -> Any:
        self.load(body["update_info"]["path"])
        return self._step("open", "loaded", "Weights updated")

    def finish_update(self, body: dict[str, Any], _: str) -> Any:
        self.version = body["weight_version"]
        return self._step("loaded", "ready", "Weight update finished")

    def weight_checker(self, body: dict[str, Any], _: str) -> Any:
        if body != {"action": "checksum"}:
            raise HttpError(400, {"detail": str(body)})
        return {"checksums": dict(self.checksums)}

    def reset_prefix_cache(self, _: Any, query: str) -> Any:
        if query != "reset_running_requests=true":
            raise HttpError(400, {"detail": query})
        return ""

    def metrics(self, *_: Any) -> str:
        return (
            "# TYPE vllm:num_preemptions counter\n"
            'vllm:num_preemptions_total{engine="0",model_name="m"} 3.0\n'
            'vllm:num_preemptions_total{engine="1",model_name="m"} 4.0\n'
            'vllm:num_requests_running{engine="0"} 9.0\n'
        )

    def _step(self, wanted: str, then: str, message: str) -> Any:
        if self.session != wanted:
            raise HttpError(500, {"detail": f"the session is {self.session}"})
        self.session = then
        return {"message": message}
