"""Quick runs of benchmarks on a CPU, and the rows of their records."""

import json
from pathlib import Path

from bench import BenchOptions
from bench.measure import Pass
from bench.serve_options import ServeOptions


def options(folder: Path | None, device: str = "cpu", **asked: object) -> BenchOptions:
    serve = ServeOptions(**asked)  # type: ignore[arg-type]
    return BenchOptions(device=device, quick=True, out=folder, commit="abc", serve=serve)


def make_pass(ms: float, loss: float = 1.0, peak: int = 2**30, joules: float | None = 10.0, **other: str) -> Pass:
    return Pass((ms, ms, ms), peak, joules, "a test", loss, **{"optimizer": "AdamW", "attention": "flash"} | other)


def rows(folder: Path, name: str = "serve") -> dict[tuple[str, str], float]:
    """(case, metric) -> value."""
    document = json.loads((folder / f"{name}.json").read_text())
    return {(row["case"], row["metric"]): row["value"] for row in document["rows"]}
