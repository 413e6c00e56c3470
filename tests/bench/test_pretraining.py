"""The convergence programs at toy size: the corpus, one run and its interruptions, what is measured of it."""

import dataclasses
import json
import re
import time
from pathlib import Path

import numpy as np
import pytest
import torch

from bench.training import pretraining, pretraining_run
from bench.training.corpus import Corpus, CorpusSettings, make_record, open_corpus
from bench.training.downstream import TASKS, last_line_start, vocabulary_masks
from bench.training.pretraining_run import PretrainingJob, execute, read_rows, train_windows
from bench.training.pretraining_sizes import SIZES
from bench.training.pretraining_variants import parse_variant
from octavo.errors import ConfigError, DataError
from octavo.models import Decoder
from octavo.nn import Linear
from octavo.numerics import get_recipe
from tests.assertions import assert_raises

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


def make_job(corpus: Corpus, work: Path, variant: str = "bf16", **changes: object) -> PretrainingJob:
    job = PretrainingJob(variant, 0, "toy", 4, 64, corpus.folder, work, "cpu", time.time() + 600, num_evals=2)
    return dataclasses.replace(job, **changes)  # type: ignore[arg-type]


def losses(job: PretrainingJob) -> list[float]:
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
    assert made[0].meta["sha256"] == made[1].meta["sha256"] and np.array_equal(made[0].train, made[1].train)
    settings = CorpusSettings((str(tmp_path / "a" / "a0.py"),), 300)
    assert_raises(DataError, "a side of the split empty", open_corpus, settings, tmp_path / "cache")


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


@pytest.mark.parametrize("variant", ["delayed", "nvfp4+last1+fp8-optimizer"])
def test_a_run_that_was_interrupted_goes_on_bit_for_bit(corpus, tmp_path, variant, monkeypatch):
    whole = make_job(corpus, tmp_path / "whole", variant)
    paused = make_job(corpus, tmp_path / "paused", variant)
    for job in (whole, paused):
        job.work.mkdir()
    assert execute(whole) == "done"
    monkeypatch.setattr(pretraining_run, "LEAST_SECONDS", -1e9)
    assert execute(dataclasses.replace(paused, deadline=time.time())) == "paused"
    assert not paused.has("end")
    assert execute(paused) == "done"
    assert losses(paused) == losses(whole)
    ends = [[r["loss"] for r in read_rows(job.results) if r["kind"] == "end"] for job in (paused, whole)]
    assert ends[0] == ends[1]


def test_a_variant_that_switches_shares_its_parents_first_half(corpus: Corpus, tmp_path: Path) -> None:
    variants = ("nvfp4+last1", "nvfp4+last1-to-mxfp8")
    parent = make_job(corpus, tmp_path, variants[0], keep_middle=True)
    child = make_job(corpus, tmp_path, variants[1])
    assert execute(dataclasses.replace(parent, deadline=time.time())) == execute(child) == "waiting"
    assert not parent.results.exists(), "too little time begins nothing"
    assert execute(parent) == execute(child) == "done"
    assert losses(child)[:2] == losses(parent)[:2]
    assert losses(child)[2:] != losses(parent)[2:]


def test_variants_are_named() -> None:
    variant = parse_variant("bf16-to-blockwise+fp8-optimizer")
    assert variant.later is not None
    assert (variant.precision.recipe, variant.later.recipe, variant.optimizer) == ("bf16", "blockwise", "fp8")
    assert variant.parent == "bf16+fp8-optimizer"
    assert parse_variant("bf16+nudged").nudged and parse_variant("bf16").parent is None
    variant = parse_variant("nvfp4+random_hadamard=false+first1+last2+mxfp8@down_proj-to-bf16")
    assert variant.precision.make_recipe() == get_recipe("nvfp4", random_hadamard=False)
    assert (variant.precision.num_layers_at_start_in_bf16, variant.precision.num_layers_at_end_in_bf16) == (1, 2)
    assert variant.precision.module_recipes() == {"down_proj": get_recipe("mxfp8")}
    assert variant.final_precision.make_recipe() == get_recipe("bf16")
    assert variant.parent == "nvfp4+random_hadamard=false+first1+last2+mxfp8@down_proj"
    gemms = parse_variant("blockwise+high_precision_gemms=grad_input.grad_weight").precision.make_recipe()
    assert gemms == get_recipe("blockwise", high_precision_gemms=("grad_input", "grad_weight"))


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("int8", "with recipes of bf16, delayed"),
        ("nvfp4+lst2", "'lst2' is no option"),
        ("nvfp4+last0", "'last0' is no option"),
        ("mxfp8+random_hadamard=false", "no field 'random_hadamard'"),
        ("nvfp4+stochastic_rounding=maybe", "stochastic_rounding must be a valid boolean"),
        ("nvfp4+fp4@mlp", "did you mean 'nvfp4'"),
        ("nvfp4+stochastic_rounding=true", "is so in nvfp4 anyway"),
        ("nvfp4+nvfp4@mlp", "is in nvfp4 anyway"),
        ("bf16+last1", "every layer of bf16 is in bf16 anyway"),
        ("nvfp4+last1+first2", r"written 'nvfp4\+first2\+last1'"),
        ("nvfp4+stochastic_rounding=no", "written 'nvfp4.stochastic_rounding=false'"),
        ("bf16+nudged+fp8-optimizer", "written 'bf16.fp8-optimizer.nudged'"),
        ("nvfp4+nudged-to-bf16", "'nudged' is no option"),
        ("nvfp4+last1-to-nvfp4+last1", "changes to the precision that it has"),
        ("bf16-to-mxfp8-to-bf16", "changes its precision once"),
    ],
)
def test_names_that_are_no_variants_are_refused(name: str, reason: str) -> None:
    assert_raises(ConfigError, f"^variant {re.escape(repr(name))}.*{reason}", parse_variant, name)


