"""What a benchmark run was asked for, checked once at the border."""

import dataclasses
import errno
from pathlib import Path

import torch

from bench.serve_options import ServeOptions
from octavo.errors import BackendError, ConfigError
from octavo.models.checkpoint.storage import check_writable, storage_error
from octavo.numerics.recipe import RECIPE_NAMES, get_recipe

FP8_RECIPES = ("delayed", "tensorwise", "rowwise", "blockwise")
ENGINE_RECIPE = "blockwise"  # of serving and of reinforcement where none is asked for
RECORDS = Path("bench/records")


@dataclasses.dataclass(frozen=True)
class BenchOptions:
    """Options of every benchmark.

    Args:
        device: "cuda" or "cpu"; a CPU runs toy sizes only, which say nothing about speed.
        quick: toy sizes and few repeats: does it run at all?
        recipes: FP8 recipes that octavo's variants run under.
        filters: run only cases whose name contains one of these; empty runs all.
        out: folder of the record; None is bench/records for a whole run, and no record for a partial one.
        commit: of the tree that is measured, where git is not at hand.
        compiled: also measure octavo's variants under torch.compile.
        layers: of the stack, where the benchmark has one; None is the benchmark's own choice.
        batch: the same.
        seq_len: the same.
        passes: how often a stack's variants are gone through; None is the benchmark's own choice.
        write_table: where `linear` writes its speed table.
        serve: what `serve` alone is asked for.

    Raises:
        ConfigError: an unknown recipe or device, or a CPU without quick.
        BackendError: no GPU.
        StorageError: out or write_table cannot be written, which would else be seen behind the measuring.
    """

    device: str = "cuda"
    quick: bool = False
    recipes: tuple[str, ...] = FP8_RECIPES
    filters: tuple[str, ...] = ()
    out: Path | None = None
    commit: str | None = None
    compiled: bool = False
    layers: int | None = None
    batch: int | None = None
    seq_len: int | None = None
    passes: int | None = None
    write_table: Path | None = None
    serve: ServeOptions = dataclasses.field(default_factory=ServeOptions)

    def __post_init__(self) -> None:
        if self.device not in ("cuda", "cpu"):
            raise ConfigError(f"--device must be cuda or cpu, got {self.device!r}")
        for name in self.recipes:
            if name not in RECIPE_NAMES or not get_recipe(name).is_fp8:
                raise ConfigError(f"--recipe must be one of {', '.join(FP8_RECIPES)}, got {name!r}")
        if self.out is not None:
            check_writable(self.out, "--out")
        if self.write_table is not None:
            if self.write_table.is_dir():
                raise storage_error(f"--write-table = {self.write_table}", errno.EISDIR)
            check_writable(self.write_table.parent, "--write-table")
        if self.serve.url is not None:  # the load is of this machine, the work of another
            return
        if self.device == "cpu" and not self.quick:
            raise ConfigError("a CPU runs benchmarks at toy sizes only, which claim nothing: add --quick")
        if self.device == "cuda" and not torch.cuda.is_available():
            raise BackendError("torch sees no GPU here; --device cpu --quick tries out whether the benchmark runs")

    @property
    def is_whole(self) -> bool:
        """Whether this run measures all that the committed record holds."""
        sizes = (self.layers, self.batch, self.seq_len, self.passes)
        is_default = self.recipes == FP8_RECIPES and self.serve == ServeOptions()
        return not self.quick and not self.filters and is_default and sizes == (None,) * 4

    @property
    def record_folder(self) -> Path | None:
        """Where the record goes; None for nowhere."""
        return self.out or (RECORDS if self.is_whole else None)

    def wants(self, case: str) -> bool:
        """Whether a case is to be run."""
        return not self.filters or any(part in case for part in self.filters)
