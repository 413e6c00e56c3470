"""The convergence programs at toy size: the corpus, one run and its interruptions, what is measured of it."""

import dataclasses
import json
import time
from pathlib import Path

import numpy as np
import pytest
import torch

from benchmarks import pretraining, pretraining_run
from benchmarks.corpus import Corpus, CorpusSettings, make_record, open_corpus
from benchmarks.downstream import TASKS, last_line_start, vocabulary_masks
from benchmarks.pretraining_arms import SIZES, parse_arm
from benchmarks.pretraining_run import Job, execute, read_rows, train_windows
from octavo.errors import ConfigError, DataError

TOY = SIZES["toy"]


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Corpus:
    """Thirty small Python files, one of them twice, and some that do not count."""
    root = tmp_path_factory.mktemp("files")
    for index in range(30):
        lines = [f"def value_{index}_{line}(number):\n    return number + {line}\n" for line in range(12)]
        (root / f"{index}.py").write_text("\n".join(lines))
    (root / "copy.py").write_bytes((root / "0.py").read_bytes())
    (root / "short.py").write_text("x")
    (root / "binary.txt").write_bytes(b"\xff\xfe" * 100)
    settings = CorpusSettings((str(root),), TOY.vocab_size, validation_fraction=0.2, enough_bytes=0)
    return open_corpus(settings, tmp_path_factory.mktemp("cache"))


def make_job(corpus: Corpus, work: Path, arm: str = "bf16", **changes: object) -> Job:
    job = Job(arm, 0, "toy", 4, 64, corpus.folder, work, "cpu", time.time() + 600, num_evals=2)
    return dataclasses.replace(job, **changes)  # type: ignore[arg-type]


def losses(job: Job) -> list[float]:
    return [loss for row in read_rows(job.results) if row["kind"] == "steps" for loss in row["loss"]]


def test_the_corpus_counts_copies_once_and_keeps_the_sides_apart(corpus: Corpus) -> None:
    assert corpus.meta["num_files"] == 30
    assert corpus.meta["suffixes"] == [".py"]
    assert len(corpus.starts) - 1 == len(corpus.is_python) == np.count_nonzero(corpus.validation == 0)
    texts = [corpus.tokenizer.decode(file.tolist()) for file in (corpus.train, corpus.validation)]
    assert texts[1].splitlines()[0] not in texts[0]
    assert make_record(corpus).rows[0]["value"] == 30


def test_the_corpus_is_the_same_wherever_its_files_lie(tmp_path: Path) -> None:
    made = []
    for name in "ab":
        folder = tmp_path / name
        folder.mkdir()
        for index in range(20):
            (folder / f"{name}{index}.py").write_text(f"# file number {index}\n" * 20)
        settings = CorpusSettings((str(folder),), 300, validation_fraction=0.3, enough_bytes=0)
        made.append(open_corpus(settings, tmp_path / "cache"))
    assert made[0].folder != made[1].folder
    assert made[0].meta["sha256"] == made[1].meta["sha256"]
    assert np.array_equal(made[0].train, made[1].train)


def test_a_corpus_without_a_side_is_refused(tmp_path: Path) -> None:
    (tmp_path / "only.py").write_text("x = 1\n" * 20)
    with pytest.raises(DataError, match="a side of the split empty"):
        open_corpus(CorpusSettings((str(tmp_path),), 300), tmp_path / "cache")


def test_a_seed_decides_the_order_and_nothing_comes_twice(corpus: Corpus, tmp_path: Path) -> None:
    job = make_job(corpus, tmp_path, steps=40)
    windows = train_windows(corpus, TOY, job)
    assert windows.shape == (80, TOY.seq_len + 1)
    assert torch.equal(windows, train_windows(corpus, TOY, job))
    assert not torch.equal(windows, train_windows(corpus, TOY, dataclasses.replace(job, seed=1)))
    available = (len(corpus.train) - 1) // TOY.seq_len
    assert len({tuple(row.tolist()) for row in windows}) == min(80, available)


