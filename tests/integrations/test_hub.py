"""octavo upload: what the model card says, and what arrives at a stand-in for the Hub."""

import json
import re
import socket
import string
from collections.abc import Iterator
from pathlib import Path

import huggingface_hub
import pytest
import torch
from huggingface_hub import ModelCard

from octavo.errors import CheckpointError
from octavo.integrations.hub import CARD, model_card
from octavo.models import (
    CalibrationText,
    ModelConfig,
    QuantizationReport,
    char_tokenizer,
    load_model,
    quantize_checkpoint,
    save_model,
)
from octavo.models.checkpoint.safetensors_io import SafetensorsReader
from octavo.numerics import sqnr
from tests.conftest import RunOctavo
from tests.integrations.hub_server import TOKEN, Hub, serving

pytestmark = pytest.mark.filterwarnings("ignore:Use 'content=:DeprecationWarning")  # httpx to huggingface_hub
ALPHABET = string.ascii_lowercase + " ."
SCORE = {"task": "piqa", "metric": "acc", "value": 0.75, "stderr": 0.0125}
EXACT = {"task": "gsm8k", "metric": "exact_match,strict", "value": 0.5, "stderr": None}


@pytest.fixture
def bf16(tmp_path: Path) -> Path:
    config = ModelConfig("llama", len(ALPHABET) + 1, 128, 256, 2, 4, 2, 32, max_position_embeddings=64)
    save_model(load_model(config), tmp_path / "small", tokenizer=char_tokenizer(ALPHABET))
    return tmp_path / "small"


@pytest.fixture
def quantized(bf16: Path, tmp_path: Path) -> tuple[Path, QuantizationReport]:
    text = tmp_path / "text.txt"
    text.write_text("the cat sat on the mat. " * 40)
    samples = CalibrationText(None, text, num_eval_samples=4, max_seq_length=32)
    return tmp_path / "fp8", quantize_checkpoint(bf16, tmp_path / "fp8", "fp8-block", text=samples)


@pytest.fixture
def scores(tmp_path: Path) -> Path:
    """As octavo eval --output writes them."""
    path = tmp_path / "scores.json"
    columns = {"auto": [SCORE, EXACT], "/home/me/small": [{**SCORE, "value": 0.7625}, EXACT]}
    path.write_text(json.dumps({"limit": 200, "scores": columns}))
    return path


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    with serving() as hub:
        monkeypatch.setattr(huggingface_hub.constants, "ENDPOINT", hub.url)
        monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_DISABLE_XET", True)
        monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", False)
        monkeypatch.setenv("HF_TOKEN", TOKEN)
        yield hub


def test_the_report_has_the_sqnr_of_the_weights_as_they_are_read(
    bf16: Path, quantized: tuple[Path, QuantizationReport]
) -> None:
    folder, report = quantized
    before, after = (SafetensorsReader(path / "model.safetensors") for path in (bf16, folder))
    assert set(report.weight_sqnr_db) == set(report.quantized)
    for name, found in report.weight_sqnr_db.items():
        codes, scale = after.load(f"{name}.weight").float(), after.load(f"{name}.weight_scale_inv")
        blocks = scale.repeat_interleave(128, 0).repeat_interleave(128, 1)[: codes.shape[0], : codes.shape[1]]
        assert found == pytest.approx(sqnr(before.load(f"{name}.weight"), codes * blocks), abs=1e-3)
    assert json.loads((folder / "octavo" / "quantization.json").read_text())["dialect"] == "fp8-block"


def test_the_card_says_recipe_fidelity_and_scores(quantized: tuple[Path, QuantizationReport], scores: Path) -> None:
    folder, report = quantized
    text = model_card(folder, base_model="me/small", license="apache-2.0", scores=scores)
    card = ModelCard(text)
    assert card.data.to_dict() == {
        "library_name": "transformers",
        "tags": ["octavo", "fp8"],
        "base_model": "me/small",
        "base_model_relation": "quantized",
        "license": "apache-2.0",
    }
    worst = min(report.weight_sqnr_db.values())
    assert "- weights: fp8-block\n- recipe: blockwise, numerics " in text
    assert f"- {len(report.quantized)} modules in FP8, {len(report.kept)} not: " in text
    assert all(reason in text for reason in report.kept.values())
    assert f"least {worst:.1f} dB (`" in text and worst > 25
    assert f"{report.perplexity_before:.4f} in bf16, {report.perplexity_after:.4f} in FP8 (" in text
    assert text.endswith(
        "By lm-evaluation-harness, 200 documents a task at most.\n\n"
        "| task | metric | this checkpoint | small |\n| --- | --- | --- | --- |\n"
        "| piqa | acc | 0.7500 ± 0.0125 | 0.7625 ± 0.0125 |\n| gsm8k | exact_match,strict | 0.5000 | 0.5000 |\n"
    )


