"""The program; see the package."""

import sys
from pathlib import Path

import torch

from bench.program import RanksProgram, backend_of
from bench.record import Record
from bench.speed.scale import __doc__ as DOC
from bench.speed.scale.ddp import ddp
from bench.speed.scale.grpo import grpo, grpo_quick
from bench.speed.scale.layers import layers18, layers36
from bench.speed.scale.ordered import ordered
from bench.speed.scale.reductions import reductions
from bench.speed.scale.saving import save
from bench.speed.scale.session import Session
from bench.speed.scale.whole import whole, whole_2k
from octavo.distributed.mesh import Mesh
from octavo.env import set_cublas_workspace

_DEFAULT = (layers18, layers36, ddp, reductions, save, grpo)
_ASKED_FOR = (ordered, whole, whole_2k, grpo_quick)  # `octavo bench scale --gpus` asks for some
PARTS = {part.__name__: part for part in (*_DEFAULT, *_ASKED_FOR)}


def main(arguments: list[str] | None = None, mesh: Mesh | None = None) -> int:
    """Check, measure, print a table, write rank 0's record; 1 where a check or a case failed.

    Args:
        mesh: of ranks that run already; None for torchrun's.
    """
    parser = RanksProgram("bench.speed.scale", DOC, PARTS)
    parser.add_argument("--profile", action="store_true", help="print the top operations of one step more (grpo)")
    parser.add_argument("--save-dir", type=Path, help="where checkpoints are written to; --out's folder by default")
    options, ranks = parser.begin(arguments, mesh)
    what = (
        f"Sharded training on {ranks.world_size} ranks of one host over {backend_of(options.device)}, random weights "
        "and tokens. Steps are timed on all ranks together, the median of rank 0; where nothing else is said, octavo's "
        "Decoder under octavo.parallel.shard, no recomputation, bf16 parameters, gradients and reduction, torch's "
        "fused AdamW. In layers18 losses and gradients are checked against one GPU's before a variant is timed; other "
        "parts check what their rows say. Sums of layers36 and save are fp32. whole: bf16, and delayed with "
        "update_every='step'; losses are checked against one GPU's."
    )
    names = options.only or [part.__name__ for part in _DEFAULT]
    if {"ordered", "reductions"} & {*names}:
        set_cublas_workspace()  # of which deterministic runs are made; before any product
    torch.manual_seed(0)  # a checkpoint's random-number state is one for all ranks
    save_dir = options.save_dir or options.out or Path("runs")
    record = Record("scale", what, device=options.device)
    session = Session(ranks, record, options.toy, save_dir, options.out, options.commit, options.profile)
    status = session.run(PARTS, names)
    if mesh is None:
        ranks.close()
    return status


if __name__ == "__main__":
    sys.exit(main())
