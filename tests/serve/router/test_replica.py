"""A replica's life: how long until it is started again, and when it is ended for being of no use."""

import asyncio
import functools
import io
import os
import pickle
import socket
from types import SimpleNamespace
from typing import Any

import pytest

import octavo
from octavo.distributed import agreement
from octavo.distributed.agreement import versions
from octavo.errors import BackendError, ConfigError, OctavoError
from octavo.models.device import check_device
from octavo.serve.http.config import ServerConfig
from octavo.serve.http.server import bind, settings_of
from octavo.serve.router import replica as module
from octavo.serve.router import replica_process, router, split_devices
from octavo.serve.router.app import build_router_app
from octavo.serve.router.replica import Backoff, Replica
from octavo.serve.router.router import RouterServer
from tests.serve.router.stubs import Answer, build_nothing, fleet_of, listening, raw, replica_at, whole

SERVING = {"status": "serving"}


def test_waits_double_up_to_a_minute_and_begin_again_after_a_minute_of_readiness() -> None:
    backoff = Backoff()
    assert [backoff.wait_after(0.0) for _ in range(8)] == [1, 2, 4, 8, 16, 32, 60, 60]
    assert [backoff.wait_after(ready_s) for ready_s in (59.9, 60.0, 0.0, 5.0)] == [60, 1, 2, 4]


class Process:
    """Of a replica; killed is set when it is."""

    def __init__(self) -> None:
        self.killed = asyncio.Event()

    def kill(self) -> None:
        self.killed.set()


@pytest.mark.parametrize(
    ("answer", "state"),
    [
        (whole(200, SERVING), "serving"),
        (whole(503, {"status": "starting"}), "starting"),
        (whole(503, {"status": "unhealthy"}), "unhealthy"),
        (whole(503, SERVING), "silent"),
        (whole(200, {"status": "starting"}), "silent"),
        (whole(200, ["serving"]), "silent"),
        (whole(200, {}), "silent"),
        (raw(b"HTTP/1.1 200 OK\r\nContent-Length: 4\r\n\r\n{\xff\xfe}"), "silent"),
        (raw(b"SSH-2.0-x\r\n"), "silent"),
        (raw(), "silent"),
    ],
)
def test_what_a_replica_says_of_itself(answer: Answer, state: str) -> None:
    async def look() -> str:
        async with listening(answer) as port:
            return await replica_at(port)._look()

    assert asyncio.run(look()) == state


def test_silence_is_said_once(caplog: pytest.LogCaptureFixture) -> None:
    async def watch() -> None:
        async with listening(raw()) as port:
            replica = replica_at(port)
            for _ in range(3):
                replica.state = await replica._look()

    asyncio.run(watch())
    assert caplog.text.count("gave no answer at /ready") == 1


