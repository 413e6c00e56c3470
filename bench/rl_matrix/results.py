"""From the learning matrix's JSON lines to its record and curves: rewards, gaps to the base, mismatch over time."""

import dataclasses
import statistics
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

from bench.record import Record
from bench.rl_matrix.rows import CLIPPED, DIFF_MAX, DIFF_MEAN, FLUSHED, HELDOUT, K3, REWARD, Row
from bench.rl_matrix.variants import GROUPS, UNCORRECTED
from bench.training.convergence_results import load_rows
from octavo.errors import DataError
from octavo.rl.history import with_current_names

AVERAGED = 10  # steps at either end that a figure "at the start" or "at the end" is the mean of
LAST = 3  # held-out rewards that a run's final one is the mean of
THIN = 5  # steps that a point of a kept curve is the mean of
COLLAPSE = 0.5  # of its own best held-out reward: a run that ends below has failed
FALL = 0.02  # below the warm start's held-out reward: so has one that ends further below, which chance does not explain
_CURVES = {"reward": REWARD, "diff": DIFF_MEAN, "diff_max": DIFF_MAX, "k3": K3, "entropy": "actor/entropy"}


@dataclasses.dataclass(frozen=True)
class MatrixRun:
    """One run as far as it came.

    Attributes:
        about: its "start" row: the job, its config, the machine.
        steps: its "step" rows, in order.
        before: held-out reward of the warm start.
        error: what its numbers died of, or empty.
    """

    about: Row
    steps: list[Row]
    before: float
    error: str = ""

    @property
    def key(self) -> tuple[str, str, int]:
        """(group, variant, seed)."""
        return self.about["group"], self.about["variant"], self.about["seed"]

    @property
    def heldout_rewards(self) -> dict[int, float]:
        """Step -> held-out reward there."""
        return {row["step"]: row[HELDOUT] for row in self.steps if HELDOUT in row}

    def until(self, step: int) -> "MatrixRun":
        """The run as it was after a step."""
        return dataclasses.replace(self, steps=[row for row in self.steps if row["step"] <= step])

    @property
    def after(self) -> float:
        """Held-out reward: the mean of the LAST times that it was measured."""
        return statistics.fmean([*self.heldout_rewards.values()][-LAST:] or [self.before])

    @property
    def has_failed(self) -> bool:
        """Dead, or collapsed: FALL below where it began, or below COLLAPSE of its best."""
        best = max((self.before, *self.heldout_rewards.values()))
        return bool(self.error) or self.after < self.before - FALL or self.after < COLLAPSE * best

    def mean(self, metric: str, *, at_end: bool = True) -> float:
        """Of a metric over the last, or the first, AVERAGED steps."""
        rows = self.steps[-AVERAGED:] if at_end else self.steps[:AVERAGED]
        return statistics.fmean(row[metric] for row in rows)

    def most(self, metric: str) -> float:
        """The largest of all steps; 0 where it was never measured."""
        return max((row[metric] for row in self.steps if metric in row), default=0.0)

    def curve(self) -> Row:
        """What plots need: means of THIN steps (maxima of the largest difference), and the held-out rewards."""
        group, variant, seed = self.key
        chunks = [self.steps[i : i + THIN] for i in range(0, len(self.steps), THIN)]
        curve: Row = {"group": group, "variant": variant, "seed": seed, "step": [chunk[-1]["step"] for chunk in chunks]}
        for name, metric in _CURVES.items():
            fold = max if metric == DIFF_MAX else statistics.fmean
            curve[name] = [float(f"{fold([row[metric] for row in chunk]):.4g}") for chunk in chunks]
        held_out = {0: self.before, **self.heldout_rewards}
        return curve | {"held_out": [[step, round(value, 5)] for step, value in held_out.items()], "error": self.error}


Runs = dict[tuple[str, str, int], MatrixRun]  # by (group, variant, seed)


def load_runs(paths: Iterable[Path]) -> Runs:
    """All runs that have made a step, in the order of GROUPS; of two of one key the longer one.

    Raises:
        DataError: a run without its warm start's row, or of a variant that is none.
    """
    runs: Runs = {}
    for path in paths:
        for run in _load_file(path):
            earlier = runs.get(run.key)
            if earlier is None or len(earlier.steps) < len(run.steps):
                runs[run.key] = run
    order = [(group, variant) for group, what in GROUPS.items() for variant in what.variants]
    if gone := [key[:2] for key in runs if key[:2] not in order]:
        raise DataError(
            f"{' '.join(gone[0])!r} is no variant of bench/rl_matrix/variants.py any more; leave its file out, or take "
            "its rows from it"
        )
    return {key: runs[key] for key in sorted(runs, key=lambda key: (order.index(key[:2]), key[2]))}