def test_a_run_writes_what_it_measures(corpus: Corpus, tmp_path: Path) -> None:
    job = make_job(corpus, tmp_path, "blockwise", downstream=True)
    assert execute(job) == "done"
    rows = {row["kind"]: row for row in read_rows(job.results)}
    assert set(rows) == {"start", "steps", "eval", "end", "downstream", "finished"}
    assert len(losses(job)) == 4 and losses(job)[-1] < losses(job)[0]
    assert rows["start"]["fp8_flop_share"] == 1.0
    assert abs(rows["end"]["loss"] - np.mean(rows["end"]["batch_losses"])) < 0.05
    assert rows["end"]["loss"] != rows["end"]["bf16_loss"]
    assert {"token", "identifier", "last_line", *TASKS} < set(rows["downstream"])
    assert execute(job) == "done"
    pretraining.collect(tmp_path, tmp_path / "all")
    assert len((tmp_path / "all").read_text().splitlines()) == len(read_rows(job.results))
    assert "blockwise" in pretraining.format_summary([job])


@pytest.mark.parametrize("arm", ["delayed", "rowwise+fp8-optimizer"])
def test_a_run_that_was_interrupted_goes_on_bit_for_bit(
    corpus: Corpus, tmp_path: Path, arm: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = make_job(corpus, tmp_path / "whole", arm)
    paused = make_job(corpus, tmp_path / "paused", arm)
    for job in (whole, paused):
        job.work.mkdir()
    assert execute(whole) == "done"
    monkeypatch.setattr(pretraining_run, "LEAST_SECONDS", -1e9)
    assert execute(dataclasses.replace(paused, deadline=time.time())) == "paused"
    assert not paused.has("end")
    assert execute(paused) == "done"
    assert losses(paused) == losses(whole)
    assert [r["loss"] for r in read_rows(paused.results) if r["kind"] == "end"] == [
        r["loss"] for r in read_rows(whole.results) if r["kind"] == "end"
    ]


def test_an_arm_that_switches_shares_its_parents_first_half(corpus: Corpus, tmp_path: Path) -> None:
    parent = make_job(corpus, tmp_path, keep_middle=True)
    child = make_job(corpus, tmp_path, "bf16-to-rowwise")
    assert execute(child) == "waiting"
    assert execute(parent) == execute(child) == "done"
    assert losses(child)[:2] == losses(parent)[:2]
    assert losses(child)[2:] != losses(parent)[2:]


def test_too_little_time_begins_nothing(corpus: Corpus, tmp_path: Path) -> None:
    job = make_job(corpus, tmp_path, deadline=time.time())
    assert execute(job) == "waiting"
    assert not job.results.exists()


def test_arms_are_named() -> None:
    arm = parse_arm("bf16-to-blockwise+fp8-optimizer")
    assert (arm.recipe, arm.later, arm.optimizer) == ("bf16", "blockwise", "fp8")
    assert arm.parent == "bf16+fp8-optimizer"
    assert parse_arm("bf16+nudged").nudged and parse_arm("bf16").parent is None
    with pytest.raises(ConfigError, match="with recipes of"):
        parse_arm("int8")


def test_masks_and_last_lines(corpus: Corpus) -> None:
    tokenizer = corpus.tokenizer
    names, breaks = vocabulary_masks(tokenizer)
    tokens = np.array(tokenizer.encode("a = 1\n\nreturn b\n\n"))
    assert tokenizer.decode(tokens[last_line_start(tokens, breaks) :].tolist()).strip() == "return b"
    assert names[tokenizer.encode("a")[0]] and not names[tokenizer.encode("=")[0]]
    train, held_out = TASKS["sorting"](tokenizer, 8, 0)
    assert tokenizer.decode(train[0].answer).split() == sorted(tokenizer.decode(train[0].prompt).split()[1:-1])
    assert {tuple(e.answer) for e in train}.isdisjoint(tuple(e.answer) for e in held_out)


@pytest.mark.slow
def test_the_command_runs_the_arms_as_processes(tmp_path: Path) -> None:
    command = ["--size", "toy", "--device", "cpu", "--corpus-mb", "1", "--tokens-per-step", "64", "--jobs", "2"]
    command += ["--arms", "bf16,bf16-to-delayed", "--work", str(tmp_path / "work"), "--out", str(tmp_path / "out")]
    assert pretraining.main(command) == 0
    rows = [json.loads(line) for line in (tmp_path / "out" / "pretraining-toy.jsonl").read_text().splitlines()]
    assert sum(row["kind"] == "finished" for row in rows) == 2
