"""New weights over HTTP: from the disk and in buckets; what is bad, stale or forbidden leaves the old ones serving."""

import functools
import json
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch
from hypothesis import HealthCheck, given, settings

from octavo import LLM, SamplingParams, save_model
from octavo.errors import ConfigError
from octavo.models.checkpoint.names import parameter_names
from octavo.models.checkpoint.safetensors_io import SafetensorsReader
from octavo.serve import WeightUpdate, tensor_sha256
from octavo.serve.engine.request import RequestInput
from octavo.serve.http import ServerConfig
from octavo.weights import exchange
from tests.serve.http import test_fuzz
from tests.serve.http.running import Running, byte_tokenizer, make_server_model, running
from tests.serve.http.test_lifecycle import metrics

ADMIN = {"Authorization": "Bearer admin"}
FIELDS: dict[str, Any] = {"prompt": "hello", "max_tokens": 6, "seed": 1, "logprobs": 2, "ignore_eos": True}
FIELDS |= {"return_token_ids": True}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """new/: a checkpoint for the server's model; outside it, beside the folder, another one."""
    parent = tmp_path_factory.mktemp("weights")
    model = make_server_model(seed=1)
    for path in ("allowed/new", "secret"):
        save_model(model, parent / path)
    (parent / "allowed" / "link").symlink_to(parent / "secret")
    (parent / "allowed" / "links").mkdir()
    for file in (parent / "secret").glob("*.*"):
        (parent / "allowed" / "links" / file.name).symlink_to(file)
    return parent / "allowed"


@pytest.fixture
def server(folder: Path) -> Iterator[Running]:
    with running(admin_key="admin", weights_dir=folder, update_timeout_s=30.0) as it:
        yield it
        it.assert_at_rest()


@functools.cache
def expected() -> list[dict[str, Any]]:
    """The answer of a server that was started with the new weights."""
    limits = {"max_num_seqs": 8, "max_num_batched_tokens": 256, "num_kv_pages": 40, "max_model_len": 256}
    model = make_server_model(seed=1)
    model.weight_version = 2
    with running(lambda: LLM(model, byte_tokenizer(), **limits).engine) as fresh:  # type: ignore[arg-type]
        choices: list[dict[str, Any]] = fresh.complete(**FIELDS)["choices"]
        return choices


def make_checkpoint() -> dict[str, torch.Tensor]:
    """The new weights by the checkpoint's names."""
    model = make_server_model(seed=1)
    parts: dict[str, torch.Tensor] = {}
    for parameter in parameter_names(model.config):
        parts |= parameter.split(model.get_parameter(parameter.name).detach())
    return parts


def tensors_of(folder: Path) -> dict[str, torch.Tensor]:
    reader = SafetensorsReader(folder / "new")
    return {name: reader.load(name) for name in reader.entries}


def manifest_of(tensors: dict[str, torch.Tensor]) -> dict[str, dict[str, Any]]:
    return {
        name: {"dtype": str(t.dtype).removeprefix("torch."), "shape": list(t.shape), "sha256": tensor_sha256(t)}
        for name, t in tensors.items()
    }


def as_bytes(tensors: dict[str, torch.Tensor]) -> bytes:
    return b"".join(t.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes() for t in tensors.values())


def begin(server: Running, tensors: dict[str, torch.Tensor], **fields: Any) -> httpx.Response:
    return server.post("/admin/weight_update", ADMIN, tensors=manifest_of(tensors), **fields)


BYTES = "application/octet-stream"


def send(server: Running, update: str, data: bytes, offset: int | str, kind: str = BYTES) -> httpx.Response:
    url = f"/admin/weight_update/{update}/bytes"
    headers = {**ADMIN, "Content-Type": kind}
    return server.client.post(url, params={"offset": offset}, content=data, headers=headers)


def commit(server: Running, update: str, **fields: Any) -> httpx.Response:
    return server.post(f"/admin/weight_update/{update}/commit", ADMIN, **fields)


