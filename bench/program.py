"""What the command lines of bench/'s programs have in common."""

import argparse
import os
import sys
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from octavo.deprecation import rename_options
from octavo.distributed.mesh import Mesh, ParallelSection


class Program(argparse.ArgumentParser):
    """Parses --device, --out and --commit beside a program's own options.

    Args:
        module: that python -m runs.
        doc: its docstring.
        out: where records or rows go by default.
        former: former names of options, and today's.
    """

    def __init__(
        self, module: str, doc: str | None, *, out: Path | None = None, former: Mapping[str, str] | None = None
    ) -> None:
        super().__init__(prog=f"python -m {module}", description=doc)
        self._former = former or {}
        device = "cuda" if torch.cuda.is_available() else "cpu"
        self.add_argument("--device", choices=("cuda", "cpu"), default=device)
        self.add_argument("--out", type=Path, default=out, help="folder of the record or the rows")
        self.add_argument("--commit", help="of the tree that is measured, where git is not at hand")

    def add_filter(self, what: str) -> None:
        """Add --filter, for which `keeps` asks."""
        self.add_argument("--filter", action="append", default=[], help=f"{what} whose name holds this; repeatable")

    def parse(self, arguments: Sequence[str] | None) -> Any:
        """The options, of which some had another name; None for sys.argv's."""
        return self.parse_args(rename_options(sys.argv[1:] if arguments is None else arguments, self._former))


def keeps(options: Any, name: str) -> bool:
    """Whether --filter leaves a case in."""
    return not options.filter or any(text in name for text in options.filter)


class RanksProgram(Program):
    """A program of several ranks, whose parts are chosen by --only.

    Args:
        parts: name -> part.
    """

    def __init__(self, module: str, doc: str | None, parts: Mapping[str, object]) -> None:
        super().__init__(module, doc)
        self.add_argument("--only", action="append", choices=parts, default=[], help="this part; repeatable")
        self.add_argument("--toy", action="store_true", help="sizes for a CPU")

    def begin(self, arguments: Sequence[str] | None, mesh: Mesh | None, *, takes_one: bool = False) -> tuple[Any, Mesh]:
        """The options and the ranks, which may be one alone if it takes that.

        Args:
            mesh: of ranks that run already; None for torchrun's.
        """
        options = self.parse(arguments)
        if options.device == "cpu" and not options.toy:
            self.error("a CPU runs toy sizes only, which claim nothing: add --toy")
        warnings.filterwarnings("ignore")
        mesh = mesh or Mesh.from_config(ParallelSection(), options.device)
        if mesh.world_size == 1 and not takes_one:
            self.error(f"it takes several ranks: torchrun --nproc-per-node 2 -m {self.prog.rpartition(' ')[2]}")
        return options, mesh


def backend_of(device: str) -> str:
    """For a record's sentence: what ranks talk over."""
    if device != "cuda":
        return "gloo"
    return f"NCCL {'.'.join(map(str, torch.cuda.nccl.version()))}{multicast()}"  # type: ignore[no-untyped-call]


def multicast() -> str:
    """For a record's sentence: that NVLink multicast is off, where NCCL was told so."""
    return {"0": ", NVLink multicast off"}.get(os.environ.get("NCCL_NVLS_ENABLE", ""), "")
