"""Servers of http.server that stand in for engines: their routes are the engine's documented ones, all else is 404.

They sample with octavo's own engine from whatever checkpoint they are told to load, so their logprobs are real ones.
Sources: vLLM's vllm/entrypoints/serve/dev/rlhf/api_router.py and its neighbours (VLLM_SERVER_DEV_MODE=1), SGLang's
python/sglang/srt/entrypoints/http_server.py with the fields of managers/io_struct.py.
"""

import hashlib
import inspect
import json
import re
import threading
from collections import defaultdict
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, Self
from urllib.parse import parse_qsl

import torch
from safetensors.torch import load_file

from octavo import LLM, SamplingParams
from octavo.models import Tokenizer
from octavo.serve.outputs import CompletionOutput
from octavo.weights.checksums import engine_name


class HttpError(Exception):
    """(status, body) of an answer."""


class StandIn:
    """POST /v1/completions is the method post_v1_completions; its parameters are the fields that it takes.

    Attributes:
        calls: every request's "METHOD /path", in order. bodies: the last fields of each, those of the query too.
        before: hooks by "METHOD /path" that tests set: called first, may raise HttpError, sleep or hang up.
        change: hooks by "METHOD /path" that change an answer. missing: routes that this version does not have.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self.tokenizer = tokenizer
        self.version, self.is_paused = "default", False
        self.llm: LLM | None = None
        self.calls: list[str] = []
        self.bodies: dict[str, Any] = {}
        self.before: dict[str, Callable[[], None]] = {}
        self.change: dict[str, Callable[[Any], Any]] = {}
        self.missing: set[str] = set()
        self.checksums: dict[str, str] = {}
        self.released = threading.Event()
        self._server = ThreadingHTTPServer(("127.0.0.1", 0), type("Handler", (_Handler,), {"stand_in": self}))
        self._server.daemon_threads = True
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.01,))
        self.url = f"http://127.0.0.1:{self._server.server_address[1]}"

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def stop(self, *_: object) -> None:
        if self._thread.is_alive():
            self.released.set()
            self._server.shutdown()
            self._thread.join(10)
        self._server.server_close()

    __exit__ = stop

    def die(self) -> None:
        """Close the connection without an answer."""
        raise ConnectionAbortedError

    def hang(self) -> None:
        """Answer nothing until the test is over."""
        self.released.wait(30)
        self.die()

    def load(self, path: str) -> None:
        self.llm = LLM(path, tokenizer=self.tokenizer, kv_cache_dtype="fp8", exact=True, max_num_seqs=8, device="cpu")
        held: dict[str, Any] = defaultdict(hashlib.sha256)
        for name, tensor in load_file(f"{path}/model.safetensors").items():
            held[engine_name(name)].update(tensor.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())
        self.checksums = {name: sha.hexdigest() for name, sha in held.items()}

    def sample(self, ids: list[list[int]], **params: Any) -> list[tuple[list[int], CompletionOutput, list[float]]]:
        """(prompt, completion, its logprobs) of each prompt's samples."""
        if self.is_paused:
            raise HttpError(503, {"error": {"message": "paused"}})
        assert self.llm is not None, "nothing was loaded"
        outputs = self.llm.generate(ids, SamplingParams(logprobs=0, **params))
        return [
            (prompt, each, [e[t].logprob for t, e in zip(each.token_ids, each.logprobs or [], strict=True)])
            for prompt, output in zip(ids, outputs, strict=True)
            for each in output.outputs
        ]

    def answer(self, route: str, fields: dict[str, Any]) -> Any:
        self.calls.append(route)
        self.bodies[route] = fields
        method = getattr(self, re.sub(r"\W+", "_", route.lower()), None)
        if method is None or route in self.missing:
            raise HttpError(404, {"detail": "Not Found"})
        self.before.get(route, lambda: None)()
        try:
            inspect.signature(method).bind(**fields)
        except TypeError as error:  # a field that the API does not document
            raise HttpError(400, {"error": {"message": str(error)}}) from None
        return self.change.get(route, lambda found: found)(method(**fields))


class _Handler(BaseHTTPRequestHandler):
    stand_in: StandIn

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers.get("Content-Length", 0))) or "{}")
        path, _, query = self.path.partition("?")
        fields = dict(parse_qsl(query)) | (body if isinstance(body, dict) else {"body": body})
        try:
            status, answer = 200, self.stand_in.answer(f"{self.command} {path}", fields)
        except ConnectionAbortedError:
            return
        except HttpError as error:
            status, answer = error.args
        raw = answer.encode() if isinstance(answer, str) else json.dumps(answer).encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(raw)))
        self.end_headers()
        self.wfile.write(raw)

    do_GET = do_POST

    def log_message(self, *_: Any) -> None: ...


