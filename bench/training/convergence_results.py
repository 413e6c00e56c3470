"""From the JSON lines of the convergence runs to records: paired gaps to bf16, their errors, thinned curves."""

import dataclasses
import json
import math
import statistics
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from bench.figures import with_keys_of_today
from bench.record import Record
from octavo.errors import ConfigError

BASE = "bf16"
NUDGED = "bf16+nudged"
THIN = 20  # steps that a point of a kept curve is the mean of
SCORES = {
    "token": "next token right",
    "identifier": "next name right",
    "last_line": "last line right",
    "addition": "addition after tuning",
    "sorting": "sorting after tuning",
}
Row = dict[str, Any]


@dataclasses.dataclass(frozen=True)
class PretrainingRun:
    """One finished pretraining run.

    Attributes:
        start: its row of this kind; see bench.training.pretraining_run.
        end: its row of this kind.
        losses: training loss of each step.
        evals: (steps done, validation loss) in the course of it.
        scores: of the downstream tasks, empty where they were not measured.
    """

    start: Row
    end: Row
    losses: list[float]
    evals: list[tuple[int, float]]
    scores: Row

    @property
    def key(self) -> tuple[str, str, int]:
        """(size, variant, seed)."""
        return self.start["size"], self.start["variant"], self.start["seed"]

    def curve(self) -> Row:
        """What plots need: means of THIN steps, and the validations."""
        chunks = [self.losses[i : i + THIN] for i in range(0, len(self.losses), THIN)]
        size, variant, seed = self.key
        return {
            "size": size,
            "variant": variant,
            "seed": seed,
            "steps": len(self.losses),
            "loss": [round(statistics.fmean(chunk), 5) for chunk in chunks],
            "evals": [[step, round(loss, 5)] for step, loss in self.evals],
        }


def load_rows(paths: Iterable[Path]) -> list[Row]:
    """All rows of some files of JSON lines."""
    return with_keys_of_today(json.loads(line) for path in paths for line in path.read_text().splitlines())


def load_runs(paths: Iterable[Path]) -> dict[tuple[str, str, int], PretrainingRun]:
    """The runs that came to their end, by (size, variant, seed); of two of one key the one that was read last."""
    rows_of: dict[tuple[Path, str], list[Row]] = {}
    for path in paths:
        for row in load_rows([path]):
            rows_of.setdefault((path, row["run"]), []).append(row)
    runs = {}
    for rows in rows_of.values():
        last = {row["kind"]: row for row in rows}
        if "end" not in last:
            continue
        losses = [loss for row in rows if row["kind"] == "steps" for loss in row["loss"]]
        evals = [(row["step"] + 1, row["loss"]) for row in rows if row["kind"] in ("eval", "end")]
        run = PretrainingRun(last["start"], last["end"], losses, evals, last.get("downstream", {}))
        runs[run.key] = run
    return dict(
        sorted(runs.items(), key=lambda item: item[1].start["num_params"])
    )  # stable: the variants keep their order


@dataclasses.dataclass(frozen=True)
class Gap:
    """One run's final validation loss against bf16's of the same seed, in percent of it.

    Attributes:
        percent: in the run's own numerics.
        bf16_percent: both in bf16.
        error: standard error of percent over stretches of the validation text, at fixed weights.
    """

    percent: float
    bf16_percent: float
    error: float


def measure_gap(run: PretrainingRun, base: PretrainingRun) -> Gap:
    """The paired gap; both were validated on the same text."""
    loss = base.end["loss"]
    differences = [a - b for a, b in zip(run.end["batch_losses"], base.end["batch_losses"], strict=True)]
    spread = statistics.stdev(differences) if len(differences) > 1 else 0.0
    return Gap(
        100.0 * (run.end["loss"] - loss) / loss,
        100.0 * (run.end["bf16_loss"] - base.end["bf16_loss"]) / base.end["bf16_loss"],
        100.0 * spread / math.sqrt(len(differences)) / loss,
    )


