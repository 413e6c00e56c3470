"""A small JSON-over-HTTP client of the standard library, whose failures are EngineErrors that say what to look at."""

import http.client
import json
from collections.abc import Mapping
from typing import Any, NamedTuple
from urllib.parse import urlsplit

from octavo.weights.errors import EngineAnswerError, EngineError, EngineTimeoutError

_CONNECT_S = 10.0
_SHOWN = 300  # characters of an answer in an error's text
# Prometheus' name -> ours
_COUNTERS = {
    "vllm:num_preemptions_total": "num_preemptions",
    "vllm:prefix_cache_queries_total": "num_prefix_query_tokens",
    "vllm:prefix_cache_hits_total": "num_prefix_hit_tokens",
}


class _Body(NamedTuple):
    data: bytes | memoryview
    kind: str


class RefusedError(EngineError):
    """An answer with an error status.

    Attributes:
        status: HTTP's.
        detail: the answer's own words.
    """

    def __init__(self, where: str, status: int, raw: bytes) -> None:
        super().__init__(f"{where} answered {status}: {_shown(raw)}")
        self.status = status
        self.detail = _detail(raw)


class HttpClient:
    """Sends one request at a time, each over a connection of its own.

    Args:
        name: of the engine, for messages.
        url: "http://host:port", with a path before every route where there is one.
        key: sent as a bearer token; empty for none.
        timeout_s: the longest silence of the server where a call names none.
    """

    def __init__(self, name: str, url: str, *, key: str = "", timeout_s: float = 300.0) -> None:
        parts = urlsplit(url)
        self._name, self._url, self._key, self._timeout_s = name, url, key, timeout_s
        self._host, self._port, self._prefix = parts.hostname or "", parts.port, parts.path.rstrip("/")
        self._make = http.client.HTTPSConnection if parts.scheme == "https" else http.client.HTTPConnection

    def post(self, path: str, body: Any = None, *, timeout_s: float | None = None, key: str | None = None) -> Any:
        """POST a JSON body.

        Returns:
            The answer's JSON; None where it is empty.
        Raises:
            EngineTimeoutError: no byte came for timeout_s.
            RefusedError: an error status.
            EngineAnswerError: no JSON.
            EngineError: no connection, or it broke.
        """
        data = b"" if body is None else json.dumps(body).encode()
        return self._json("POST", path, _Body(data, "application/json"), timeout_s, key)

    def order(self, path: str, body: Any = None) -> None:
        """POST a JSON body to a route whose answer is words for people; see post."""
        data = b"" if body is None else json.dumps(body).encode()
        self._request("POST", path, _Body(data, "application/json"))

    def send(self, path: str, data: bytes | memoryview, *, key: str | None = None) -> Any:
        """POST bytes; see post."""
        return self._json("POST", path, _Body(data, "application/octet-stream"), key=key)

    def get(self, path: str, *, key: str | None = None) -> Any:
        """GET JSON; see post."""
        return self._json("GET", path, key=key)

    def delete(self, path: str, *, key: str | None = None) -> Any:
        """DELETE; see post."""
        return self._json("DELETE", path, key=key)

    def get_text(self, path: str) -> str:
        """GET text; see post."""
        return self._request("GET", path).decode(errors="replace")

    def _json(
        self, method: str, path: str, body: _Body | None = None, timeout_s: float | None = None, key: str | None = None
    ) -> Any:
        raw = self._request(method, path, body, timeout_s, key)
        if not raw.strip():
            return None
        try:
            return json.loads(raw)
        except ValueError as error:
            raise EngineAnswerError(f"{self._where(path)} answered with no JSON ({error}): {_shown(raw)}") from None

    def _request(
        self, method: str, path: str, body: _Body | None = None, timeout_s: float | None = None, key: str | None = None
    ) -> bytes:
        timeout_s = timeout_s or self._timeout_s
        headers = {} if body is None else {"Content-Type": body.kind}
        if bearer := self._key if key is None else key:
            headers["Authorization"] = f"Bearer {bearer}"
        connection = self._make(self._host, self._port, timeout=min(_CONNECT_S, timeout_s))
        try:
            self._connect(connection, path)
            connection.sock.settimeout(timeout_s)
            connection.request(method, self._prefix + path, body=None if body is None else body.data, headers=headers)
            response = connection.getresponse()
            raw = response.read()
        except TimeoutError:
            raise EngineTimeoutError(
                f"{self._where(path)} did not answer within {timeout_s:g} s; it hangs, or needs more time "
                "(engine.timeout_s, engine.update_timeout_s)"
            ) from None
        except (OSError, http.client.HTTPException) as error:
            raise EngineError(
                f"{self._where(path)} broke off the connection ({type(error).__name__}: {error}); the engine died or "
                "was restarted; look at its log, start it and begin the step again"
            ) from error
        finally:
            connection.close()
        if response.status >= 400:
            raise RefusedError(self._where(path), response.status, raw)
        return raw

    def _connect(self, connection: http.client.HTTPConnection, path: str) -> None:
        try:
            connection.connect()
        except OSError as error:
            raise EngineError(
                f"{self._where(path)} cannot be reached ({error}); start the engine, or fix engine.url"
            ) from error

    def _where(self, path: str) -> str:
        return f"{self._name}: {self._url}{path}"


def _shown(raw: bytes) -> str:
    text = raw.decode(errors="replace").strip()
    return text if len(text) <= _SHOWN else f"{text[:_SHOWN]}..."


def _detail(raw: bytes) -> str:
    """The message of an error in OpenAI's shape, else the whole text."""
    try:
        return str(json.loads(raw)["error"]["message"])
    except (ValueError, KeyError, TypeError):
        return raw.decode(errors="replace")


def read_counters(text: str, names: Mapping[str, str] = _COUNTERS) -> dict[str, float]:
    """Numbers out of Prometheus text, summed over their labels."""
    found: dict[str, float] = {}
    for line in text.splitlines():
        name, _, rest = line.partition("{") if "{" in line else line.partition(" ")
        if name in names and not line.startswith("#"):
            found[names[name]] = found.get(names[name], 0.0) + float(rest.rpartition("}")[2].split()[0])
    return found
