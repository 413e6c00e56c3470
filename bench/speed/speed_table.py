"""From `octavo bench linear`'s timings to a table of where FP8 wins: what convert asks before it chooses.

Format, one JSON file: {"device", "commit", "format": 2, "rule", "recipes": {NAME: [[tokens, in, out, step, eager,
graph], ...]}}; the last three are speedups over the faster bf16 one: in an eager step of several linears, one linear
at a time with torch's defaults, and replayed from a CUDA graph; null where not measured. Rows are sorted. A reader
looks a shape up as docs/performance.md says: the measured shape that is nearest in log2 of tokens, in and out, among
those that are not larger in any of the three; where there is none, bf16.
"""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from bench.options import BenchOptions
from bench.record import git_commit
from bench.report import EAGER, GRAPH, STEP

if TYPE_CHECKING:
    from bench.speed.linear import CaseTimings

FORMAT = 2
RULE = "FP8 where the speedup at the nearest measured shape that is not larger in any size is above 1; else bf16"


def write_speed_table(path: Path, cases: Sequence["CaseTimings"], options: BenchOptions) -> Path:
    """Write the table of every recipe; returns path."""
    recipes = {recipe: sorted(_rows(f"octavo {recipe}", cases)) for recipe in options.recipes}
    document = {
        "device": torch.cuda.get_device_name() if options.device == "cuda" else "CPU",
        "commit": options.commit or git_commit(),
        "format": FORMAT,
        "rule": RULE,
        "recipes": recipes,
    }
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(_dump(document))
    return path


def _rows(name: str, cases: Sequence["CaseTimings"]) -> list[list[float | None]]:
    rows: list[list[float | None]] = []
    for case in cases:
        ratios = [case.speedup(way, name) for way in (STEP, EAGER, GRAPH)]
        if ratios[0] is not None:
            rows.append([*case.shape, *(None if r is None else round(r, 3) for r in ratios)])
    return rows


def _dump(document: dict[str, object]) -> str:
    """JSON with one line a row, so that a changed figure is one changed line."""
    text = json.dumps(document | {"recipes": {}}, indent=1)
    recipes = document["recipes"]
    assert isinstance(recipes, dict), "a table holds its recipes by name"
    blocks = []
    for name, rows in recipes.items():
        lines = ",\n".join(f"   {json.dumps(row)}" for row in rows)
        blocks.append(f"  {json.dumps(name)}: [\n{lines}\n  ]")
    return text.replace('"recipes": {}', '"recipes": {\n' + ",\n".join(blocks) + "\n }") + "\n"
