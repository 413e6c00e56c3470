"""The report: one file that refers to nothing outside it, every section there, every claim from the results."""

import dataclasses
import html.parser
import re
from pathlib import Path

import pytest
import torch

from bench.demo.compare import Comparison, PerplexityRow
from bench.demo.pretrain import Pretraining, PretrainVariant
from bench.demo.reinforce import CORRECTED, EXACT, Reinforcement, ReinforceVariant, ScoredAnswer
from bench.demo.report import headline_rows, write_report
from bench.demo.results import DemoResults
from bench.demo.sampling import Sample, Sampling
from bench.demo.weights import WeightStudy
from octavo.numerics import get_recipe
from octavo.numerics.analysis import analyze
from octavo.rl import StepRow
from octavo.rl.metrics import mismatch_metrics
from octavo.run.metrics import Row
from octavo.train.config import TrainConfig

SECTIONS = ["loss", "perplexity", "weights", "samples", "reward", "mismatch", "correction", "conversion", "timing"]
CHANGES = ["loss_without", "loss_with", "grad_norm_without", "grad_norm_with", "grad_relative_change", "grad_cosine"]


RECIPES = ("bf16", "blockwise", "delayed")


def pretrain_variant(recipe: str) -> PretrainVariant:
    rows = [Row(step, 6.0 / step + 0.01 * len(recipe), 1e-3, 1.0, 900.0, float(step)) for step in range(1, 41)]
    return PretrainVariant(recipe, rows, Path("model"), 1_000_000, f"linears of <{recipe}>", 1.0, 10.0)


def reinforce_variant(name: str, spread: float) -> ReinforceVariant:
    generator = torch.Generator().manual_seed(0)
    trainer = -torch.rand(64, generator=generator)
    sampler = trainer + spread * torch.randn(64, generator=generator)
    mismatch = mismatch_metrics(trainer, sampler, [4] * 16)
    metrics = {**mismatch, "reward/mean": 0.4, "response_length/mean": 4.0}
    rows = [StepRow(s, 0.1, 1e-4, 1.0, 500.0, float(s), metrics=metrics) for s in range(1, 11)]
    rows[-1] = dataclasses.replace(rows[-1], metrics={**metrics, "eval/reward": 0.7})
    effect = {f"correction/{key}": 0.5 for key in CHANGES}
    study = WeightStudy(64, [1, 0, 60, 3], [-0.1, -0.05, 0.0, 0.05, 0.1], mismatch, {} if name == EXACT else effect)
    return ReinforceVariant("bf16", "blockwise", rows, 0.3, 0.7, study, [ScoredAnswer("1+2=", "3.", 1.0)], 12.0)


def results(exact_spread: float = 0.0) -> DemoResults:
    scaling = get_recipe("blockwise").weight
    assert scaling is not None
    return DemoResults(
        pretraining=Pretraining({r: pretrain_variant(r) for r in RECIPES}, TrainConfig(), 1000, 99),
        comparison=Comparison(
            [PerplexityRow("run", "bf16", "bf16", 4.0), PerplexityRow("the export", "blockwise", "fp8", 4.01)],
            *(4096, Path("export"), 2_000_000, 1_100_000, True),
            [analyze(torch.randn(128, 128), scaling, "layers.0")],
        ),
        sampling=Sampling([Sample("def <f>(", "x):\n    return x & 1")], 17, 0.0, 0.01, 0.2, 100.0, 1024, 576),
        reinforcement=Reinforcement(
            {EXACT: reinforce_variant(EXACT, exact_spread), CORRECTED: reinforce_variant(CORRECTED, 0.05)},
            120,
            9.0,
            256,
            16,
        ),
        seconds_asked=280.0,
        seed=7,
        machine={"device": "CPU", "cores": "2"},
        stage_seconds={"text": 1.0, "train": 100.0},
    )


@pytest.fixture
def page(tmp_path: Path) -> str:
    path = tmp_path / "report.html"
    write_report(results(), path)
    return path.read_text(encoding="utf-8")


def test_every_section_is_there_and_linked_and_nothing_is_fetched(page: str) -> None:
    assert not re.search(r"https?:|//[a-z]|@import|url\(|<script|<link|<img|<iframe", page)
    assert all(f'<section id="{key}">' in page and f'href="#{key}"' in page for key in SECTIONS)
    assert page.count("<svg") == page.count("<figcaption>") == 7


def test_tags_are_balanced_and_text_is_escaped(page: str) -> None:
    class Balance(html.parser.HTMLParser):
        open_tags: list[str] = []

        def handle_starttag(self, tag: str, attrs: object) -> None:
            if tag not in ("meta", "line", "rect", "circle", "polyline"):
                self.open_tags.append(tag)

        def handle_endtag(self, tag: str) -> None:
            if tag not in ("line", "rect", "circle", "polyline"):
                assert self.open_tags.pop() == tag

    parser = Balance()
    parser.feed(page)
    assert parser.open_tags == []
    assert "def &lt;f&gt;(" in page
    assert "<f>" not in page


def test_the_exact_variant_is_said_to_be_exact_where_it_is(page: str) -> None:
    assert "the largest difference of a logprob is 0.0, bit for bit" in page
    assert "weights from 1.0 to 1.0: there is nothing to correct" in page
    assert dict(headline_rows(results()))["max |trainer - sampler| logprob, exact"] == "0.0 over 657 tokens"

    worst = results(exact_spread=0.1).worst_exact_delta
    assert worst > 0
    assert str(worst) in dict(headline_rows(results(exact_spread=0.1)))["max |trainer - sampler| logprob, exact"]
