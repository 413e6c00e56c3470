"""A server of http.server that stands in for an engine: its routes are the engine's documented ones, all else is 404.

It samples with octavo's own engine from whatever checkpoint it is told to load, so its logprobs are real ones.
"""

import hashlib
import json
import threading
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import torch
from safetensors.torch import load_file

from octavo import LLM, SamplingParams
from octavo.models import Tokenizer
from octavo.serve.outputs import CompletionOutput


class HttpError(Exception):
    def __init__(self, status: int, body: Any) -> None:
        super().__init__(str(body))
        self.status, self.body = status, body


class StandIn:
    """Routes are methods named in `routes`: "POST /path" -> name; each takes (body, query) and returns the answer.

    Attributes:
        calls: every request's "METHOD /path", in order. bodies: the last body of each.
        before: hooks by "METHOD /path" that tests set: called first, may raise HttpError, sleep or hang up.
        change: hooks by "METHOD /path" that change an answer.
    """

    routes: dict[str, str] = {}

    def __init__(self, tokenizer: Tokenizer) -> None:
        self.tokenizer = tokenizer
        self.llm: LLM | None = None
        self.path: Path | None = None
        self.calls: list[str] = []
        self.bodies: dict[str, Any] = {}
        self.before: dict[str, Callable[[], None]] = {}
        self.change: dict[str, Callable[[Any], Any]] = {}
        self.checksums: dict[str, str] = {}
        self.released = threading.Event()
        self._server = ThreadingHTTPServer(("127.0.0.1", 0), self._handler())
        self._server.daemon_threads = True
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.01,))
        self.url = f"http://127.0.0.1:{self._server.server_address[1]}"

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
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
        """Take over a checkpoint as the files say."""
        self.path = Path(path)
        self.llm = LLM(path, tokenizer=self.tokenizer, kv_cache_dtype="fp8", exact=True, max_num_seqs=8, device="cpu")
        held: dict[str, list[torch.Tensor]] = {}
        for name, tensor in load_file(self.path / "model.safetensors").items():
            held.setdefault(_fuse(name), []).append(tensor)
        self.checksums = {name: _sha(parts) for name, parts in held.items()}

    def sample(self, ids: list[list[int]], **params: Any) -> list[list[CompletionOutput]]:
        assert self.llm is not None, "nothing was loaded"
        outputs = self.llm.generate(ids, SamplingParams(logprobs=0, **params))
        return [output.outputs for output in outputs]

    def answer(self, route: str, query: str, body: Any) -> Any:
        self.calls.append(route)
        self.bodies[route] = body
        if route not in self.routes:
            raise HttpError(404, {"detail": "Not Found"})
        if route in self.before:
            self.before[route]()
        found = getattr(self, self.routes[route])(body, query)
        return self.change[route](found) if route in self.change else found

    def _handler(self) -> type[BaseHTTPRequestHandler]:
        stand_in = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                raw = self.rfile.read(int(self.headers.get("Content-Length", 0)))
                self.respond("POST", json.loads(raw) if raw else None)

            def do_GET(self) -> None:
                self.respond("GET", None)

            def respond(self, method: str, body: Any) -> None:
                path, _, query = self.path.partition("?")
                status = 200
                try:
                    answer = stand_in.answer(f"{method} {path}", query, body)
                except ConnectionAbortedError:
                    return
                except HttpError as error:
                    status, answer = error.status, error.body
                raw = answer.encode() if isinstance(answer, str) else json.dumps(answer).encode()
                self.send_response(status)
                self.send_header("Content-Length", str(len(raw)))
                self.end_headers()
                self.wfile.write(raw)

            def log_message(self, *_: Any) -> None:
                pass

        return Handler


def refuse_unknown(body: dict[str, Any], known: set[str]) -> None:
    """A field that the API does not document is an error of the client's."""
    if strange := set(body) - known:
        raise HttpError(400, {"error": {"message": f"unknown fields {sorted(strange)}"}})


def logprobs_of(completion: CompletionOutput) -> list[float]:
    assert completion.logprobs is not None
    return [entry[token].logprob for token, entry in zip(completion.token_ids, completion.logprobs, strict=True)]


def _fuse(name: str) -> str:
    """The name of the parameter that such engines merge a tensor into."""
    for part, fused in (("q", "qkv"), ("k", "qkv"), ("v", "qkv"), ("gate", "gate_up"), ("up", "gate_up")):
        name = name.replace(f".{part}_proj.", f".{fused}_proj.")
    return name


def _sha(parts: list[torch.Tensor]) -> str:
    raw = b"".join(part.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes() for part in parts)
    return hashlib.sha256(raw).hexdigest()
