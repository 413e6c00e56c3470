"""A stand-in for the Hugging Face Hub on loopback: repositories, branches, files in commits, and weights by LFS."""

import base64
import hashlib
import json
import re
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

TOKEN = "hf_of_a_test"


class Hub:
    """What the server was given.

    Attributes:
        files: (repository, branch) -> path -> content.
        private: repository -> whether it is.
        stored: LFS objects by their SHA-256.
        is_full: takes no more of them.
    """

    def __init__(self) -> None:
        self.files: dict[tuple[str, str], dict[str, bytes]] = {}
        self.private: dict[str, bool] = {}
        self.stored: dict[str, bytes] = {}
        self.url, self.is_full = "", False

    def answer(self, method: str, path: str, body: bytes) -> tuple[int, Any]:
        """A request's status and JSON."""
        path = path.partition("?")[0]
        if found := re.fullmatch(r"/lfs/(\w+)", path):
            if self.is_full:
                return 403, {"error": "no room"}
            assert hashlib.sha256(body).hexdigest() == found[1]
            self.stored[found[1]] = body
            return 200, {}
        if path == "/api/validate-yaml":  # of a card
            return 200, {"errors": [], "warnings": []}
        if path == "/api/repos/create":
            asked = json.loads(body)
            name = f"{asked['organization']}/{asked['name']}" if asked.get("organization") else asked["name"]
            is_new = name not in self.private
            self.private.setdefault(name, asked.get("visibility") == "private")
            self.files.setdefault((name, "main"), {})
            return (200 if is_new else 409), {"url": f"{self.url}/{name}"}
        if found := re.fullmatch(r"/api/models/(.+)/branch/(.+)", path):
            self.files.setdefault((found[1], found[2]), {})
            return 201, {}
        if found := re.fullmatch(r"/api/models/(.+)/preupload/(.+)", path):
            modes = {True: "lfs", False: "regular"}
            rows = [
                {"path": f["path"], "uploadMode": modes[f["path"].endswith(".safetensors")], "shouldIgnore": False}
                for f in json.loads(body)["files"]
            ]
            return 200, {"files": rows}
        if re.fullmatch(r"/(.+)\.git/info/lfs/objects/batch", path):
            objects = json.loads(body)["objects"]
            each = [{**o, "actions": {"upload": {"href": f"{self.url}/lfs/{o['oid']}"}}} for o in objects]
            return 200, {"transfer": "basic", "objects": each}
        if found := re.fullmatch(r"/api/models/(.+)/commit/(.+)", path):
            for line in map(json.loads, body.splitlines()):
                value = line["value"]
                if line["key"] == "file":
                    self.files[found[1], found[2]][value["path"]] = base64.b64decode(value["content"])
                elif line["key"] == "lfsFile":
                    self.files[found[1], found[2]][value["path"]] = self.stored[value["oid"]]
            return 200, {
                "commitUrl": f"{self.url}/{found[1]}/commit/1",
                "commitOid": "1",
                "hookOutput": "",
                "success": True,
            }
        if method == "GET" and (found := re.fullmatch(r"/api/models/([^/]+/[^/]+)(/revision/.+)?", path)):
            return 200, {"id": found[1], "sha": "0", "siblings": [], "private": False}
        return 404, {"error": f"{method} {path}"}


@contextmanager
def serving() -> Iterator[Hub]:
    """A server on a free port, for who has TOKEN."""
    hub = Hub()

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def reply(self) -> None:
            body = self.read_body()
            is_known = self.path.startswith("/lfs/") or self.headers.get("Authorization") == f"Bearer {TOKEN}"
            status, found = hub.answer(self.command, self.path, body) if is_known else (401, {"error": "who are you?"})
            data = json.dumps(found).encode()
            self.send_response(status)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)

        def read_body(self) -> bytes:
            if self.headers.get("Transfer-Encoding") != "chunked":
                return self.rfile.read(int(self.headers.get("Content-Length") or 0))
            parts = []
            while size := int(self.rfile.readline(), 16):
                parts.append(self.rfile.read(size))
                self.rfile.readline()
            self.rfile.readline()
            return b"".join(parts)

        do_GET = do_POST = do_PUT = do_HEAD = reply

        def log_message(self, *_: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    hub.url = f"http://127.0.0.1:{server.server_address[1]}"
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield hub
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
