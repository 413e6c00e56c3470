"""The learning matrix's jobs: what each process is to do, where it writes, and whether it is done."""

import dataclasses
import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from bench.rl_matrix.variants import FAMILIES, GROUPS, QUICK, QUICK_MOE
from octavo.config import load_config
from octavo.errors import ConfigError
from octavo.rl import RLConfig

JOB_FILE, END_FILE = "job.json", "end.json"
CONFIG = Path(__file__).with_name("rl_matrix.toml")
_OF_STARTS = ("model.", "task.", "warmup.")  # sections that a warm start is made of
_STEPS = "trainer.steps="


@dataclasses.dataclass(frozen=True)
class MatrixJob:
    """One process's work: the warm start of a family and seed, or a run from it.

    Attributes:
        group: a key of GROUPS; empty for a warm start.
        variant: a key of its variants; empty for a warm start.
        tag: of a trial with other overrides; empty for the matrix itself.
        overrides: of rl_matrix.toml, all of them, `section.key=value`.
        work: folder of all jobs.
        device: "cuda" or "cpu".
        side_by_side: for the record.
        commit: for the record.
    """

    family: str
    seed: int
    overrides: tuple[str, ...]
    work: Path
    device: str
    group: str = ""
    variant: str = ""
    tag: str = ""
    side_by_side: int = 1
    commit: str = "unknown"

    @property
    def is_start(self) -> bool:
        """Whether it is a warm start."""
        return not self.group

    @property
    def name(self) -> str:
        """Of its folder."""
        trial = f"@{self.tag}" if self.tag else ""
        return self._start_name if self.is_start else f"{self.group}-{self.variant}-s{self.seed}{trial}"

    @property
    def _start_name(self) -> str:
        return f"start-{self.family}-s{self.seed}"

    @property
    def folder(self) -> Path:
        """Where it writes."""
        return self.work / self.name

    @property
    def start(self) -> Path:
        """The folder of the warm start that it begins from."""
        return self.work / self._start_name

    @property
    def start_is_made(self) -> bool:
        """Whether that warm start is there."""
        return (self.start / END_FILE).is_file()

    @property
    def settings(self) -> frozenset[str]:
        """What must be the same when the job goes on."""
        return frozenset(text for text in self.overrides if not text.startswith(_STEPS))

    @property
    def num_steps(self) -> int:
        """Rollout steps that are wanted."""
        return self.config.trainer.steps

    @property
    def end_file(self) -> Path:
        """There once the job has come to its end, by its steps or by an error of its numbers."""
        return self.folder / END_FILE

    @property
    def config(self) -> RLConfig:
        """What octavo.rl is told."""
        own = [f"run.dir={self.folder}", f"run.seed={self.seed}", f"run.device={self.device}"]
        if not self.is_start:
            own += [f"model.path={self.start / 'model'}", "warmup.steps=0"]
        return load_config(RLConfig, CONFIG, [*self.overrides, *own])

    def as_dict(self) -> dict[str, Any]:
        """Plain JSON values, Job's own fields."""
        return dataclasses.asdict(self) | {"work": str(self.work), "overrides": list(self.overrides)}

    @classmethod
    def load(cls, path: Path) -> "MatrixJob":
        """Of a JOB_FILE."""
        fields = json.loads(path.read_text())
        return cls(**(fields | {"work": Path(fields["work"]), "overrides": tuple(fields["overrides"])}))


def make_jobs(
    groups: Iterable[str],
    work: Path,
    device: str,
    *,
    variants: Iterable[str] = (),
    seeds: Iterable[int] = (),
    overrides: Iterable[str] = (),
    quick: bool = False,
    tag: str = "",
    **about: Any,
) -> list[MatrixJob]:
    """The warm starts that are needed, then the runs, the first seed's first.

    Args:
        variants: only these; none for all of a group.
        seeds: only these; none for all of a group.
        overrides: of every job, after the variant's own; a warm start takes those of its sections alone.
        tag: of the runs.
        about: MatrixJob's side_by_side and commit.
    Raises:
        ConfigError: no such group, or no group has a variant of that name.
    """
    names, wanted, chosen = list(groups), set(variants), list(seeds)
    if unknown := set(names) - set(GROUPS):
        raise ConfigError(f"no group {sorted(unknown)[0]!r}; known: {', '.join(GROUPS)}")
    known = {variant for name in names for variant in GROUPS[name].variants}
    if unknown := wanted - known:
        raise ConfigError(f"no variant {sorted(unknown)[0]!r} in {', '.join(names)}; known: {', '.join(sorted(known))}")
    extra = tuple(overrides)
    of_starts = tuple(change for change in extra if change.startswith(_OF_STARTS))
    starts, runs = {}, []
    for name in names:
        group = GROUPS[name]
        family = FAMILIES[group.family]
        toy: tuple[str, ...] = QUICK if quick else ()
        if quick and group.family.endswith("moe"):
            toy += QUICK_MOE
        for seed in chosen or range(group.seeds):
            for variant in group.variants:
                if wanted and variant not in wanted:
                    continue
                starts[group.family, seed] = MatrixJob(
                    group.family, seed, (*family, *toy, *of_starts), work, device, **about
                )
                changes = (*family, *group.common, *toy, *group.variants[variant], *extra)
                runs.append(MatrixJob(group.family, seed, changes, work, device, name, variant, tag, **about))
    runs.sort(key=lambda job: job.seed)
    return [*starts.values(), *runs]
