"""The program of worker processes: it loads what they need once, then forks one for each socket that it is sent.

octavo.serve.nursery starts it, by its path: it imports nothing but the standard library and the program that it is
told to load, so that one for JSON schemas has no torch. Beside each worker is a process that ends it as soon as the
server hangs up, and tells the server how it ended.
"""

import contextlib
import importlib
import importlib.util
import os
import pickle
import resource
import select
import signal
import socket
import sys
from collections.abc import Callable
from multiprocessing.connection import Connection
from types import ModuleType
from typing import Any

READY = b"\0"
# a worker that holds so much more address space than at its start is replaced: the next job shall find all of it
MAX_LEFT_BYTES = 64 << 20


def main(control_fd: int) -> None:
    """Load, say so, and fork until the server is gone.

    Args:
        control_fd: a socket. On standard input: the pickled (sys.path or None, program: a module's name or file), and
            what the program's prepare() gets; it returns the address space that a worker may have.
    """
    path, program = pickle.load(sys.stdin.buffer)
    if path is not None:
        sys.path[:] = path
    with socket.socket(fileno=control_fd) as control:
        serve(control, program, lambda: pickle.load(sys.stdin.buffer))


def serve(control: socket.socket, program: str, setup: Callable[[], Any]) -> None:
    """Load a program, say so, and fork until the server is gone; see main."""
    try:
        module = _load(program)
        max_bytes = module.prepare(setup())
    except BaseException as error:  # a panic of a library in Rust is no Exception
        control.sendall(f"{type(error).__name__}: {error}".encode()[:1000])
        return
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    control.sendall(READY)
    while True:
        message, sockets, _, _ = socket.recv_fds(control, 1, 1)
        if not sockets:
            return
        if os.fork() == 0:
            control.close()
            _keep(Connection(sockets[0]), module, message[0], max_bytes)
            os._exit(0)
        os.close(sockets[0])


def _load(program: str) -> ModuleType:
    if not program.endswith(".py"):
        return importlib.import_module(program)
    spec = importlib.util.spec_from_file_location("program", program)
    assert spec is not None and spec.loader is not None, "it is a Python file"
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def _keep(jobs: Connection, module: ModuleType, niceness: int, max_bytes: int) -> None:
    """Fork the worker, end it once the server hangs up, and send its exit code."""
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    life, its_end = os.pipe()  # the worker alone holds the other end
    worker = os.fork()
    if worker == 0:
        os.close(life)
        with contextlib.suppress(EOFError, OSError):  # the server is gone
            _work(jobs, module, niceness, max_bytes)
        os._exit(0)
    os.close(its_end)
    ends = select.poll()
    ends.register(jobs.fileno(), getattr(select, "POLLRDHUP", 0))
    ends.register(life, 0)
    ends.poll()
    os.kill(worker, signal.SIGKILL)  # nothing happens to one that has ended
    exit_code = os.waitstatus_to_exitcode(os.waitpid(worker, 0)[1])
    with contextlib.suppress(OSError):
        jobs.send(("ended", exit_code, True))


def _work(jobs: Connection, module: ModuleType, niceness: int, max_bytes: int) -> None:
    """Answer (clock, limit in s, function or its name in the program, arguments) with (outcome, value, is_last)."""
    os.nice(niceness)
    if sys.platform == "linux":
        resource.setrlimit(resource.RLIMIT_AS, (max_bytes, max_bytes))
    least, is_last = address_space(), False
    while not is_last:
        try:
            clock, limit_s, function, arguments = jobs.recv()
        except (EOFError, OSError):
            return
        try:
            signal.setitimer(clock, limit_s)  # its signal ends the process: Python cannot hold that up
            function = getattr(module, function) if isinstance(function, str) else function
            outcome, value = "returned", function(*arguments)
        except MemoryError:
            outcome, value = "memory", None
        except Exception as error:
            outcome, value = "raised", error
        is_last = address_space() > least + MAX_LEFT_BYTES
        jobs.send((outcome, value, is_last))
        signal.setitimer(clock, 0)


def address_space() -> int:
    """Bytes of this process's address space; 0 on systems that do not say."""
    with contextlib.suppress(OSError), open("/proc/self/statm", encoding="ascii") as file:
        return int(file.read().split()[0]) * resource.getpagesize()
    return 0


if __name__ == "__main__":
    main(int(sys.argv[1]))
