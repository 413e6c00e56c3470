"""`make bench`: every benchmark once, over the GPUs that there are, and one record of rows that belong together."""

import json
import subprocess
from pathlib import Path
from typing import Any

import pytest

from bench import BENCHMARKS
from bench import __main__ as command
from bench.figures import Figures
from bench.jobs import SECONDS, BenchJob, all_jobs, choose_jobs, find_parts, join, join_records
from bench.processes import share_of_cores, usable_cores
from bench.report import THROUGHPUT
from bench.rl import workloads as rl
from bench.serve import workloads as serve
from octavo.errors import DataError
from tests.assertions import assert_raises


def test_every_benchmark_is_a_job_once() -> None:
    jobs = all_jobs()
    wanted = {name for name in BENCHMARKS if name not in ("serve", "rl")}
    wanted |= {f"serve {name}" for name in serve.NAMES} | {f"rl {name}" for name in rl.NAMES}
    assert {" ".join(job.name.split()[:2]) for job in jobs} == wanted
    variants = [variant for job in jobs if "512x1000" in job.name for variant in job.name.split()[2].split(",")]
    assert variants == list(dict.fromkeys(variants)) and set(variants) == set(serve.WORKLOADS["8b-512x1000"].variants)
    assert [job.seconds for job in jobs] == sorted(SECONDS.values(), reverse=True)
    assert len({job.folder for job in jobs}) == len(jobs)


def test_jobs_by_a_part_of_their_name() -> None:
    gptj = [job.name for job in choose_jobs(["gptj", "qdq"])]
    assert sorted(gptj) == ["qdq", *(f"serve gptj-{size}" for size in ("1", "64", "8", "largest"))]
    assert [job.name for job in choose_jobs(["step"])] == ["step"]  # and no learner's
    assert choose_jobs([]) == all_jobs()
    assert_raises(DataError, "no benchmark's name contains 'tpu'; they are: gemm, ", choose_jobs, ["serve", "tpu"])


def test_a_job_is_one_octavo_bench(tmp_path: Path) -> None:
    assert BenchJob("step").arguments(tmp_path, "abc") == ["step", "--out", str(tmp_path / "step"), "--commit", "abc"]
    found = BenchJob("serve 8b-single fp8,exact").arguments(tmp_path, "abc")
    asked = ["serve", "--workload", "8b-single", "--variant", "fp8", "--variant", "exact"]
    assert found == [*asked, "--out", str(tmp_path / "serve-8b-single-fp8-exact"), "--commit", "abc"]


def write(folder: Path, name: str, rows: list[str], metric: str = "m", value: float = 1.0, **changes: object) -> None:
    folder.mkdir(parents=True)
    about = {"what": folder.name, "device": "a card", "torch": "2", "triton": "3", "commit": "abc", "date": "today"}
    listed = [{"case": row, "metric": metric, "value": value, "peer_value": None} for row in rows]
    (folder / name).write_text(json.dumps(about | changes | {"rows": listed}))


def test_rows_of_one_record_are_joined(tmp_path: Path) -> None:
    jobs = choose_jobs(["serve gptj", "step"])
    write(tmp_path / "serve-gptj-8", "serve.json", ["b", "c"])
    write(tmp_path / "serve-gptj-1", "serve.json", ["a", "b"])
    write(tmp_path / "step", "step.json", ["d"])
    serve, step = sorted(join_records(find_parts(tmp_path, jobs), tmp_path / "records"))
    document = json.loads(serve.read_text())
    assert [row["case"] for row in document["rows"]] == ["a", "b", "c"]
    assert document["what"] == "serve-gptj-1" and document["commit"] == "abc"
    assert [row["case"] for row in json.loads(step.read_text())["rows"]] == ["d"]


def test_rows_of_another_commit_or_day_say_so(tmp_path: Path) -> None:
    write(tmp_path / "serve-gptj-1", "serve.json", ["x: octavo bf16", "x: b", "x: c"], THROUGHPUT)
    write(tmp_path / "serve-gptj-8", "serve.json", ["x: b"], THROUGHPUT, 2.0, commit="def")
    write(tmp_path / "serve-gptj-64", "serve.json", ["y: d"], date="later")
    (path,) = join_records(find_parts(tmp_path, choose_jobs(["gptj"])), tmp_path / "records")
    document = json.loads(path.read_text())
    found = [(row["case"], row["value"], row.get("commit"), row.get("date")) for row in document["rows"]]
    assert (document["commit"], document["date"]) == ("abc", "today")
    ours = [(name, 1.0, None, None) for name in ("x: octavo bf16", "x: c", "x: c")]  # at last its ratio
    assert found == [ours[0], ("x: b", 2.0, "def", "today"), *ours[1:], ("y: d", 1.0, "abc", "later")]
    said = "commit abc, today. Of commit def, today: x: b. Of commit abc, later: y."
    assert Figures(document).provenance().endswith(said)
    assert join({"again": document}) == document


