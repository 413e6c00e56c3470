"""What `bench.serve.cold_start` measures, stage by stage, with every Triton compilation and its time."""

import dataclasses
import json
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from bench.profiling.settings import Settings
from bench.report import format_table
from bench.serve.cold_start import checkpoint_of, first_line_of, process_fields
from bench.serve.shapes import QWEN3_8B, make_toy
from bench.serve.workloads import VARIANTS

_TIMEOUT_S, _NUM_ROWS = 600.0, 15


@dataclasses.dataclass(frozen=True)
class ColdProfile:
    """A fresh process up to its first tokens: seconds of each stage and of each Triton compilation, both in order."""

    title: str
    stages: dict[str, float]
    compilations: list[tuple[str, float]]

    def format(self) -> str:
        """For people, the longest compilations first."""
        total = sum(seconds for _, seconds in self.compilations)
        made = sorted(self.compilations, key=lambda row: -row[1])[:_NUM_ROWS]
        rows = [*self.stages.items(), (f"{len(self.compilations)} Triton compilations, of that", total), *made]
        return f"\n== {self.title}\n" + format_table(("stage", "s"), [[name, f"{s:.2f}"] for name, s in rows])

    def document(self) -> dict[str, Any]:
        """All of it, to be written as JSON."""
        return dataclasses.asdict(self)


def profile_cold_start(settings: Settings, _name: str, variant_name: str) -> Iterator[ColdProfile]:
    """One start with empty caches of kernels, of a checkpoint of random weights in the page cache.

    Raises:
        BackendError: the process failed.
    """
    settings.host.free()
    options, variant = settings.options, VARIANTS[variant_name]
    shape = make_toy(QWEN3_8B) if options.quick else QWEN3_8B
    shape = dataclasses.replace(shape, num_layers=options.layers or shape.num_layers)
    with checkpoint_of(shape, options.device, None) as path, tempfile.TemporaryDirectory() as folder:
        settings.host.free()  # the weights that were written
        fields = process_fields(path, variant, settings.host.recipe, options.device, quick=options.quick)
        fields["process_began"] = time.time()
        command = [sys.executable, "-m", "bench.serve.first_token", json.dumps(fields)]
        details = json.loads(first_line_of(command, Path(folder), _TIMEOUT_S))["details"]
    title = f"cold start, {shape.num_layers} layers: {variant.label(settings.host.recipe)}"
    yield ColdProfile(title, details["stages"], details["compilations"])
