"""The program; see the package."""

import sys
import time
import warnings
from typing import Any

import torch

from bench.program import Program, multicast
from bench.record import Record
from bench.speed.scale.session import Session
from bench.speed.tensor import __doc__ as DOC
from bench.speed.tensor.bits import bits
from bench.speed.tensor.serving import long, mixed, single
from octavo.distributed.mesh import Mesh, ParallelSection

SERVING: tuple[Any, ...] = (single, mixed, long)
PARTS: dict[str, Any] = {part.__name__: part for part in (bits, *SERVING)}


def main(arguments: list[str] | None = None, mesh: Mesh | None = None) -> int:
    """Check, measure, print a table, write rank 0's record; 1 where a check or a case failed.

    Args:
        mesh: of ranks that run already; None for torchrun's.
    """
    parser = Program("bench.speed.tensor", DOC)
    parser.add_argument("--only", action="append", choices=PARTS, default=[], help="this part; repeatable")
    parser.add_argument("--profile", action="store_true", help="print the top kernels of some decode steps")
    parser.add_argument("--runs", type=int, default=3, help="of each workload, whose median counts")
    parser.add_argument("--toy", action="store_true", help="sizes for a CPU")
    options = parser.parse(arguments)
    if options.device == "cpu" and not options.toy:
        parser.error("a CPU runs toy sizes only, which claim nothing: add --toy")
    warnings.filterwarnings("ignore")
    is_ours = mesh is None
    mesh = mesh or Mesh.from_config(ParallelSection(), options.device)
    if mesh.world_size == 1:
        parser.error("tensor parallelism takes several ranks: torchrun --nproc-per-node 2 -m bench.speed.tensor")
    backend = "gloo"
    if options.device == "cuda":
        backend = f"NCCL {'.'.join(map(str, torch.cuda.nccl.version()))}"  # type: ignore[no-untyped-call]
    what = (
        f"Linears cut among {mesh.world_size} ranks of one host over {backend}{multicast()}, random weights and "
        "tokens, beside one GPU alone in the same run. gather: each sum over in_features is made on one rank, "
        "in a row of its own with exact numerics. reduce: partial sums in bf16 are added. Blockwise recipe, FP8 "
        "KV cache, temperature 1, ignore_eos, all requests at once, lengths unknown; the ranks make the same calls."
    )
    session = Session(
        *(mesh, Record("tensor", what, device=options.device), options.toy, options.out, options.out),
        *(options.commit, options.profile),
    )
    for name, part in PARTS.items():
        if name not in (options.only or PARTS):
            continue
        began = time.perf_counter()
        part(session, *([options.runs] if part in SERVING else []))
        session.say(f"{name}: {time.perf_counter() - began:.1f} s")
    if is_ours:
        mesh.close()
    return 1 if session.complaints else 0


if __name__ == "__main__":
    sys.exit(main())
