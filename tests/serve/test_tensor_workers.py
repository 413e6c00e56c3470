"""LLM and `octavo serve` over two ranks that they start: one process's bits, and what becomes of ranks that die."""

import contextlib
import functools
import os
import re
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch
from safetensors.torch import save_file

import octavo
from octavo import LLM, SamplingParams, save_model
from octavo.cli.ranks import torchrun
from octavo.distributed import agreement, local_job
from octavo.distributed.tensor_group import TensorGroup
from octavo.errors import BackendError, ConfigError, RecipeError, RequestError, ShapeError
from octavo.models import Decoder, ModelConfig, load_model
from octavo.parallel import parallelize
from octavo.serve import rank_watch
from octavo.serve.engine.request import LostRankError
from octavo.serve.tensor_workers import TensorParallel, TensorWorkers
from tests import forks
from tests.conftest import RunOctavo
from tests.parallel.test_tensor_parallel import ids, make
from tests.ranks import run_group
from tests.serve.dying_worker import capture_with
from tests.serve.eager_graphs import EagerGraphs
from tests.serve.http.running import VOCAB, byte_tokenizer
from tests.serve.http.test_chaos import served

LIMITS: dict[str, Any] = {"max_num_seqs": 4, "max_num_batched_tokens": 48, "num_kv_pages": 8, "device": "cpu"}
FP8: dict[str, Any] = {"quantization": "blockwise", "kv_cache_dtype": "fp8", "exact": True}


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("cut") / "model"
    config = make().config
    save_model(Decoder(ModelConfig(**{**vars(config), "vocab_size": VOCAB}), seed=0), path, tokenizer=byte_tokenizer())
    return path


@pytest.fixture
def llm(checkpoint: Path) -> Iterator[LLM]:
    with LLM(checkpoint, tensor_parallel_size=2, **FP8, **LIMITS) as made:
        yield made


def processes(llm: LLM) -> list["subprocess.Popen[bytes]"]:
    return llm.engine.workers._processes  # type: ignore[attr-defined,no-any-return]


def seeded(llm: LLM, prompts: list[list[int]]) -> list[Any]:
    params = SamplingParams(max_tokens=12, temperature=1.0, logprobs=1, seed=5, n=2)
    samples = [sample for output in llm.generate(prompts, params) for sample in output.outputs]
    return [(sample.token_ids, str(sample.logprobs)) for sample in samples]


def answers(llm: LLM) -> list[Any]:
    """What requests of several kinds get: tokens and logprobs, text, a schema, a stream, a score."""
    prompts = [ids(seed, num).tolist() for seed, num in ((1, 5), (2, 40), (3, 70))]
    found = seeded(llm, [*prompts, prompts[2][:64] + prompts[0]])
    schema = {"type": "object", "properties": {"a": {"type": "integer", "maximum": 9}}, "required": ["a"]}
    for given in (
        SamplingParams(max_tokens=30, temperature=1.0, seed=7, stop=["a", "e"]),
        SamplingParams(max_tokens=30, temperature=1.0, seed=8, json_schema=schema),
        SamplingParams(max_tokens=0, prompt_logprobs=1),
    ):
        (output,) = llm.generate("some words", given)
        found.append((output.outputs[0].text, output.outputs[0].finish_reason, str(output.prompt_logprobs)))
    stream = llm.stream("a stream", SamplingParams(max_tokens=9, seed=3))
    found += [next(stream).outputs[0].token_ids for _ in range(3)]
    stream.close()
    llm.engine.reset_prefix_cache()
    llm.engine.sleep()
    llm.engine.wake()
    found.append([o.outputs[0].token_ids for o in llm.generate(prompts, SamplingParams(max_tokens=5))])
    return found


def test_two_ranks_answer_as_one_process(checkpoint: Path, llm: LLM) -> None:
    found = answers(llm)
    assert found == answers(LLM(checkpoint, **FP8, **LIMITS))
    assert llm.engine.model.num_local_heads == (2, 2)
    assert all(process.poll() is None for process in processes(llm))
    llm.engine.reallocate_kv_cache()
    assert seeded(llm, [ids(1, 5).tolist()]) == found[:2]
    with pytest.raises(ConfigError, match="replace_weights changes the first rank's alone"):
        llm.engine.replace_weights(lambda: 1)
    llm.model.mark_weights_updated()
    with pytest.raises(ConfigError, match="writing into the model's weights changes the first rank's alone"):
        llm.generate([[1, 2]])


