"""Which files an FP8 linear goes through, eager: `python docs/tools/trace_files.py [--device cuda] [RECIPE ...]`.

A hop is an entry into a function of octavo from a function of another file of octavo. One forward and backward in
training mode, after two which make what is kept, with a weight that an optimizer has just changed; the reference
implementations and what they call are left out. bench/speed/host_time.py counts and times the calls themselves.
"""

import argparse
import sys
from collections import Counter
from pathlib import Path
from types import FrameType

import torch

import octavo
from octavo.nn import Linear, mark_weights_updated
from octavo.numerics import get_recipe

HOME = Path(octavo.__file__).parent
SIZE = 128  # tokens, in and out features


class Hops:
    """A profile function that notes each hop as (depth, file, function)."""

    def __init__(self) -> None:
        self.found: list[tuple[int, str, str]] = []
        self._files: list[str] = []  # of octavo's functions that have not returned

    def __call__(self, frame: FrameType, event: str, _: object) -> None:
        path = Path(frame.f_code.co_filename)
        if event not in ("call", "return") or HOME not in path.parents:
            return
        if event == "return":
            del self._files[-1:]
            return
        name, files = str(path.relative_to(HOME)), self._files
        if files and files[-1] != name and not any(file.endswith("reference.py") for file in (*files, name)):
            self.found.append((len(files), name, frame.f_code.co_qualname))
        files.append(name)


def hops_of(recipe: str, device: str) -> list[tuple[int, str, str]]:
    """The hops of one forward and backward, in order."""
    linear = Linear(SIZE, SIZE, device=device)
    linear.set_recipe(get_recipe(recipe))
    x = torch.randn(SIZE, SIZE, device=device).bfloat16().requires_grad_()
    with torch.autograd.set_multithreading_enabled(False):  # the backward on this thread, where it is seen
        for _ in range(2):
            linear(x).sum().backward()
        mark_weights_updated(linear)
        hops = Hops()
        sys.setprofile(hops)
        try:
            linear(x).sum().backward()
        finally:
            sys.setprofile(None)
    return hops.found


def main() -> None:
    """Print the hops of each recipe, and how many lead into each file."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("recipes", nargs="*", default=["delayed", "blockwise"])
    parser.add_argument("--device", default="cpu")
    options = parser.parse_args()
    for recipe in options.recipes:
        hops = hops_of(recipe, options.device)
        print(f"{recipe}: {len(hops)} hops, {len({file for _, file, _ in hops})} files")
        for depth, file, function in hops:
            print(f"  {'  ' * depth}{file} {function}")
        for file, num in Counter(file for _, file, _ in hops).most_common():
            print(f"  {num:3d} into {file}")


if __name__ == "__main__":
    main()
