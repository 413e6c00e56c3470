"""The parts of bench: options, tables, energy, the search for memory, complaints, the speed table."""

import dataclasses
import json
import math
from pathlib import Path

import pytest
import torch

from bench import BenchOptions, Outcome
from bench.energy import _Sampler, measure_energy
from bench.measure import VariantResult
from bench.outcome import finish
from bench.record import Record, Timing
from bench.report import format_results, format_table, number
from bench.speed.capacity import Search, Trial, _search
from bench.speed.ceilings import Ceilings
from bench.speed.linear import CaseTimings
from bench.speed.qdq import plain_dequantize, plain_quantize
from bench.speed.speed_table import write_speed_table
from bench.speed.stack import StackShape
from bench.speed.step import LLAMA_3_8B, add_results, floor_s
from bench.speed.variants import BASE, StackVariant
from octavo.errors import BackendError, ConfigError
from octavo.qdq import dequantize, quantize
from tests.assertions import assert_raises
from tests.bench.quick import make_pass

QUICK = BenchOptions(device="cpu", quick=True)
BLOCKWISE = StackVariant("octavo blockwise", "octavo", "blockwise")


def test_options_refuse() -> None:
    quick = {"device": "cpu", "quick": True}
    for fields in ({"device": "tpu"}, {"device": "cpu"}, quick | {"recipes": ("bf16",)}, quick | {"recipes": ("fp4",)}):
        assert_raises(ConfigError, "--device|--recipe|--quick", BenchOptions, **fields)
    if not torch.cuda.is_available():
        assert_raises(BackendError, "--device cpu --quick", BenchOptions)


def test_a_partial_run_leaves_the_committed_records_alone() -> None:
    assert QUICK.record_folder is None
    assert dataclasses.replace(QUICK, out=Path("x")).record_folder == Path("x")


def test_cases_are_chosen_by_part_of_their_name() -> None:
    chosen = dataclasses.replace(QUICK, filters=("block", "row"))
    assert QUICK.wants("anything") and chosen.wants("octavo blockwise") and not chosen.wants("octavo delayed")


def test_complaints_fail_the_run_and_keep_the_record_away(capsys: pytest.CaptureFixture[str]) -> None:
    assert not finish(Outcome(Record("x", "y", device="cpu"), ["it is off"]), QUICK)
    assert not finish(Outcome(Record("x", "y", device="cpu")), dataclasses.replace(QUICK, filters=("nosuch",)))
    said = capsys.readouterr().out
    assert "COMPLAINT: it is off" in said and "no case of this benchmark has any of nosuch" in said


def test_tiny_numbers_keep_two_digits() -> None:
    asked = [(0.0004, ".2f"), (-3.21e-6, ".3f"), (0.0123, "7.2f"), (0.97, ",.0f"), (0.0, ".2f"), (12345.0, ",.0f")]
    asked += [(0.12, ".2f"), (1.0, ".0f"), (0.00004, ".1e"), (1.25, ".1f"), (math.nan, ".2f")]
    wanted = ["0.00040", "-3.2e-06", "  0.012", "0.97", "0.00", "12,345", "0.12", "1", "4.0e-05", "1.2", "nan"]
    assert [number(*each) for each in asked] == wanted and number(None) == "-"
    assert format_table(("a", "b"), [("long", "1"), ("x", "22")]) == "a      b\nlong   1\nx     22"


def test_power_is_integrated_and_none_where_it_cannot_be_read() -> None:
    with _Sampler(lambda: 100.0) as sampler, _Sampler(lambda: None) as blind, measure_energy("cpu") as reading:
        while len(sampler._samples) < 3:
            sampler._ended.wait(0.01)
    first, last = sampler._samples[0][0], sampler._samples[-1][0]
    assert sampler.joules() == pytest.approx(100.0 * (last - first)) and blind.joules() is None
    assert (reading.joules, reading.source) == (None, "not measured: no GPU")


