"""New weights for an LLM of two ranks: a fresh LLM's bits, or on any rank's failure the old weights on all."""

import signal
import time
from collections.abc import Iterator
from multiprocessing import Pipe
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import httpx
import pytest
import torch

from octavo import LLM, SamplingParams, save_model
from octavo.distributed import pieces
from octavo.errors import BackendError, CheckpointError, LostWeightsError, RequestError
from octavo.models import Decoder, ModelConfig
from octavo.models.checkpoint.safetensors_io import SafetensorsReader
from octavo.nn.live_weights import live_tensors
from octavo.numerics import Numerics, get_recipe
from octavo.serve import tensor_updates
from octavo.serve.engine.request import LostRankError
from octavo.serve.tensor_worker import Repeater
from octavo.weights import exchange
from octavo.weights.manifest import tensor_sha256
from tests.parallel.test_tensor_parallel import ids, make
from tests.serve.http.running import VOCAB, byte_tokenizer
from tests.serve.http.test_chaos import served
from tests.serve.http.test_weights import ADMIN, as_bytes, manifest_of
from tests.serve.test_tensor_workers import FP8, LIMITS, processes

PROMPTS = [ids(seed, num).tolist() for seed, num in ((1, 5), (2, 70))]
NORM = "model.norm.weight"
LONG = {"max_tokens": 30, "stream": True, "ignore_eos": True}


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path, Path]:
    """The old weights, the new ones, and these as FP8 codes."""
    folder, config = tmp_path_factory.mktemp("updates"), make().config
    for seed in (0, 1):
        save_model(Decoder(config, seed=seed), folder / str(seed))
    coded = Decoder(config, seed=1)
    coded.set_numerics(Numerics(get_recipe("blockwise")))
    save_model(coded, folder / "codes", "fp8-block")
    return folder / "0", folder / "1", folder / "codes"


@pytest.fixture(scope="module")
def started() -> Iterator[list[LLM]]:
    """At most one: a process has one job."""
    found: list[LLM] = []
    yield found
    close(found)


@pytest.fixture
def llm(started: list[LLM], checkpoints: tuple[Path, ...]) -> LLM:
    """With the old weights; a new one where a test has killed a rank of the last."""
    if any(process.poll() is not None for each in started for process in processes(each)):
        close(started)
    if not started:
        started.append(LLM(checkpoints[0], tensor_parallel_size=2, **FP8, **LIMITS))
    started[0].update_weights(checkpoints[0])
    return started[0]


def close(started: list[LLM]) -> None:
    while started:
        started.pop().engine.workers.close()  # type: ignore[attr-defined]


def tensors_of(path: Path) -> dict[str, torch.Tensor]:
    reader = SafetensorsReader(path)
    return {name: reader.load(name) for name in reader.entries}


def answers(llm: LLM) -> list[Any]:
    params = SamplingParams(max_tokens=4, temperature=1.0, logprobs=1, seed=5)
    outputs = [sample for output in llm.generate(PROMPTS, params) for sample in output.outputs]
    return [(sample.token_ids, str(sample.logprobs)) for sample in outputs]


def versions(llm: LLM) -> set[int]:
    (output,) = llm.generate(PROMPTS[:1], SamplingParams(max_tokens=2))
    return set(output.outputs[0].weight_versions)


