"""The program; see the package."""

import sys

from bench.program import RanksProgram, backend_of
from bench.record import Record
from bench.speed.scale.session import Session
from bench.speed.tensor import __doc__ as DOC
from bench.speed.tensor.bits import bits
from bench.speed.tensor.down import down
from bench.speed.tensor.large import large, large_mixed
from bench.speed.tensor.models import LAYOUTS
from bench.speed.tensor.refit import refit
from bench.speed.tensor.serving import long, mixed, single
from bench.speed.tensor.training import training
from octavo.distributed.mesh import Mesh

_DEFAULT = (bits, single, mixed, long, large, down, training, refit)
PARTS = {part.__name__: part for part in (*_DEFAULT, large_mixed)}  # `octavo bench scale --gpus` asks for the last


def main(arguments: list[str] | None = None, mesh: Mesh | None = None) -> int:
    """Check, measure, print a table, write rank 0's record; 1 where a check or a case failed.

    Args:
        mesh: of ranks that run already; None for torchrun's.
    """
    parser = RanksProgram("bench.speed.tensor", DOC, PARTS)
    parser.add_argument("--profile", action="store_true", help="print the top kernels of some decode steps")
    parser.add_argument(
        "--layout", action="append", choices=LAYOUTS, default=[], help="this one alone, of parts that have several"
    )
    options, ranks = parser.begin(arguments, mesh)
    what = (
        f"Linears cut among {ranks.world_size} ranks of one host over {backend_of(options.device)}, random weights "
        "and tokens, beside one GPU alone in the same run (70B: beside a limit; refit: alone). gather: each sum over "
        "in_features is made on one rank, in a row of its own with exact numerics. reduce: partial sums in bf16 are "
        "added. Blockwise recipe where no other is named. Serving: FP8 KV cache, temperature 1, ignore_eos, all "
        "requests at once, lengths unknown; the ranks make the same calls. Training: Llama-3-8B layers without head, "
        "all ranks see all tokens, torch's fused AdamW on bf16 parameters, the loss is the distance to random states."
    )
    record = Record("tensor", what, device=options.device)
    given = (options.toy, options.out, options.out, options.commit, options.profile, options.layout)
    session = Session(ranks, record, *given)
    status = session.run(PARTS, options.only or [part.__name__ for part in _DEFAULT])
    if mesh is None:
        ranks.close()
    return status


if __name__ == "__main__":
    sys.exit(main())
