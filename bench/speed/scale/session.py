"""The ranks of a run, its record and its complaints; how steps are timed on all of them alike."""

import dataclasses
import gc
import statistics
import time
import traceback
from collections.abc import Callable, Collection, Mapping
from pathlib import Path

import torch

from bench.record import Record, Timing, summarize
from bench.report import FAILED
from bench.timing import synchronize
from octavo.distributed.mesh import Mesh
from octavo.distributed.outcome import together
from octavo.distributed.symmetric import shared_bytes

GIB = 2**30


@dataclasses.dataclass(frozen=True)
class Steps:
    """Timed steps of one variant on this rank.

    Attributes:
        timing: of a step, in milliseconds.
        peak_bytes: allocated at most on this rank's GPU, warm-up left out; 0 on a CPU.
        losses: of all steps, warm-up included.
    """

    timing: Timing
    peak_bytes: int
    losses: tuple[float, ...]

    @property
    def ms(self) -> float:
        """The median step."""
        return self.timing.median_us


@dataclasses.dataclass
class Session:
    """One run of the program on one rank.

    Args:
        mesh: of all ranks.
        record: that rank 0 writes.
        is_toy: sizes for a CPU.
        save_dir: where checkpoints are written to.
        out: folder of the record; None for nowhere.
        commit: of the tree that is measured; None asks git.
        profiles: print what takes longest in one step of the parts that can tell.
        layouts: names of those that parts with several run; none for all.
    """

    mesh: Mesh
    record: Record
    is_toy: bool
    save_dir: Path
    out: Path | None = None
    commit: str | None = None
    profiles: bool = False
    layouts: Collection[str] = ()
    complaints: list[str] = dataclasses.field(default_factory=list)

    @property
    def device(self) -> torch.device:
        """This rank's."""
        return self.mesh.device

    def run(self, parts: Mapping[str, Callable[["Session"], None]], names: Collection[str]) -> int:
        """Run the parts of these names; the exit code: 1 where a check or a case failed."""
        for name, part in parts.items():
            if name in names:
                began = time.perf_counter()
                part(self)
                self.say(f"{name}: {time.perf_counter() - began:.1f} s")
        return 1 if self.complaints else 0

    def say(self, text: str) -> None:
        """Print on rank 0."""
        if self.mesh.is_first:
            print(text, flush=True)

    def complain(self, text: str) -> None:
        """Note what is wrong; the exit code is then 1."""
        self.complaints.append(text)
        self.say(f"COMPLAINT: {text}")

    def keep(self) -> None:
        """Write the record as it is: a program that is cut off leaves what was measured."""
        if self.mesh.is_first and self.out is not None:
            self.record.save(self.out, self.commit)

    def attempt(self, case: str, run: Callable[[], None]) -> None:
        """Run one case; what fails alike on all ranks leaves the others."""
        began = time.perf_counter()
        try:
            run()
        except Exception as error:
            traceback.print_exc()
            self.complain(f"{case}: {type(error).__name__}: {error}")
            self.record.add(case, FAILED, type(error).__name__, 1.0)  # as octavo bench step has it
        self.free()
        self.keep()
        self.say(f"  {case}: {time.perf_counter() - began:.1f} s")

    def check(self, promise: Callable[[], None]) -> None:
        """Raise on all ranks where a promise is broken on any; it asks for no other rank itself."""
        together(self.mesh.host_group, promise)

    def free(self) -> None:
        """Give back what a case left."""
        gc.collect()
        if self.device.type == "cuda":
            torch.cuda.synchronize()
            torch.cuda.empty_cache()

    def time_steps(
        self, steps: dict[str, Callable[[], torch.Tensor]], warmup: int = 3, timed: int = 8
    ) -> dict[str, Steps]:
        """Time variants in turn; every rank begins each step together.

        Args:
            steps: name -> one training step, which returns its loss. The peak is of all of them.
        """
        warmup, timed = (1, 2) if self.is_toy else (warmup, timed)
        times: dict[str, list[float]] = {name: [] for name in steps}
        losses: dict[str, list[torch.Tensor]] = {name: [] for name in steps}
        for index in range(warmup + timed):
            if index == warmup and self.device.type == "cuda":
                torch.cuda.reset_peak_memory_stats()
            for name, step in steps.items():
                self.mesh.barrier()
                synchronize(self.device)
                began = time.perf_counter()
                losses[name].append(step())
                synchronize(self.device)
                times[name].append((time.perf_counter() - began) * 1e3)
        peak = torch.cuda.max_memory_allocated() + shared_bytes() if self.device.type == "cuda" else 0
        return {
            name: Steps(summarize(times[name][warmup:]), peak, tuple(float(loss) for loss in losses[name]))
            for name in steps
        }

    def time_step(self, step: Callable[[], torch.Tensor], warmup: int = 3, timed: int = 8) -> Steps:
        """time_steps of one variant."""
        return self.time_steps({"": step}, warmup, timed)[""]

    def mean(self, value: float) -> float:
        """Over the ranks."""
        return statistics.fmean(self.mesh.gather_objects(value))

    def largest(self, value: float) -> float:
        """Over the ranks."""
        return max(self.mesh.gather_objects(value))

    def add_step(self, case: str, steps: Steps, peer: str | None = None, peer_ms: float | None = None) -> None:
        """Rows of a step's time and its peak memory; a collective."""
        peak = self.largest(steps.peak_bytes) / GIB
        self.record.add_times(case, "step time", "ms", steps.timing, peer=peer, peer_value=peer_ms)
        if peak:
            self.record.add(case, "peak memory", "GiB", peak)
        compared = "" if peer_ms is None else f"   {peer_ms / steps.ms:5.3f} x its baseline"
        self.say(f"{case:<110} {steps.ms:9.1f} ms {peak:6.2f} GiB{compared}")
