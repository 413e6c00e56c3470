"""The demo from end to end, short: it ends, its claims hold, its report is whole."""

import functools
import math
import multiprocessing
from pathlib import Path

import pytest
from rich.console import Console

from bench.demo import pretrain, reinforce
from bench.demo import run as demo_run
from bench.demo.budget import MIN_SECONDS
from bench.demo.compare import EXPORTED
from bench.demo.pretrain import VARIANTS
from bench.demo.reinforce import CORRECTED, EXACT
from bench.demo.results import DemoResults
from octavo.errors import ConfigError
from octavo.rl.config import WarmupSection
from tests import forks
from tests.assertions import assert_raises


def test_a_directory_that_is_not_the_demos_is_left_alone(tmp_path: Path) -> None:
    precious = tmp_path / "thesis.tex"
    precious.write_text("x")
    assert_raises(ConfigError, "holds files that no demo wrote", demo_run.run_demo, 280, tmp_path, 0)
    assert list(tmp_path.iterdir()) == [precious]
    assert_raises(ConfigError, "is a file", demo_run.run_demo, 280, precious, 0)


def test_too_little_time_writes_nothing(tmp_path: Path) -> None:
    for seconds in (1, 0.0, -5.0, float("nan"), MIN_SECONDS - 1):
        assert_raises(ConfigError, "--seconds must be at least", demo_run.run_demo, seconds, tmp_path / "out", 0)
    assert not (tmp_path / "out").exists()


def test_the_report_of_an_earlier_demo_stays(tmp_path: Path) -> None:
    demo_run.make_directory(tmp_path)
    (tmp_path / "rl").mkdir()
    (tmp_path / demo_run.REPORT).write_text("earlier")
    demo_run.make_directory(tmp_path)
    assert not (tmp_path / "rl").exists() and not (tmp_path / demo_run.REPORT).exists()
    assert (tmp_path / demo_run.FORMER_REPORT).read_text() == "earlier"


@pytest.mark.slow(first=True)
def test_a_short_run_keeps_every_promise(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[DemoResults] = []
    write = demo_run.write_report
    monkeypatch.setattr(demo_run, "write_report", lambda results, path: seen.append(results) or write(results, path))
    shorter = {"_MIN_STEPS": 3, "_MAX_STEPS": 3, "_MAX_WARMUP_STEPS": 40, "_TIMED_STEPS": 2}
    for name, number in shorter.items():
        monkeypatch.setattr(reinforce, name, number)
    monkeypatch.setattr(pretrain, "_MAX_STEPS", pretrain._MIN_STEPS)
    monkeypatch.setattr(reinforce, "WarmupSection", functools.partial(WarmupSection, check_every=13))
    context = forks.context()  # has the imports
    monkeypatch.setattr(multiprocessing, "get_context", lambda _: context)
    with (tmp_path / "log").open("w") as log:
        report = demo_run.run_demo(24, tmp_path / "out", 0, console=Console(file=log, width=100))
    results = seen[0]
    variants = results.pretraining.variants
    assert tuple(variants) == VARIANTS
    assert len({len(variant.rows) for variant in variants.values()}) == 1
    assert all(variant.rows[-1].loss < variant.rows[0].loss for variant in variants.values())
    assert [variant.fp8_flop_share for variant in variants.values()] == [0.0, 1.0, 1.0]
    base, *others = results.comparison.rows
    assert all(math.isfinite(row.perplexity) for row in results.comparison.rows)
    assert all(abs(row.loss - base.loss) < 0.02 * base.loss for row in others)
    assert results.comparison.is_bit_equal
    exported = results.comparison.loss_of("FP8 export, read back")
    assert results.comparison.loss_of("FP8 export, FP8 KV cache") != exported
    assert results.comparison.num_bytes_fp8 < 0.7 * results.comparison.num_bytes_bf16
    assert {report.scaling.kind for report in results.comparison.tensors} == {"block_128x128"}, EXPORTED
    exact, corrected = (results.reinforcement.variants[name] for name in (EXACT, CORRECTED))
    assert results.worst_exact_delta == 0.0
    assert results.sampling.mean_delta_bf16 > 0.0
    assert len(exact.rows) == len(corrected.rows)
    assert all(row["rollout_corr/k3_kl"] == 0.0 for row in exact.rows)
    assert all(row["mismatch/logprob_abs_diff_max"] > 0.0 for row in corrected.rows)
    assert exact.study.mismatch["rollout_corr/rollout_is_min"] == 1.0
    assert exact.study.mismatch["rollout_corr/rollout_is_max"] == 1.0
    assert sum(corrected.study.counts) == corrected.study.num_tokens > 0
    assert corrected.study.effect["correction/grad_relative_change"] > 0.0
    page = report.read_text(encoding="utf-8")
    assert page.endswith("</html>\n")
    assert str(report.resolve()) in (tmp_path / "log").read_text(encoding="utf-8").replace("\n", "")