def _load_file(path: Path) -> Iterator[MatrixRun]:
    rows_of: dict[str, list[Row]] = {}
    for row in load_rows([path]):
        rows_of.setdefault(row["run"], []).append(with_current_names(row))
    parts = [
        (
            next(row for row in rows if row["kind"] == "start"),
            [row for row in rows if row["kind"] == "step"],
            next((row for row in rows if row["kind"] == "end"), {}),
        )
        for rows in rows_of.values()
    ]
    starts = {(about["family"], about["seed"]): end for about, _, end in parts if not about["group"]}
    for about, steps, end in parts:
        if about["group"] and steps:
            start = starts.get((about["family"], about["seed"]), {})
            if "accuracy" not in start:
                raise DataError(
                    f"{path}: {about['group']} {about['variant']} has no row of its warm start; give the whole file "
                    "that bench.rl_matrix.matrix wrote"
                )
            yield MatrixRun(about, steps, start["accuracy"], end.get("error", ""))


def aligned(runs: Runs) -> Runs:
    """The runs cut at their group's last step that all of it evaluated; those that died are left as they are.

    Runs that were cut off before their first evaluation are left out.
    """
    begun = {key: run for key, run in runs.items() if run.error or run.heldout_rewards}
    cut: Runs = {}
    for group in dict.fromkeys(key[0] for key in begun):
        mine = {key: run for key, run in begun.items() if key[0] == group}
        shared = [set(run.heldout_rewards) for run in mine.values() if not run.error]
        last = max(set.intersection(*shared), default=0) if shared else 0
        cut |= {key: run if run.error else run.until(last) for key, run in mine.items()}
    return {key: run for key, run in cut.items() if run.steps}


def matrix_record(name: str, runs: Runs) -> Record:
    """Every variant's seeds one by one, and their mean beside the group's base variant.

    Args:
        name: the record's.
        runs: as `aligned` gives them.
    """
    record = Record(name, _describe(runs), device="cpu")
    for group, variant in dict.fromkeys(key[:2] for key in runs):
        mine = [run for key, run in runs.items() if key[:2] == (group, variant)]
        base = [run for key, run in runs.items() if key[:2] == (group, GROUPS[group].base)]
        _add_variant(record, f"{group} {variant}", mine, base)
        for run in mine:
            _add_run(record, f"{group} {variant}, seed {run.key[2]}", run)
    return record


def _add_variant(record: Record, case: str, runs: Sequence[MatrixRun], base: Sequence[MatrixRun]) -> None:
    after = [run.after for run in runs]
    before = statistics.fmean(run.before for run in runs)
    record.add(case, "seeds", "", len(runs))
    about, num_steps = runs[0].about, min(run.steps[-1]["step"] for run in runs)
    asked = about["config"]["trainer"]["steps"]
    record.add(case, "steps", "", num_steps, peer="asked for", peer_value=asked)
    mean = statistics.fmean(after)
    record.add(case, "held-out reward", "", mean, min(after), max(after), "warm start", before)
    reward = statistics.fmean(run.mean(REWARD) for run in runs)
    record.add(case, "sampled reward, last steps", "", reward)
    if base:
        of_base = statistics.fmean(run.after for run in base)
        theirs = {run.key[2]: run.after for run in base}
        by_seed = [100.0 * (run.after - theirs[run.key[2]]) for run in runs if run.key[2] in theirs]
        least, most = (min(by_seed), max(by_seed)) if by_seed else (None, None)
        record.add(case, "gap to base, held-out", "points", 100.0 * (mean - of_base), least, most)
        of_base = statistics.fmean(run.mean(REWARD) for run in base)
        record.add(case, "gap to base, sampled", "points", 100.0 * (reward - of_base))
    record.add(case, "failed", "seeds", sum(run.has_failed for run in runs))
    for metric, name in ((DIFF_MEAN, "mean |delta logprob|"), (K3, "mismatch KL (k3)")):
        start, end = (statistics.fmean(run.mean(metric, at_end=x) for run in runs) for x in (False, True))
        record.add(case, f"{name}, last steps", "nats", end, peer="first steps", peer_value=start)
    record.add(case, "max |delta logprob|, all steps", "nats", max(run.most(DIFF_MAX) for run in runs))
    record.add(case, "K or V clipped, largest share", "", max(run.most(CLIPPED) for run in runs))
    record.add(case, "K or V flushed to zero, largest share", "", max(run.most(FLUSHED) for run in runs))
    seconds = statistics.fmean(run.steps[-1]["seconds"] / len(run.steps) for run in runs)
    record.add(case, "time a step", "s", seconds, peer="runs side by side", peer_value=about["side_by_side"])