def test_a_closed_llm_makes_way_for_the_next(checkpoint: Path) -> None:
    found = []
    for _ in range(2):
        with LLM(checkpoint, tensor_parallel_size=2, **FP8, **LIMITS) as llm:
            (worker,) = processes(llm)
            found.append(seeded(llm, [ids(1, 5).tolist()]))
            if len(found) == 1:
                with pytest.raises(ConfigError, match=r"another LLM.* close it first: llm\.close\(\)"):
                    LLM(checkpoint, tensor_parallel_size=2, **FP8, **LIMITS)
        assert worker.poll() is not None
        llm.close()
        with pytest.raises(RequestError, match="this LLM is closed; make a new one"):
            llm.generate([[1, 2]])
    assert found[0] == found[1]


def test_between_calls_too_a_rank_that_ends_is_seen(llm: LLM) -> None:
    seen: list[tuple[str, bool]] = []
    llm.engine.watch_ranks(lambda error, is_stuck: seen.append((str(error), is_stuck)), 60.0)
    processes(llm)[0].kill()
    deadline = time.monotonic() + 10
    while not seen and time.monotonic() < deadline:
        time.sleep(0.02)
    llm.engine.watch_ranks(lambda error, is_stuck: seen.append((str(error), is_stuck)), 60.0)  # who asks later, too
    assert len(seen) == 2 and seen[0] == seen[1] and "was killed by signal 9" in seen[0][0] and not seen[0][1]
    with pytest.raises(LostRankError, match=re.escape(seen[0][0])):
        llm.generate([[1, 2]])


def wait_for_a_dead_rank() -> None:
    """Stands for a call whose kernel waits for a rank that was killed."""
    rank_watch._GRACE_S = rank_watch.FLUSH_S = 0.1
    rank = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
    watch = rank_watch.RankWatch([rank], threading.Event(), is_gpu=True)
    watch.on_lost = lambda error, is_stuck: print(error, is_stuck, flush=True)
    watch.start()
    with watch.calling("step"):
        rank.kill()
        time.sleep(60)


def test_a_call_on_gpus_that_never_ends_ends_the_process() -> None:
    code = "from tests.serve.test_tensor_workers import wait_for_a_dead_rank as wait; wait()"
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False)
    assert ended.returncode == rank_watch.EXIT_CODE, ended.stderr
    assert [line.split()[-1] for line in ended.stdout.splitlines()] == ["False", "True"]
    assert "a kernel waits for that rank for ever" in ended.stderr


@pytest.mark.parametrize("when", ["decode", pytest.param("prefill", marks=pytest.mark.slow)])
def test_a_rank_that_is_killed_ends_all_requests(llm: LLM, when: str) -> None:
    given = llm.engine.make_input(list(range(9 if when == "decode" else 90)), SamplingParams(max_tokens=400))
    stream = llm._driver.stream(given)
    if when == "decode":
        next(stream)
    processes(llm)[0].send_signal(signal.SIGKILL)
    began = time.monotonic()
    with pytest.raises(
        LostRankError, match=r"rank 1 \(process \d+\) was killed by signal 9; all requests ended with it"
    ):
        for _ in stream:
            pass
    assert time.monotonic() - began < 10
    assert not llm.engine.has_unfinished
    with pytest.raises(LostRankError, match="was killed by signal 9"):
        llm.generate([[1, 2]])


