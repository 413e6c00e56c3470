"""Which records are older than the code that they measure: `python -m bench.record_age` writes the list.

A record names the commit of the tree that was measured, and rows of another tree name theirs. It is older where code
that the record is about differs from one of these trees'. Such records stay, for a figure is true of its tree, but the
README marks them until they are taken again, and a test holds the list (bench/records/older.txt) to the history.
"""

import json
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parent.parent
RECORDS = Path(__file__).parent / "records"
OLDER = RECORDS / "older.txt"
_LINEAR = ("octavo/numerics", "octavo/ops", "octavo/nn", "octavo/optim")
_ENGINE = (
    *_LINEAR,
    "octavo/models",
    "octavo/weights",
    "octavo/serve/engine",
    "octavo/serve/llm.py",
    "octavo/serve/prompts.py",
)
_STEP = (*_LINEAR, "octavo/models")
_TRAINER = (*_STEP, "octavo/run", "octavo/train")
_LOOP = (*_ENGINE, "octavo/run", "octavo/train", "octavo/rl")
_WIRE = (
    *(f"octavo/distributed/{name}.py" for name in ("packed", "symmetric", "transport", "two_shot")),
    "octavo/ops/packed",
)
_SHARDED = (
    *(f"octavo/parallel/{name}.py" for name in ("copy_engine_gather", "fp8_all_gather", "fsdp", "sharded_weight")),
    "octavo/distributed/symmetric.py",
)
_SCALE = (*_LOOP, *_SHARDED, *_WIRE, "octavo/distributed/fp8_hook.py", "octavo/parallel/gather.py")
_RESTART = ("octavo/distributed", "octavo/parallel", "octavo/run", "octavo/train")
_TENSOR = (
    *_ENGINE,
    *(f"octavo/distributed/{name}.py" for name in ("one_shot", "tensor_group")),
    *(f"octavo/parallel/{name}.py" for name in ("lend", "tensor_parallel")),
    "octavo/rl/engines/dealt.py",
)
_TRAINERS = ("deepspeed.py", "huggingface.py", "megatron", "peft.py")
# record -> what a change of would make it older
CODE: dict[str, tuple[str, ...]] = {
    "capacity": _TRAINER,
    "convergence": _TRAINER,
    "comm": _WIRE,
    "comm_4_gpus": _WIRE,
    "corpus": ("bench/training/corpus.py",),
    "gemm": ("octavo/ops/gemm/scaled_mm", "octavo/ops/gemm/skinny_mm"),
    "host_time": _LINEAR,
    "hostile_load": ("bench/serve/hostile_load.py", "octavo/serve"),
    "hostile_load_b14d6df": ("bench/serve/hostile_load.py", "octavo/serve"),
    "layer": _LINEAR,
    "linear": _LINEAR,
    "fingerprints_cpu": _LOOP,
    "fingerprints_cuda": _LOOP,
    "fsdp": (*_LINEAR, *_SHARDED),
    "fsdp_2048_tokens": (*_LINEAR, *_SHARDED),
    "fsdp_budget": _LINEAR,
    "fsdp_trace": (*_LINEAR, *_SHARDED),
    "fsdp_simulated": _LINEAR,
    "fsdp_simulated_b86c91b": _LINEAR,
    "peers": _ENGINE,  # octavo's figures in it are of its commit, those of others of none of ours
    "nightly": ("octavo/distributed", "octavo/parallel", "octavo/run", "octavo/train", "octavo/rl"),
    "perplexity": _ENGINE,
    "pretraining": _TRAINER,
    "qdq": ("octavo/ops", "octavo/qdq"),
    "quant": ("octavo/ops",),
    "replicas": (*_ENGINE, "octavo/serve"),
    "rl": _LOOP,
    "rl_corrections_cpu": _LOOP,
    "rl_learning": _LOOP,
    "rl_matrix": _LOOP,
    "reduction_gap": ("octavo/distributed/fp8_hook.py", *_WIRE),
    "restart_4_gpus": _RESTART,
    "scale": _SCALE,
    "scale_4_gpus": _SCALE,
    "serve": _ENGINE,
    "serve_1c41493": _ENGINE,
    "serve_2d966c2": _ENGINE,
    "serve_e0caf9b": _ENGINE,
    "sizes": _LINEAR,
    "step": _STEP,
    "step_1c41493": _STEP,
    "step_host": _ENGINE,
    "tensor": _TENSOR,
    "tensor_4_gpus": _TENSOR,
    "trainers": (*_LINEAR, *(f"octavo/integrations/{name}" for name in _TRAINERS)),
    "tree_loops": (*_LOOP, "octavo/serve"),
    "trees": _ENGINE,
    "trees_b14d6df": _LINEAR,
    "trees_host": _LINEAR,
    "vision": _LINEAR,
    "vllm": ("bench/serve/workloads.py",),  # the requests: of the engine nothing is octavo's
}
# as CODE, of records that are still to be taken; with the record its row moves up
AWAITED: dict[str, tuple[str, ...]] = {
    "fsdp_1024_tokens": (*_LINEAR, *_SHARDED),
    "fsdp_4096_tokens": (*_LINEAR, *_SHARDED),
    "fsdp_trace_2048_tokens": (*_LINEAR, *_SHARDED),
    "restart": _RESTART,
}
# A table that a benchmark writes, a drawing, and how a written folder gets its name, no measurable part of a save.
_UNTIMED = (
    ":!octavo/nn/speed_table.json",
    ":!octavo/numerics/analysis_plot.py",
    ":!octavo/models/checkpoint/atomic.py",
)


def main() -> int:
    """Write the list."""
    names = sorted(name for name in CODE if is_older(name))
    OLDER.write_text("".join(f"{name}\n" for name in names))
    print(f"{OLDER}: {', '.join(names) or 'none'}")
    return 0


def load_older() -> set[str]:
    """Names of the records that are marked."""
    return set(OLDER.read_text().split()) if OLDER.is_file() else set()


def is_older(name: str) -> bool:
    """Whether the code that a record measures is another now than at one of its commits.

    Raises:
        subprocess.CalledProcessError: git knows no such commit.
        FileNotFoundError: there is no git.
    """
    return any(_has_changed(commit, CODE[name]) for commit in commits_of(name))


def commits_of(name: str) -> list[str]:
    """The trees that a record was measured on, and those of rows that name their own."""
    document = json.loads((RECORDS / f"{name}.json").read_text())
    named = [part["commit"] for part in (document, *document["rows"]) if "commit" in part]
    return list(dict.fromkeys(commit for commits in named for commit in commits.split(", ")))


def _has_changed(commit: str, paths: tuple[str, ...]) -> bool:
    command = ["git", "diff", "--quiet", commit, "--", *paths, *_UNTIMED]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, check=False)
    if done.returncode > 1:
        done.check_returncode()
    return done.returncode == 1


if __name__ == "__main__":
    sys.exit(main())
