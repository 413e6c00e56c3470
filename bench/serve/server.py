"""octavo's own server over random weights in a process of its own, for the online benchmark."""

import contextlib
import dataclasses
import functools
import json
import logging
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import torch

from bench.serve.made_tokenizer import make_tokenizer
from bench.serve.shapes import SHAPES, build_model, make_toy
from bench.serve.workloads import VARIANTS
from octavo.errors import BackendError
from octavo.serve import LLM
from octavo.serve.engine import Engine

_STOP_S = 60.0


@dataclasses.dataclass(frozen=True)
class ServerSetup:
    """What the process serves; travels as JSON. limits: of the LLM. has_tokenizer: answers are text, not ids alone.

    num_replicas: several are on a GPU each behind a router, as `octavo serve --data-parallel-size` has them.
    """

    model: str
    variant: str
    recipe: str
    device: str
    port: int
    limits: dict[str, Any]
    has_tokenizer: bool = False
    num_layers: int | None = None
    is_toy: bool = False
    num_replicas: int = 1


@contextlib.contextmanager
def running_server(setup: ServerSetup) -> Iterator["subprocess.Popen[bytes]"]:
    """Start the process; at the end stop it as SIGTERM does.

    Raises:
        BackendError: it did not end well: a request without its due end, or pages that did not come back.
    """
    command = [sys.executable, "-m", "bench.serve.server", json.dumps(dataclasses.asdict(setup))]
    process = subprocess.Popen(command)
    try:
        yield process
        process.send_signal(signal.SIGTERM)
        try:
            code: int | None = process.wait(_STOP_S)
        except subprocess.TimeoutExpired:
            code = None
        if code != 0:
            raise BackendError(f"the server was to end with 0 at SIGTERM, got {code}; its log stands above")
    finally:
        process.kill()
        process.wait()


def free_port() -> int:
    """A free port."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port: int = listener.getsockname()[1]
        return port


def main(setup: ServerSetup) -> int:
    """Serve until SIGTERM; the exit code is the server's."""
    from octavo.serve.http import ServerConfig, run_server
    from octavo.serve.router import run_router, split_devices

    logging.basicConfig(level=logging.WARNING, format="server: %(levelname)s %(name)s: %(message)s")
    build, config = functools.partial(build_engine, setup), ServerConfig(model_names=(setup.model,))
    if setup.num_replicas == 1:
        return run_server(build, config, port=setup.port)
    devices = split_devices(setup.num_replicas, 1, torch.device(setup.device))
    return run_router(build, config, port=setup.port, devices=devices)


def build_engine(setup: ServerSetup) -> Engine:
    """An engine over random weights, warm."""
    config = make_toy(SHAPES[setup.model]) if setup.is_toy else SHAPES[setup.model]
    config = dataclasses.replace(config, num_layers=setup.num_layers or config.num_layers)
    numerics = VARIANTS[setup.variant].numerics(setup.recipe)
    tokenizer = make_tokenizer(config.vocab_size) if setup.has_tokenizer else None
    engine = LLM(build_model(config, numerics, setup.device), tokenizer, **setup.limits).engine
    engine.warm_up()
    return engine


if __name__ == "__main__":
    from bench.serve import server  # by this name replicas find build_engine, too

    sys.exit(server.main(server.ServerSetup(**json.loads(sys.argv[1]))))