@pytest.mark.slow
def test_a_rank_that_is_killed_as_it_captures_a_graph_ends_the_start_or_all_requests(
    checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    popen = subprocess.Popen

    def start_dying(command: list[str], **given: Any) -> "subprocess.Popen[bytes]":
        module = command.index("octavo.serve.tensor_worker")
        return popen([*command[:module], "tests.serve.dying_worker", *command[module + 1 :]], **given)

    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parents[2]))
    monkeypatch.setattr(subprocess, "Popen", start_dying)
    capture_with(EagerGraphs, monkeypatch)
    with pytest.raises(LostRankError, match=r"rank 1 \(process \d+\) was killed by signal 9"):
        LLM(checkpoint, tensor_parallel_size=2, **FP8, **LIMITS)
    llm = LLM(checkpoint, tensor_parallel_size=2, warm_up=False, **FP8, **LIMITS)
    began = time.monotonic()
    for _ in range(2):  # the second one is not captured either
        with pytest.raises(LostRankError, match=r"rank 1 \(process \d+\) was killed by signal 9"):
            llm.generate([[1, 2]], SamplingParams(max_tokens=4))
    assert time.monotonic() - began < 10
    assert not llm.engine.has_unfinished and [each.poll() for each in processes(llm)] == [-signal.SIGKILL]
    llm.close()


