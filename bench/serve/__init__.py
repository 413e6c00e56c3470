"""`octavo bench serve`: the engine offline and behind its server, on random weights in the shapes of real models.

What is run lies in `workloads`, how one is measured in `measure` and `online`, and `session` goes through them.
"""

from bench.options import BenchOptions
from bench.outcome import Outcome


def run(options: BenchOptions) -> Outcome:
    """Go through the workloads that were asked for; see `bench.serve.session`."""
    # the processes that this benchmark starts import this package too, and their start is measured
    from bench.serve.session import ServeSession

    return ServeSession(options).run()
