"""What all workloads of a profile share."""

import dataclasses

from bench.options import ENGINE_RECIPE, FP8_RECIPES, BenchOptions
from bench.serve.host import EngineHost
from bench.speed.ceilings import Ceilings, measure_ceilings


@dataclasses.dataclass(frozen=True)
class Settings:
    """What was asked for, the engine that one workload leaves to the next, and the ceilings of this run."""

    options: BenchOptions
    host: EngineHost
    ceilings: Ceilings

    @classmethod
    def of(cls, options: BenchOptions) -> "Settings":
        recipe = ENGINE_RECIPE if options.recipes == FP8_RECIPES else options.recipes[0]
        host = EngineHost(options.device, recipe, quick=options.quick)
        return cls(options, host, measure_ceilings(options.device, quick=options.quick))

    def few(self, num_steps: int) -> int:
        """Of a toy two at most."""
        return min(num_steps, 2) if self.options.quick else num_steps
