"""Analysis: SQNR, every figure of a report against numpy, the table, the plot and `octavo analyze`."""

import dataclasses
import math
import shutil
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from octavo import cli
from octavo.errors import BackendError, ConfigError, DtypeError, RecipeError, ShapeError
from octavo.nn.statistics import FP8_STATS
from octavo.numerics import analysis
from octavo.numerics.analysis import TensorReport, analyze, analyze_model, format_table, sqnr
from octavo.numerics.analysis_plot import bands, plot_exponents
from octavo.numerics.formats import E4M3, E5M2
from octavo.numerics.quantized import quantize_reference
from octavo.numerics.recipe import get_recipe
from octavo.numerics.scaling import BLOCK_SIZES, Scaling
from tests.assertions import assert_raises
from tests.numerics import rule

INF, NAN = math.inf, math.nan
FP8 = pytest.mark.parametrize("dtype", [E4M3.dtype, E5M2.dtype], ids=["e4m3", "e5m2"])
KINDS = pytest.mark.parametrize("kind", list(BLOCK_SIZES))


def normal(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def heavy(*shape: int) -> torch.Tensor:
    return normal(*shape) * torch.exp(3 * normal(*shape, seed=1))


# sqnr


def test_sqnr_of_known_errors() -> None:
    x = torch.full((100,), 2.0)
    assert sqnr(x, x * 1.1) == pytest.approx(20.0, abs=1e-5)
    assert sqnr(x, x * 0.99) == pytest.approx(40.0, abs=1e-4)
    assert sqnr(x, -x) == pytest.approx(20 * math.log10(1 / 2))
    assert sqnr(x * 1e-30, x * 1.1e-30) == pytest.approx(20.0, abs=1e-4)  # squares that fp32 cannot hold


def test_sqnr_of_equal_and_of_bad_tensors() -> None:
    x = torch.tensor([1.0, 2.0, 3.0])
    bad = torch.tensor([1.0, NAN, 3.0])
    assert sqnr(x, x.clone()) == INF
    assert sqnr(torch.zeros(3), torch.zeros(3)) == INF
    assert sqnr(torch.zeros(3), x) == -INF
    assert sqnr(x, bad) == sqnr(bad, x) == sqnr(bad, bad) == -INF
    assert sqnr(x, x / 0) == sqnr(x / 0, x) == sqnr(x / 0, -x / 0) == -INF
    assert sqnr(torch.empty(0), torch.empty(0)) == INF


def test_sqnr_takes_any_dtype_and_one_shape() -> None:
    x = normal(64, 64)
    assert sqnr(x, x.bfloat16()) == pytest.approx(55.6, abs=1.0)
    assert sqnr(x.requires_grad_(), x.detach().to(E4M3.dtype)) == pytest.approx(31.5, abs=1.0)
    assert_raises(ShapeError, r"one shape, got \(3,\) and \(4,\)", sqnr, torch.ones(3), torch.ones(4))


# analyze


def expected_figures(x: torch.Tensor, scaling: Scaling) -> dict[str, float]:
    """The report's figures, counted by numpy from rule.py's codes."""
    codes, scale = rule.quantize(x, scaling.dtype, scaling.block_size, scaling.scale_format)
    fmt = E4M3 if scaling.dtype == E4M3.dtype else E5M2
    bm, bk = (size if size > 0 else max(x.shape) for size in scaling.block_size)
    scales = scale[np.arange(x.shape[0]) // bm][:, np.arange(x.shape[1]) // bk]
    decoded = codes.view(rule.FP8[scaling.dtype]).astype(np.float32) * scales
    values = x.float().numpy()
    finite = np.isfinite(values)
    used = finite & (values != 0)
    error = (values.astype(np.float64) - decoded)[finite]
    relative = np.abs(values.astype(np.float64) - decoded)[used] / np.abs(values[used])
    magnitude, large = codes & 0x7F, np.abs(values[used]).astype(np.float64)
    return {
        "underflow": float((used & (magnitude == 0)).mean()),
        "subnormal": float((finite & (magnitude > 0) & (magnitude < 1 << fmt.mantissa_bits)).mean()),
        "zeros": float((values == 0).mean()),
        "num_nonfinite": int((~finite).sum()),
        "mse": float((error**2).sum() / values.size) if finite.all() else INF,
        "sqnr_db": 10 * np.log10((values[finite].astype(float) ** 2).sum() / (error**2).sum())
        if finite.all()
        else -INF,
        "mean_relative_error": float(relative.mean()),
        "max_relative_error": float(relative.max()),
        "dynamic_range": float(np.log2(large.max() / large.min())),
        "scale_min": float(scale.min()),
        "scale_max": float(scale.max()),
    }


@FP8
@KINDS
@pytest.mark.parametrize("case", ["normal", "heavy", "special"])
def test_figures_equal_a_count_by_numpy(case: str, kind: str, dtype: torch.dtype) -> None:
    x = (normal(200, 300) if case == "normal" else heavy(200, 300)).bfloat16()
    if case == "special":
        x[3, 5], x[3, 6], x[150, 290], x[10:20] = INF, NAN, -INF, 0.0
    report = analyze(x, Scaling.of_kind(kind, dtype), "w")
    for name, value in expected_figures(x, report.scaling).items():
        assert getattr(report, name) == pytest.approx(value, rel=1e-5), name
    assert (report.name, report.shape, report.numel) == ("w", (200, 300), 60_000)
    assert report.amax == (INF if case == "special" else float(x.abs().max()))
    num_used = 60_000 - round(report.zeros * 60_000) - report.num_nonfinite
    assert sum(report.histogram.values()) == num_used


@KINDS
def test_chunks_do_not_change_the_report(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    x = heavy(700, 130)
    whole = analyze(x, Scaling.of_kind(kind))
    monkeypatch.setattr(analysis, "_CHUNK_ELEMENTS", 200 * 130)
    chunked = analyze(x, Scaling.of_kind(kind))
    for field in dataclasses.fields(TensorReport):
        got, expected = getattr(chunked, field.name), getattr(whole, field.name)
        assert got == (pytest.approx(expected) if isinstance(expected, float) else expected), field.name


def test_histogram_counts_exponents_after_scaling() -> None:
    x = torch.tensor([[448.0, 256.0, 1.0, 1.5, 2.0**-6, 2.0**-9, 2.0**-20, 0.0]])
    report = analyze(x, Scaling.per_tensor())
    assert report.histogram == {8: 2, 0: 2, -6: 1, -9: 1, -20: 1}
    assert report.underflow == 1 / 8
    assert report.subnormal == 1 / 8
    assert report.zeros == 1 / 8
    assert report.dynamic_range == pytest.approx(math.log2(448) + 20)


def test_histogram_holds_what_fp32_cannot() -> None:
    report = analyze(torch.tensor([[1e30, 1e-20, 1e-44]]), Scaling.per_tensor())
    assert report.histogram == {8: 1, -127: 2}
    assert report.underflow == pytest.approx(2 / 3)
    report = analyze(torch.tensor([[1e30]]), Scaling.per_tensor(), quant_scale=torch.tensor(1e30))
    assert report.histogram == {127: 1}


def test_saturation_by_rounding_is_not_clipping() -> None:
    x = torch.tensor([[448.0, 449.0, 464.0, 465.0, -1000.0, 1.0]])
    report = analyze(x, Scaling.per_tensor(), quant_scale=torch.tensor(1.0))
    assert report.saturation == pytest.approx(4 / 6)
    assert report.num_clipped == 2
    assert report.te_stats["overflows%"] == pytest.approx(100 * 2 / 6)
    current = analyze(normal(512, 256), Scaling())
    assert current.num_clipped == 0
    assert current.saturation < 1 / 128  # a block's largest element may land a rounding above 448


def test_half_of_the_smallest_subnormal_is_the_underflow_edge() -> None:
    x = torch.tensor([[448.0, 2.0**-10, 2.0**-10 * 1.01]])
    assert analyze(x, Scaling.per_tensor()).underflow == pytest.approx(1 / 3)
    assert bands(E4M3)["underflow"][1] == -10
    assert bands(E4M3)["subnormal"] == (-10, -6)
    assert bands(E5M2)["normal"] == (-14, pytest.approx(15.807, abs=1e-3))


@KINDS
def test_empty_and_zero_tensors(kind: str) -> None:
    for shape in ((0, 128), (128, 0), (4, 128)):
        report = analyze(torch.zeros(shape), Scaling.of_kind(kind))
        assert (report.amax, report.underflow, report.sqnr_db, report.mse) == (0.0, 0.0, INF, 0.0)
        assert (report.scale_min, report.scale_max, report.dynamic_range) == (1.0, 1.0, 0.0)
        assert report.histogram == {}
        assert report.notes == ()


def test_transformer_engine_names() -> None:
    report = analyze(heavy(128, 256), Scaling())
    assert set(report.te_stats) == {*FP8_STATS, "cur_amax", "dynamic_range"}  # values: tests/nn/test_statistics.py
    assert (report.scale_inv_min, report.scale_inv_max) == (report.scale_min, report.scale_max)


@FP8
@KINDS
def test_notes_say_what_hurts(kind: str, dtype: torch.dtype) -> None:
    scaling = Scaling.of_kind(kind, dtype)
    assert analyze(normal(256, 256), scaling).notes == ()
    bad = normal(256, 256)
    bad[0, 0] = NAN
    assert analyze(bad, scaling).notes == ("1 non-finite",)
    if kind == "per_tensor" and dtype == E4M3.dtype:
        assert analyze(heavy(256, 256), scaling).notes == ("small values lost",)
        late = analyze(normal(256, 256), scaling, quant_scale=torch.tensor(448.0))
        assert late.notes == (f"{late.num_clipped} clipped", "low SQNR")


def test_inputs_are_checked() -> None:
    assert_raises(ShapeError, "must be a matrix", analyze, torch.ones(3), Scaling())
    assert_raises(DtypeError, "float32, bfloat16 or float16", analyze, torch.ones(3, 3, dtype=torch.float64), Scaling())
    with pytest.raises(ShapeError, match="one number and goes with per_tensor"):
        analyze(torch.ones(3, 3), Scaling(), quant_scale=torch.ones(()))


# models


class Fused(torch.nn.Module):
    """As octavo.nn.Linear: one weight of several projections."""

    def __init__(self) -> None:
        super().__init__()
        self.parts = (96, 32, 32)
        self.weight = torch.nn.Parameter(torch.cat([normal(96, 64), normal(32, 64) * 1e-3, normal(32, 64) * 1e3]))


def test_analyze_model_reports_every_matrix_once() -> None:
    model = torch.nn.Sequential(torch.nn.Embedding(50, 64), torch.nn.Linear(64, 50), torch.nn.LayerNorm(64), Fused())
    model[1].weight = model[0].weight
    reports = analyze_model(model, get_recipe("blockwise"))
    assert [report.name for report in reports] == ["0.weight", *(f"3.weight[{i}]" for i in range(3))]
    assert [report.shape for report in reports] == [(50, 64), (96, 64), (32, 64), (32, 64)]
    assert {report.scaling.kind for report in reports} == {"block_128x128"}
    per_row = analyze_model(model, Scaling.per_row())
    assert {report.scaling.kind for report in per_row} == {"per_row"}
    assert analyze_model(model, "blockwise") == reports


def test_analyze_model_starts_from_bf16() -> None:
    model = torch.nn.Linear(256, 256, bias=False)
    report = analyze_model(model, "rowwise")[0]
    expected = analyze(model.weight.bfloat16(), Scaling.per_row(), "weight")
    assert report == expected
    q = quantize_reference(model.weight.detach().bfloat16(), Scaling.per_row())
    assert report.sqnr_db == pytest.approx(sqnr(model.weight.bfloat16(), q.dequantize()))


def test_analyze_model_needs_a_weight_scaling() -> None:
    with pytest.raises(RecipeError, match="recipe 'bf16' quantizes no weight; analyze an FP8 recipe"):
        analyze_model(torch.nn.Linear(4, 4), get_recipe("bf16"))


# table and plot


def reports() -> list[TensorReport]:
    return [
        analyze(normal(128, 256), Scaling(), "layers.0.normal"),
        analyze(heavy(128, 256), Scaling.per_tensor(E5M2.dtype, scale_format="e8m0"), "heavy"),
        analyze(torch.full((2, 3), NAN), Scaling()),
    ]


def test_table_is_aligned() -> None:
    lines = format_table(reports()).split("\n")
    header = " ".join(lines[0].split())
    assert header.startswith("tensor shape scaling amax range SQNR dB underflow % subnormal % clipped")
    starts = (
        "layers.0.normal  128x256  e4m3 block_1x128",
        "heavy            128x256  e5m2 per_tensor e8m0",
        "-                2x3 ",
    )
    assert all(line.startswith(start) for line, start in zip(lines[1:], starts, strict=True))
    assert all(line.endswith(end) for line, end in zip(lines[1:], ("ok", "ok", "6 non-finite"), strict=True))
    note = lines[0].index("note")
    assert all(line[note - 1] == " " != line[note] for line in lines[1:])
    assert format_table([]).split() == lines[0].split()


def test_plot_is_written(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    for suffix, head in (("svg", b"<?xml"), ("pdf", b"%PDF")):  # png: by the command, below
        odd = dataclasses.replace(reports()[0], name="$a_{$.weight")  # is no formula
        plot_exponents([*reports(), odd], path := tmp_path / "new" / f"exponents.{suffix}")
        assert path.read_bytes().startswith(head) and path.stat().st_size > 5_000


def test_plot_refuses_what_it_cannot_draw(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("matplotlib")
    assert_raises(ConfigError, r"must end in \.png, \.svg or \.pdf", plot_exponents, reports(), tmp_path / "plot.bmp")
    assert_raises(ConfigError, "at least one report", plot_exponents, [], tmp_path / "plot.png")
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(BackendError, match=r"needs matplotlib; run pip install -e '\.\[plots\]' in"):
        plot_exponents(reports(), tmp_path / "plot.png")
    assert not list(tmp_path.iterdir())


# octavo analyze


def run_cli(monkeypatch: pytest.MonkeyPatch, *args: str) -> None:
    """The command in this process, which saves a second of imports."""
    monkeypatch.setattr(sys, "argv", ["octavo", "analyze", *args])
    with pytest.raises(SystemExit) as exit_:
        cli.main()
    assert exit_.value.code in (0, 2)


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    first = {"a.weight": normal(130, 200).bfloat16(), "a.norm": torch.ones(200)}
    second = {"b.weight": heavy(64, 64), "codes": torch.zeros(4, 4).to(E4M3.dtype)}
    second["codes_scale_inv"] = torch.ones(1, 1)
    save_file(first, tmp_path / "model-00001-of-00002.safetensors")
    save_file(second, tmp_path / "model-00002-of-00002.safetensors")
    return tmp_path


def test_cli_prints_the_table_and_draws(checkpoint, monkeypatch, capfd):
    plot = checkpoint / "out.png"
    run_cli(monkeypatch, str(checkpoint), "--scaling", "rowwise", "--plot", str(plot))
    out = capfd.readouterr().out
    a = analyze(normal(130, 200).bfloat16(), Scaling.per_row(), "a.weight")
    b = analyze(heavy(64, 64).bfloat16(), Scaling.per_row(), "b.weight")
    assert format_table([a, b]) in out
    assert "2 weights, 1 with a note; 3 other tensors skipped" in out
    assert "1 of them are FP8 codes already: give the bf16 checkpoint for those" in out
    assert plot.read_bytes().startswith(b"\x89PNG")


def test_cli_reads_the_newest_model_of_a_run(checkpoint, tmp_path, monkeypatch, capfd):
    step = tmp_path / "run" / "checkpoints" / "step-00000200"
    step.mkdir(parents=True)
    shutil.copytree(checkpoint, step / "model", ignore=shutil.ignore_patterns("run"))
    (step / "model" / "config.json").write_text("{}")
    (step.parent / "LATEST").write_text(f"{step.name}\n")
    for folder in (step, tmp_path / "run"):
        run_cli(monkeypatch, str(folder))
        captured = capfd.readouterr()
        assert f"{folder}: a run; reading {step / 'model'}\n" in captured.err
        assert "2 weights" in captured.out


def test_cli_takes_one_file_and_block_shapes(checkpoint, monkeypatch, capfd):
    path = checkpoint / "model-00001-of-00002.safetensors"
    run_cli(monkeypatch, str(path), "--scaling", "mx_1x32", "--scale-format", "e8m0")
    out = capfd.readouterr().out
    assert "e4m3 mx_1x32 e8m0" in out
    assert "b.weight" not in out


def test_cli_refuses(checkpoint: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> None:
    def error(*args: str) -> str:
        run_cli(monkeypatch, *args)
        return capfd.readouterr().err

    assert "unknown scaling 'rowise'" in (text := error(str(checkpoint), "--scaling", "rowise"))
    assert "did you mean 'rowwise'?" in text
    assert "is no .safetensors file" in error(str(checkpoint / "missing"))
    assert "--scale-format must be one of" in error(str(checkpoint), "--scale-format", "fp16")
    whole = (checkpoint / "model-00001-of-00002.safetensors").read_bytes()
    (checkpoint / "model-00001-of-00002.safetensors").write_bytes(whole[: len(whole) // 2])
    assert "is not a whole safetensors file" in error(str(checkpoint))
    save_file({"norm": torch.ones(4)}, checkpoint / "only.safetensors")
    assert "holds no 2-D weight" in error(str(checkpoint / "only.safetensors"))
