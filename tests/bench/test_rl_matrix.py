"""The learning matrix: its task, its variants, a toy run of it and its interruption, and the report of made-up rows."""

import json
from pathlib import Path
from typing import Any

import pytest

from bench.figures import Figures
from bench.rl_matrix import matrix as rl_matrix
from bench.rl_matrix import report as rl_matrix_report
from bench.rl_matrix.jobs import MatrixJob, make_jobs
from bench.rl_matrix.report import PAGE, RECORDS, SECTIONS, load_curves, main, write_page
from bench.rl_matrix.results import aligned, load_runs, matrix_record
from bench.rl_matrix.rows import DIFF_MAX, DIFF_MEAN, HELDOUT, K3, REWARD, collect
from bench.rl_matrix.run import execute
from bench.rl_matrix.task import Sorting
from bench.rl_matrix.variants import GROUPS
from octavo.errors import ConfigError, DataError
from octavo.rl.history import StepRow
from octavo.run.metrics import read_metrics
from tests.assertions import assert_raises

TINY = ("rollout.prompts_per_step=2", "warmup.steps=2", "warmup.check_every=2", "eval.num_prompts=4")


def jobs_of(work: Path, *groups: str, **options: Any) -> list[MatrixJob]:
    return make_jobs(groups or GROUPS, work, "cpu", **options)


def by_name(jobs: list[MatrixJob]) -> dict[str, MatrixJob]:
    return {job.name: job for job in jobs}


def test_the_reward_is_the_share_before_the_first_wrong_token() -> None:
    task = Sorting(num_items=4)
    assert task.answer("3b07=") == "037b;"
    completions = ("037b;", "037b", "03b7;", "137b;", "", "037bb")
    assert [task.score("3b07=", each) for each in completions] == [1.0, 0.8, 0.4, 0.0, 0.0, 0.8]
    assert set("".join(task.prompts("train", 50, 0))) <= set(task.alphabet)
    assert not set(task.prompts("train", 500, 0)) & set(task.prompts("heldout", 500, 0))
    assert all(task.score(*example) == 1.0 for example in task.examples("train", 5, 0))


def test_a_group_of_corrections_has_every_variant_and_three_seeds(tmp_path: Path) -> None:
    names = [name for name, group in GROUPS.items() if group.compares_corrections]
    assert names == ["corrections", "corrections-moe", "corrections-cpu"]
    for name in names:
        jobs = [job for job in jobs_of(tmp_path, name) if not job.is_start]
        assert {job.seed for job in jobs} == {0, 1, 2} and GROUPS[name].base == "bf16"
        found = {(job.variant, job.config.exact, job.config.correction.kind) for job in jobs}
        kinds = {("bf16", False, "none"), ("uncorrected", False, "none"), ("tis", False, "token_tis")}
        optional = {("exact-bf16-backward", True, "none")}
        assert found - optional == kinds | {("exact", True, "none")}, name


@pytest.mark.parametrize("name", ["dense", "moe", "corrections", "corrections-moe", "corrections-cpu"])
def test_variants_that_compare_corrections_roll_out_in_one_format(tmp_path: Path, name: str) -> None:
    """All but the bf16 control: they differ in what the trainer does about the mismatch, and in no format."""
    configs = [job.config for job in jobs_of(tmp_path, name, seeds=[0]) if not job.is_start]
    formats = {
        (config.rollout, n.recipe.input, n.recipe.weight, n.kv_cache_dtype, n.attention_dtype, n.kv_scales)
        for config in configs
        for n in [config.rollout_numerics]
        if config.precision != "bf16"
    }
    assert len(formats) == 1, formats


def test_a_warm_start_takes_its_own_settings_alone(tmp_path: Path) -> None:
    changes = ["trainer.optimizer.lr=0.5", "task.options.num_items=5"]
    jobs = by_name(jobs_of(tmp_path, "moe", seeds=[1], overrides=changes, tag="trial"))
    assert set(changes) & set(jobs["start-qwen3_moe-s1"].overrides) == {changes[1]}
    assert jobs["moe-exact-s1@trial"].config.trainer.optimizer.lr == 0.5


