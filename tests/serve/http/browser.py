"""A headless Chromium, driven over its debugging pipe: enough to open a page, run JavaScript in it, and wait."""

import json
import os
import shutil
import subprocess
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

PROGRAM = next(
    (path for name in ("chromium", "chromium-browser", "google-chrome") if (path := shutil.which(name))), None
)


class Browser:
    """One tab. Messages are JSON, each ended by a zero byte.

    Attributes:
        errors: texts of exceptions that pages threw, and of requests that their policy forbade.
    """

    def __init__(self, write_fd: int, read_fd: int) -> None:
        self.errors: list[str] = []
        self._write_fd, self._read_fd = write_fd, read_fd
        self._buffer, self._last_id = b"", 0
        self._session: str | None = None
        target = self._call("Target.createTarget", url="about:blank")["targetId"]
        self._session = self._call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Log"):
            self._call(f"{domain}.enable")

    def open(self, url: str) -> None:
        """Load a page and wait until it is there."""
        self._call("Page.navigate", url=url)
        self.wait_for(f"location.href.startsWith({url!r}) && document.readyState === 'complete'")

    def run(self, code: str) -> Any:
        """The value of an expression; a promise is waited for."""
        answer = self._call("Runtime.evaluate", expression=code, awaitPromise=True, returnByValue=True)
        assert "exceptionDetails" not in answer, answer
        return answer["result"].get("value")

    def type(self, text: str) -> None:
        """Write into whatever has the focus."""
        self._call("Input.insertText", text=text)

    def press_enter(self, shift: bool = False) -> None:
        """Press and release the key."""
        key = {"key": "Enter", "code": "Enter", "windowsVirtualKeyCode": 13, "modifiers": 8 if shift else 0}
        self._call("Input.dispatchKeyEvent", type="keyDown", text="\r", **key)
        self._call("Input.dispatchKeyEvent", type="keyUp", **key)

    def wait_for(self, condition: str, timeout_s: float = 20.0) -> None:
        """Wait until a JavaScript expression is true; one that throws is not, yet."""
        pause = threading.Event()
        for _ in range(int(timeout_s / 0.05)):
            if self.run(f"(() => {{ try {{ return Boolean({condition}); }} catch {{ return false; }} }})()"):
                return
            pause.wait(0.05)
        text = self.run("document.body.innerText")
        raise AssertionError(f"{condition} did not come about; the page says: {text}")

    def _call(self, method: str, **params: Any) -> Any:
        self._last_id += 1
        message = {"id": self._last_id, "method": method, "params": params}
        if self._session is not None:
            message["sessionId"] = self._session
        os.write(self._write_fd, json.dumps(message).encode() + b"\0")
        while True:
            answer = self._read()
            if answer.get("id") == self._last_id:
                assert "error" not in answer, answer
                return answer["result"]
            if answer.get("method") == "Runtime.exceptionThrown":
                self.errors.append(json.dumps(answer["params"]["exceptionDetails"]))
            if answer.get("method") == "Log.entryAdded" and answer["params"]["entry"]["level"] == "error":
                self.errors.append(answer["params"]["entry"]["text"])

    def _read(self) -> dict[str, Any]:
        while b"\0" not in self._buffer:
            part = os.read(self._read_fd, 1 << 16)
            assert part, "the browser has gone"
            self._buffer += part
        message, _, self._buffer = self._buffer.partition(b"\0")
        content: dict[str, Any] = json.loads(message)
        return content


@contextmanager
def browser(profile: Path) -> Iterator[Browser]:
    """Start Chromium with an empty profile, end it at the end."""
    assert PROGRAM is not None, "there is no Chromium here"
    theirs_in, ours_out = os.pipe()
    ours_in, theirs_out = os.pipe()
    options = ["--headless", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--no-first-run"]
    options += ["--disable-background-networking", f"--user-data-dir={profile}", "--remote-debugging-pipe"]
    # the pipe's ends are to be the descriptors 3 and 4
    script = f'exec "$0" "$@" 3<&{theirs_in} 4>&{theirs_out}'
    process = subprocess.Popen(
        ["bash", "-c", script, PROGRAM, *options],
        pass_fds=(theirs_in, theirs_out),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    os.close(theirs_in)
    os.close(theirs_out)
    try:
        yield Browser(ours_out, ours_in)
    finally:
        process.terminate()
        process.wait(20)
        os.close(ours_out)
        os.close(ours_in)
