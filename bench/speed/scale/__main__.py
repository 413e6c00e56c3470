"""The program; see the package."""

import sys
import time
import warnings
from pathlib import Path

import torch

from bench.program import Program, multicast
from bench.record import Record
from bench.speed.scale import __doc__ as DOC
from bench.speed.scale.ddp import ddp
from bench.speed.scale.grpo import grpo, grpo_quick
from bench.speed.scale.layers import layers18, layers36
from bench.speed.scale.reductions import reductions
from bench.speed.scale.saving import save
from bench.speed.scale.session import Session
from octavo.distributed.mesh import Mesh, ParallelSection

PARTS = {part.__name__: part for part in (layers18, layers36, ddp, reductions, save, grpo, grpo_quick)}
_DEFAULT = [name for name in PARTS if name != "grpo_quick"]


def main(arguments: list[str] | None = None, mesh: Mesh | None = None) -> int:
    """Check, measure, print a table, write rank 0's record; 1 where a check or a case failed.

    Args:
        mesh: of ranks that run already; None for torchrun's.
    """
    parser = Program("bench.speed.scale", DOC)
    parser.add_argument("--only", action="append", choices=PARTS, default=[], help="this part; repeatable")
    parser.add_argument("--profile", action="store_true", help="print the top operations of one step more (grpo)")
    parser.add_argument("--toy", action="store_true", help="sizes for a CPU")
    parser.add_argument("--save-dir", type=Path, help="where checkpoints are written to; --out's folder by default")
    options = parser.parse(arguments)
    if options.device == "cpu" and not options.toy:
        parser.error("a CPU runs toy sizes only, which claim nothing: add --toy")
    warnings.filterwarnings("ignore")
    is_ours = mesh is None
    mesh = mesh or Mesh.from_config(ParallelSection(), options.device)
    if mesh.world_size == 1:
        parser.error("scaling takes several ranks: torchrun --nproc-per-node 2 -m bench.speed.scale")
    backend = "gloo"
    if options.device == "cuda":
        backend = f"NCCL {'.'.join(map(str, torch.cuda.nccl.version()))}"  # type: ignore[no-untyped-call]
    what = (
        f"Sharded training on {mesh.world_size} ranks of one host over {backend}{multicast()}, random weights and "
        "tokens. Steps are timed on all ranks together, the median of rank 0; where nothing else is said, octavo's "
        "Decoder under octavo.parallel.shard, no recomputation, bf16 parameters, gradients and reduction, torch's "
        "fused AdamW. In layers18 losses and gradients are checked against one GPU's before a variant is timed; other "
        "parts check what their rows say. Sums of layers36 and save are fp32."
    )
    torch.manual_seed(0)  # a checkpoint's random-number state is one for all ranks
    save_dir = options.save_dir or options.out or Path("runs")
    session = Session(
        mesh,
        Record("scale", what, device=options.device),
        options.toy,
        save_dir,
        options.out,
        options.commit,
        options.profile,
    )
    for name, part in PARTS.items():
        if name not in (options.only or _DEFAULT):
            continue
        began = time.perf_counter()
        part(session)
        session.say(f"{name}: {time.perf_counter() - began:.1f} s")
    if is_ours:
        mesh.close()
    return 1 if session.complaints else 0


if __name__ == "__main__":
    sys.exit(main())
