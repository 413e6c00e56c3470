"""Prints octavo's packages from top to bottom and the imports between them, counted: `make layers`.

An import is an arrow. Exits with 1 where one points up, or sideways in a layer, and where modules import in a circle.
"""

import graphlib
import sys
import tomllib
from collections import Counter
from pathlib import Path

import grimp

PYPROJECT = Path(__file__).parents[2] / "pyproject.toml"


def main() -> int:
    """Print the picture and what is wrong with it."""
    linter = tomllib.loads(PYPROJECT.read_text(encoding="utf-8"))["tool"]["importlinter"]
    layers = [[name.strip(" ()") for name in layer.split("|")] for layer in linter["contracts"][0]["layers"]]
    graph = grimp.build_graph("octavo", exclude_type_checking_imports=True)
    below = {name: graph.find_modules_directly_imported_by(name) - {"octavo"} for name in graph.modules - {"octavo"}}
    text, faults = picture(layers, below)
    print(text, *faults or ["none points up, and no modules import in a circle"], sep="\n")
    return int(bool(faults))


def picture(layers: list[list[str]], below: dict[str, set[str]]) -> tuple[str, list[str]]:
    """A line a package, and the faults.

    Args:
        layers: the packages of each, from the top.
        below: module -> the modules that it imports.
    """
    depth = {name: at for at, layer in enumerate(layers) for name in layer}
    pairs = ((a.split(".")[1], b.split(".")[1]) for a, imported in below.items() for b in imported)
    arrows = Counter((a, b) for a, b in pairs if a != b)
    rows = {name: [f"{b} {arrows[name, b]}" for b in depth if (name, b) in arrows] for name in depth}
    lines = [f"{name:>{max(map(len, depth))}} -> {', '.join(told) or '-'}" for name, told in rows.items()]
    faults = [f"{a} -> {b} does not point down" for a, b in arrows if depth[b] <= depth[a]]
    try:
        graphlib.TopologicalSorter(below).prepare()
    except graphlib.CycleError as error:
        faults.append(f"a circle: {' -> '.join(error.args[1])}")
    return "\n".join([*lines, f"{arrows.total()} arrows between packages"]), faults


if __name__ == "__main__":
    sys.exit(main())