@pytest.mark.parametrize(
    "wrong",
    [
        {"kept": None},
        {"quantized": 3},
        {"num_bytes_before": "many"},
        {"weight_sqnr_db": {}},
        {"perplexity_before": "low"},
        {"perplexity_before": 0},
        {"num_eval_tokens": None},
    ],
)
def test_a_damaged_report_is_said(wrong: dict[str, object], quantized: tuple[Path, QuantizationReport]) -> None:
    path = quantized[0] / "octavo" / "quantization.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | wrong))
    with pytest.raises(CheckpointError, match="json is not a report of octavo's"):
        model_card(quantized[0])


def test_what_was_not_measured_is_said(bf16: Path) -> None:
    text = model_card(bf16)
    assert "fp8" not in text.split("---")[1] and "- weights: bf16\n" in text
    assert "## Fidelity\n\nNot measured.\n\n## Evaluation\n\nNot measured.\n" in text


def test_every_file_arrives(
    quantized: tuple[Path, QuantizationReport], scores: Path, hub: Hub, run_octavo: RunOctavo
) -> None:
    folder, _ = quantized
    (folder / ".lock").write_text("")
    done = run_octavo("upload", folder, "me/small-fp8", "--eval", scores, "--private")
    assert done.code == 0, done.err
    assert done.out.strip() == f"{hub.url}/me/small-fp8/commit/1"
    sent = hub.files["me/small-fp8", "main"]
    files = {str(path.relative_to(folder)): path for path in folder.rglob("*") if path.is_file()}
    assert set(sent) == set(files) - {".lock"} and {CARD, "model.safetensors", "octavo/numerics.json"} <= set(sent)
    assert all(content == files[name].read_bytes() for name, content in sent.items())
    assert hub.private == {"me/small-fp8": True}
    again = run_octavo("upload", folder, "me/small-fp8", "--revision", "next")
    assert again.code == 0 and b"Evaluation\n\nNot measured" in hub.files["me/small-fp8", "next"][CARD]
    weights = hub.files["me/small-fp8", "next"]["model.safetensors"]
    (folder.parent / "back").mkdir()
    (folder.parent / "back" / "model.safetensors").write_bytes(weights)
    back = SafetensorsReader(folder.parent / "back" / "model.safetensors")
    assert torch.float8_e4m3fn in {back.load(name).dtype for name in back.entries}


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["me/small"], "me/small was not uploaded: .*401.*`hf auth whoami`"),
        (["me/small", "--eval", "NONE"], "NONE is not what `octavo eval --output` writes"),
        (["a/b/c"], "REPO must be owner/name as the Hub takes it, got 'a/b/c'"),
    ],
)
def test_a_mistake_is_said_in_one_line(
    arguments: list[str], words: str, bf16: Path, hub: Hub, run_octavo: RunOctavo, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_TOKEN", "hf_of_another")
    ended = run_octavo("upload", bf16, *arguments)
    assert ended.code == 2
    assert re.search(words, ended.err.replace("\n", " ")), ended.err


def test_no_network_is_said_in_one_line(
    bf16: Path, hub: Hub, run_octavo: RunOctavo, monkeypatch: pytest.MonkeyPatch
) -> None:
    with socket.socket() as taken:  # bound, and nothing listens
        taken.bind(("127.0.0.1", 0))
        monkeypatch.setattr(huggingface_hub.constants, "ENDPOINT", f"http://127.0.0.1:{taken.getsockname()[1]}")
        ended = run_octavo("upload", bf16, "me/small")
    assert ended.code == 2 and "Traceback" not in ended.err
    assert re.search(r"me/small was not uploaded: Connect\w*: .*the network", ended.err.replace("\n", " "))


def test_weights_that_do_not_arrive_are_said(bf16: Path, hub: Hub, run_octavo: RunOctavo) -> None:
    hub.is_full = True
    ended = run_octavo("upload", bf16, "me/small")
    assert ended.code == 2 and re.search(r"me/small was not uploaded: HfHubHTTPError: .*403 Forbidden", ended.err)
    assert hub.files["me/small", "main"] == {}


def test_a_card_of_ones_own_stays(bf16: Path, hub: Hub, run_octavo: RunOctavo) -> None:
    (bf16 / CARD).write_text("# Mine\n")
    assert "stays; give --no-card to upload it" in run_octavo("upload", bf16, "me/small").err
    assert run_octavo("upload", bf16, "me/small", "--no-card").code == 0
    assert hub.files["me/small", "main"][CARD] == b"# Mine\n"
    (bf16 / CARD).unlink()
    assert "## Recipe" in run_octavo("upload", bf16, "me/small", "--dry-run").out
    assert not (bf16 / CARD).exists()
