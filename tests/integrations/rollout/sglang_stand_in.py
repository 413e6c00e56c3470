"""SGLang's routes, of python/sglang/srt/entrypoints/http_server.py, with the fields of managers/io_struct.py."""

from typing import Any

from tests.integrations.rollout.stand_in import HttpError, StandIn

_SAMPLING = {"temperature", "max_new_tokens", "top_p", "top_k", "min_p", "stop"}


class SglangStandIn(StandIn):
    is_open = False

    def post_generate(
        self, input_ids: list[list[int]], sampling_params: dict[str, Any], return_logprob: bool, stream: bool
    ) -> Any:
        if strange := set(sampling_params) - _SAMPLING:
            raise HttpError(400, {"error": {"message": f"unknown fields {sorted(strange)}"}})
        params = {name: sampling_params[name] for name in ("temperature", "stop") if name in sampling_params}
        rows = self.sample(input_ids, max_tokens=sampling_params["max_new_tokens"], **params)
        return [
            {
                "text": completion.text,
                "output_ids": completion.token_ids,
                "meta_info": {
                    "finish_reason": self._reason(completion),
                    "weight_version": self.version,
                    "num_retractions": 1,
                    "output_token_logprobs": [[a, b, None] for a, b in zip(told, completion.token_ids, strict=True)],
                },
            }
            for _, completion, told in rows
        ]

    def _reason(self, completion: Any) -> dict[str, Any]:
        if completion.finish_reason == "stop":
            return {"type": "stop", "matched": completion.stop_reason or self.tokenizer.eos_id}
        return {"type": completion.finish_reason, "length": len(completion.token_ids)}

    def post_pause_generation(self, mode: str) -> Any:
        if mode not in ("abort", "retract", "in_place"):
            raise HttpError(400, {"detail": mode})
        self.is_paused = True
        return {"status": "ok", "message": "Generation paused successfully."}

    def post_continue_generation(self) -> Any:
        self.is_paused = False
        return {"status": "ok", "message": "Generation continued successfully."}

    def post_begin_weight_update(self, selector: str) -> Any:
        if self.is_open or selector != "all":
            raise HttpError(400, {"success": False, "message": "a session is already open"})
        self.is_open = True
        return {"success": True, "message": ""}

    def post_update_weights_from_disk(self, model_path: str, weight_version: str, flush_cache: bool) -> Any:
        if "POST /begin_weight_update" not in self.missing and not self.is_open:
            raise HttpError(400, {"success": False, "message": "call begin_weight_update first"})
        self.load(model_path)
        self.version = weight_version
        return {"success": True, "message": "Succeeded to update model weights.", "num_paused_requests": 0}

    def post_end_weight_update(self) -> Any:
        self.is_open = False
        return {"success": True, "message": ""}

    def post_weights_checker(self, action: str) -> Any:
        return {"success": True, "message": "", "ranks": [{f"{action}s": dict(self.checksums)}]}

    def get_get_model_info(self) -> Any:
        return {"is_generation": True, "weight_version": self.version}

    def post_flush_cache(self) -> str:
        return "Cache flushed.\n"
