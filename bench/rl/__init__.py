"""`octavo bench rl`: rollouts, refit, learning and whole steps of the reinforcement loop, on random weights.

What is run lies in `workloads`, and `session` goes through it.
"""

from bench.options import BenchOptions
from bench.outcome import Outcome


def run(options: BenchOptions) -> Outcome:
    """Go through the workloads that were asked for; see `bench.rl.session`."""
    # the page of all records wants this package's tables alone
    from bench.rl.session import RLSession

    return RLSession(options).run()