def pretraining_record(runs: dict[tuple[str, str, int], PretrainingRun]) -> Record:
    """Every size and variant, with the gap of each seed beside the mean."""
    record = Record("pretraining", _describe(runs), device="cpu")
    for size, variant in dict.fromkeys((size, variant) for size, variant, _ in runs):
        mine = {seed: run for (s, a, seed), run in runs.items() if (s, a) == (size, variant)}
        case = f"{size} {variant}"
        _add_losses(record, case, list(mine.values()))
        bases = {seed: runs[size, BASE, seed] for seed in mine if (size, BASE, seed) in runs}
        if variant == BASE:
            losses = [run.end["loss"] for run in mine.values()]
            if len(losses) > 1:
                spread = 100.0 * (max(losses) - min(losses)) / min(losses)
                record.add(case, "spread of the seeds", "%", spread)
        elif bases:
            _add_gaps(record, case, {seed: measure_gap(mine[seed], base) for seed, base in bases.items()})
        _add_scores(record, case, list(mine.values()))
    return record


def _add_losses(record: Record, case: str, runs: Sequence[PretrainingRun]) -> None:
    first = runs[0]
    loss = statistics.fmean(run.end["loss"] for run in runs)
    record.add(case, "parameters", "", first.start["num_params"])
    record.add(case, "seeds", "", len(runs))
    record.add(case, "passes over the training text", "", first.start["epochs"])
    record.add(case, "linear FLOPs in FP8", "%", 100.0 * first.start["fp8_flop_share"])
    record.add(case, "validation loss", "nats/token", loss)
    record.add(case, "held-out perplexity", "", statistics.fmean(math.exp(run.end["loss"]) for run in runs))
    rate = statistics.fmean(run.end["tokens_per_s"] for run in runs)
    record.add(case, "throughput of one run", "tokens/s", rate, peer="runs side by side")
    record.rows[-1]["peer_value"] = first.start["side_by_side"]
    record.add(case, "optimizer state", "bytes/parameter", first.end["optimizer_bytes"] / first.start["num_params"])
    record.add(case, "peak memory", "GiB", first.end["peak_bytes"] / 2**30)


def _add_gaps(record: Record, case: str, gaps: dict[int, Gap]) -> None:
    mean = statistics.fmean(gap.percent for gap in gaps.values())
    record.add(case, "gap to bf16", "%", mean)
    record.add(case, "gap to bf16, both in bf16", "%", statistics.fmean(gap.bf16_percent for gap in gaps.values()))
    for seed, gap in gaps.items():
        record.add(case, f"gap to bf16, seed {seed}", "%", gap.percent, peer="error over text", peer_value=gap.error)


def _add_scores(record: Record, case: str, runs: Sequence[PretrainingRun]) -> None:
    scored = [run.scores for run in runs if run.scores]
    for name, metric in SCORES.items():
        if scored:
            record.add(case, metric, "%", 100.0 * statistics.fmean(scores[name] for scores in scored))


def _describe(runs: dict[tuple[str, str, int], PretrainingRun]) -> str:
    parts = []
    for size in dict.fromkeys(size for size, _, _ in runs):
        start = next(run.start for key, run in runs.items() if key[0] == size)
        layers, hidden, intermediate = start["shape"]
        end = next(run.end for key, run in runs.items() if key[0] == size)
        parts.append(
            f"{size}: a Llama of {start['num_params'] / 1e6:.1f}M parameters (layers: {layers}, hidden {hidden}, MLP "
            f"{intermediate}), {start['steps']:,} steps of {start['tokens_per_step']:,} tokens in sequences of "
            f"{start['seq_len']:,}, peak learning rate {start['learning_rate']:g}, {start['epochs']:.2f} passes over "
            f"the training text, validated on {end['num_tokens'] / 1e6:.2f}M tokens"
        )
    corpus = next(iter(runs.values())).start["corpus"]
    return (
        "Pretraining from the same weights on the same batches, AdamW on bf16 parameters with fp32 masters, clipping "
        f"at 1, cosine to a tenth. {'; '.join(parts)}. Text: {corpus}."
    )