def check_known(fields: dict[str, Any], known: str) -> None:
    if strange := fields.keys() - set(known.split()):
        raise HttpError(400, {"error": {"message": f"unknown {sorted(strange)}"}})


class VllmStandIn(StandIn):
    def post_v1_completions(self, prompt: Any, n: int, max_tokens: int, temperature: float, **others: Any) -> Any:
        # each must come: a model's generation_config.json would set those of sampling otherwise
        needed = {"logprobs", "return_token_ids", "top_p", "top_k", "min_p", "repetition_penalty"}
        check_known(dict.fromkeys(needed ^ (others.keys() - {"stop", "model"})), "")
        rows = self.sample(prompt, n=n, max_tokens=max_tokens, temperature=temperature, stop=others.get("stop"))
        choices: list[dict[str, Any]] = [
            {
                "index": index, "text": completion.text, "token_ids": completion.token_ids, "prompt_token_ids": ids,
                "logprobs": {"token_logprobs": told}, "finish_reason": completion.finish_reason,
                "stop_reason": completion.stop_reason,
            }
            for index, (ids, completion, told) in enumerate(rows)
        ]  # fmt: skip
        return {"choices": choices[::-1]}  # their order is promised by the index alone

    def post_pause(self, mode: str) -> None:
        check_known({mode: True}, "abort wait keep")
        self.is_paused = True

    def post_resume(self) -> None:
        self.is_paused = False

    def get_weight_info(self) -> Any:
        return {"weight_version": self.version}

    def post_collective_rpc(self, method: str, kwargs: dict[str, str]) -> None:
        if method != "reload_weights" or set(kwargs) != {"weights_path"} or not self.is_paused:
            raise HttpError(500, {"error": {"message": method}})
        self.load(kwargs["weights_path"])

    def post_update_weight_version(self, new_version: str) -> None:
        self.version = new_version

    def post_init_weight_transfer_engine(self, init_info: dict[str, Any]) -> None: ...

    def post_start_weight_update(self) -> None: ...

    def post_update_weights(self, update_info: dict[str, str]) -> None:
        self.load(update_info["path"])

    def post_finish_weight_update(self, weight_version: str) -> None:
        self.version = weight_version

    def post_weight_checker(self, action: str) -> Any:
        return {f"{action}s": dict(self.checksums)}

    def post_reset_prefix_cache(self, reset_running_requests: str) -> None: ...

    def get_metrics(self) -> str:
        name = "vllm:num_preemptions"
        counts = f'{name}_total{{engine="0",model_name="m"}} 3.0\n{name}_total{{engine="1",model_name="m"}} 4.0\n'
        return f"# TYPE {name} counter\n{counts}vllm:num_requests_running 9.0\n"


class SglangStandIn(StandIn):
    def post_generate(
        self, input_ids: list[list[int]], sampling_params: dict[str, Any], return_logprob: bool, stream: bool
    ) -> Any:
        check_known(sampling_params, "temperature max_new_tokens top_p top_k min_p stop")
        params = {name: sampling_params[name] for name in ("temperature", "stop") if name in sampling_params}
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
            for _, completion, told in self.sample(input_ids, max_tokens=sampling_params["max_new_tokens"], **params)
        ]

    def _reason(self, completion: Any) -> dict[str, Any]:
        if completion.finish_reason == "stop":
            return {"type": "stop", "matched": completion.stop_reason or self.tokenizer.eos_id}
        return {"type": completion.finish_reason, "length": len(completion.token_ids)}

    def post_pause_generation(self, mode: str) -> None:
        check_known({mode: True}, "abort retract in_place")
        self.is_paused = True

    def post_continue_generation(self) -> None:
        self.is_paused = False

    def post_begin_weight_update(self, selector: str) -> Any:
        return {"success": selector == "all"}

    def post_update_weights_from_disk(self, model_path: str, weight_version: str, flush_cache: bool) -> Any:
        self.load(model_path)
        self.version = weight_version
        return {"success": True}

    def post_end_weight_update(self) -> Any:
        return {"success": True}

    def post_weights_checker(self, action: str) -> Any:
        return {"success": True, "ranks": [{f"{action}s": dict(self.checksums)}]}

    def get_get_model_info(self) -> Any:
        return {"weight_version": self.version}

    def post_flush_cache(self) -> str:
        return "Cache flushed.\n"
