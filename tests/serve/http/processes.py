"""`octavo serve` as a process of its own."""

import re
import subprocess
import sys
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import httpx

LISTENING = re.compile(r"listening at (http://\S+)")


class Process:
    """A server's process; log holds what it has said."""

    def __init__(self, *arguments: str, octavo: Sequence[str] = ()) -> None:
        command = octavo or [sys.executable, "-c", "from octavo.cli import main; main()"]
        self.popen = subprocess.Popen(
            [*command, "serve", *arguments], stderr=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        self.log: list[str] = []
        self.url = ""
        self._is_listening = threading.Event()
        self._reader = threading.Thread(target=self._read)
        self._reader.start()

    def wait_until_ready(self) -> None:
        assert self._is_listening.wait(60) and self.url, self.log
        with httpx.Client(transport=httpx.HTTPTransport(retries=20)) as client:
            for _ in range(3000):
                if client.get(f"{self.url}/ready").status_code == 200:
                    return
                threading.Event().wait(0.02)
        raise AssertionError(f"it is not ready: {self.log}")

    def end(self) -> tuple[int, str]:
        """Exit code and log, once it has ended."""
        code = self.popen.wait(60)
        self._reader.join(10)
        return code, "".join(self.log)

    def _read(self) -> None:
        assert self.popen.stderr is not None
        for line in self.popen.stderr:
            self.log.append(line)
            if match := LISTENING.search(line):
                self.url = match.group(1)
                self._is_listening.set()
        self._is_listening.set()


@contextmanager
def served(*arguments: str, octavo: Sequence[str] = ()) -> Iterator[Process]:
    process = Process(*arguments, octavo=octavo)
    try:
        yield process
    finally:
        if process.popen.poll() is None:
            process.popen.kill()
        process.end()
        for pipe in (process.popen.stdout, process.popen.stderr):
            assert pipe is not None
            pipe.close()
