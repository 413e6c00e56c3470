"""A rank killed in the middle of a step of `octavo train`: `python -m bench.speed.scale.restart --ranks 2 --out DIR`.

The demo's run on so many ranks (larger on GPUs), undisturbed, then with the last rank killed: torchrun starts all again
from the last checkpoint. Seconds are from the kill to the end of the first step after it; then the two are compared.
"""

import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from bench.demo.ranks import TRAIN, children, compare_files, numbers
from bench.program import Program, backend_of
from bench.record import Record
from octavo.cli.ranks import torchrun
from octavo.env import child_environment
from octavo.run.metrics import METRICS_FILE, Row, read_metrics

STEPS, KILL_AFTER, EVERY = 24, 13, 4
SECONDS, COMPARED, DIFFERING = "killed to the end of the next step", "losses and norms compared", "that differ"
_LIMIT_S = 280.0  # of one run
_ON_GPU = {
    "model.hidden_size": 1024, "model.intermediate_size": 4096, "model.num_hidden_layers": 12, "data.seq_len": 1024,
    "run.deterministic": "true",
}  # fmt: skip


def case_label(num_ranks: int) -> str:
    """The case's name in the record."""
    return f"a rank killed in mid-step of octavo train, ordered: {num_ranks} GPUs"


def main(arguments: list[str] | None = None) -> int:
    """Run both, write the record; 1 where numbers or weights differ."""
    parser = Program("bench.speed.scale.restart", __doc__)
    parser.add_argument("--ranks", type=int, required=True, help="of this host")
    parser.add_argument("--toy", action="store_true", help="sizes for a CPU")
    options = parser.parse(arguments)
    case = case_label(options.ranks)
    record = Record("restart", f"{__doc__} Over {backend_of(options.device)}.", device=options.device)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        config = folder / "train.toml"
        config.write_text(
            TRAIN.format(out=folder, every=EVERY, steps=STEPS, seed=0, micro_batch_size=1), encoding="utf-8"
        )
        command = torchrun(options.ranks, "octavo", "train", str(config), "--set", f"run.device={options.device}")
        command[3:3] = ["--max-restarts", "1"]
        for key, value in {} if options.toy else _ON_GPU.items():
            command += ["--set", f"{key}={value}"]
        _run(command, folder / "undisturbed", is_killed=False)
        seconds = _run(command, folder / "killed", is_killed=True)
        one, other = (numbers(folder / run / METRICS_FILE) for run in ("undisturbed", "killed"))
        weights = compare_files("weights", *(folder / run / "checkpoints" for run in ("undisturbed", "killed")))
    pairs = [(a, b) for row, its in zip(one, other, strict=True) for a, b in zip(row, its, strict=True)]
    differing = sum(a != b for a, b in pairs)
    record.add(case, SECONDS, "s", seconds)
    record.add(case, COMPARED, "", len(pairs))
    record.add(case, DIFFERING, "", differing)
    record.add(case, "files of weights that differ", "", float(not weights.is_equal))
    print(f"{case}: {seconds:.1f} s {SECONDS}; {differing} of {len(pairs)} numbers differ; weights: {weights}")
    if options.out is not None:
        record.save(options.out, options.commit)
    return 0 if not differing and weights.is_equal else 1


def _run(command: list[str], folder: Path, *, is_killed: bool) -> float:
    """Run it to its end; seconds from the kill to the first step that was made again, 0 where there is none."""
    log, metrics, seconds = folder.with_suffix(".log"), folder / METRICS_FILE, 0.0
    with log.open("w", encoding="utf-8") as file:
        began = time.monotonic()
        job = subprocess.Popen(
            [*command, "--set", f"run.dir={folder}"],
            stdout=file,
            stderr=file,
            env=child_environment(OMP_NUM_THREADS="1"),
        )
        try:
            if is_killed:
                seconds = _kill_one(job, metrics, began)
            _wait(lambda: job.poll() is not None, job, began)
        finally:
            if job.poll() is None:
                job.terminate()
                job.wait()
    if job.returncode:
        raise SystemExit(f"octavo train ended with {job.returncode}: {log.read_text(errors='replace')[-3000:]}")
    return seconds


def _kill_one(job: "subprocess.Popen[bytes]", metrics: Path, began: float) -> float:
    """Kill the last rank within a step; seconds until the first step after the checkpoint has been made again."""
    _wait(lambda: len(_seconds(metrics)) >= KILL_AFTER, job, began)
    before = _seconds(metrics)
    if job.poll() is not None or len(before) < KILL_AFTER:
        return 0.0  # it has failed
    time.sleep((before[-1] - before[-2]) / 2)
    os.kill(max(children(job.pid)), signal.SIGKILL)
    killed = time.monotonic()
    again = KILL_AFTER // EVERY * EVERY  # the step's row
    _wait(lambda: _seconds(metrics)[again : again + 1] not in ([], [before[again]]), job, began)
    return time.monotonic() - killed


def _seconds(metrics: Path) -> list[float]:
    rows: list[Row] = read_metrics(metrics)
    return [row.seconds for row in rows]


def _wait(is_there: Callable[[], bool], job: "subprocess.Popen[bytes]", began: float) -> None:
    """Until it is so, or the job has ended."""
    while not is_there() and job.poll() is None:
        if time.monotonic() - began > _LIMIT_S:
            raise SystemExit(f"octavo train did not get there in {_LIMIT_S:.0f} s")
        time.sleep(0.02)


if __name__ == "__main__":
    sys.exit(main())
