"""Configs that are legal and ask for a second thought are told so, and others are not."""

import logging
from pathlib import Path
from typing import Any

import pytest

from octavo.rl.cautions import cautions
from octavo.rl.config import RLConfig
from tests.rl.conftest import Policy, tiny_config
from tests.rl.test_loop import run

BF16 = {"recipe": "bf16", "kv_cache_dtype": "bf16"}


def said(**sections: Any) -> str:
    (caution,) = cautions(RLConfig(**sections))
    return caution


@pytest.mark.parametrize(
    ("correction", "named"),
    [
        ({"kind": "token_tis"}, "correction.kind = 'token_tis' has no effect beside exact = true"),
        ({"reject": "geometric"}, "correction.reject = 'geometric' has no effect beside exact = true"),
        ({"veto": 1e-4}, "correction.veto = 0.0001 has no effect beside exact = true"),
        ({"kind": "icepop", "veto": 0.1}, "correction.kind = 'icepop', correction.veto = 0.1 has no effect"),
    ],
)
def test_correction_beside_exact(correction: dict[str, Any], named: str) -> None:
    assert named in said(correction=correction)
    assert "leave it out, or set exact = false" in said(correction=correction)


@pytest.mark.parametrize(
    ("rollout", "named"),
    [
        ({"recipe": "blockwise", "kv_cache_dtype": "bf16"}, "(linears in blockwise)"),
        ({"recipe": "bf16", "kv_cache_dtype": "fp8"}, "(FP8 KV cache)"),
        ({"recipe": "bf16", "kv_cache_dtype": "fp8", "attention_dtype": "fp8"}, "(FP8 KV cache, FP8 attention)"),
        ({"recipe": "rowwise", "kv_cache_dtype": "fp8"}, "(linears in rowwise, FP8 KV cache)"),
    ],
)
def test_fp8_rollouts_that_nothing_weighs(rollout: dict[str, Any], named: str) -> None:
    text = said(exact=False, trainer={"recipe": "bf16"}, rollout=rollout)
    assert named in text and "set correction.kind = 'token_tis'" in text


@pytest.mark.parametrize(
    "sections",
    [
        {},
        {"exact": False, "correction": {"kind": "token_tis"}},
        {"exact": False, "correction": {"veto": 1e-4}},
        {"exact": False, "trainer": {"recipe": "bf16"}, "rollout": BF16},
    ],
    ids=["exact", "tis", "veto", "one precision"],
)
def test_what_needs_no_second_thought(sections: dict[str, Any]) -> None:
    assert cautions(RLConfig(**sections)) == []


def test_a_quiet_run_says_it_once(tmp_path: Path, policy: Policy, caplog: pytest.LogCaptureFixture) -> None:
    config = tiny_config(tmp_path, correction={"kind": "token_tis"}, trainer={"steps": 2})
    run(config, model=policy[0], tokenizer=policy[1])
    (record,) = [record for record in caplog.records if "beside exact = true" in record.message]
    assert record.levelno == logging.WARNING
