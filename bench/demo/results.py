"""Everything that a demo run found out: what the report and the terminal summary are made of."""

import dataclasses

from bench.demo.compare import Comparison
from bench.demo.pretrain import Pretraining
from bench.demo.reinforce import EXACT, Reinforcement
from bench.demo.sampling import Sampling


@dataclasses.dataclass(frozen=True)
class DemoResults:
    """One run.

    Attributes:
        seconds_asked: as asked for.
        seed: as asked for.
        machine: name -> value, facts of the machine and the software.
        stage_seconds: stage -> seconds, in order.
    """

    pretraining: Pretraining
    comparison: Comparison
    sampling: Sampling
    reinforcement: Reinforcement
    seconds_asked: float
    seed: int
    machine: dict[str, str]
    stage_seconds: dict[str, float]

    @property
    def worst_exact_delta(self) -> float:
        """Largest |trainer - sampler| logprob wherever exact mode ran: sampling and every step of the exact variant."""
        steps = (row["mismatch/logprob_abs_diff_max"] for row in self.reinforcement.variants[EXACT].rows)
        return max(self.sampling.max_delta_exact, *steps)