def test_an_update_has_the_bits_of_a_new_llm(
    checkpoints: tuple[Path, ...], llm: LLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    old, new, codes = checkpoints
    expected = answers(LLM(new, **FP8, **LIMITS))
    first, begin = answers(llm), llm.engine.weight_version
    assert first != expected
    assert llm.update_weights(new) == begin + 1
    assert answers(llm) == expected and versions(llm) == {begin + 1}

    whole = tensors_of(old)
    assert llm.update_weights(whole, checksums={name: tensor_sha256(t) for name, t in whole.items()}) == begin + 2
    assert answers(llm) == first

    # codes; a stream goes on under the new weights
    stream = llm.stream(PROMPTS[0], SamplingParams(max_tokens=4, ignore_eos=True))
    next(stream)
    assert llm.update_weights(codes, running="keep") == begin + 3
    *_, last = stream
    assert sorted(set(last.outputs[0].weight_versions)) == [begin + 2, begin + 3]
    assert answers(llm) == expected

    # a part
    assert llm.update_weights({NORM: 2 * whole[NORM]}, partial=NORM) == begin + 4
    one = LLM(new, **FP8, **LIMITS)
    one.update_weights({NORM: 2 * whole[NORM]}, partial=NORM)
    assert answers(llm) == answers(one)


def test_a_failed_update_leaves_the_old_weights(
    checkpoints: tuple[Path, ...], llm: LLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    _, new, _ = checkpoints
    first, whole, begin = answers(llm), tensors_of(new), llm.engine.weight_version

    def refused(kind: type[Exception], text: str, weights: Any, **given: Any) -> None:
        with pytest.raises(kind, match=text):
            llm.update_weights(weights, **given)
        assert llm.engine.weight_version == begin and answers(llm) == first

    sent = []

    def flip(piece: torch.Tensor, group: Any) -> None:
        sent.append(len(piece))
        piece = piece.clone()
        piece[len(piece) // 2] ^= 1 if len(sent) == 5 else 0
        broadcast(piece, group)

    broadcast = pieces.broadcast_piece
    with monkeypatch.context() as patch:
        patch.setattr(pieces, "broadcast_piece", flip)
        refused(CheckpointError, "tensor-parallel rank 1: .*damaged on the way", whole)
    assert len(sent) == 5
    checksums = {name: tensor_sha256(t) for name, t in whole.items()}
    refused(CheckpointError, "damaged on the way", whole, checksums=checksums | {NORM: "0" * 64})
    refused(CheckpointError, "missing tensors", {NORM: whole[NORM]})
    refused(CheckpointError, "shape", whole | {NORM: whole[NORM][:1]})
    refused(RequestError, "names with torch tensors", [*whole.items(), "x"])

    # a worker without memory for a tensor says so before the broadcast, in which the first rank would wait for it
    began = time.monotonic()
    with monkeypatch.context() as patch:
        patch.setattr(tensor_updates.UpdateChannel, "ask", asking_for(1 << 60))
        refused(BackendError, "tensor-parallel rank 1: .*(alloc|memory)", whole)
    assert time.monotonic() - began < 30

    # of an update that has ended the worker hears nothing
    update = llm.engine.begin_update()
    update.end()
    with monkeypatch.context() as patch:
        patch.setattr(tensor_updates.UpdateChannel, "ask", lambda *_, **__: pytest.fail("it was told"))
        for call in (update.verify, lambda: update.stage(NORM, whole[NORM])):
            with pytest.raises(RequestError, match="takes nothing more: it was aborted"):
                call()

    copies = []

    def fail(target: torch.Tensor, source: torch.Tensor) -> None:
        copies.append(1)
        if len(copies) == 7:
            raise BackendError("no disk")
        copy(target, source)

    copy = exchange.copy_piece
    with monkeypatch.context() as patch:
        patch.setattr(exchange, "copy_piece", fail)
        refused(BackendError, "rank 0: no disk.*the old weights are back", whole)
    assert llm.update_weights(new) == begin + 1
    assert answers(llm) == answers(LLM(new, **FP8, **LIMITS))


def test_a_second_commit_brings_the_old_weights_back_on_all_ranks(checkpoints: tuple[Path, ...], llm: LLM) -> None:
    first, begin = answers(llm), llm.engine.weight_version
    update = llm.engine.begin_update()
    for name, tensor in tensors_of(checkpoints[1]).items():
        update.stage(name, tensor)
    update.keep_old()
    assert llm.engine.commit_update(update) == begin + 1
    assert answers(llm) != first
    assert llm.engine.commit_update(update) == begin + 2
    assert answers(llm) == first


def asking_for(num_bytes: int) -> Any:
    """UpdateChannel.ask that asks the workers for so much memory."""
    ask = tensor_updates.UpdateChannel.ask

    def ask_for_more(self: Any, *order: Any, **given: Any) -> Any:
        return ask(self, *("expect", num_bytes) if order[0] == "expect" else order, **given)

    return ask_for_more


def test_a_worker_that_has_lost_its_weights_ends_and_goes_on_after_other_errors() -> None:
    class Engine:
        """Fails at each order."""

        def step(self) -> None:
            raise BackendError("as on the first rank")

        def commit_update(self, *_: Any) -> None:
            raise LostWeightsError("load the model again")

    first, own = Pipe()
    engine, updates = cast(Any, Engine()), cast(Any, SimpleNamespace(update=object()))
    first.send(("step",))
    first.send(("commit_update", "keep"))
    with pytest.raises(LostWeightsError):
        Repeater(engine, updates).run(own)


@pytest.mark.parametrize("when", ["stage", pytest.param("commit", marks=pytest.mark.slow)])
def test_a_rank_that_is_killed_in_an_update_is_one_error(
    checkpoints: tuple[Path, ...], llm: LLM, when: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    began: list[float] = []

    def kill(*given: Any) -> None:
        if not began:
            began.append(time.monotonic())
            processes(llm)[0].send_signal(signal.SIGKILL)
            processes(llm)[0].wait()
        real(*given)

    module, name = (pieces, "broadcast_piece") if when == "stage" else (exchange, "copy_piece")
    real = getattr(module, name)
    monkeypatch.setattr(module, name, kill)
    before = {key: tensor.clone() for key, tensor in live_tensors(llm.model).items()}
    with pytest.raises(LostRankError, match=r"rank 1 \(process \d+\) was killed by signal 9"):
        llm.update_weights(checkpoints[1])
    assert time.monotonic() - began[0] < 10
    assert all(torch.equal(tensor, before[key]) for key, tensor in live_tensors(llm.model).items())
    with pytest.raises(LostRankError, match=r"rank 1 \(process \d+\) was killed by signal 9"):
        llm.generate(PROMPTS)


@pytest.mark.slow
def test_a_rank_that_hangs_in_an_update_is_one_error(
    checkpoints: tuple[Path, ...], started: list[LLM], monkeypatch: pytest.MonkeyPatch
) -> None:
    close(started)
    monkeypatch.setattr(tensor_updates, "_ANSWER_S", 2.0)
    started.append(LLM(checkpoints[0], tensor_parallel_size=2, **FP8, **LIMITS))
    processes(started[0])[0].send_signal(signal.SIGSTOP)
    for _ in range(2):
        with pytest.raises(LostRankError, match=r"rank 1 \(process \d+\) did not answer: no answer in 2 s"):
            started[0].update_weights(checkpoints[1])
    close(started)


@pytest.mark.slow
def test_a_server_of_two_ranks_takes_new_weights(tmp_path: Path) -> None:
    """From its disk and in buckets, while a stream runs; a flipped byte is refused."""
    for seed in (0, 1):
        model = Decoder(ModelConfig(**{**vars(make().config), "vocab_size": VOCAB}), seed=seed)
        save_model(model, tmp_path / str(seed), tokenizer=byte_tokenizer())
    options = ["--port", "0", "--device", "cpu", "--quantization", "fp8", "--exact", "--tensor-parallel-size", "2"]
    options += ["--admin-key", "admin", "--weights-dir", str(tmp_path)]
    prompt = "so it is " * 9  # more than a page, which is cached
    body = {"prompt": prompt, "max_tokens": 8, "temperature": 0}

    def text_of(seed: int) -> str:
        one = LLM(tmp_path / str(seed), quantization="fp8", exact=True, device="cpu")
        return one.generate(prompt, SamplingParams(max_tokens=8, temperature=0))[0].outputs[0].text

    with served(str(tmp_path / "0"), *options) as two, httpx.Client(timeout=60) as client:
        two.wait_until_ready()

        def post(path: str, **given: Any) -> httpx.Response:
            headers = {"Authorization": "Bearer admin", "Content-Type": "application/octet-stream"}
            return client.post(f"{two.url}{path}", headers=headers if "content" in given else ADMIN, **given)

        def text() -> str:
            return str(client.post(f"{two.url}/v1/completions", json=body).json()["choices"][0]["text"])

        def upload(data: bytes, status: int) -> None:
            begun = post("/admin/weight_update", json={"tensors": manifest_of(tensors_of(tmp_path / "0"))})
            update = f"/admin/weight_update/{begun.json()['id']}"
            half = len(data) // 2
            first = post(f"{update}/bytes?offset=0", content=data[:half])
            last = post(f"{update}/bytes?offset={half}", content=data[half:]) if first.is_success else first
            assert last.status_code == status, last.text
            if status == 200:
                assert post(f"{update}/commit", json={"running": "keep"}).status_code == 200

        old = text()
        assert old == text_of(0)
        assert post("/admin/update_weights", json={"path": "1"}).status_code == 200
        assert text() == text_of(1) != old
        data = as_bytes(tensors_of(tmp_path / "0"))
        upload(data[:999] + bytes([data[999] ^ 1]) + data[1000:], 400)
        assert text() == text_of(1)
        with client.stream("POST", f"{two.url}/v1/completions", json=body | LONG) as answer:
            lines = answer.iter_lines()
            next(lines)
            upload(data, 200)
            *_, last = [line for line in lines if line]
            assert last == "data: [DONE]"
        assert text() == old
        assert post("/admin/reset_prefix_cache").status_code == 200
        assert text() == old  # ranks whose caches differ would wait for each other
        assert post("/admin/sleep").status_code == 200 and post("/admin/wake").status_code == 200
        assert text() == old