def _add_run(record: Record, case: str, run: MatrixRun) -> None:
    record.add(case, "steps", "", run.steps[-1]["step"])
    record.add(case, "held-out reward", "", run.after, peer="warm start", peer_value=run.before)
    record.add(case, "failed", "", float(run.has_failed))
    for metric, name, unit in (
        (REWARD, "sampled reward", ""),
        (DIFF_MEAN, "mean |delta logprob|", "nats"),
        (DIFF_MAX, "max |delta logprob|", "nats"),
        (K3, "mismatch KL (k3)", "nats"),
        ("actor/entropy", "entropy", "nats"),
        ("response_length/mean", "response length", "tokens"),
    ):
        first = run.mean(metric, at_end=False)
        record.add(case, f"{name}, last steps", unit, run.mean(metric), peer="first steps", peer_value=first)
    record.add(case, "max |delta logprob|, all steps", "nats", run.most(DIFF_MAX))


def _describe(runs: Runs) -> str:
    first = next(iter(runs.values())).about
    config = first["config"]
    model, rollout, trainer = (config[section] for section in ("model", "rollout", "trainer"))
    num_items = config["task"]["options"]["num_items"]
    rates = {
        run.key[0]: (run.about["config"]["trainer"]["optimizer"]["lr"], run.about["config"]["trainer"]["minibatches"])
        for run in runs.values()
    }
    settings = "; ".join(f"{group}: lr {lr:g}, {batches} updates a step" for group, (lr, batches) in rates.items())
    return (
        f"GRPO on sorting {num_items} symbols, one token each (reward: share of the answer before the first "
        f"wrong token), from a supervised warm start in bf16 that all variants of a family and seed share. Layers: "
        f"{model['num_hidden_layers']}, hidden {model['hidden_size']}, {rollout['prompts_per_step']} prompts x "
        f"{rollout['samples_per_prompt']} completions a step, {trainer['steps']} steps asked for; {settings}. "
        f"Held-out: {config['eval']['num_prompts']} prompts, greedy, by a bf16 engine for every variant, at the end "
        f"the mean of the last {LAST} times, {config['eval']['every']} steps apart. First and last "
        f"steps: means over {AVERAGED}. Failed: numbers that are not finite, a held-out reward {FALL:g} or more below "
        f"the warm start's, or below {COLLAPSE:.0%} of the run's best.{_rollouts(runs)}{_other_starts(runs)}"
    )


def _rollouts(runs: Runs) -> str:
    """How the variants sample, and what the corrections are, in groups that compare corrections."""
    text = ""
    for (group, variant), config in {key[:2]: run.about["config"] for key, run in runs.items()}.items():
        if not GROUPS[group].compares_corrections:
            continue
        rollout, c = config["rollout"], config["correction"]
        if variant == UNCORRECTED:
            recipe = rollout["recipe"] or config["trainer"]["recipe"]
            text += (
                f" Rollouts of {group}, of all variants but {GROUPS[group].base}: {recipe} in {config['precision']}, "
                f"KV scales {rollout['kv_scales']!r}."
            )
        elif c["kind"] != "none":
            text += f" {group} {variant}: kind {c['kind']}, cap {c['cap']:g}, reject {c['reject']}, veto {c['veto']:g}."
    return text


def _other_starts(runs: Runs) -> str:
    """Says where variants of one group and seed do not share a warm start: another machine made its own."""
    found: dict[tuple[str, int], set[float]] = {}
    for (group, _, seed), run in runs.items():
        found.setdefault((group, seed), set()).add(run.before)
    apart = [f"{group}, seed {seed}" for (group, seed), values in found.items() if len(values) > 1]
    return f" Variants began from different warm starts in: {'; '.join(apart)}." if apart else ""
