"""The perplexity program at toy size, and the outliers that change nothing in bf16."""

import dataclasses
import json
from pathlib import Path

import pytest
import torch

from benchmarks import perplexity
from benchmarks.corpus import CorpusSettings
from benchmarks.key_outliers import add_key_outliers, key_spread
from octavo.errors import ConfigError
from octavo.models import Decoder, ModelConfig, save_model, sequence_logprobs, train_bpe
from octavo.models.calibration import calibrate
from octavo.models.perplexity import perplexity as scored_perplexity
from octavo.testing import assert_bitwise

TOKENS = [list(range(1, 60)), [7, 3, 9] * 8]
CONFIG = ModelConfig("llama", 96, 128, 256, 2, 4, 2, 32, max_position_embeddings=64)


@pytest.mark.parametrize("kv_heads", [1, 2, 4])
@pytest.mark.parametrize("has_bias", [False, True], ids=["plain", "bias"])
def test_outliers_in_k_leave_every_bit_of_bf16(kv_heads: int, has_bias: bool) -> None:
    config = dataclasses.replace(CONFIG, num_kv_heads=kv_heads, attention_bias=has_bias)
    model = Decoder(config)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("bias"):
                parameter.normal_(0.0, 0.5)
        before = sequence_logprobs(model, TOKENS)
        largest = calibrate(model, TOKENS).keys
        add_key_outliers(model, 256.0)
        after = sequence_logprobs(model, TOKENS)
    for mine, theirs in zip(after, before, strict=True):
        assert_bitwise(mine, theirs)
    for layer, amax in calibrate(model, TOKENS).keys.items():
        assert amax > 32 * largest[layer], "K does have outliers"
    assert key_spread(model) > 100


def test_what_would_change_the_model_is_refused() -> None:
    with pytest.raises(ConfigError, match="a power of two above 1, for other ones round; got 100"):
        add_key_outliers(Decoder(CONFIG), 100.0)
    normed = dataclasses.replace(CONFIG, family="qwen3", qk_norm=True)
    with pytest.raises(ConfigError, match="without QK-norm"):
        add_key_outliers(Decoder(normed), 64.0)


def test_the_engine_measures_what_the_scorer_does() -> None:
    model = Decoder(CONFIG)
    for arm in perplexity._arms():
        found = perplexity.measure(model, arm, TOKENS, TOKENS)
        if arm.is_calibrated:
            assert found != scored_perplexity(model, TOKENS)
        else:
            tolerance = 0.0 if arm.numerics.exact else 1e-3
            assert found == pytest.approx(scored_perplexity(model, TOKENS), rel=max(tolerance, 1e-12))


def test_a_gap_that_is_too_large_is_a_complaint(monkeypatch: pytest.MonkeyPatch) -> None:
    values = {"bf16": 10.0, "FP8 + FP8 KV": 10.051}
    monkeypatch.setattr(perplexity, "measure", lambda model, arm, *_: values.get(arm.name, 10.04))
    record = perplexity.Record("perplexity", "what", device="cpu")
    [complaint] = perplexity.measure_all(record, "x", Decoder(CONFIG), TOKENS, TOKENS)
    assert complaint == "x: FP8 + FP8 KV is +0.510% from bf16, at most 0.5% are allowed"


@pytest.mark.slow
def test_the_command_trains_measures_and_writes_a_record(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    texts = tmp_path / "texts"
    texts.mkdir()
    for index in range(40):
        lines = [f"def value_{index}_{line}(number):\n    return number + {line}\n" for line in range(12)]
        (texts / f"{index}.py").write_text("\n".join(lines))
    toy = perplexity.PLANS["toy"]
    small = CorpusSettings((str(texts),), 300, enough_bytes=0, validation_fraction=0.2)
    monkeypatch.setitem(perplexity.PLANS, "toy", dataclasses.replace(toy, corpus=small))
    command = ["--device", "cpu", "--plan", "toy", "--minutes", "0.05", "--cache", str(tmp_path / "cache")]
    assert perplexity.main([*command, "--out", str(tmp_path), "--commit", "abc"]) in (0, 1)
    document = json.loads((tmp_path / "perplexity.json").read_text())
    found = {(row["case"], row["metric"]): row["value"] for row in document["rows"]}
    models = ("Llama without QK-norm", "Llama without QK-norm, outliers in K", "Qwen3 with QK-norm")
    assert {case for case, metric in found if metric == "perplexity"} == {
        f"{model}: {arm.name}" for model in models for arm in perplexity._arms()
    }
    plain, outliers = (found[f"{model}: bf16", "perplexity"] for model in models[:2])
    assert plain == outliers
    assert found[models[1], "largest channel of K over the median"] > 100
    assert document["commit"] == "abc"
    # a checkpoint takes the place of training
    tokenizer = train_bpe([path.read_text() for path in texts.iterdir()], 300)
    config = dataclasses.replace(CONFIG, vocab_size=tokenizer.vocab_size)
    save_model(Decoder(config), tmp_path / "given", tokenizer=tokenizer)
    perplexity.main([*command, "--out", str(tmp_path), "--checkpoint", str(tmp_path / "given")])
    cases = {row["case"] for row in json.loads((tmp_path / "perplexity.json").read_text())["rows"]}
    assert {"given: bf16", "given, outliers in K: FP8 + FP8 KV"} < cases
    assert not any("Qwen3" in case for case in cases)
