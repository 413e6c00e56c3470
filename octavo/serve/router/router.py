"""Running a router: its port, its replicas' devices, the drain, and the exit code."""

import asyncio
import contextlib
import dataclasses
import logging
import resource
from collections.abc import Callable

import torch
import uvicorn

from octavo.env import visible_devices
from octavo.errors import ConfigError
from octavo.serve.engine import Engine
from octavo.serve.http.config import ServerConfig
from octavo.serve.http.server import FLUSH_S, StoppableServer, announce, bind, settings_of
from octavo.serve.router.app import build_router_app
from octavo.serve.router.balance import Balance
from octavo.serve.router.fleet import Fleet
from octavo.serve.router.replica import Replica

# time that a replica has to end when its requests have
END_S = 30.0
_TICK_S = 0.05
OPEN_FILES = 1 << 16

logger = logging.getLogger(__name__)


def run_router(
    build_engine: Callable[[], Engine],
    config: ServerConfig,
    host: str = "127.0.0.1",
    port: int = 8000,
    *,
    devices: list[str | None],
) -> int:
    """Serve by several processes behind one port until a signal comes; then finish what was admitted.

    Args:
        build_engine: run_server's, for each replica; it can be pickled.
        devices: see split_devices; one a replica.
    Returns:
        The exit code: 0 if at the end every request in flight had its due end, and every ready replica too, else 1.
        Requests that were lost with a replica before are counted in the log alone.
    Raises:
        ConfigError: the address cannot be had.
        BackendError: a replica could not be started at all, for what it said on standard error.
    """
    listener = bind(host, port)
    announce(listener, host, config)
    _raise_open_files()
    balance = Balance(len(devices))
    # a request is logged once, here, and a client that does not send it whole is cut off here
    order = (build_engine, dataclasses.replace(config, access_log=False, max_unfinished=OPEN_FILES))
    replicas = [Replica(index, order, each) for index, each in enumerate(devices)]
    fleet = Fleet(replicas, balance)
    server = RouterServer(settings_of(build_router_app(fleet, config), config), fleet, config.drain_timeout_s)
    with contextlib.closing(listener):
        asyncio.run(server.serve(sockets=[listener]))
    if fleet.error is not None:
        raise fleet.error
    counts = [sum(getattr(each, name) for each in replicas) for name in ("num_routed", "num_failures", "num_restarts")]
    logger.info("%d requests routed; %d lost with their replica; %d restarts", *counts)
    return 1 if server.was_cut_short else 0


def _raise_open_files() -> None:
    """Let this process have more sockets: a request takes two, the client's and the replica's."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    allowed = OPEN_FILES if hard == resource.RLIM_INFINITY else min(hard, OPEN_FILES)
    if soft != resource.RLIM_INFINITY and soft < allowed:
        resource.setrlimit(resource.RLIMIT_NOFILE, (allowed, hard))


def split_devices(size: int, gpus_each: int, device: torch.device) -> list[str | None]:
    """Each replica's CUDA_VISIBLE_DEVICES; None on a CPU.

    Raises:
        ConfigError: more GPUs than there are, or one chosen for all.
    """
    if device.type != "cuda":
        return [None] * size
    if device.index is not None:
        raise ConfigError(
            f"with --data-parallel-size {size} each replica has GPUs of its own, got --device {device}; "
            "choose by CUDA_VISIBLE_DEVICES"
        )
    count = torch.cuda.device_count()
    if size * gpus_each > count:
        raise ConfigError(
            f"--data-parallel-size {size} with --tensor-parallel-size {gpus_each} takes {size * gpus_each} GPUs, and "
            f"torch sees {count}; lower one of them, or set CUDA_VISIBLE_DEVICES"
        )
    names = visible_devices() or [str(index) for index in range(count)]
    return [",".join(names[index * gpus_each : (index + 1) * gpus_each]) for index in range(size)]


class RouterServer(StoppableServer):
    """A uvicorn server that stays up while its replicas finish, and answers 503 meanwhile.

    Args:
        fleet: the replicas.
        drain_timeout_s: how long it may take.

    Attributes:
        was_cut_short: requests were ended before their due end.
    """

    def __init__(self, settings: uvicorn.Config, fleet: Fleet, drain_timeout_s: float) -> None:
        super().__init__(settings)
        self.was_cut_short = False
        self._fleet, self._drain_timeout_s = fleet, drain_timeout_s
        self._drain: asyncio.Task[None] | None = None
        self._is_hurried = asyncio.Event()

    def stop(self) -> None:
        """Drain, then end; called a second time, end what is unfinished. From the event loop's thread."""
        if self._drain is None:
            logger.info("finishing %d requests; new ones are refused", self._fleet.num_in_flight)
            self._fleet.is_draining = True
            self._drain = asyncio.get_running_loop().create_task(self._finish())
        else:
            self._is_hurried.set()

    async def on_tick(self, counter: int) -> bool:
        """Whether to end: also if a replica cannot be started at all."""
        return await super().on_tick(counter) or self._fleet.error is not None

    async def _finish(self) -> None:
        """Drain; the server ends whatever happens."""
        try:
            await self._end_replicas()
        except Exception:
            logger.exception("the drain failed; what is left is ended at once")
            self.was_cut_short = True
        finally:
            self.should_exit = True

    async def _end_replicas(self) -> None:
        """Let requests end, then the replicas; what does not end in time is ended."""
        fleet = self._fleet
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(self._drain_timeout_s):
                while fleet.num_in_flight and not self._is_hurried.is_set():
                    await asyncio.sleep(_TICK_S)
        if fleet.num_in_flight:
            why = "by a second signal" if self._is_hurried.is_set() else "for they are not finished in time"
            logger.warning("%d requests are ended %s", fleet.num_in_flight, why)
            self.was_cut_short = True
        were_ready = [replica for replica in fleet.replicas if replica.is_ready]
        for replica in fleet.replicas:
            for _ in range(1 + self.was_cut_short):  # the second time it ends what is unfinished
                replica.stop()
                await asyncio.sleep(_TICK_S)
        if not await fleet.join(END_S + FLUSH_S):
            logger.error("replicas have not ended in %g s and are killed", END_S + FLUSH_S)
            self.was_cut_short = True
        self.was_cut_short |= any(replica.exit_code for replica in were_ready)