def test_one_that_does_not_answer_is_silent_and_one_that_does_not_listen_yet_starts(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(module, "LOOK_S", 0.05)

    async def hang(reader: asyncio.StreamReader, _: asyncio.StreamWriter) -> None:
        await reader.read()

    async def look() -> list[str]:
        async with listening(hang) as port:
            first = await replica_at(port)._look()
        replica = replica_at(port)
        states = [first, await replica._look()]
        replica._ready_since = 0.0
        return [*states, await replica._look()]

    assert asyncio.run(look()) == ["silent", "starting", "silent"]


def test_one_that_is_not_ready_in_time_is_killed() -> None:
    async def watch() -> None:
        async with listening(whole(503, {"status": "starting"})) as port:
            replica = Replica(0, (build_nothing, ServerConfig(("m",))), start_timeout_s=0.05)
            replica.port = port
            process: Any = Process()
            await asyncio.wait_for(replica._watch(process), 10)
            assert process.killed.is_set()

    asyncio.run(watch())


def test_one_that_hangs_is_killed_and_gets_no_requests_meanwhile(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "LOST_S", 0.3)
    monkeypatch.setattr(module, "POLL_S", 0.01)
    states = [True, False, True, *[False] * 500]

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        is_well = states.pop(0)
        await whole(*(200, SERVING) if is_well else (503, {"status": "unhealthy"}))(reader, writer)

    async def watch() -> None:
        async with listening(answer) as port:
            replica = replica_at(port)
            process: Any = Process()
            await asyncio.wait_for(replica._watch(process), 10)
            assert process.killed.is_set() and not replica.is_ready
            assert len(states) < 500  # it was well twice, and had its time after that

    asyncio.run(watch())


@pytest.mark.slow
def test_what_a_user_has_to_correct_ends_it_for_good(capfd: pytest.CaptureFixture[str]) -> None:
    build = functools.partial(check_device, "tpu9")
    with pytest.raises(BackendError, match="replica 3 could not start"):
        asyncio.run(Replica(3, (build, ServerConfig(("m",)))).run())
    assert "error: replica 3: device must be 'cpu', 'cuda' or 'cuda:N', got 'tpu9'" in capfd.readouterr().err


@pytest.mark.slow
def test_one_of_another_version_ends_before_it_reads_its_order(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(agreement, "__version__", "9.9")
    build = functools.partial(check_device, "tpu9")
    with pytest.raises(BackendError, match="replica 1 could not start"):
        asyncio.run(Replica(1, (build, ServerConfig(("m",)))).run())
    err = capfd.readouterr().err
    assert f"replica 1: all ranks must run the same; octavo is 9.9 on the router and {octavo.__version__} on" in err
    assert "tpu9" not in err and "Traceback" not in err


@pytest.mark.parametrize(("error", "code"), [(BackendError("no memory"), 1), (ConfigError("no such device"), 2)])
def test_the_exit_code_says_whether_another_start_may_help(
    error: OctavoError, code: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail(listener: socket.socket, *_: object, **__: object) -> None:
        listener.close()
        raise error

    order = pickle.dumps(versions()) + pickle.dumps((build_nothing, ServerConfig(("m",))))
    monkeypatch.setattr(replica_process, "follow", lambda _: None)
    monkeypatch.setattr(replica_process, "serve_at", fail)
    monkeypatch.setattr(replica_process.sys, "stdin", SimpleNamespace(buffer=io.BytesIO(order)))
    with bind("127.0.0.1", 0) as listener:
        assert replica_process.main(["3", str(os.dup(listener.fileno())), str(os.getppid())]) == code
    assert capsys.readouterr().err == f"error: replica 3: {error}\n"


def test_what_a_router_keeps_from_its_replicas(monkeypatch: pytest.MonkeyPatch) -> None:
    """They log no requests a second time, and cut off none that is on its way to them."""
    orders: list[ServerConfig] = []

    def make(index: int, order: Any, *given: Any) -> Replica:
        orders.append(order[1])
        return Replica(index, order, *given)

    async def end_at_once(*_: object, **__: object) -> None:
        """In the place of serve."""

    monkeypatch.setattr(router, "Replica", make)
    monkeypatch.setattr(router, "_raise_open_files", lambda: None)
    monkeypatch.setattr(RouterServer, "serve", end_at_once)
    given = ServerConfig(("m",), access_log=True, max_unfinished=3, max_num_waiting=5)
    build: Any = build_nothing
    assert router.run_router(build, given, port=0, devices=[None]) == 0
    assert orders == [ServerConfig(("m",), max_unfinished=router.OPEN_FILES, max_num_waiting=5)]


def test_a_drain_that_fails_ends_the_server(monkeypatch: pytest.MonkeyPatch) -> None:
    async def end() -> RouterServer:
        async with fleet_of(whole(200, SERVING)) as fleet:
            config = ServerConfig(("m",))
            server = RouterServer(settings_of(build_router_app(fleet, config), config), fleet, 1.0)
            monkeypatch.setattr(fleet.replicas[0], "stop", lambda: 1 / 0)
            await server._finish()
            return server

    server = asyncio.run(end())
    assert server.should_exit and server.was_cut_short


def test_each_replica_has_gpus_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    import torch

    cpu, gpu = torch.device("cpu"), torch.device("cuda")
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 4)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    assert split_devices(3, 2, cpu) == [None, None, None]
    assert split_devices(4, 1, gpu) == ["0", "1", "2", "3"]
    assert split_devices(2, 2, gpu) == ["0,1", "2,3"]
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "7, 5,GPU-ab,0")
    assert split_devices(2, 2, gpu) == ["7,5", "GPU-ab,0"]
    text = r"--data-parallel-size 3 with --tensor-parallel-size 2 takes 6 GPUs, and torch sees 4; lower one of them"
    with pytest.raises(ConfigError, match=text):
        split_devices(3, 2, gpu)
    with pytest.raises(ConfigError, match="got --device cuda:1; choose by CUDA_VISIBLE_DEVICES"):
        split_devices(2, 1, torch.device("cuda:1"))