def test_from_the_disk(server: Running) -> None:
    before = server.complete(**FIELDS)
    answer = server.post("/admin/update_weights", ADMIN, path="new")
    assert (answer.status_code, answer.json()) == (200, {"weight_version": 2})
    after = server.complete(**FIELDS)
    assert after["choices"] == expected() != before["choices"]
    assert after["choices"][0]["weight_versions"] == [2] * 6
    assert before["choices"][0]["weight_versions"] == [1] * 6
    assert after["system_fingerprint"] != before["system_fingerprint"]
    seen = metrics(server)
    assert seen["octavo:weight_version"] == 2
    assert (seen["octavo:weight_updates_total"], seen["octavo:weight_update_failures_total"]) == (1, 0)


def test_paths_are_confined(server: Running, folder: Path) -> None:
    before = server.complete(**FIELDS)["choices"]
    forbidden = ("../secret", "link", "links", "/etc", str(folder.parent / "secret"))
    for path, status in (*((path, 403) for path in forbidden), ("none", 400), ("\0", 400), (".", 400)):
        assert server.post("/admin/update_weights", ADMIN, path=path).status_code == status, path
    assert server.complete(**FIELDS)["choices"] == before


def test_without_the_option_or_the_key(folder: Path) -> None:
    with running(admin_key="admin") as server:
        answer = server.post("/admin/update_weights", ADMIN, path="new")
        assert answer.status_code == 403 and "--weights-dir" in answer.text
        for headers in (None, {"Authorization": "Bearer else"}):
            assert server.post("/admin/update_weights", headers, path="new").status_code == 401
            assert server.post("/admin/weight_update", headers, tensors={}).status_code == 401
    with running() as server:
        assert server.post("/admin/update_weights", path="new").status_code == 404
    for fields in ({"weights_dir": folder}, {"weights_dir": folder / "none", "admin_key": "admin"}):
        with pytest.raises(ConfigError, match="weights_dir must be a folder"):
            ServerConfig(("tiny",), **fields)  # type: ignore[arg-type]


def test_in_buckets(server: Running, folder: Path) -> None:
    tensors = tensors_of(folder)
    data = as_bytes(tensors)
    answer = begin(server, tensors).json()
    assert (answer["received"], answer["num_bytes"]) == (0, len(data))
    update, sent = answer["id"], 0
    while sent < len(data):
        bucket = data[sent : sent + 100_001]  # ends within elements and tensors
        assert commit(server, update).json()["error"]["code"] == "update_incomplete"
        answer = send(server, update, bucket, sent)
        assert answer.status_code == 200, answer.text
        assert send(server, update, bucket, sent).json()["error"]["code"] == "wrong_offset"
        sent += len(bucket)
        assert server.client.get(f"/admin/weight_update/{update}", headers=ADMIN).json()["received"] == sent
    assert send(server, update, b"1", sent).status_code == 413
    answer = commit(server, update)
    assert (answer.status_code, answer.json()) == (200, {"weight_version": 2})
    assert server.complete(**FIELDS)["choices"] == expected()
    assert commit(server, update).json()["error"]["message"].endswith("it was committed")


@pytest.mark.parametrize("is_kept", [True, False])
def test_an_update_that_is_verified_and_keeps_the_old_weights(is_kept: bool, server: Running, folder: Path) -> None:
    """What a router asks for: staged, verified, committed, and taken back or not."""
    before = server.complete(**FIELDS)["choices"]
    update = server.post("/admin/update_weights", ADMIN, path="new", commit=False).json()["id"]
    assert server.post(f"/admin/weight_update/{update}/verify", ADMIN).json()["status"] == "verified"
    assert server.complete(**FIELDS)["choices"] == before
    assert commit(server, update, keep_old=True).json() == {"weight_version": 2}
    assert server.complete(**FIELDS)["choices"] == expected()
    if is_kept:
        assert server.client.delete(f"/admin/weight_update/{update}", headers=ADMIN).status_code == 200
    else:
        assert commit(server, update, running="keep").json() == {"weight_version": 3}
    after = server.complete(**FIELDS)["choices"]
    assert after == expected() if is_kept else [each["token_ids"] for each in after] == [e["token_ids"] for e in before]
    assert commit(server, update).status_code == 410
    update = begin(server, tensors_of(folder)).json()["id"]
    assert server.post(f"/admin/weight_update/{update}/verify", ADMIN).json()["error"]["code"] == "update_incomplete"
    assert server.client.delete(f"/admin/weight_update/{update}", headers=ADMIN).status_code == 200


