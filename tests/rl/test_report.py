"""report.html: curves and transcripts of a run's files, nothing from outside, and no text of the policy's as HTML."""

import dataclasses
import html.parser
import importlib.util
import json
import math
import re
import sys
import types
from pathlib import Path
from typing import Any

import pytest
import torch

from octavo.errors import ConfigError, DataError
from octavo.integrations.config import to_toml
from octavo.models.tokenizer import char_tokenizer, train_bpe
from octavo.rl import loop
from octavo.rl.config import RLConfig
from octavo.rl.health import HealthMonitor, HealthSection
from octavo.rl.history import CONFIG_FILE, HEALTH_FILE, StepRow, read_alerts
from octavo.rl.loop import run as reinforce
from octavo.rl.report import REPORT_FILE, render_report, write_report
from octavo.rl.report_transcripts import FULL, LEAST, colour_class, render_transcript
from octavo.rl.reporter import RunReporter
from octavo.rl.rollout_batch import Rollouts
from octavo.rl.transcripts import (
    MAX_TOKENS,
    TRANSCRIPTS_FILE,
    Token,
    Transcript,
    append_transcripts,
    choose_transcripts,
    read_transcripts,
)
from octavo.run.metrics import METRICS_FILE, MetricsWriter, read_metrics
from tests.conftest import RunOctavo
from tests.rl.conftest import make_rollouts, tiny_config
from tests.rl.test_progress import row
from tests.serve.http.browser import PROGRAM, browser

EVIL = "</span><script>window.hacked = 1</script><img src=x onerror='window.hacked = 1'>&amp; \"quoted\""