def test_parts_are_added_to_a_record(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    write(Path("bench", "records"), "step.json", ["a", "b", "c"])
    write(Path("runs", "step"), "step.json", ["b", "c", "d"], commit="def")
    assert command.main(["--add", "runs"]) == 0
    document = json.loads(Path("bench", "records", "step.json").read_text())
    assert (document["commit"], document["what"]) == ("def", "step")  # most rows'
    found = [(row["case"], row.get("commit")) for row in document["rows"]]
    assert found == [("a", "abc"), ("b", None), ("c", None), ("d", None)]


@pytest.mark.parametrize("key", ["device", "torch", "triton"])
def test_what_another_machine_measured_is_not_joined(tmp_path: Path, key: str) -> None:
    write(tmp_path / "serve-gptj-1", "serve.json", ["a"])
    write(tmp_path / "serve-gptj-8", "serve.json", ["b"], **{key: "other"})
    with pytest.raises(DataError, match=f"of different machines: {key} is .* and 'other'"):
        join_records(find_parts(tmp_path, choose_jobs(["gptj"])), tmp_path / "records")
    assert not (tmp_path / "records").exists()


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Commands that would run, each with its GPU; "sizes" fails."""
    found: list[Any] = []

    class Done:
        def __init__(self, returncode: int) -> None:
            self.returncode = returncode

    def run(words: list[str], *, env: dict[str, str], stdout: Any, **_: object) -> Done:
        found.append((words[4], env["CUDA_VISIBLE_DEVICES"]))
        stdout.write(f"log of {words[4]}\n")
        if words[4] == "gemm":
            raise subprocess.TimeoutExpired(words, 1.0)
        return Done(int(words[4] == "sizes"))

    monkeypatch.setattr(subprocess, "run", run)
    return found


def test_jobs_run_on_all_gpus_and_one_failure_stops_none(tmp_path, calls, capsys):
    jobs = [BenchJob(name) for name in ("sizes", "step", "gemm", "qdq")]
    outcomes = command.run_jobs(jobs, ["3", "5"], tmp_path, "abc", None)
    assert outcomes == {"sizes": "failed", "step": "done", "gemm": "left out", "qdq": "done"}
    assert {name for name, _ in calls} == {"sizes", "step", "gemm", "qdq"}
    assert {gpu for _, gpu in calls} <= {"3", "5"}
    shown = capsys.readouterr().out
    assert "sizes: exit code 1" in shown and "log of sizes" in shown
    assert (tmp_path / "step" / "log.txt").read_text() == "log of step\n"


def test_each_gpu_has_neighbouring_cores() -> None:
    assert [share_of_cores([7, 0, 1, 2, 4, 6], i, 2) for i in (0, 1)] == [{0, 1, 2}, {4, 6, 7}]
    assert share_of_cores([3, 5], 2, 4) == {3, 5}  # fewer than processes: all of them
    assert share_of_cores([], 0, 2) == set()


@pytest.mark.skipif(len(usable_cores()) < 2, reason="one core has no shares")
def test_jobs_start_on_their_share_of_the_cores(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before, seen = usable_cores(), set()
    monkeypatch.setattr(command, "_run", lambda job, gpu, *_: seen.add((int(gpu), frozenset(usable_cores()))) or "done")
    command.run_jobs([BenchJob(name) for name in ("step", "qdq", "gemm", "quant")], ["0", "1"], tmp_path, "abc", None)
    assert seen and all(share == share_of_cores(before, gpu, 2) for gpu, share in seen)
    assert usable_cores() == before


def test_what_would_end_late_is_left_out(tmp_path: Path, calls: list[Any]) -> None:
    outcomes = command.run_jobs([BenchJob("step"), BenchJob("qdq")], ["0"], tmp_path, "abc", 2.0)
    assert outcomes == {"step": "left out", "qdq": "done"} and [name for name, _ in calls] == ["qdq"]


def test_the_exit_code_says_what_became_of_them(tmp_path, calls, monkeypatch, capsys):
    rest = ["--out", str(tmp_path), "--commit", "abc", "--only"]
    assert command.main([*rest, "qdq"]) == 2  # without a GPU
    monkeypatch.setattr(command.torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(command, "visible_gpus", lambda: ["0"])
    assert [command.main([*rest, name]) for name in ("qdq", "sizes", "gemm")] == [0, 1, 3]
    assert command.main([*rest, "tpu"]) == 2
    assert "no benchmark's name contains 'tpu'" in capsys.readouterr().err
