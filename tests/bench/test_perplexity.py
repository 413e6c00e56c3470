"""The perplexity program at toy size, and the outliers that change nothing in bf16."""

import dataclasses
import json
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from bench.training import perplexity
from bench.training.corpus import CorpusSettings
from bench.training.key_outliers import add_key_outliers, key_spread
from octavo.errors import ConfigError
from octavo.models import Decoder, ModelConfig, save_model, sequence_logprobs, train_bpe
from octavo.models.calibration import calibrate
from octavo.models.perplexity import perplexity as scored_perplexity
from octavo.numerics.formats import E4M3
from tests.assertions import assert_all_bitwise, assert_raises

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
    assert_all_bitwise(after, before)
    for layer, amax in calibrate(model, TOKENS).keys.items():
        assert amax > 32 * largest[layer], "K does have outliers"
    assert key_spread(model) > 100


def test_what_would_change_the_model_is_refused() -> None:
    said = "a power of two above 1, for other ones round; got 100"
    assert_raises(ConfigError, said, add_key_outliers, Decoder(CONFIG), 100.0)
    normed = Decoder(dataclasses.replace(CONFIG, family="qwen3", qk_norm=True))
    assert_raises(ConfigError, "without QK-norm", add_key_outliers, normed, 64.0)


def test_outliers_in_k_are_beyond_e4m3() -> None:
    """Small random weights have smaller keys than any trained model: what is beyond the range there is so anywhere."""
    model = Decoder(CONFIG)
    add_key_outliers(model, perplexity.OUTLIER_FACTOR)
    assert all(amax > 4 * E4M3.max for amax in calibrate(model, TOKENS).keys.values())


def test_the_engine_measures_what_the_scorer_does() -> None:
    model = Decoder(CONFIG)
    for variant in perplexity._variants(has_outliers=True):
        found = perplexity.measure(model, variant, TOKENS, TOKENS)
        if variant.is_calibrated:
            assert found != scored_perplexity(model, TOKENS)
        else:
            tolerance = 0.0 if variant.numerics.exact else 1e-3
            assert found == pytest.approx(scored_perplexity(model, TOKENS), rel=max(tolerance, 1e-12))


def made_up(scale_1: float = 12.0, reach: float = 9.0, **values: float) -> dict[str, perplexity.Found]:
    """A model with outliers, two seeds: bf16 at 10 and at 20, every variant 0.4 % above; the second as `values`."""
    found = perplexity.Found([300.0, 320.0], [9.0, reach])
    for variant in perplexity._variants(has_outliers=True):
        gap = {"bf16": 0.0, "FP8 + FP8 KV with scale 1": scale_1 / 10 - 1}.get(variant.name, 0.004)
        second = values.get(variant.name.replace(" + ", "_").replace(" ", "_"), 10 * (1 + gap))
        found.values[variant.name] = [10 * (1 + gap), 2 * second]
    return {f"x{perplexity._OUTLIERS}": found}


@pytest.mark.parametrize(
    ("values", "complaint"),
    [
        ({}, ""),
        ({"FP8_FP8_KV": 10.051}, "FP8 + FP8 KV is +0.510% from bf16, at most 0.5% are allowed"),
        ({"FP8": 10.2}, ""),  # weights alone are not held to it
        ({"reach": 0.5}, "K reaches 0.50 times E4M3's range, more than 1 is asked for"),
        ({"FP8_FP8_KV_with_scale_1": 10.04}, "FP8 + FP8 KV with scale 1 is +0.400% from bf16, more than 0.5%"),
    ],
    ids=["holds", "gap", "weights", "range", "no scale"],
)
def test_what_is_too_far_or_too_near_in_any_seed_is_a_complaint(values: dict[str, float], complaint: str) -> None:
    found = perplexity.find_complaints(made_up(**values))
    assert len(found) == bool(complaint) and all(f"x, outliers in K: {complaint}" in each for each in found)


def test_seeds_are_put_one_behind_another(monkeypatch: pytest.MonkeyPatch) -> None:
    measured = iter(range(10, 100))
    monkeypatch.setattr(perplexity, "measure", lambda *_: float(next(measured)))
    found, model = perplexity.Found(), Decoder(CONFIG)
    for _ in range(2):
        perplexity.measure_all(found, "x", model, TOKENS, TOKENS)
    names = [variant.name for variant in perplexity._variants()]
    assert found.values == {name: [10.0 + i, 10.0 + i + len(names)] for i, name in enumerate(names)}
    assert found.gaps["FP8"] == pytest.approx([0.2, 2 / (10 + len(names))])
    assert len(found.spreads) == len(found.reaches) == 2