class Page(html.parser.HTMLParser):
    """What a browser would see: elements with their attributes and texts."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.texts: list[str] = []
        self.spans: list[tuple[str, str | None, str]] = []  # class, title, text
        self._open: list[tuple[str, dict[str, str | None]]] = []
        self.feed(text)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        self._open.append((tag, dict(attrs)))
        if tag == "span":
            self.spans.append((dict(attrs).get("class") or "", dict(attrs).get("title"), ""))

    def handle_endtag(self, tag: str) -> None:
        while self._open and self._open.pop()[0] != tag:
            pass

    def handle_data(self, data: str) -> None:
        self.texts.append(data)
        if self._open and self._open[-1][0] == "span":
            name, title, text = self.spans[-1]
            self.spans[-1] = (name, title, text + data)


def transcript(*tokens: Token, **fields: Any) -> Transcript:
    base = Transcript(3, "largest mismatch", "1+1=", 1.0, True, tokens)
    return dataclasses.replace(base, **fields)


def rollouts() -> Rollouts:
    """Three responses over the characters of "abc=", the second of two tokens."""
    fields = {
        "prompts": ["a=", "b=", "c="],
        "sequences": [[1, 4, 1, 2, 3], [2, 4, 2, 1], [3, 4, 3]],  # id 0 ends a text
        "rollout_logprobs": torch.tensor([-1.0, -2.0, -0.5, -0.1, -0.2, -3.0]),
        "rewards": torch.tensor([0.0, 0.5, 1.0]),
        "is_finished": torch.tensor([True, False, True]),
    }
    return make_rollouts([3, 2, 1], **fields)


# transcripts


def test_the_best_the_worst_and_the_furthest_are_kept() -> None:
    trainer = torch.tensor([-1.0, -2.0, -0.5, -0.1, -0.9, -3.0])
    found = choose_transcripts(7, rollouts(), trainer, char_tokenizer("abc="))
    assert [(t.why, t.prompt, t.reward) for t in found] == [
        ("best reward", "c=", 1.0), ("worst reward", "a=", 0.0), ("largest mismatch", "b=", 0.5),
    ]  # fmt: skip
    assert [token.text for token in found[1].tokens] == ["a", "b", "c"]
    assert [(t.trainer, t.rollout) for t in found[2].tokens] == [
        (pytest.approx(-0.1), pytest.approx(-0.1)), (pytest.approx(-0.9), pytest.approx(-0.2)),
    ]  # fmt: skip
    assert found[2].max_abs_delta == pytest.approx(0.7)
    assert not found[2].is_finished


def test_what_an_environment_wrote_has_no_logprobs() -> None:
    played = dataclasses.replace(rollouts(), response_lens=[2, 2, 1], rollout_logprobs=torch.arange(5.0),
                                 is_sampled=[[True, False, True], [True, True], [True]])  # fmt: skip
    found = {t.prompt: t for t in choose_transcripts(1, played, torch.arange(5.0), char_tokenizer("abc="))}
    assert [(t.text, t.rollout) for t in found["a="].tokens] == [("a", 0.0), ("b", None), ("c", 1.0)]
    assert '<span class="env">b</span>' in render_transcript(found["a="])


def test_a_long_response_is_cut_and_counted() -> None:
    long = make_rollouts([MAX_TOKENS + 5], sequences=[[0, 3] + [1] * (MAX_TOKENS + 5)])
    (found,) = choose_transcripts(1, long, torch.zeros(MAX_TOKENS + 5), char_tokenizer("abc="))
    assert (len(found.tokens), found.num_left_out) == (MAX_TOKENS, 5)
    assert "5 more tokens" in render_transcript(found)


def test_characters_of_several_tokens_stay_whole() -> None:
    tokenizer = train_bpe(["plain text"], 260)
    ids = tokenizer.encode("né")
    played = make_rollouts([len(ids) - 1], sequences=[ids], prompt_lens=[1])
    (found,) = choose_transcripts(1, played, torch.zeros(len(ids) - 1), tokenizer)
    assert [token.text for token in found.tokens] == ["", "é"]


def test_files_of_transcripts_survive_a_kill(tmp_path: Path) -> None:
    path = tmp_path / TRANSCRIPTS_FILE
    assert read_transcripts(path) == []
    kept = [transcript(Token("a", -1.0, -1.5), Token("x"), step=n) for n in (1, 2)]
    append_transcripts(path, kept[:1])
    append_transcripts(path, kept[1:])
    path.write_text(path.read_text() + '{"step": 3, "why"')
    assert read_transcripts(path) == kept


# colours


@pytest.mark.parametrize(
    ("delta", "name"),
    [
        (0.0, "same"), (LEAST / 2, ""), (-LEAST / 2, ""), (LEAST * 1.01, "up1"), (-LEAST * 1.01, "down1"),
        (FULL, "up10"), (-FULL, "down10"), (-9.0, "down10"), (math.inf, "up10"), (-math.inf, "down10"),
        (math.sqrt(LEAST * FULL), "up5"),
    ],
)  # fmt: skip
def test_the_colour_says_which_side_and_how_far(delta: float, name: str) -> None:
    assert colour_class(delta) == name


def test_tokens_have_their_numbers() -> None:
    page = Page(render_transcript(transcript(Token("7", math.log(0.25), math.log(0.5)), Token("!", -1.0, -1.0))))
    (prompt, off, same) = page.spans
    assert prompt == ("prompt", None, "1+1=")
    assert (off[0], off[2]) == ("down10", "7")
    assert off[1] is not None and "(25 %)" in off[1] and "(50 %)" in off[1] and "ratio 0.5" in off[1]
    assert (same[0], same[2]) == ("same", "!")


def test_no_text_of_the_policy_is_html() -> None:
    evil = transcript(Token(EVIL, -1.0, -2.0), Token(EVIL), prompt=EVIL, why=EVIL)
    alert = {"step": 1, "action": "warn", "text": EVIL}
    page = Page(render_report(EVIL, [row(1), row(2)], [evil], [alert], {"task": EVIL}))
    names = {tag for tag, _ in page.tags}
    assert not names & {"script", "img", "iframe", "object", "link", "base"}
    assert not [attrs for _, attrs in page.tags if any(name.startswith("on") for name in attrs)]
    assert [text for name, title, text in page.spans if title or name in ("prompt", "env")] == [EVIL] * 3
    assert any(text == EVIL for text in page.texts)


def test_the_page_needs_nothing_from_outside() -> None:
    text = render_report("run", [row(1)], [transcript(Token("a", -1.0, -1.1))], [], {})
    assert "http" not in text
    assert not re.findall(r"(?:src|href)=\"(?!#)", text)


# the whole report


def test_curves_are_of_what_was_measured() -> None:
    rows = [row(n, **{"eval/reward": n / 10} if n % 5 == 0 else {}) for n in range(1, 11)]
    page = Page(render_report("run", rows, [], [], {}))
    charts = [attrs["aria-label"] for tag, attrs in page.tags if tag == "svg"]
    assert charts == [
        "reward", "held-out reward", "response length", "entropy", "mismatch KL", "effective sample size",
        "tokens a second", "seconds of each phase", "joules of each phase", "preemptions",
    ]  # fmt: skip
    assert "Held-out reward at the last evaluation: 1.000." in "".join(page.texts)


def test_plots_are_small_multiples_in_two_columns() -> None:
    rows = [row(n, **{"eval/reward": 0.5} if n == 3 else {}) for n in range(1, 5)]
    text = render_report("run", rows, [], [], {})
    grids = re.findall(r'<div class="plots">(.*?</figure></div>)</div>', text)
    cells = [re.findall(r"<div><h3>[^<]+</h3><figure><svg", grid) for grid in grids]
    assert list(map(len, cells)) == [7, 3] and text.count("<svg") == 10
    assert ".plots{display:grid;grid-template-columns:repeat(2,minmax(0,1fr))" in text
    assert "@media (max-width:820px){.plots{grid-template-columns:minmax(0,1fr)}}" in text
    # one range of steps for all, also of what was measured at step 3 alone
    last_labels = re.findall(r'<text x="([\d.]+)" y="[\d.]+" text-anchor="middle">4.0</text>', text)
    assert len(last_labels) == 10 and len(set(last_labels)) == 1


def test_zeros_are_written_as_0_and_exact_runs_are_said_to_be() -> None:
    exact = {"mismatch/logprob_abs_diff_max": 0.0, "rollout_corr/k3_kl": 0.0, "engine/num_preemptions": 0.0}
    text = render_report("run", [row(n, **exact) for n in range(1, 4)], [], [], {})
    assert not [t for t in Page(text).texts if re.search(r"\b0\.?0*e[+-]00\b|^-?0\.0+$", t)]
    assert re.findall(r"max \|delta logprob\|</td>(.*?)</tr>", text) == ["<td class=number>0</td>" * 2]
    assert "equal in bits at every step" in text
    assert "equal in bits at every step" not in render_report("run", [row(1, **exact), row(2)], [], [], {})


def test_steps_with_nan_are_drawn_without_it() -> None:
    rows = [row(1), row(2, **{"rollout_corr/k3_kl": math.nan, "reward/mean": math.inf}), row(3)]
    assert "nan" not in "".join(re.findall(r'points="[^"]*"', render_report("run", rows, [], [], {})))


def test_a_run_s_files_become_a_report(tmp_path: Path) -> None:
    config = RLConfig(run={"dir": tmp_path, "transcripts_every": 2})
    status = HealthMonitor(HealthSection()).check(2, {"rollout_corr/k3_kl": 0.5})
    tokenizer = char_tokenizer("abc=")
    with MetricsWriter(tmp_path, 0, False) as metrics, RunReporter(config) as reporter:
        for n in range(1, 4):
            metrics.write(row(n))
            reporter.write(row(n), status.alerts if n == 2 else ())
            reporter.keep_transcripts(n, rollouts(), rollouts().rollout_logprobs + 0.01 * n, tokenizer, is_last=n == 3)
    assert read_metrics(tmp_path / METRICS_FILE, StepRow) == [row(n) for n in range(1, 4)]
    assert {t.step for t in read_transcripts(tmp_path / TRANSCRIPTS_FILE)} == {1, 2, 3}
    assert [f["key"] for f in read_alerts(tmp_path / HEALTH_FILE)] == ["k3_kl"]
    assert json.loads((tmp_path / CONFIG_FILE).read_text())["exact"] is True
    written = (tmp_path / REPORT_FILE).read_text(encoding="utf-8")
    path = write_report(tmp_path)
    assert path.read_text(encoding="utf-8") == written
    page = Page(path.read_text(encoding="utf-8"))
    text = "".join(page.texts)
    assert "3 steps up to step 3" in text
    assert "rollout_corr/k3_kl = 0.5, should be at most 0.1 (health.k3_kl)" in text
    headings = [t for t in page.texts if t.startswith("step ") and "reward" in t]
    assert [heading[:6] for heading in headings] == sorted((h[:6] for h in headings), reverse=True)


def test_a_directory_without_a_run_is_refused(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="no steps yet"):
        write_report(tmp_path)


def test_a_step_that_was_written_twice_is_shown_once() -> None:
    twice = [transcript(Token("old", -1.0, -1.0)), transcript(Token("new", -1.0, -1.0))]
    text = render_report("run", [row(1)], twice, [], {})
    assert ">new<" in text and ">old<" not in text


def test_a_run_writes_its_report_and_the_command_writes_it_again(
    tmp_path: Path, run_octavo: RunOctavo, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "config.toml"
    directory = tmp_path / "run"
    config = tiny_config(directory, exact=False, trainer={"recipe": "bf16", "steps": 2})
    file.write_text(to_toml(config))
    monkeypatch.setattr(loop, "threads_advice", lambda device: f"set OMP_NUM_THREADS=3 on {device}")
    ended = run_octavo("rl", file)
    assert str(directory / REPORT_FILE) in ended.out.replace("\n", "")
    assert "note: set OMP_NUM_THREADS=3 on cpu, or steps" in ended.err
    page = Page((directory / REPORT_FILE).read_text(encoding="utf-8"))
    coloured = [name for name, title, _ in page.spans if title]
    assert any(re.fullmatch(r"(up|down)\d+", name) for name in coloured)
    steps = read_metrics(directory / METRICS_FILE, StepRow)
    assert all(key in steps[0].metrics for key in ("timing_s/gen", "timing_s/update_actor", "timing_s/refit"))
    assert "engine/num_preemptions" in steps[0].metrics
    (directory / REPORT_FILE).unlink()
    assert run_octavo("rl", file, "--report").code == 0
    assert (directory / REPORT_FILE).exists()
    assert len(read_metrics(directory / METRICS_FILE, StepRow)) == 2


# W&B


class FakeRun:
    step = 0

    def __init__(self) -> None:
        self.logged: list[tuple[dict[str, Any], int]] = []
        self.exit_code: int | None = None

    def log(self, values: dict[str, Any], step: int) -> None:
        self.logged.append((values, step))

    def finish(self, exit_code: int) -> None:
        self.exit_code = exit_code


def test_wandb_gets_every_step(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run, asked = FakeRun(), {}

    def init(**kwargs: Any) -> FakeRun:
        asked.update(kwargs)
        return run

    monkeypatch.setitem(sys.modules, "wandb", types.SimpleNamespace(init=init))
    with RunReporter(RLConfig(run={"dir": tmp_path, "wandb": "mine"})) as watch:
        watch.write(row(4))
    assert (asked["project"], asked["name"], asked["config"]["exact"]) == ("mine", tmp_path.name, True)
    ((values, step),) = run.logged
    assert step == 4 and values["reward/mean"] == row(4)["reward/mean"] and "step" not in values
    assert run.exit_code == 0
    with pytest.raises(RuntimeError), RunReporter(RLConfig(run={"dir": tmp_path, "wandb": "mine"})):
        raise RuntimeError
    assert run.exit_code == 1


@pytest.mark.skipif(importlib.util.find_spec("wandb") is not None, reason="wandb is installed")
def test_wandb_that_is_not_installed_is_said(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"pip install wandb, or leave run\.wandb empty"):
        reinforce(tiny_config(tmp_path, run={"wandb": "mine"}))


@pytest.mark.slow
@pytest.mark.skipif(PROGRAM is None, reason="needs Chromium")
def test_a_browser_shows_the_tokens_and_runs_none_of_them(tmp_path: Path) -> None:
    evil = transcript(Token(EVIL, -1.0, -2.0), Token("fine", -1.0, -1.0), prompt=EVIL)
    path = tmp_path / "report.html"
    path.write_text(render_report("run", [StepRow(**vars(row(1)))], [evil], [], {"x": EVIL}), encoding="utf-8")
    with browser(tmp_path / "profile") as tab:
        tab.open(path.as_uri())
        assert tab.run("typeof window.hacked") == "undefined"
        assert tab.run("document.querySelector('.t .up10[title]').textContent") == EVIL
        colour = "getComputedStyle(document.querySelector('.t .up10[title]')).backgroundColor"
        assert tab.run(colour).startswith("rgba(37, 99, 235")
        assert tab.errors == []