def test_other_settings_do_not_go_on_in_the_same_folder(tmp_path: Path) -> None:
    for job in jobs_of(tmp_path, "dense", seeds=[0], variants=["exact"], overrides=["trainer.steps=3"]):
        rl_matrix.prepare(job)
        job.end_file.write_text("{}")
    longer = by_name(jobs_of(tmp_path, "dense", seeds=[0], variants=["exact"], overrides=["trainer.steps=5"]))
    for job in longer.values():
        rl_matrix.prepare(job)
    assert longer["start-qwen3-s0"].end_file.is_file()
    assert not longer["dense-exact-s0"].end_file.is_file()
    other = by_name(jobs_of(tmp_path, "dense", seeds=[0], variants=["exact"], overrides=["trainer.minibatches=1"]))
    assert_raises(ConfigError, r"trainer\.minibatches=1 differ", rl_matrix.prepare, other["dense-exact-s0"])


@pytest.mark.slow
def test_a_toy_run_is_cut_off_and_goes_on(tmp_path: Path) -> None:
    def prepared(steps: int) -> dict[str, MatrixJob]:
        changes = [*TINY, f"trainer.steps={steps}"]
        jobs = by_name(jobs_of(tmp_path, "dense", seeds=[0], variants=["exact"], overrides=changes, quick=True))
        for job in jobs.values():
            rl_matrix.prepare(job)
        return jobs

    jobs = prepared(4)
    start, job = jobs["start-qwen3-s0"], jobs["dense-exact-s0"]
    assert execute(start, 600.0) == "finished"
    assert execute(job, 0.0) == "waiting"  # one step, and its checkpoint
    done = len(read_metrics(job.folder / "metrics.jsonl", StepRow))
    assert 1 <= done < 4 and not job.end_file.exists()
    assert execute(job, 600.0) == "finished"
    rows = read_metrics(job.folder / "metrics.jsonl", StepRow)
    assert [row.step for row in rows] == [1, 2, 3, 4]
    assert all(row[DIFF_MAX] == 0.0 for row in rows)
    collect(tmp_path, tmp_path / "rl_matrix.jsonl")
    runs = load_runs([tmp_path / "rl_matrix.jsonl"])
    run = runs["dense", "exact", 0]
    assert run.before == pytest.approx(json.loads(job.end_file.read_text())["accuracy_before"])
    assert set(run.heldout_rewards) >= {2, 4}
    prepared(4)
    assert execute(job, 600.0) == "finished"  # there is nothing left to do
    jobs = prepared(6)
    assert execute(jobs["dense-exact-s0"], 600.0) == "finished"
    assert len(read_metrics(job.folder / "metrics.jsonl", StepRow)) == 6


@pytest.mark.largest
def test_a_command_runs_its_jobs_as_processes(tmp_path: Path) -> None:
    rest = ["--work", str(tmp_path / "work"), "--out", str(tmp_path), "--device", "cpu", "--quick", "--seeds", "0"]
    rest += [word for text in (*TINY, "trainer.steps=2") for word in ("--set", text)]
    only = ["--groups", "dense", "--variants", "bf16", "--commit", "abc"]
    assert rl_matrix.main([*rest, *only]) == 0
    rows = [json.loads(line) for line in (tmp_path / "rl_matrix.jsonl").read_text().splitlines()]
    assert [row["run"] for row in rows if row["kind"] == "end"] == ["dense-bf16-s0", "start-qwen3-s0"]
    assert [row["kind"] for row in rows] == ["start", "step", "step", "end", "start", "end"]
    assert {row["commit"] for row in rows if row["kind"] == "start"} == {"abc"}


def made_up_rows(group: str, variant: str, seed=0, *, steps: int, gain=0.0, diff=0.0, error="") -> list[Any]:
    config = jobs_of(Path("x"), group, variants=[variant], seeds=[seed])[-1].config.model_dump(mode="json")
    about = {"device": "a card", "torch": "2.11", "triton": None, "date": "2026-11-20", "commit": "abc"}
    about |= {"group": group, "variant": variant, "family": GROUPS[group].family, "seed": seed, "side_by_side": 20}
    rows: list[Any] = [{"kind": "start", **about, "config": config}]
    for step in range(1, steps + 1):
        row = {"kind": "step", "step": step, "seconds": 2.0 * step, REWARD: 0.4, K3: diff, "actor/entropy": 0.1}
        row |= {DIFF_MEAN: diff, DIFF_MAX: 10 * diff, "response_length/mean": 49.0}
        rows.append(row | ({HELDOUT: 0.5 + gain * min(step, 20)} if step % 10 == 0 else {}))
    rows.append({"kind": "end", **({"error": error} if error else {"step": steps})})
    return [{"run": f"{group}-{variant}-s{seed}", **row} for row in rows]


