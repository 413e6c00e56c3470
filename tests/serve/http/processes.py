"""`octavo serve` as a process of its own."""

import os
import re
import subprocess
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import httpx

from tests import forks

LISTENING = re.compile(r"listening at (http://\S+)")


class Process:
    """A server's process, a fork where `octavo` is no command of its own; log holds what it has said."""

    def __init__(self, *arguments: str, octavo: Sequence[str] = ()) -> None:
        self.popen: Any
        ours, theirs = os.pipe()
        self._stderr = os.fdopen(ours)
        with os.fdopen(theirs, "wb"), open(os.devnull, "wb") as nowhere:
            if octavo:
                self.popen = subprocess.Popen([*octavo, "serve", *arguments], stdout=nowhere, stderr=theirs)
            else:
                self.popen = forks.Fork(forks.serve, *arguments, streams=(nowhere.fileno(), theirs))
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
        with self._stderr:
            for line in self._stderr:
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
