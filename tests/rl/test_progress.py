"""What a person sees: a live table on a terminal, plain lines elsewhere, with time and joules of each phase."""

import errno
import io
import itertools
import re

import pytest
from rich.console import Console

from octavo.rl.history import StepRow
from octavo.rl.phases import PhaseMeter
from octavo.rl.progress import RLProgress
from octavo.rl.step_table import cells, headers, make_table, phases_of, preemptions
from octavo.rl.warmup import WarmupStep


def row(step: int, **extra: float) -> StepRow:
    metrics = {
        "reward/mean": 0.25 + step / 100,
        "response_length/mean": 12.5,
        "actor/entropy": 1.25,
        "rollout_corr/k3_kl": 2e-4,
        "rollout_corr/rollout_is_eff_sample_size": 0.987,
        "engine/num_preemptions": 3.0 * step,
        "perf/tokens_per_s": 4321.0,
        "timing_s/gen": 1.5,
        "timing_s/update_actor": 0.5,
        "timing_s/step": 2.0,
        "energy_j/gen": 700.0,
        "mismatch/logprob_abs_diff_max": 0.1,
        **extra,
    }
    return StepRow(step, 0.1, 1e-4, 1.0, 4321.0, float(step), metrics=metrics)


def shown(is_terminal: bool, num_steps: int = 3) -> str:
    text = io.StringIO()
    console = Console(file=text, force_terminal=is_terminal, width=150, color_system=None, legacy_windows=False)
    with RLProgress(True, console) as view:
        view.begin("warm start", 1)
        view.show_warmup(WarmupStep(1, 2.0, 0.5))
        view.end()
        view.begin("reinforce", num_steps)
        for step in range(1, num_steps + 1):
            view.show_step(row(step))
        view.say("[not] markup")
        view.end()
    return text.getvalue()


def test_a_terminal_that_is_gone_is_counted(caplog: pytest.LogCaptureFixture) -> None:
    class Gone(io.StringIO):
        def write(self, text: str) -> int:
            raise OSError(errno.EIO, "Input/output error")

    view = RLProgress(True, Console(file=Gone(), force_terminal=False))
    for _ in range(2):
        view.say("step 1: a limit was passed")
    assert view.failures.counts == {"progress": 2}
    assert caplog.text.count("progress was not written") == 1


def test_cells_are_what_was_measured() -> None:
    phases = phases_of(row(1).metrics)
    assert phases == ["gen", "update_actor"]
    found = dict(zip(headers(phases), cells(row(2), row(1), phases), strict=True))
    assert found == {
        "step": "2", "reward": "0.270", "length": "12.5", "entropy": "1.250", "KL (k3)": "2.0e-04", "ESS": "0.987",
        "preempt.": "3", "tokens/s": "4,321", "sample": "1.5 s 700 J", "learn": "0.5 s",
    }  # fmt: skip
    bare = StepRow(1, 0.1, 1e-4, 1.0, 1.0, 1.0, metrics={"reward/mean": 1.0})
    assert cells(bare, None, ["gen"]) == ["1", "1.000", *[""] * 7]


def test_steps_beyond_a_limit_are_marked() -> None:
    table = make_table([row(1), row(2, **{"health/num_findings": 1.0})])
    assert [r.style for r in table.rows] == [None, "yellow"]


def test_preemptions_are_of_the_step() -> None:
    assert preemptions(row(1), None) == 3.0
    assert preemptions(row(2), row(1)) == 3.0
    assert preemptions(row(1), row(2)) == 3.0  # an engine that was restarted


def test_a_terminal_has_a_live_table_of_the_last_steps() -> None:
    text = shown(True, num_steps=14)
    last = text[text.rindex("KL (k3)") :]
    assert re.findall(r"^ *(\d+) +0\.\d{3} ", last, flags=re.MULTILINE) == [str(n) for n in range(5, 15)]
    assert "1.5 s 700 J" in last
    assert "14/14" in last
    assert "[not] markup" in text


def test_elsewhere_there_are_plain_lines() -> None:
    lines = shown(False).splitlines()
    assert lines[0] == "warm start 1/1  loss 2.000  sampled reward 0.50"
    assert lines[1].startswith("reinforce 3/3  reward 0.280  length 12.5  entropy 1.250  KL (k3) 2.0e-04  ESS 0.987")
    assert lines[1].endswith("preempt. 3  tokens/s 4,321  sample 1.5 s 700 J  learn 0.5 s")
    assert lines[2] == "[not] markup"


def test_nothing_is_said_unless_asked() -> None:
    text = io.StringIO()
    with RLProgress(False, Console(file=text, force_terminal=True)) as view:
        view.begin("reinforce", 1)
        view.show_step(row(1))
        view.say("no")
    assert text.getvalue() == ""


def test_phases_follow_each_other(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = itertools.count(0.0, 2.0)
    monkeypatch.setattr("octavo.rl.phases.time.perf_counter", lambda: next(clock))
    joules = itertools.count(100.0, 50.0)
    meter = PhaseMeter(lambda: next(joules))
    for phase in ("gen", "update_actor", "gen"):
        meter.end(phase)
    assert meter.seconds == 6.0
    assert meter.metrics() == {
        "timing_s/gen": 4.0, "timing_s/update_actor": 2.0, "timing_s/step": 6.0,
        "energy_j/gen": 100.0, "energy_j/update_actor": 50.0, "energy_j/step": 150.0,
    }  # fmt: skip
    assert not any(key.startswith("energy") for key in PhaseMeter().metrics())
