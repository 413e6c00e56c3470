"""A remote engine is asked before any work: none there, another one there, one that is not ready."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from octavo.models import char_tokenizer
from octavo.numerics import Numerics
from octavo.rl import loop
from octavo.rl.engines import EngineError, EngineSection
from octavo.rl.engines.build import check_engine
from tests.integrations.rollout.conftest import KINDS
from tests.integrations.rollout.stand_in import HttpError, StandIn
from tests.rl.conftest import tiny_config
from tests.rl.test_loop import EASY


class Health(StandIn):
    """What of `octavo serve` is asked first."""

    def get_health(self) -> Any:
        return {"status": "starting", "step_age_s": 0.0, "sequences_open": 0}


SERVERS: dict[str, Callable[..., StandIn]] = {"octavo-server": Health, **{kind: KINDS[kind][1] for kind in KINDS}}
PROBES = {"octavo-server": "GET /health", "vllm": "GET /weight_info", "sglang": "GET /get_model_info"}


def section_of(kind: str, url: str, folder: Path) -> EngineSection:
    return EngineSection(name=kind, url=url, admin_key="secret", weights_dir=folder, update_timeout_s=10.0)  # type: ignore[arg-type]


@pytest.mark.parametrize("kind", SERVERS)
def test_a_dead_url_is_found_before_the_warm_start(tmp_path: Path, kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    server = SERVERS[kind](char_tokenizer("ab"))
    server.stop()  # its port is free again: nobody listens there
    monkeypatch.setattr("octavo.rl.loop.build_policy", lambda *_: pytest.fail("a policy was built"))
    config = tiny_config(
        tmp_path,
        exact=False,
        correction={"kind": "token_tis"},
        warmup={"steps": 5},
        engine=section_of(kind, server.url, tmp_path),
    )
    with pytest.raises(EngineError, match=rf"{kind}: {server.url}/.* cannot be reached .*; start the engine, or fix"):
        loop.run(config, task=EASY, progress=False)


@pytest.mark.parametrize("kind", SERVERS)
def test_a_server_that_answers_is_asked_once(tmp_path: Path, kind: str) -> None:
    with SERVERS[kind](char_tokenizer("ab")) as server:
        check_engine(section_of(kind, server.url, tmp_path), Numerics())
    assert server.calls == [PROBES[kind]]


@pytest.mark.parametrize("kind", SERVERS)
@pytest.mark.parametrize("fault", ["refuses", "other field", "words"])
def test_a_server_that_answers_otherwise(tmp_path: Path, kind: str, fault: str) -> None:
    def refuse() -> None:
        raise HttpError(503, {"error": "the engine failed"})

    with SERVERS[kind](char_tokenizer("ab")) as server:
        if fault == "refuses":
            server.before[PROBES[kind]] = refuse
        else:
            server.change[PROBES[kind]] = lambda _: {"model": "x"} if fault == "other field" else "<html>"
        with pytest.raises(EngineError, match=rf"{kind}: {server.url} does not answer .*, or fix engine.name and"):
            check_engine(section_of(kind, server.url, tmp_path), Numerics())


def test_a_vllm_without_its_development_routes(tmp_path: Path) -> None:
    server = KINDS["vllm"][1](char_tokenizer("ab"))
    server.missing.add(PROBES["vllm"])
    with server, pytest.raises(EngineError, match=r"answered 404.*VLLM_SERVER_DEV_MODE=1"):
        check_engine(section_of("vllm", server.url, tmp_path), Numerics())
