"""SGLang's routes, of python/sglang/srt/entrypoints/http_server.py, with the fields of managers/io_struct.py."""

from typing import Any

from octavo.models import Tokenizer
from tests.integrations.rollout.stand_in import HttpError, StandIn, logprobs_of, refuse_unknown

_SAMPLING = {"temperature", "max_new_tokens", "top_p", "top_k", "min_p", "stop"}


class SglangStandIn(StandIn):
    routes = {
        "POST /generate": "generate",
        "POST /pause_generation": "pause",
        "POST /continue_generation": "resume",
        "POST /begin_weight_update": "begin",
        "POST /update_weights_from_disk": "update",
        "POST /end_weight_update": "end",
        "POST /weights_checker": "weights_checker",
        "POST /flush_cache": "flush_cache",
        "GET /get_model_info": "model_info",
    }

    def __init__(self, tokenizer: Tokenizer) -> None:
        super().__init__(tokenizer)
        self.version = "default"
        self.is_paused = False
        self.is_open = False

    def generate(self, body: dict[str, Any], _: str) -> Any:
        refuse_unknown(body, {"input_ids", "sampling_params", "return_logprob", "stream"})
        refuse_unknown(body["sampling_params"], _SAMPLING)
        if self.is_paused:
            raise HttpError(503, {"error": {"message": "paused"}})
        params = body["sampling_params"]
        stop = {"stop": params["stop"]} if "stop" in params else {}
        sampled = self.sample(
            body["input_ids"], max_tokens=params["max_new_tokens"], temperature=params["temperature"], **stop
        )
        return [self._row(prompt, outputs[0]) for prompt, outputs in zip(body["input_ids"], sampled, strict=True)]

    def _row(self, prompt: list[int], completion: Any) -> Any:
        reason: dict[str, Any] = {"type": completion.finish_reason}
        if completion.finish_reason == "stop":
            reason["matched"] = completion.stop_reason or self.tokenizer.eos_id
        else:
            reason["length"] = len(completion.token_ids)
        pairs = zip(logprobs_of(completion), completion.token_ids, strict=True)
        return {
            "text": completion.text,
            "output_ids": completion.token_ids,
            "meta_info": {
                "id": "0",
                "finish_reason": reason,
                "prompt_tokens": len(prompt),
                "completion_tokens": len(completion.token_ids),
                "weight_version": self.version,
                "num_retractions": 1,
                "output_token_logprobs": [[logprob, token, None] for logprob, token in pairs],
            },
        }

    def pause(self, body: dict[str, Any], _: str) -> Any:
        if body["mode"] not in ("abort", "retract", "in_place"):
            raise HttpError(400, {"detail": str(body)})
        self.is_paused = True
        return {"status": "ok", "message": "Generation paused successfully."}

    def resume(self, *_: Any) -> Any:
        self.is_paused = False
        return {"status": "ok", "message": "Generation continued successfully."}

    def begin(self, body: dict[str, Any], _: str) -> Any:
        if self.is_open or body != {"selector": "all"}:
            raise HttpError(400, {"success": False, "message": "a session is already open"})
        self.is_open = True
        return {"success": True, "message": ""}

    def update(self, body: dict[str, Any], _: str) -> Any:
        has_session = "POST /begin_weight_update" in self.routes
        if has_session and not self.is_open:
            raise HttpError(400, {"success": False, "message": "call begin_weight_update first"})
        self.load(body["model_path"])
        self.version = body["weight_version"]
        return {"success": True, "message": "Succeeded to update model weights.", "num_paused_requests": 0}

    def end(self, *_: Any) -> Any:
        if not self.is_open:
            raise HttpError(400, {"success": False, "message": "call begin_weight_update first"})
        self.is_open = False
        return {"success": True, "message": ""}

    def weights_checker(self, body: dict[str, Any], _: str) -> Any:
        if body != {"action": "checksum"}:
            raise HttpError(400, {"success": False, "message": str(body)})
        return {"success": True, "message": "", "ranks": [{"checksums": dict(self.checksums)}]}

    def model_info(self, *_: Any) -> Any:
        return {"model_path": str(self.path), "is_generation": True, "weight_version": self.version}

    def flush_cache(self, *_: Any) -> str:
        return "Cache flushed.\n"
