"""The program of the worker processes: it reads large bodies, renders chat templates and tokenizes long texts.

octavo.serve.http.lanes starts one process that loads what is needed and then forks a worker for each socket that it is
sent. A worker answers jobs until its socket closes; the kernel ends one that takes too long, whatever it is doing.
"""

import contextlib
import os
import pickle
import resource
import signal
import socket
import sys
from collections.abc import Mapping, Sequence
from multiprocessing.connection import Connection
from typing import Any

from octavo.errors import DataError
from octavo.models.chat import render
from octavo.models.tokenizer import Tokenizer
from octavo.serve.http.errors import ApiError

# memory that a job may take beside what the worker has at its start
JOB_BYTES = 1 << 30

# set before the first fork
_tokenizer: Tokenizer | None = None


def render_chat(messages: Sequence[Mapping[str, Any]], add_generation_prompt: bool, kwargs: Mapping[str, Any]) -> str:
    """A conversation as text; see octavo.models.chat.render."""
    return render(_own(), messages, add_generation_prompt=add_generation_prompt, template_kwargs=kwargs)


def encode(text: str, add_special_tokens: bool, most: int | None) -> list[int] | int:
    """A text's token ids, or their number if it is more than `most`."""
    ids = _own().encode(text, add_special_tokens=add_special_tokens)
    return len(ids) if most is not None and len(ids) > most else ids


def decode(token_ids: Sequence[int], vocab_size: int, tokenizer: Tokenizer | None = None) -> str:
    """The text of token ids, special tokens included, by the worker's tokenizer or another.

    Raises:
        ApiError: 400 for an id that is none of the vocabulary's.
    """
    if bad := [token_id for token_id in token_ids if not 0 <= token_id < vocab_size]:
        raise ApiError(400, f"tokens must be ids from 0 to {vocab_size - 1}, got {bad[0]}", "tokens", "invalid_value")
    return (tokenizer or _own()).decode(token_ids, skip_special_tokens=False)


def _own() -> Tokenizer:
    assert _tokenizer is not None, "text is for servers with a tokenizer"
    return _tokenizer


def main(control_fd: int) -> None:
    """Load, then fork a worker for each socket that comes, until the server is gone.

    Args:
        control_fd: a socket; on standard input the pickled arguments of a Tokenizer, or None.
    """
    global _tokenizer
    arguments = pickle.load(sys.stdin.buffer)
    if arguments is not None:
        _tokenizer = Tokenizer(*arguments[0], **arguments[1])
        with contextlib.suppress(Exception):  # the job that needs it says what is missing
            _tokenizer.prepare_chat()
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # no wait() for the workers
    with socket.socket(fileno=control_fd) as control:
        while True:
            message, sockets, _, _ = socket.recv_fds(control, 1, 1)
            if not sockets:
                return
            if os.fork() == 0:
                control.close()
                _work(Connection(sockets[0]), niceness=message[0])
                os._exit(0)
            os.close(sockets[0])


def _work(jobs: Connection, niceness: int) -> None:
    """Answer (time limit, function, arguments) with (whether it returned, what it returned or raised)."""
    os.nice(niceness)
    if sys.platform == "linux":
        limit = _address_space() + JOB_BYTES
        resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
    while True:
        try:
            limit_s, function, arguments = jobs.recv()
        except MemoryError:
            jobs.send((False, DataError("the request takes too much memory; send less")))
            continue
        except (EOFError, OSError):
            return
        signal.setitimer(signal.ITIMER_PROF, limit_s)  # SIGPROF ends the process: Python cannot hold that up
        try:
            answer = (True, function(*arguments))
        except MemoryError:
            answer = (False, DataError("the request takes too much memory; send less"))
        except Exception as error:
            answer = (False, error)
        jobs.send(answer)
        signal.setitimer(signal.ITIMER_PROF, 0)


def _address_space() -> int:
    """Bytes of this process's address space."""
    with open("/proc/self/statm", encoding="ascii") as file:
        return int(file.read().split()[0]) * resource.getpagesize()