def write_rows(folder: Path, runs: list[list[Any]]) -> None:
    starts = []
    for family, seed in {(rows[0]["family"], rows[0]["seed"]) for rows in runs}:
        start = {"run": f"start-{family}-s{seed}", "kind": "start", "group": "", "family": family, "seed": seed}
        starts += [start, {"run": start["run"], "kind": "end", "accuracy": 0.5}]
    lines = [json.dumps(row) for row in starts + [row for rows in runs for row in rows]]
    (folder / "rl_matrix.jsonl").write_text("\n".join(lines) + "\n")


def test_runs_are_compared_at_the_last_step_that_all_share(tmp_path: Path) -> None:
    write_rows(
        tmp_path,
        [
            made_up_rows("dense", "bf16", steps=40, gain=0.01, diff=1e-5),
            made_up_rows("dense", "exact", steps=25, gain=0.01),
            made_up_rows("dense", "fp8-rollout", steps=12, diff=0.1, error="NonFiniteError: step 13"),
            made_up_rows("dense", "fp8-rollout+tis", steps=5, diff=0.1),
        ],
    )
    runs = aligned(load_runs([tmp_path / "rl_matrix.jsonl"]))
    assert {key[1]: run.steps[-1]["step"] for key, run in runs.items()} == {"bf16": 20, "fp8-rollout": 12, "exact": 20}
    assert runs["dense", "bf16", 0].after == pytest.approx(0.65)  # of 0.6 and 0.7
    assert [key[1] for key, run in runs.items() if run.has_failed] == ["fp8-rollout"]


@pytest.mark.parametrize(("gain", "has_failed"), [(0.01, False), (0.0, False), (-0.0005, False), (-0.002, True)])
def test_a_run_that_falls_below_its_warm_start_has_failed(tmp_path: Path, gain: float, has_failed: bool) -> None:
    write_rows(tmp_path, [made_up_rows("dense", "bf16", steps=20, gain=gain)])
    assert load_runs([tmp_path / "rl_matrix.jsonl"])["dense", "bf16", 0].has_failed == has_failed


def matrix_rows() -> list[list[Any]]:
    runs = [
        made_up_rows("dense", variant, seed, steps=40, gain=gain + 0.001 * seed, diff=diff)
        for variant, gain, diff in (("bf16", 0.01, 1e-5), ("fp8-rollout", 0.002, 0.02), ("exact", 0.0095, 0.0))
        for seed in (0, 1)
    ]
    gains = {"bf16": 0.01, "uncorrected": -0.01, "tis": 0.009, "exact": 0.0102}
    for variant, gain in gains.items():
        diff = {"bf16": 1e-5, "exact": 0.0}.get(variant, 0.1)
        runs += [made_up_rows("corrections-cpu", variant, seed, steps=40, gain=gain, diff=diff) for seed in (0, 1)]
    # one seed of tis ends above the control's
    runs[-3] = made_up_rows("corrections-cpu", "tis", 1, steps=40, gain=0.0105, diff=0.1)
    return runs