def test_a_record_has_the_mean_and_the_spread_over_seeds() -> None:
    record = perplexity.make_record(made_up(FP8_FP8_KV=10.051), "what", "cpu")
    rows = {(row["case"], row["metric"]): row for row in record.rows}
    gap = rows["x, outliers in K: FP8 + FP8 KV", "over bf16"]
    assert (gap["value"], gap["p20"], gap["p80"]) == (0.455, 0.4, 0.51)
    value = rows["x, outliers in K: bf16", "perplexity"]
    assert (value["value"], value["p20"], value["p80"], value["peer_value"]) == (15.0, 10.0, 20.0, 15.0)


def test_the_command_trains_three_seeds_of_each_kind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    trained: list[tuple[bool, int]] = []

    def train(*_: object, qk_norm: bool, seed: int, **__: object) -> Decoder:
        trained.append((qk_norm, seed))
        return Decoder(CONFIG)

    monkeypatch.setattr(perplexity, "train", train)
    monkeypatch.setattr(perplexity, "measure", lambda *_: 10.0)
    monkeypatch.setattr(perplexity, "_sequences", lambda *_: (TOKENS, TOKENS))
    monkeypatch.setattr(perplexity, "open_corpus", lambda *_: SimpleNamespace(describe=lambda: "made up"))
    perplexity.main(["--device", "cpu", "--out", str(tmp_path), "--commit", "abc"])
    assert trained == [(qk_norm, seed) for seed in range(3) for qk_norm in (False, True)]


@pytest.mark.largest
def test_the_command_trains_measures_and_writes_a_record(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    texts = tmp_path / "texts"
    texts.mkdir()
    for index in range(40):
        lines = [f"def value_{index}_{line}(number):\n    return number + {line}\n" for line in range(12)]
        (texts / f"{index}.py").write_text("\n".join(lines))
    toy = perplexity.PLANS["toy"]
    small = CorpusSettings((str(texts),), 300, enough_bytes=0, validation_fraction=0.2)
    monkeypatch.setitem(perplexity.PLANS, "toy", dataclasses.replace(toy, corpus=small))
    command = ["--device=cpu", "--plan=toy", "--minutes=0.05", "--seeds=2", f"--cache={tmp_path / 'cache'}"]
    assert perplexity.main([*command, "--out", str(tmp_path), "--commit", "abc"]) in (0, 1)
    document = json.loads((tmp_path / "perplexity.json").read_text())
    found = {(row["case"], row["metric"]): row["value"] for row in document["rows"]}
    models = ("Llama without QK-norm", "Llama without QK-norm, outliers in K", "Qwen3 with QK-norm")
    pairs = [(model, each) for model in models for each in perplexity._variants(has_outliers="outliers" in model)]
    assert {case for case, metric in found if metric == "perplexity"} == {f"{m}: {each.name}" for m, each in pairs}
    plain, outliers = (found[f"{model}: bf16", "perplexity"] for model in models[:2])
    assert plain == outliers
    assert found[models[1], "largest channel of K over the median"] > 100
    assert found[models[1], "largest K over E4M3's largest number"] > 4
    spread = {(row["case"], row["metric"]): (row["p20"], row["value"], row["p80"]) for row in document["rows"]}
    least, mean, most = spread[f"{models[0]}: bf16", "perplexity"]
    assert least < mean < most  # two models
    assert document["commit"] == "abc"
    # a checkpoint takes the place of training
    tokenizer = train_bpe([path.read_text() for path in texts.iterdir()], 300)
    config = dataclasses.replace(CONFIG, vocab_size=tokenizer.vocab_size)
    save_model(Decoder(config), tmp_path / "given", tokenizer=tokenizer)
    perplexity.main([*command, "--out", str(tmp_path), "--checkpoint", str(tmp_path / "given")])
    cases = {row["case"] for row in json.loads((tmp_path / "perplexity.json").read_text())["rows"]}
    assert {"given: bf16", "given, outliers in K: FP8 + FP8 KV"} < cases
    assert not any("Qwen3" in case for case in cases)
