"""The loss gap of FP8 reductions, on two gloo ranks at a toy size: pairs, rows, and that a cut run goes on."""

import dataclasses
import json
import tempfile
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from bench.training import reduction_gap as gap
from bench.training.corpus import CorpusSettings
from tests.ranks import run_group

SOURCES = (str(Path(gap.__file__).parents[1]),)


def row(variant: str, seed: int, loss: float) -> dict[str, Any]:
    return {"variant": variant, "seed": seed, "held_out_loss": loss}


def test_gaps_are_paired_by_seed() -> None:
    runs = [row(gap.BASE, 0, 2.0), row(gap.BASE, 1, 4.0), row(gap.HOOK, 1, 4.02), row(gap.HOOK, 0, 2.0)]
    runs += [row(gap.NUDGED, 0, 1.99), row(gap.HOOK, 2, 9.0)]  # seed 2 has no baseline
    assert gap.gaps(runs, gap.HOOK) == pytest.approx([0.0, 0.5])
    rows = {(r["case"], r["metric"]): r for r in gap.make_record(runs, gap.TOY, "0" * 64, "cpu", 2).rows}
    found = rows[gap.HOOK, "gap to the fp32 all-reduce, mean over seeds"]
    assert (found["value"], found["p20"], found["p80"], found["peer_value"]) == pytest.approx((0.25, 0.0, 0.5, 0.5))
    assert gap.find_complaints(runs) == []
    assert gap.find_complaints([*runs, row(gap.HOOK, 0, 2.1)]) != []
    assert gap.find_complaints([row(gap.CONTROL, 0, float("nan"))]) == [f"{gap.CONTROL}, seed 0: loss nan"]


def bench(rank: int, _: int) -> dict[str, Any]:
    gap.TOY = dataclasses.replace(gap.TOY, text=CorpusSettings(roots=SOURCES, enough_bytes=0))
    found = [tempfile.mkdtemp() if rank == 0 else None]
    dist.broadcast_object_list(found)
    folder = Path(str(found[0]))
    asked = ["--toy", "--device", "cpu", "--commit", "abc", "--out", str(folder), "--seeds", "1", "--variants"]
    assert gap.main([*asked, gap.HOOK, gap.NUDGED]) == 0
    dist.barrier()
    before = (folder / gap.ROWS).read_text()
    assert gap.main([*asked, *gap.VARIANTS]) == 0
    dist.barrier()
    after = (folder / gap.ROWS).read_text()
    assert after.startswith(before) and before.count("\n") == 3  # what was finished is not run again
    with pytest.raises(SystemExit):
        gap.main(["--device", "cpu"])
    text = gap.load_text(gap.TOY, "cpu")
    assert 0 < len(text.held_out) < 0.1 * len(text.train)
    again = gap.train(gap.TOY, gap.HOOK, 0, text, "cpu")
    rows = [json.loads(line) for line in after.splitlines()]
    return {
        "record": json.loads((folder / "reduction_gap.json").read_text()),
        "losses": {one["variant"]: one["held_out_loss"] for one in rows},
        "again": again["held_out_loss"],
    }


@pytest.mark.largest
def test_every_variant_has_its_gap_and_a_cut_run_goes_on() -> None:
    first, second = run_group(bench, 2)
    losses = first["losses"]
    assert losses.keys() == set(gap.VARIANTS) and len(set(losses.values())) == len(losses)  # each computes otherwise
    assert max(losses.values()) - min(losses.values()) < 0.01 * min(losses.values())
    assert first["again"] == second["again"] == losses[gap.HOOK]  # the same seed, the same bits
    assert "min_bytes of both FP8 reductions is 0" in first["record"]["what"] and first["record"]["commit"] == "abc"
    cases = {r["case"] for r in first["record"]["rows"] if r["metric"].startswith("gap")}
    assert cases == set(gap.VARIANTS) - {gap.BASE}


def test_a_nudged_model_differs_in_one_weight_after_rounding() -> None:
    def weights(variant: str) -> torch.Tensor:
        dist.init_process_group("gloo", rank=0, world_size=1, store=dist.HashStore())
        try:
            model = gap.build(gap.TOY, variant, 0, "cpu")
        finally:
            dist.destroy_process_group()
        return torch.cat([p.detach().bfloat16().flatten() for p in model.parameters()])

    assert int((weights(gap.BASE) != weights(gap.NUDGED)).sum()) == 1