def test_floor_counts_each_part_at_its_ceiling() -> None:
    shape = StackShape("x", 128, 256, 2, 1, 64, layers=1, batch=1, seq_len=128)
    ceilings = Ceilings(bf16_flops=1e12, fp8_flops=2e12, copy_bytes=1e9)
    fp8 = StackVariant("octavo blockwise, FP8 AdamW", "octavo", "blockwise", fp8_optimizer=True)
    for variant, flops, num_bytes in ((BASE, 1e12, 14), (fp8, 2e12, 10)):
        wanted = shape.linear_flops / flops + shape.attention_flops / 1e12 + num_bytes * 1e-9 * shape.num_params
        assert floor_s(variant, shape, ceilings) == pytest.approx(wanted)


def test_results_are_means_of_the_passes_medians() -> None:
    base = VariantResult(BASE, (make_pass(200.0), make_pass(220.0)))
    fast = VariantResult(BLOCKWISE, (make_pass(100.0), make_pass(110.0, joules=None)))
    assert (base.step_ms, base.joules, fast.joules) == (210.0, 10.0, None)
    assert base.drift == pytest.approx(0.1)
    record = Record("step", "what", device="cpu")
    ceilings = Ceilings(1e15, 2e15, 4e12)
    add_results(record, [base, fast], LLAMA_3_8B, ceilings)
    speedups = {row["case"]: row["value"] for row in record.rows if row["metric"] == "speedup"}
    assert speedups == {"bf16, compiled": 1.0, "octavo blockwise": 2.0}
    assert "2.00" in format_results(record, "step")


@pytest.mark.parametrize("setting", [None, 3])
@pytest.mark.parametrize("capacity", [0, 1, 2, 3, 5, 8, 21, 64, 100])
def test_the_search_finds_what_fits(capacity: int, setting: int | None) -> None:
    tried: list[int] = []

    def attempt(batch: int) -> Trial | None:
        tried.append(batch)
        return Trial(1.0, 1, 1.0) if batch <= capacity else None

    search = Search(BASE)
    _search(search, setting, limit=64, attempt=attempt)
    most = min(capacity, 64)
    assert search.max_batch <= most <= search.max_batch + search.max_batch // 8
    assert 1 in search.trials
    assert setting in search.trials or not setting or not capacity
    assert len(tried) == len(set(tried))


def test_the_speed_table_has_a_line_a_shape(tmp_path: Path) -> None:
    timing = {"bf16": Timing(20.0, 20.0, 20.0), "octavo rowwise": Timing(10.0, 10.0, 10.0)}
    ways = {"step": timing, "eager": timing, "queued": timing, "graph": {}}
    cases = [CaseTimings((t, 128, 256), ways) for t in (512, 64)]
    options = dataclasses.replace(QUICK, recipes=("rowwise",), commit="abc")
    text = write_speed_table(tmp_path / "folder" / "table.json", cases, options).read_text()
    document = json.loads(text)
    assert document["recipes"] == {"rowwise": [[64, 128, 256, 2.0, 2.0, None], [512, 128, 256, 2.0, 2.0, None]]}
    assert (document["format"], document["commit"]) == (2, "abc")
    assert "   [64, 128, 256, 2.0, 2.0, null],\n" in text


def test_pairs_in_plain_torch_give_the_same_codes() -> None:
    """The compiled peer of `qdq` computes what the explicit ops compute."""
    x, scale = torch.randn(64, 64, generator=torch.Generator().manual_seed(0)), torch.tensor(0.0123)
    codes = plain_quantize(x, scale, "per_tensor", torch.float8_e4m3fn)
    assert torch.equal(codes.view(torch.uint8), quantize(x, scale).view(torch.uint8))
    decoded = plain_dequantize(codes, scale, "per_tensor", torch.bfloat16)
    assert torch.equal(decoded, dequantize(codes, scale, dtype=torch.bfloat16))
