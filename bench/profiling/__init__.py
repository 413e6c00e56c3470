"""`octavo bench profile`: where a steady step spends its time on a GPU, kernel by kernel.

`kernels` reads torch's profiler, `profile` makes tables of it, `session` goes through the workloads.
"""

from bench.options import BenchOptions

PROFILE = {"profile": "kernels of decode, prompt, training and reinforcement steps, and the stages of a cold start"}


def run(options: BenchOptions) -> bool:
    """Go through the workloads that were asked for; whether all went well. See `bench.profiling.session`."""
    # the process of a cold start imports this package too, and its imports are measured
    from bench.profiling.session import run_workloads

    return run_workloads(options)