@pytest.mark.parametrize(
    "step", [pytest.param("wait_until_loaded", marks=pytest.mark.slow), pytest.param("join", marks=pytest.mark.largest)]
)
def test_a_rank_that_is_killed_at_the_start_is_one_error(
    checkpoint: Path, step: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(local_job, "_TIMEOUT", local_job._TIMEOUT / 60)
    real = getattr(TensorWorkers, step)

    def kill(workers: TensorWorkers) -> Any:
        workers._processes[0].kill()
        workers._processes[0].wait()
        return real(workers)

    monkeypatch.setattr(TensorWorkers, step, kill)
    with pytest.raises(BackendError, match=r"^tensor-parallel rank 1.* was killed by signal 9"):
        LLM(checkpoint, tensor_parallel_size=2, **FP8, **LIMITS)
    assert not local_job.dist.is_initialized()
    monkeypatch.undo()
    again = LLM(checkpoint, tensor_parallel_size=2, **FP8, **LIMITS)  # the next one starts
    again.close()


@pytest.mark.slow
def test_a_rank_of_another_version_is_one_error(
    checkpoint: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    started: list[subprocess.Popen[bytes]] = []
    popen = subprocess.Popen
    monkeypatch.setattr(subprocess, "Popen", lambda *args, **given: started.append(popen(*args, **given)) or started[0])
    monkeypatch.setattr(agreement, "__version__", "9.9")
    text = f"^tensor-parallel rank 1: .*octavo is 9.9 on rank 0 and {octavo.__version__} on rank 1; .*restart the"
    with pytest.raises(BackendError, match=text):
        LLM(checkpoint, tensor_parallel_size=2, **FP8, **LIMITS)
    assert [process.poll() for process in started] == [1]
    assert not local_job.dist.is_initialized() and "Traceback" not in capfd.readouterr().err


def test_more_ranks_than_gpus_is_one_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.cuda.device_count", lambda: 2)
    for device in ("cuda", "cuda:0"):
        TensorParallel(2).check(torch.device(device))
        with pytest.raises(ConfigError, match="tensor_parallel_size=3 takes a GPU a rank, and torch sees 2; lower it"):
            TensorParallel(3).check(torch.device(device))
    with pytest.raises(ConfigError, match="ranks take GPUs 0 to 1, got device='cuda:1'"):
        TensorParallel(2).check(torch.device("cuda:1"))


@pytest.mark.slow
def test_a_rank_that_hangs_ends_all_requests(checkpoint: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a limit of a call, at the end of gloo's own."""
    monkeypatch.setattr(local_job, "_TIMEOUT", local_job._TIMEOUT / 15)
    with LLM(checkpoint, tensor_parallel_size=2, **FP8, **LIMITS) as llm:
        worker = processes(llm)[0]
        worker.send_signal(signal.SIGSTOP)
        for _ in range(2):
            with pytest.raises(LostRankError, match=r"rank 1 \(process \d+\) did not answer: .*imed out"):
                llm.generate([[1, 2]])
        assert worker.wait(10) == -signal.SIGKILL


def test_a_rank_that_hangs_is_ended_when_a_call_takes_too_long(llm: LLM) -> None:
    llm.engine.watch_ranks(lambda error, is_stuck: None, 0.5)
    processes(llm)[0].send_signal(signal.SIGSTOP)
    began = time.monotonic()
    with pytest.raises(LostRankError, match=r"rank 1 \(process \d+\) did not answer at '\w+' within 0.5 s, and was"):
        llm.generate([[1, 2]])
    assert time.monotonic() - began < 10


@pytest.mark.slow
def test_workers_end_with_their_first_rank(checkpoint: Path) -> None:
    code = (
        f"import octavo, time; llm = octavo.LLM({str(checkpoint)!r}, tensor_parallel_size=2, **{FP8 | LIMITS!r}); "
        "print(llm.engine.workers._processes[0].pid, flush=True); time.sleep(60)"
    )
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True) as first:
        assert first.stdout is not None
        worker = int(first.stdout.readline())
        first.kill()
    deadline = time.monotonic() + 10
    while Path(f"/proc/{worker}").exists() and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not Path(f"/proc/{worker}").exists() or "zombie" in Path(f"/proc/{worker}/status").read_text()


def test_what_cannot_be_cut_is_one_error(checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Before a worker is started."""
    monkeypatch.setattr(subprocess, "Popen", None)
    other = tmp_path / "odd"
    save_model(Decoder(ModelConfig(**{**vars(make().config), "num_heads": 3, "num_kv_heads": 3}), seed=0), other)
    for given, kind, text in (
        ({"model": other}, ShapeError, "divide the heads.* got 2 ranks for 3 heads and 3 KV heads: use 1 or 3$"),
        ({"model": make()}, ConfigError, "tensor_parallel_size=2 goes with a checkpoint's path"),
        ({"tensor_parallel_size": 0}, ConfigError, "tensor_parallel_size must be an integer of at least 1"),
        ({"tensor_parallel_mode": "reduce"}, ConfigError, "mode='reduce' is not exact"),
        ({"tensor_parallel_mode": "columns", "tensor_parallel_size": 1}, ConfigError, "mode must be one of"),
        ({"tokenizer": byte_tokenizer()}, ConfigError, "the tokenizer must be a path"),
        ({"quantization": "tensorwise"}, RecipeError, "exact=True needs activation scales of one token each"),
    ):
        fields = {"model": checkpoint, "tensor_parallel_size": 2, **FP8, **LIMITS, **given}
        with pytest.raises(kind, match=text):
            LLM(**fields)
    assert not local_job.dist.is_initialized()


def save_cut(rank: int, world: int, checkpoint: Path, folder: Path) -> None:
    """octavo's checkpoint of a model that is cut among the ranks, and a file of each rank, as other engines write."""
    model = load_model(checkpoint, device="cpu")
    parallelize(model, TensorGroup.of())
    save_model(model, folder / "whole")
    parts = {name: param.detach().contiguous() for name, param in model.named_parameters()}
    (folder / "parts").mkdir(exist_ok=True)
    save_file(parts, folder / "parts" / f"model-rank-{rank}-part-0.safetensors")


@pytest.mark.slow
def test_a_checkpoint_of_another_degree(checkpoint: Path, tmp_path: Path, run_octavo: RunOctavo) -> None:
    """octavo's are whole whatever the degree; a folder of ranks' parts is one line."""
    run_group(functools.partial(save_cut, checkpoint=checkpoint, folder=tmp_path), 4)
    prompts = [ids(1, 5).tolist(), ids(2, 40).tolist()]
    two = LLM(tmp_path / "whole", checkpoint, tensor_parallel_size=2, **FP8, **LIMITS)
    found = seeded(two, prompts)
    two.close()
    assert found == seeded(LLM(checkpoint, **FP8, **LIMITS), prompts)
    shutil.copy(checkpoint / "config.json", tmp_path / "parts")
    options = ("--port", "0", "--device", "cpu", "--tensor-parallel-size", "2")
    ended = run_octavo("serve", tmp_path / "parts", "--tokenizer", checkpoint, *options)
    errors = [line for line in ended.err.splitlines() if "rror" in line]
    assert ended.code == 2 and len(errors) == 1, ended.err
    assert "model-rank-0-part-0.safetensors alone is a part without an index: write the whole model" in errors[0]


@pytest.mark.slow
def test_generate_over_two_ranks_has_the_text_of_one(checkpoint: Path, run_octavo: RunOctavo) -> None:
    options = ("-p", "so it is", "--max-tokens", "12", "--quantization", "fp8", "--exact", "--device", "cpu")
    texts = []
    for size in ("1", "2"):
        ended = run_octavo("generate", checkpoint, *options, "--no-progress", "--tensor-parallel-size", size)
        assert ended.code == 0, ended.err
        texts.append(ended.out.rpartition(" tokens in ")[0])
    assert texts[0] == texts[1] and "so it is" in texts[0]


@pytest.mark.slow
def test_a_server_of_two_ranks(checkpoint: Path) -> None:
    options = ("--port", "0", "--device", "cpu", "--quantization", "fp8", "--exact", "--tensor-parallel-size", "2")
    body = {"prompt": "so it is", "max_tokens": 8, "temperature": 0}
    with served(str(checkpoint), *options) as two:
        two.wait_until_ready()
        text = httpx.post(f"{two.url}/v1/completions", json=body, timeout=30).json()["choices"][0]["text"]
        (expected,) = LLM(checkpoint, quantization="fp8", exact=True, device="cpu").generate(
            "so it is", SamplingParams(max_tokens=8, temperature=0)
        )
        assert text == expected.outputs[0].text
        long = body | {"max_tokens": 60, "stream": True, "ignore_eos": True}
        with httpx.stream("POST", f"{two.url}/v1/completions", json=long, timeout=30) as answer:
            lines = answer.iter_lines()
            next(lines)
            two.popen.send_signal(signal.SIGTERM)
            rest = [line for line in lines if line]
        assert '"finish_reason":"length"' in "".join(rest) and rest[-1] == "data: [DONE]"
        code, log = two.end()
        assert code == 0 and "2 tensor-parallel ranks" in log
    with served(str(checkpoint), *options) as two:
        two.wait_until_ready()
        ended: list[str] = []

        def stream() -> None:
            long = body | {"max_tokens": 110, "stream": True, "ignore_eos": True}
            with httpx.stream("POST", f"{two.url}/v1/completions", json=long, timeout=30) as answer:
                ended.extend(answer.iter_lines())

        reader = threading.Thread(target=stream)
        reader.start()
        while not ended and reader.is_alive():
            time.sleep(0.02)
        for worker in children(two.popen.pid):
            os.kill(worker, signal.SIGKILL)
        reader.join(20)
        assert not reader.is_alive() and any('"error"' in line for line in ended[-6:]), ended[-6:]
        assert httpx.get(f"{two.url}/health").status_code == 503
        assert any("was killed by signal 9" in line for line in two.log)


@pytest.mark.slow
def test_an_idle_server_says_at_once_that_a_rank_has_ended(checkpoint: Path) -> None:
    with served(str(checkpoint), "--port", "0", "--device", "cpu", "--tensor-parallel-size", "2") as two:
        two.wait_until_ready()
        (worker,) = children(two.popen.pid)
        os.kill(worker, signal.SIGKILL)
        deadline = time.monotonic() + 5
        while httpx.get(f"{two.url}/health").status_code == 200 and time.monotonic() < deadline:
            time.sleep(0.05)
        health = httpx.get(f"{two.url}/health")
        assert health.status_code == 503 and "was killed by signal 9" in health.json()["error"]
        ready = httpx.get(f"{two.url}/ready")
        assert ready.status_code == 503 and "Retry-After" not in ready.headers
        refused = httpx.post(f"{two.url}/v1/completions", json={"prompt": "a"}, timeout=10)
        error = refused.json()["error"]
        assert (refused.status_code, error["code"]) == (503, "engine_failed") and "Retry-After" not in refused.headers
        assert f"rank 1 (process {worker}) was killed by signal 9" in error["message"]
        two.popen.send_signal(signal.SIGTERM)
        code, log = two.end()
    assert code == 1 and log.count("was killed by signal 9") == 2 and "Traceback" not in log


@pytest.mark.slow
@pytest.mark.parametrize("ended_by", ["step timeout", "second signal"])
def test_a_server_whose_rank_hangs(checkpoint: Path, ended_by: str) -> None:
    limit = ("--step-timeout", "2" if ended_by == "step timeout" else "50")
    with served(str(checkpoint), "--port", "0", "--device", "cpu", "--tensor-parallel-size", "2", *limit) as two:
        two.wait_until_ready()
        (worker,) = children(two.popen.pid)
        os.kill(worker, signal.SIGSTOP)
        answers: list[httpx.Response] = []
        body = {"prompt": "so it is", "max_tokens": 8}
        client = threading.Thread(
            target=lambda: answers.append(httpx.post(f"{two.url}/v1/completions", json=body, timeout=40))
        )
        began = time.monotonic()
        client.start()
        if ended_by == "second signal":
            time.sleep(1.0)
            for _ in range(2):
                two.popen.send_signal(signal.SIGTERM)
                time.sleep(0.5)
        client.join(40)
        assert time.monotonic() - began < (10 if ended_by == "step timeout" else 25)
        assert answers[0].status_code == (500 if ended_by == "step timeout" else 503)
        if ended_by == "step timeout":
            text = f"rank 1 (process {worker}) did not answer at 'step' within 2 s, and was ended"
            assert text in answers[0].json()["error"]["message"]
            assert httpx.get(f"{two.url}/health").status_code == 503
            two.popen.send_signal(signal.SIGTERM)
        else:
            assert "the server shut down before" in answers[0].json()["error"]["message"]
        code, log = two.end()
    assert code == 1 and "Traceback" not in log
    assert "was killed by signal" not in log and "did not answer" in log


@pytest.mark.slow
def test_a_server_of_two_ranks_under_torchrun(checkpoint: Path) -> None:
    options = ("--port", "0", "--device", "cpu", "--tensor-parallel-size", "2")
    with served(str(checkpoint), *options, octavo=torchrun(2, "octavo")) as two:
        two.wait_until_ready()
        body = {"prompt": "so it is", "max_tokens": 4, "ignore_eos": True}
        answer = httpx.post(f"{two.url}/v1/completions", json=body, timeout=30).json()
        assert answer["usage"]["completion_tokens"] == 4
        two.popen.send_signal(signal.SIGTERM)
        _, log = two.end()  # torchrun counts a signal as a failure
    assert log.count("listening at") == 1 and "2 tensor-parallel ranks" in log
    assert "1 requests admitted; sequences ended: 0 stop, 1 length, 0 abort, 0 error; 0 open" in log


@pytest.mark.parametrize(
    ("options", "text"),
    [
        (("--tensor-parallel-size", "5"), "divide the KV heads or be a multiple of them; got 5 ranks"),
        (
            ("--tensor-parallel-size", "2", "--tensor-parallel-mode", "reduce", "--exact"),
            "--tensor-parallel-mode reduce is not exact",
        ),
    ],
)
def test_a_server_refuses_ranks_that_do_not_fit_before_it_listens(
    options: tuple[str, ...], text: str, checkpoint: Path, run_octavo: RunOctavo, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(subprocess, "Popen", None)
    ended = run_octavo("serve", checkpoint, "--port", "0", "--device", "cpu", *options)
    assert ended.code == 2 and ended.err.count("\n") == 1 and text in ended.err and "listening" not in ended.err


@pytest.mark.parametrize(("rank", "local_rank", "size"), [(0, 0, 3), (2, 0, 2)])
def test_torchruns_ranks_that_are_not_the_servers_are_one_error(
    checkpoint: Path, rank: int, local_rank: int, size: int, monkeypatch: pytest.MonkeyPatch, run_octavo: RunOctavo
) -> None:
    for name, value in {"RANK": rank, "LOCAL_RANK": local_rank, "WORLD_SIZE": size}.items():
        monkeypatch.setenv(name, str(value))
    ended = run_octavo("serve", checkpoint, "--device", "cpu", "--tensor-parallel-size", "2")
    assert ended.code == 2 and "starts its 2 ranks itself, on one host" in ended.err and ended.err.count("\n") == 1


def children(pid: int) -> list[int]:
    """Workers of a process."""
    found = []
    for path in Path("/proc").glob("[0-9]*/comm"):
        with contextlib.suppress(OSError):  # it has ended
            if path.read_text().strip() == forks.rank_name(pid):
                found.append(int(path.parent.name))
    return found
