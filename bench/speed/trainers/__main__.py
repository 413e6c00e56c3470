"""The program; see the package."""

import importlib.util
import json
import sys
from pathlib import Path

import torch

from bench.program import RanksProgram, backend_of
from bench.record import Record
from bench.speed.trainers import __doc__ as DOC
from bench.speed.trainers.accelerate import accelerate
from bench.speed.trainers.deepspeed import deepspeed
from bench.speed.trainers.huggingface import huggingface
from bench.speed.trainers.lora import lora
from bench.speed.trainers.megatron import megatron
from bench.speed.trainers.variants import TrainersSession
from octavo.distributed.mesh import Mesh

PARTS = {part.__name__: part for part in (huggingface, lora, accelerate, deepspeed, megatron)}
_NEEDS = {"huggingface": "transformers", "lora": "peft", "megatron": "megatron.core"}  # the others: their own name
_ONE_GPU = ("huggingface", "lora")
_RECIPES = ("delayed", "tensorwise", "rowwise", "blockwise")


def main(arguments: list[str] | None = None, mesh: Mesh | None = None) -> int:
    """Measure the parts, print a line a variant, write rank 0's record; 1 where a check or a case failed.

    Args:
        mesh: of ranks that run already; None for torchrun's.
    """
    parser = RanksProgram("bench.speed.trainers", DOC, PARTS)
    parser.add_argument("--recipe", action="append", choices=_RECIPES, default=[], help="beside bf16; repeatable")
    parser.add_argument("--eager", action="store_true", help="without torch.compile of the model, in all variants")
    options, ranks = parser.begin(arguments, mesh, takes_one=True)
    fitting = [name for name in PARTS if (name in _ONE_GPU) == (ranks.world_size == 1)]
    if unfit := set(options.only) - set(fitting):
        parser.error(f"--only {', '.join(sorted(unfit))}: {ranks.world_size} rank(s) run {', '.join(fitting)}")
    if ranks.world_size == 1 and options.device == "cuda" and torch.cuda.device_count() > 1:
        parser.error(f"{torch.cuda.device_count()} GPUs, which Trainer joins by DataParallel: CUDA_VISIBLE_DEVICES=0")
    what = "Training steps inside other trainers, octavo's FP8 linears against bf16."
    if ranks.world_size > 1:
        what += f" {ranks.world_size} ranks of one host over {backend_of(options.device)}."
    record = Record("trainers", what, device=options.device)
    session = TrainersSession(ranks, record, options.toy, options.out, options.out, options.commit)
    session.recipes, session.compiled = options.recipe or session.recipes, not options.eager
    names = options.only or [name for name in fitting if _is_installed(_NEEDS.get(name, name))]
    if options.out is not None:
        take_former(record, options.out / "trainers.json", options.commit)
    status = session.run(PARTS, names)  # type: ignore[arg-type]
    if mesh is None:
        ranks.close()
    return status


def take_former(record: Record, path: Path, commit: str | None) -> None:
    """Begin with what a record of the same tree, device and libraries has.

    Args:
        record: to add to.
        path: of the former record; nothing where there is none.
        commit: of the tree that is measured; None asks git.
    """
    former, mine = json.loads(path.read_text()) if path.is_file() else {}, record.document(commit)
    if all(former.get(key) == mine[key] for key in ("device", "torch", "triton", "commit")):
        record.rows += former["rows"]
        record.what = former["what"]
    elif former:
        print(f"{path} is of another tree, device or library: its rows are left out")


def _is_installed(package: str) -> bool:
    try:
        return importlib.util.find_spec(package) is not None
    except ModuleNotFoundError:  # of the package that holds it
        return False


if __name__ == "__main__":
    sys.exit(main())
