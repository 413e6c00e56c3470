"""Every launch of the AdamW step compiles for Hopper without spills and without fma, and moves 16 bytes at once."""

import re

import pytest
import torch

from octavo.ops.adamw import triton as kernels
from tests.ops.adamw.cases import BETAS, MODES, make_case, make_hyper, mode_id
from tests.ops.compiled import Launch, assert_moves_16_bytes, compiled, launched

FP8 = (torch.bfloat16, "fp8", "remainder")


def launch_of(mode: tuple[torch.dtype, str, str | None], shape: tuple[int, ...]) -> Launch:
    case = make_case(mode, shape)
    names = ("param", "exp_avg", "exp_avg_sq", "exp_avg_scale", "exp_avg_sq_scale", "master")
    given = (*map(case.get, names), torch.empty(shape, dtype=mode[0]), make_hyper(1), *BETAS.values())
    (launch,) = launched(lambda: kernels.adamw_step(*given))
    return launch


def check(launch: Launch) -> str:
    report = compiled(launch)
    # The root alone may flush: of a second moment below 1e-38, beside eps.
    assert ".ftz" not in report.ptx.replace("sqrt.approx.ftz.f32", ""), f"{launch} flushes subnormals"
    found = set(re.findall(r"\b(?:fma|mul|add|sub|div)\.[\w.]*f32", report.ptx))
    assert found <= {"mul.rn.f32", "add.rn.f32", "sub.rn.f32", "div.rn.f32", "div.full.f32"}, f"{launch}: {found}"
    return report.ptx


def test_fp8_with_remainder_compiles() -> None:
    launch = launch_of(FP8, (256, 640))
    ptx = check(launch)
    assert_moves_16_bytes(launch, ptx)
    assert not re.search(r"(?:ld|st)\.global[\w.:]*\.b(?:8|16)\b", ptx)
    assert "cvt.rn.satfinite.e4m3x2.f32" in ptx


@pytest.mark.slow
@pytest.mark.parametrize("shape", [(256, 640), (17, 129)], ids=str)
@pytest.mark.parametrize("mode", MODES, ids=mode_id)
def test_every_mode_compiles(mode: tuple[torch.dtype, str, str | None], shape: tuple[int, ...]) -> None:
    check(launch_of(mode, shape))