def vision_record(rows: Sequence[Row]) -> Record:
    """Accuracy of every task and variant over the seeds, beside bf16's."""
    setting, seeds = rows[0]["setting"], len({row["seed"] for row in rows})
    what = (
        f"A vision transformer of plain torch (layers: {setting['layers']}, width {setting['width']}, "
        f"{rows[0]['num_params'] / 1e6:.1f}M parameters) through octavo.convert, {setting['steps']} steps of "
        f"{setting['batch']} images, {seeds} seeds, accuracy on images that training never saw; first and last linear "
        "stay in bf16."
    )
    record = Record("vision", what, device="cpu")
    for task, variant in dict.fromkeys((row["task"], row["variant"]) for row in rows):
        mine = {row["seed"]: row for row in rows if (row["task"], row["variant"]) == (task, variant)}
        base = {row["seed"]: row for row in rows if (row["task"], row["variant"]) == (task, BASE)}
        values = [100.0 * row["accuracy"] for row in mine.values()]
        of_base = [100.0 * base[seed]["accuracy"] for seed in mine if seed in base]
        peer_value = statistics.fmean(of_base) if of_base else None
        case = f"{task} {variant}"
        record.add_mean(case, "accuracy", "%", values, BASE, peer_value)
        record.add(case, "test loss", "nats", statistics.fmean(row["loss"] for row in mine.values()))
        first = next(iter(mine.values()))
        record.add(case, "linear FLOPs in FP8", "%", 100.0 * first["fp8_flop_share"])
        record.add(case, "test images", "", first["num_test"])
    return record


def save_as_measured(record: Record, rows: Sequence[Row], folder: Path) -> Path:
    """Write a record of another machine's rows: commits are those of all of them, all else is the first's."""
    about = rows[0]
    path = record.save(folder, ", ".join(dict.fromkeys(row["commit"] for row in rows)))
    document = json.loads(path.read_text()) | {key: about[key] for key in ("device", "torch", "triton", "date")}
    path.write_text(json.dumps(document, indent=1) + "\n")
    return path


def find_files(results: Iterable[Path], pattern: str) -> list[Path]:
    """The files of results, which are files or folders of them."""
    return [file for path in results for file in (sorted(path.rglob(pattern)) if path.is_dir() else [path])]


def save_curves(path: Path, curves: Iterable[Row]) -> Path:
    """Write curves, a line each."""
    path.write_text("[\n" + ",\n".join(json.dumps(curve) for curve in curves) + "\n]\n")
    return path


def read_curves(path: Path) -> list[Row]:
    """What save_curves wrote, nothing where there is no file."""
    return with_keys_of_today(json.loads(path.read_text()) if path.is_file() else [])


def is_base(case: str) -> bool:
    """Whether a record's case ("SIZE VARIANT") is bf16's."""
    return case.rpartition(" ")[2] == BASE


def join_records(path: Path, earlier: dict[str, Any]) -> None:
    """Put what a record held before back to the front of the new one; of variants that both have, the new ones stay.

    But for bf16's, of which the record may have more seeds: the new variants were paired with the new runs.

    Raises:
        ConfigError: the new runs were on other text.
    """
    new = json.loads(path.read_text())
    texts = [document["what"].rpartition("sha256 ")[2] for document in (earlier, new)]
    if texts[0] != texts[1]:
        path.write_text(json.dumps(earlier, indent=1) + "\n")
        raise ConfigError(f"the record's runs were on the text {texts[0]}, these on {texts[1]}; run all variants again")
    known = {row["case"] for row in earlier["rows"]}
    replaced = {row["case"] for row in new["rows"] if not (is_base(row["case"]) and row["case"] in known)}
    rows = [row for row in earlier["rows"] if row["case"] not in replaced]
    rows += [row for row in new["rows"] if row["case"] in replaced]
    commits = ", ".join(dict.fromkeys([*earlier["commit"].split(", "), *new["commit"].split(", ")]))
    path.write_text(json.dumps(earlier | {"rows": rows, "commit": commits}, indent=1) + "\n")