def test_a_variant_decides_on_every_linear() -> None:
    model = Decoder(TOY.model_config(TOY.vocab_size), device="meta")
    parse_variant("nvfp4+random_hadamard=false+last1+mxfp8@down_proj").check_model(model)
    recipes = {name: module.recipe for name, module in model.named_modules() if isinstance(module, Linear)}
    in_bf16 = {name for name, recipe in recipes.items() if recipe is None}
    assert in_bf16 == {name for name in recipes if name.startswith("layers.1.") or name == "lm_head"}
    assert recipes["layers.0.mlp.down_proj"] == get_recipe("mxfp8")
    assert recipes["layers.0.self_attn.o_proj"] == get_recipe("nvfp4", random_hadamard=False)


def test_jobs_are_refused_before_anything_runs(corpus: Corpus, tmp_path: Path) -> None:
    command = ["--size", "toy", "--device", "cpu", "--work", str(tmp_path), "--variants"]
    options = pretraining._parse([*command, "bf16,nvfp4+last1,nvfp4+last1-to-bf16"])
    jobs = pretraining.make_jobs(options, corpus)
    assert [job.name for job in jobs] == ["toy-bf16-s0", "toy-nvfp4+last1-s0", "toy-nvfp4+last1-to-bf16-s0"]
    assert [job.keep_middle for job in jobs] == [False, True, False]
    for variant, reason in (("nvfp4+last3", "the model has 2"), ("nvfp4+bf16@experts", "no linear of this model")):
        with pytest.raises(ConfigError, match=rf"variant '{re.escape(variant)}': .*{reason}"):
            pretraining.make_jobs(pretraining._parse([*command, f"bf16,{variant}"]), corpus)
    assert not list(tmp_path.iterdir())


def test_masks_and_last_lines(corpus: Corpus) -> None:
    tokenizer = corpus.tokenizer
    names, breaks = vocabulary_masks(tokenizer)
    tokens = np.array(tokenizer.encode("a = 1\n\nreturn b\n\n"))
    assert tokenizer.decode(tokens[last_line_start(tokens, breaks) :].tolist()).strip() == "return b"
    assert names[tokenizer.encode("a")[0]] and not names[tokenizer.encode("=")[0]]
    train, held_out = TASKS["sorting"](tokenizer, 8, 0)
    assert tokenizer.decode(train[0].answer).split() == sorted(tokenizer.decode(train[0].prompt).split()[1:-1])
    assert {tuple(e.answer) for e in train}.isdisjoint(tuple(e.answer) for e in held_out)


@pytest.mark.largest
def test_the_command_runs_the_variants_as_processes(tmp_path: Path) -> None:
    command = ["--size", "toy", "--device", "cpu", "--corpus-mb", "1", "--tokens-per-step", "64", "--jobs", "2"]
    command += ["--variants", "nvfp4+last1,nvfp4+last1-to-bf16"]
    command += ["--work", str(tmp_path / "work"), "--out", str(tmp_path / "out")]
    assert pretraining.main(command) == 0
    rows = [json.loads(line) for line in (tmp_path / "out" / "pretraining-toy.jsonl").read_text().splitlines()]
    assert sum(row["kind"] == "finished" for row in rows) == 2
