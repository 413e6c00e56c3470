"""Where FP8 was measured to win over bf16, by recipe and shape of a linear; `octavo bench linear` writes the table.

The measured shape that counts is the nearest one, in log2 of tokens, in and out, of those that are not larger in any
of the three; a shape below all of them stays in bf16.
"""

import functools
import json
import math
from importlib import resources
from typing import Any, NamedTuple

TABLE = "speed_table.json"


class Measured(NamedTuple):
    """One measured linear, forward and backward: its sizes, FP8's speedup over bf16, and the GPU's name.

    The speedup is that of an eager step of several linears; where that was not measured, of one linear at a time, which
    is the smaller one of the two at small sizes.
    """

    num_tokens: int
    in_features: int
    out_features: int
    speedup: float
    device: str


def measured_speedup(recipe: str, num_tokens: int, in_features: int, out_features: int) -> Measured | None:
    """What was measured nearest to a linear of these sizes.

    Args:
        recipe: its name.
        num_tokens: rows of the input in one forward pass.
    Returns:
        The measurement, or None where every measured shape is larger in some size or the recipe was not measured.
    """
    table = load_table()
    sizes = (num_tokens, in_features, out_features)
    fitting = [row for row in table["recipes"].get(recipe, ()) if all(a <= b for a, b in zip(row, sizes, strict=False))]
    if not fitting:
        return None
    nearest = min(fitting, key=lambda row: sum(math.log2(b / a) for a, b in zip(row, sizes, strict=False)))
    num_rows, cols_in, cols_out, step, eager = nearest[:5]  # what a CUDA graph gets comes last, and needs one
    return Measured(num_rows, cols_in, cols_out, eager if step is None else step, table["device"])


@functools.cache
def load_table() -> dict[str, Any]:
    """The shipped table: {"device", "recipes": {NAME: [[tokens, in, out, step, eager, graph], ...]}, ...}."""
    return json.loads((resources.files("octavo.nn") / TABLE).read_text())
