"""Two trees of octavo side by side on one machine: `python -m bench.speed.trees OTHER --out FOLDER`.

OTHER is a folder that holds another tree's package `octavo` (a `git worktree` or an archive). Each tree has one
process that lives through the whole run; every case is timed in turns, other and this, this and other, so that clock
and heat hit both alike. What the host bounds (host, linears of 4096 cubed) also depends on how fast a process
happens to run, by a factor of two on a virtual machine: `--restarts N` starts each tree's process N times and takes the
median of their medians. A case is KIND SIZES VARIANT, see `bench.speed.tree_worker`.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from bench.program import Program, keeps
from bench.record import Record, summarize
from octavo.env import child_environment

ROOT = Path(__file__).parents[2]
RECIPES = ("delayed", "tensorwise", "rowwise", "blockwise")
_LINEARS = ("4096x4096x4096", "8192x4096x4096", "16384x4096x14336")
CASES = (
    *(f"quantize 32768x4096 {v}{both}" for v in ("tensor", "row", "1x128") for both in ("", "-both")),
    *(f"host 128x128x128 {recipe}" for recipe in RECIPES),
    *(f"linear {sizes} {recipe}" for sizes in _LINEARS for recipe in RECIPES),
    *(f"step 6x2x8192 {recipe}" for recipe in RECIPES),
    "decode 1x128x512 blockwise",
    "decode 512x128x256 blockwise",
)
QUICK_CASES = ("quantize 64x256 1x128-both", "host 16x128x128 rowwise", "linear 16x128x128 blockwise",
               "step 1x1x32 delayed", "decode 2x8x4 blockwise")  # fmt: skip
WHAT = (
    "Time of this tree beside another's, both processes on one machine, in turns. quantize: of a matrix; host: forward "
    "and backward of a small linear, in bursts of 20; linear: a sixth of a step of six linears of tokens x in x out, "
    "one backward, weights quantized again; step: training step of layers x batch x tokens of Llama-3-8B's layer with "
    "torch's fused AdamW; decode: seconds a token of requests x prompt x output tokens through Qwen3-8B with FP8 KV."
)


class CaseError(Exception):
    """A case failed in a tree."""


def environment_of(folder: Path) -> dict[str, str]:
    """That of a process whose octavo is a folder's; what else PYTHONPATH names stays behind it."""
    paths = [str(folder.resolve()), *filter(None, [os.environ.get("PYTHONPATH")])]
    return child_environment() | {"PYTHONPATH": os.pathsep.join(paths), "PYTHONSAFEPATH": "1"}


class Tree:
    """The process of one tree."""

    def __init__(self, folder: Path, device: str) -> None:
        self._folder = folder
        command = [sys.executable, str(Path(__file__).with_name("tree_worker.py")), device]
        self._process = subprocess.Popen(
            command, env=environment_of(folder), stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=folder
        )

    @property
    def has_ended(self) -> bool:
        """Whether the process is gone."""
        return self._process.poll() is not None

    def ask(self, verb: str, case: str) -> None:
        """Send a request, without waiting for its answer."""
        assert self._process.stdin is not None, "a pipe"
        self._process.stdin.write(json.dumps({verb: case}) + "\n")
        self._process.stdin.flush()

    def answer(self) -> float:
        """Seconds of the oldest request that was not answered, 0 where it has none.

        Raises:
            CaseError: the case failed there.
            RuntimeError: the process has ended.
        """
        assert self._process.stdout is not None, "a pipe"
        line = self._process.stdout.readline()
        if not line:
            raise RuntimeError(f"the tree's process ended with exit code {self._process.wait()}; its log is above")
        answer = json.loads(line)
        if "error" in answer:
            raise CaseError(f"{self._folder}: {answer['error']}")
        return float(answer["seconds"] or 0.0)

    def close(self) -> None:
        """End the process."""
        self._process.kill()
        self._process.communicate()


