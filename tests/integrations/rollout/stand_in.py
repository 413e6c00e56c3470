"""A server of http.server that stands in for an engine: its routes are the engine's documented ones, all else is 404.

It samples with octavo's own engine from whatever checkpoint it is told to load, so its logprobs are real ones.
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
    def __init__(self, status: int, body: Any) -> None:
        super().__init__(str(body))
        self.status, self.body = status, body


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

    def __exit__(self, *_: object) -> None:
        self.stop()

    def stop(self) -> None:
        if self._thread.is_alive():
            self.released.set()
            self._server.shutdown()
            self._thread.join(10)
        self._server.server_close()

    def hang(self) -> None:
        """Answer nothing until the test is over."""
        self.released.wait(30)
        raise ConnectionAbortedError

    def die(self) -> None:
        """Close the connection without an answer."""
        raise ConnectionAbortedError

    def load(self, path: str) -> None:
        """Load a checkpoint as the files say."""
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
        found = [(prompt, each) for prompt, output in zip(ids, outputs, strict=True) for each in output.outputs]
        return [
            (prompt, each, [e[t].logprob for t, e in zip(each.token_ids, each.logprobs or [], strict=True)])
            for prompt, each in found
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
        raw = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        body = json.loads(raw) if raw else {}
        path, _, query = self.path.partition("?")
        fields = dict(parse_qsl(query)) | (body if isinstance(body, dict) else {"body": body})
        status = 200
        try:
            answer = self.stand_in.answer(f"{self.command} {path}", fields)
        except ConnectionAbortedError:
            return
        except HttpError as error:
            status, answer = error.status, error.body
        raw = answer.encode() if isinstance(answer, str) else json.dumps(answer).encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(raw)))
        self.end_headers()
        self.wfile.write(raw)

    do_GET = do_POST

    def log_message(self, *_: Any) -> None:
        pass