def test_bad_uploads(server: Running, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tensors = tensors_of(folder)
    data, before = as_bytes(tensors), server.complete(**FIELDS)["choices"]
    for bad in (
        {name: t for name, t in tensors.items() if "norm" not in name},
        {**tensors, "model.extra.weight": torch.ones(3)},
        {**tensors, "model.norm.weight": torch.ones(3, dtype=torch.bfloat16)},
        {**tensors, "model.norm.weight": torch.ones(128).to(torch.float8_e4m3fn)},
    ):
        answer = begin(server, bad)
        assert (answer.status_code, answer.json()["error"]["code"]) == (400, "invalid_weights")
    update = begin(server, tensors).json()["id"]
    damaged = bytearray(data)
    damaged[len(data) // 2] ^= 1
    answer = send(server, update, bytes(damaged), 0)
    assert answer.status_code == 400 and "SHA-256" in answer.text
    name = next(name for name in tensors if name.endswith("down_proj.weight"))
    infinite = {**tensors, name: tensors[name].clone()}
    infinite[name][-1, -1] = torch.inf
    answer = send(server, begin(server, infinite).json()["id"], as_bytes(infinite), 0)
    assert answer.status_code == 400
    assert f"{name} holds 1 NaN or infinite values" in answer.text
    assert commit(server, update).status_code == 410
    update = begin(server, tensors).json()["id"]
    assert send(server, update, data, 0).status_code == 200
    with monkeypatch.context() as patch:
        patch.setattr(exchange, "copy_piece", _fail)
        answer = commit(server, update)
    assert answer.status_code == 500 and "the old weights are back" in answer.text
    assert server.complete(**FIELDS)["choices"] == before
    assert metrics(server)["octavo:weight_update_failures_total"] == 7
    assert metrics(server)["octavo:weight_version"] == 1
    assert server.client.get("/health").status_code == 200


def _fail(*_: object) -> None:
    raise RuntimeError("out of luck")


def test_one_at_a_time(server: Running, folder: Path) -> None:
    tensors = tensors_of(folder)
    first = begin(server, tensors).json()["id"]
    answer = begin(server, tensors)
    assert (answer.status_code, answer.json()["error"]["code"]) == (409, "update_open")
    assert first in answer.json()["error"]["message"]
    assert server.post("/admin/update_weights", ADMIN, path="new").status_code == 409
    second = begin(server, tensors, replace=True).json()["id"]
    answer = send(server, first, b"1", 0)
    assert answer.status_code == 410 and "another update took its place" in answer.text
    assert server.client.delete(f"/admin/weight_update/{second}", headers=ADMIN).status_code == 200
    assert "it was aborted" in commit(server, second).text
    assert commit(server, "0123456789abcdef").status_code == 404
    assert server.post("/admin/update_weights", ADMIN, path="new").status_code == 200


def test_malformed_requests(server: Running, folder: Path) -> None:
    update = begin(server, tensors_of(folder)).json()["id"]
    assert send(server, update, b"1", 0, "application/json").status_code == 415
    for offset in ("", "-1", "1.5", "9" * 30, "x", "²"):
        answer = send(server, update, b"1", offset)
        assert answer.status_code == 400, answer.text
    for fields in ({}, {"tensors": {}}, {"tensors": {"a": {"dtype": "int4", "shape": [1], "sha256": "0" * 64}}}):
        assert server.post("/admin/weight_update", ADMIN, **fields).status_code == 400
    assert commit(server, update, running="later").status_code == 400
    assert server.client.delete(f"/admin/weight_update/{update}", headers=ADMIN).status_code == 200


@pytest.mark.slow
@pytest.mark.parametrize("route", ["/admin/update_weights", "/admin/weight_update"])
def test_no_5xx(route: str, server: Running) -> None:
    schema = test_fuzz.schemas(server)[route]

    @settings(max_examples=30, deadline=None, database=None, suppress_health_check=list(HealthCheck))
    @given(test_fuzz.bodies(schema))
    def run(body: Any) -> None:
        headers = {**ADMIN, "Content-Type": "application/json"}
        answer = server.client.post(route, content=json.dumps(body), headers=headers)
        assert answer.status_code in (400, 403), (answer.text, body)
        assert answer.json()["error"]["message"]

    run()
    assert server.engine.weight_version == 1


def test_a_stale_upload_expires(folder: Path) -> None:
    tensors = tensors_of(folder)
    with running(admin_key="admin", update_timeout_s=0.2) as server:
        update = begin(server, tensors).json()["id"]
        server.wait_until(lambda: server.client.get(f"/admin/weight_update/{update}", headers=ADMIN).status_code == 410)
        assert "nothing came for 0.2 s" in send(server, update, b"1", 0).text
        assert begin(server, tensors).status_code == 200


def hold(server: Running) -> threading.Event:
    """Stop the engine between two steps until the event is set."""
    stopped, go_on = threading.Event(), threading.Event()
    server.service.engine.loop.run(lambda _: stopped.set() or go_on.wait(30))
    assert stopped.wait(30)
    return go_on


@pytest.mark.parametrize("policy", [pytest.param("wait", marks=pytest.mark.slow), "abort", "keep"])
def test_running_requests(policy: str, server: Running) -> None:
    loop = server.service.engine.loop
    long = {"prompt": "a", "max_tokens": 80, "ignore_eos": True, "return_token_ids": True, "n": 4}
    running = [server.post_meanwhile("/v1/completions", **long) for _ in range(2)]
    server.wait_until(lambda: loop.is_built and loop.engine.stats.output_tokens > 40)
    go_on = hold(server)  # the engine stands still while the update is staged
    update = server.post_meanwhile("/admin/update_weights", ADMIN, path="new", running=policy)
    server.wait_until(lambda: loop._inbox.qsize() == 1)
    late = server.post_meanwhile("/v1/completions", **FIELDS)
    server.wait_until(lambda: loop._inbox.qsize() == 2)
    go_on.set()
    assert update.result(30).json() == {"weight_version": 2}
    assert late.result(30).json()["choices"] == server.complete(**FIELDS)["choices"] == expected()
    answers = [each.result(30) for each in running]
    if policy == "abort":
        assert [answer.status_code for answer in answers] == [503, 503]
        assert "new weights were taken over" in answers[0].text
        return
    versions = [choice["weight_versions"] for answer in answers for choice in answer.json()["choices"]]
    assert all(len(each) == 80 and each == sorted(each) for each in versions)
    assert {v for each in versions for v in each} == ({1} if policy == "wait" else {1, 2})


@pytest.mark.parametrize("is_drained", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_requests_that_wait_for_an_update_end_too(is_drained: bool, server: Running) -> None:
    """Aborted while they wait, and finished by a drain."""
    loop = server.service.engine.loop
    params = SamplingParams(max_tokens=60, ignore_eos=True)
    loop.submit([RequestInput([1, 2], params)])
    go_on = hold(server)
    update = WeightUpdate(server.engine.model)
    for name, tensor in make_checkpoint().items():
        update.stage(name, tensor)
    version = loop.update_weights(update)
    late = loop.submit([RequestInput([1, 2], params), RequestInput([1, 2], params)])
    loop.abort(late[:1])
    if is_drained:
        loop.drain()
    go_on.set()
    assert version.result(30) == 2
    server.wait_until(lambda: loop.num_open == 0)
    assert loop.num_ended == {"stop": 0, "length": 2, "abort": 1, "error": 0}


def test_lost_weights_end_the_engine(server: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(exchange, "_wait_for", _fail)
    answer = server.post("/admin/update_weights", ADMIN, path="new")
    assert answer.status_code == 500 and "load the model again" in answer.text
    server.wait_until(lambda: server.client.get("/health").status_code == 503)
    assert server.post("/v1/completions", **FIELDS).status_code == 503