@contextmanager
def started(folders: list[Path], device: str) -> Iterator[list[Tree]]:
    """A process for each folder."""
    trees = [Tree(folder, device) for folder in folders]
    try:
        yield trees
    finally:
        for tree in trees:
            tree.close()


def time_case(trees: list[Tree], case: str, rounds: int) -> list[list[float]]:
    """Microseconds of each round, a list a tree; trees change places from round to round.

    Raises:
        CaseError: it failed in a tree.
    """
    try:
        _ask_all(trees, "build", case)  # both at once: what is compiled here takes longest
        samples: list[list[float]] = [[] for _ in trees]
        for index in range(rounds):
            order = range(len(trees)) if index % 2 == 0 else reversed(range(len(trees)))
            for place in order:
                trees[place].ask("time", case)
                samples[place].append(trees[place].answer() * 1e6)
        return samples
    finally:
        _ask_all(trees, "free", case)


def _ask_all(trees: list[Tree], verb: str, case: str) -> None:
    for tree in trees:
        tree.ask(verb, case)
    failures = []
    for tree in trees:
        try:
            tree.answer()
        except CaseError as error:  # the others' answers are on their way
            failures.append(error)
    if failures:
        raise failures[0]


def main(arguments: list[str] | None = None) -> int:
    """Measure, print a table, write the record; 1 where a case failed."""
    parser = Program("bench.speed.trees", __doc__, former={"--case": "--filter"})
    parser.add_argument("other", type=Path, help="folder of the other tree, the one before")
    parser.add_argument("--name", default="before", help="what tables and records call the other tree: its commit")
    parser.add_filter("cases")
    parser.add_argument("--rounds", type=int, default=5, help="times that each tree runs a case")
    parser.add_argument(
        "--restarts", type=int, default=1, help="processes of each tree, one after the other; see above"
    )
    parser.add_argument("--record", default="trees", help="the record's name")
    options = parser.parse(arguments)
    known = CASES if options.device == "cuda" else QUICK_CASES
    cases = [case for case in known if keeps(options, case)]
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    samples: dict[str, list[list[float]]] = {case: [[], []] for case in cases}  # the other tree's and this one's
    failed = set()
    for _ in range(options.restarts):
        with started([options.other, ROOT], options.device) as trees:
            for case in cases:
                try:
                    times = time_case(trees, case, options.rounds)
                except CaseError as error:  # the other cases' figures are worth having
                    failed.add(case)
                    print(f"{case:<36} failed: {error}", flush=True)
                    continue
                for known_times, new in zip(samples[case], times, strict=True):
                    known_times += new if options.restarts == 1 else [statistics.median(new)]
                print(f"{case:<36} {_compare(*samples[case])}", flush=True)
                if options.out is not None:  # a run that is stopped keeps what it has
                    make_record(samples, options).save(options.out, options.commit)
    return 1 if failed else 0


def make_record(samples: dict[str, list[list[float]]], options: argparse.Namespace) -> Record:
    """Rows of every case that was timed: the median, and that of this tree over the other's."""
    record, peer = Record(options.record, WHAT, device=options.device), f"octavo at {options.name}"
    for case, (others, ours) in samples.items():
        if not (others and ours):
            continue
        before, after = summarize(others), summarize(ours)
        record.add(case, "time", "us", after.median_us, after.p20_us, after.p80_us, peer, before.median_us)
        ratio = after.median_us / before.median_us
        record.add(case, "time over the other tree's", "x", ratio, peer=peer, peer_value=1.0)
        if options.restarts > 1:
            record.add(case, "time of the fastest process", "us", min(ours), peer=peer, peer_value=min(others))
    return record


def _compare(others: list[float], ours: list[float]) -> str:
    before, after = statistics.median(others), statistics.median(ours)
    fastest = f"fastest {min(others):.2f} and {min(ours):.2f}"
    return f"{before:12.2f} us before {after:12.2f} us now  x{after / before:.4f}  {fastest}"


if __name__ == "__main__":
    sys.exit(main())