def test_rows_become_a_record_and_a_section(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    drawn: list[tuple[str, int]] = []
    monkeypatch.setattr(
        rl_matrix_report, "plot_learning", lambda path, curves, _: drawn.append((path.name, len(curves)))
    )
    write_rows(tmp_path, matrix_rows())
    page = tmp_path / "page.md"
    marked = "".join(f"<!-- section {name} -->\n<!-- end -->\n" for name in SECTIONS)
    page.write_text(f"before\n{marked}after\n")
    assert main([str(tmp_path), "--out", str(tmp_path / "records"), "--page", str(page)]) == 0
    text = page.read_text()
    assert drawn == [("learning_dense.svg", 6), ("learning_corrections-cpu.svg", 8)]
    assert text.startswith("before\n") and text.endswith("<!-- end -->\nafter\n")
    for said in (
        "| exact | 0.500 -> 0.700 | 0.690 to 0.710 | -1.0 | +0.0 | 40 | 0 of 2 | 0.0e+00, 0.0e+00 | 0 | 2.00 |",
        "Dense with QK-norm, exact: trainer's and sampler's logprobs are equal at every step of every seed",
        "| fp8-rollout | 0.500 -> 0.550 |",
        "-1.0 points from bf16's, within the 2",
        "bf16 0 of 2, uncorrected 2 of 2, tis 0 of 2, exact 0 of 2: uncorrected rollouts **fail**",
        "what prevents it: tis, exact.",
        "Points of held-out reward to bf16's: uncorrected -40.0 (-40.0 to -40.0 by seed: a cost); tis -0.5 (-2.0 to "
        "+1.0 by seed: not of one sign, so neither a cost nor a gain); exact +0.4 (+0.4 to +0.4 by seed: a gain).",
        "| -2.0 to +1.0 | 1.0e-01, 1.0e-01 |",
    ):
        assert said in text
    figures = Figures.load(tmp_path / "records" / "rl_matrix.json")
    assert figures.value("dense fp8-rollout, seed 1", "held-out reward") == pytest.approx(0.56)
    assert figures.document["device"] == "a card" and figures.document["commit"] == "abc"
    apart = Figures.load(tmp_path / "records" / "rl_corrections_cpu.json")
    told = "Rollouts of corrections-cpu, of all variants but bf16: blockwise in linears+kv, KV scales 'per_token_head'."
    assert told in apart.document["what"] and told not in figures.document["what"]
    assert "corrections-cpu tis: kind token_tis, cap 2" in apart.document["what"]
    assert {case.split()[0] for case in apart.cases} == {"corrections-cpu"}
    assert not any(case.startswith("corrections") for case in figures.cases)


@pytest.mark.parametrize(("control", "gain"), [(0.01, 0.009), (-0.01, -0.01)], ids=["all learn", "all fail"])
def test_a_group_whose_uncorrected_variant_does_not_fail_alone_says_so(tmp_path, control, gain):
    gains = {"bf16": control, "uncorrected": gain, "tis": gain, "exact": gain}
    write_rows(tmp_path, [made_up_rows("corrections", name, steps=40, gain=g, diff=0.1) for name, g in gains.items()])
    (path, _) = rl_matrix_report.write_record([tmp_path], tmp_path)
    said = rl_matrix_report.make_section(Figures.load(path), "Heading", "rl")
    assert "uncorrected rollouts do **not** fail here" in said and "**fail** here" not in said


def test_the_page_equals_the_record(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rl_matrix_report, "plot_learning", lambda *_: None)
    page = tmp_path / "rl.md"
    page.write_text(PAGE.read_text(encoding="utf-8"))
    write_page(RECORDS, page)
    assert page.read_text() == PAGE.read_text(encoding="utf-8"), "run `python -m bench.rl_matrix.report`"
    drawn = {f"learning_{group}.svg" for group in load_curves(RECORDS)}
    assert drawn == {path.name for path in (PAGE.parent / PAGE.stem).glob("learning_*.svg")}


@pytest.mark.parametrize(
    ("text", "missing"), [("nothing", "learning"), ("<!-- section learning -->\n<!-- end -->\n", "corrections")]
)
def test_a_page_without_a_mark_is_refused(tmp_path: Path, text: str, missing: str) -> None:
    (page := tmp_path / "page.md").write_text(text)
    assert_raises(ConfigError, f"section {missing}", write_page, tmp_path, page)
    assert page.read_text() == text


def test_rows_that_belong_to_nothing_are_refused(tmp_path: Path) -> None:
    rows, path = made_up_rows("dense", "bf16", steps=10), tmp_path / "rl_matrix.jsonl"
    path.write_text("\n".join(map(json.dumps, rows)) + "\n")
    assert_raises(DataError, "no row of its warm start", load_runs, [path])
    write_rows(tmp_path, [[rows[0] | {"variant": "fp2"}, *rows[1:]]])
    assert_raises(DataError, "'dense fp2' is no variant", load_runs, [path])


def test_files_of_two_machines_are_joined_and_other_warm_starts_told(tmp_path: Path) -> None:
    paths = []
    for name, variant, before in (("a", "bf16", 0.5), ("b", "exact", 0.4)):
        (tmp_path / name).mkdir()
        write_rows(tmp_path / name, [made_up_rows("dense", variant, steps=10, gain=0.01)])
        paths.append(tmp_path / name / "rl_matrix.jsonl")
        paths[-1].write_text(paths[-1].read_text().replace('"accuracy": 0.5', f'"accuracy": {before}'))
    runs = aligned(load_runs(paths))
    assert [key[1] for key in runs] == ["bf16", "exact"]
    assert "different warm starts in: dense, seed 0." in matrix_record("rl_matrix", runs).what
