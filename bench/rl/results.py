"""The record of `octavo bench rl`: ServeResults' rows and ratios, and those of times."""

from bench.options import BenchOptions
from bench.record import Record
from bench.serve.results import ServeResults

STEP_TIME = "step time"
RECOMPUTED = "tokens computed again"
FORWARD_LAYOUT, BOTH_LAYOUTS = "refit, forward layout", "refit, both layouts"
DELTA, DELTA_WITH_GRADIENT = "largest difference to the scoring", "largest difference to the learning pass"
_OVER_BF16 = "time over bf16's"
_OVER_INEXACT = "time over the inexact loop's"


class RLResults(ServeResults):
    """Rows by case ("WORKLOAD: ARM"), in rl.json; see ServeResults."""

    def __init__(self, options: BenchOptions, what: str) -> None:
        super().__init__(options, what, "rl")

    def flush(self) -> None:
        """Work out what follows from several rows, and write the record where --out says."""
        self.record.rows = [row for row in self.record.rows if row["metric"] not in (_OVER_BF16, _OVER_INEXACT)]
        _add_time_ratios(self.record)
        super().flush()


def _add_time_ratios(record: Record) -> None:
    """Steps of one workload against each other."""
    times = {str(row["case"]): row["value"] for row in record.rows if row["metric"] == STEP_TIME}
    for case, ours in times.items():
        workload, _, arm = case.partition(": ")
        pairs = [(_OVER_BF16, "octavo bf16")]
        if arm.endswith(", exact"):
            pairs.append((_OVER_INEXACT, arm.removesuffix(", exact")))
        for metric, other in pairs:
            theirs = times.get(f"{workload}: {other}")
            if isinstance(ours, float) and isinstance(theirs, float) and arm != other:
                record.add(case, metric, "x", ours / theirs, peer=other, peer_value=1.0)
