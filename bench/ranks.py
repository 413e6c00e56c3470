"""Benchmarks of several ranks: `octavo bench comm`, `scale` and `tensor` start one a GPU of this machine."""

import subprocess

from bench.options import BenchOptions
from bench.processes import ROOT, visible_gpus
from octavo.cli.ranks import torchrun
from octavo.env import child_environment
from octavo.errors import BackendError

# Name -> what it measures; bench.speed.NAME is the program that torchrun starts.
ON_RANKS = {
    "comm": "collectives between GPUs, FP8 beside bf16",
    "scale": "sharded training, saving and reinforcement learning on several GPUs against one",
    "tensor": "serving, a training step and a refit with linears cut among GPUs, against one GPU",
}
# Options of each program: for --filter, for toy sizes.
_FILTERS = {"comm": "--filter", "scale": "--only", "tensor": "--only"}
_QUICK = {"comm": ["--sizes", "0.05", "--repeats", "2"], "scale": ["--toy"], "tensor": ["--toy"]}
_CPU_RANKS = 2


def run_on_ranks(name: str, options: BenchOptions) -> bool:
    """Run a benchmark of ON_RANKS on all GPUs, or on two ranks of a CPU; whether all went well.

    Raises:
        BackendError: there are fewer than two GPUs.
    """
    num_ranks = _CPU_RANKS if options.device == "cpu" else len(visible_gpus())
    if num_ranks < 2:
        raise BackendError(
            f"octavo bench {name} compares GPUs of one machine with each other and needs two, torch sees one"
        )
    return subprocess.run(command_of(name, options, num_ranks), env=environment(), check=False).returncode == 0


def command_of(name: str, options: BenchOptions, num_ranks: int) -> list[str]:
    """torchrun's command line."""
    command = torchrun(num_ranks, f"bench.speed.{name}", "--device", options.device)
    for part in options.filters:
        command += [_FILTERS[name], part]
    if options.quick:
        command += _QUICK[name]
    if options.record_folder is not None:
        command += ["--out", str(options.record_folder.resolve())]
    return command + (["--commit", options.commit] if options.commit else [])


def environment() -> dict[str, str]:
    """Of a program of bench/, wherever the command was called."""
    inherited = child_environment()
    paths = [str(ROOT), *filter(None, [inherited.get("PYTHONPATH")])]
    return inherited | {"PYTHONPATH": ":".join(paths)}
