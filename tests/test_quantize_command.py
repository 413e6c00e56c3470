"""`octavo quantize`: options reach the library, what is printed, one red line for a mistake."""

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest

from octavo import cli
from octavo.models import ModelConfig, char_tokenizer, load_model, save_model
from octavo.models.checkpoint.inspect import inspect_checkpoint

TEXT = "the quick brown fox jumps over the lazy dog. " * 20


Octavo = Callable[..., SimpleNamespace]


@pytest.fixture
def octavo(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Octavo:
    """octavo(argument, ...) runs the command: its returncode, stdout and stderr."""

    def run(*args: object) -> SimpleNamespace:
        monkeypatch.setattr("sys.argv", ["octavo", *map(str, args)])
        with pytest.raises(SystemExit) as exit_:
            cli.main()
        said = capsys.readouterr()
        return SimpleNamespace(returncode=exit_.value.code, stdout=said.out, stderr=said.err)

    return run


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("quantize")
    config = ModelConfig("llama", 64, 128, 128, 1, 4, 4, 32, max_position_embeddings=64)
    save_model(load_model(config), directory / "model", tokenizer=char_tokenizer("".join(sorted(set(TEXT)))))
    (directory / "text.txt").write_text(TEXT)
    return directory / "model"


def test_it_writes_a_checkpoint_and_says_what_it_costs(checkpoint: Path, tmp_path: Path, octavo: Octavo) -> None:
    text, out = checkpoint.parent / "text.txt", tmp_path / "out"
    done = octavo(
        *("quantize", checkpoint, out, "--dialect", "fp8-tensor", "--activation", "static", "--kv-scales"),
        *("--calibration", text, "--num-calibration-samples", 8, "--eval-samples", 4),
        *("--max-seq-length", 32, "--ignore", "o_proj"),
    )
    assert done.returncode == 0, done.stderr
    assert inspect_checkpoint(out).dialect == "fp8-tensor-static"
    assert "model.layers.*.self_attn.o_proj  1      ignore 'o_proj'" in done.stdout
    assert "6 modules in FP8, 3 in bf16, dialect fp8-tensor-static" in done.stdout
    assert "calibrated with 256 tokens" in done.stdout
    assert "perplexity over 124 tokens: " in done.stdout
    assert "with the KV cache in FP8 too: " in done.stdout
    stages = ["loading", "calibrating", "perplexity in bf16", "writing", "perplexity in FP8"]
    assert done.stderr.splitlines() == [*stages, "perplexity in FP8 with the KV cache"]


def test_former_options_are_taken_with_a_warning(checkpoint: Path, tmp_path: Path, octavo: Octavo) -> None:
    options = (*("--samples", 4), *("--seq-len", 16), *("--exclude", "o_proj"), *("--dialect", "fp8-tensor-static"))
    options += ("--ignore", "down_proj")  # beside the former name
    text = checkpoint.parent / "text.txt"
    done = octavo("quantize", checkpoint, tmp_path / "out", "--calibration", text, *options)
    assert done.returncode == 0, done.stderr
    assert all(f"ignore '{name}'" in done.stdout for name in ("o_proj", "down_proj"))
    assert "calibrated with 64 tokens" in done.stdout
    named = [line.split("; use ")[1] for line in done.stderr.splitlines() if line.startswith("warning: ")]
    assert named == ["--num-calibration-samples", "--max-seq-length", "--ignore"]


def test_a_runs_folder_means_its_newest_model(checkpoint: Path, tmp_path: Path, octavo: Octavo) -> None:
    step = tmp_path / "step-00000002"
    step.mkdir()
    (step / "model").symlink_to(checkpoint, target_is_directory=True)
    done = octavo("quantize", step, tmp_path / "out", "--dialect", "fp8-block")
    assert done.returncode == 0, done.stderr
    assert done.stderr.startswith(f"{step}: a run; reading {step / 'model'}\n")
    assert inspect_checkpoint(tmp_path / "out").dialect == "fp8-block"


@pytest.mark.parametrize(("scheme", "dialect"), [("FP8_DYNAMIC", "channel"), ("FP8", "tensor"), ("FP8_BLOCK", "block")])
def test_the_schemes_of_llm_compressor(scheme, dialect, checkpoint, tmp_path, octavo):
    text = checkpoint.parent / "text.txt"
    options = ("--calibration", text, "--num-calibration-samples", 4, "--max-seq-length", 16)
    done = octavo("quantize", checkpoint, tmp_path / "out", "--scheme", scheme, *options)
    assert done.returncode == 0, done.stderr
    assert inspect_checkpoint(tmp_path / "out").dialect == f"compressed-tensors-{dialect}"


def test_a_mistake_is_one_line(checkpoint: Path, tmp_path: Path, octavo: Octavo) -> None:
    done = octavo("quantize", checkpoint, tmp_path / "out")
    assert done.returncode == 2
    assert done.stderr.startswith("error: --dialect must be one of fp8-block, ")
    assert done.stderr.endswith(", and is not given\n")
    done = octavo("quantize", checkpoint, tmp_path / "out", "--dialect", "fp8_blok")
    assert done.returncode == 2
    assert done.stderr.startswith("error: --dialect must be one of fp8-block")
    assert done.stderr.endswith("got 'fp8_blok'; did you mean 'fp8-block'?\n")
    assert len(done.stderr.splitlines()) == 1
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("pattern", ["*.[qk]_proj", "re:.*q_proj[/]?", "re:.*q(:x:)?_proj"])
def test_a_pattern_is_shown_as_it_was_given(checkpoint: Path, tmp_path: Path, octavo: Octavo, pattern: str) -> None:
    done = octavo("quantize", checkpoint, tmp_path / "[out] :x:", "--dialect", "fp8-tensor", "--ignore", pattern)
    assert done.returncode == 0, done.stderr
    assert f"ignore {pattern!r}" in done.stdout
    assert f"{tmp_path}/[out] :x:: " in done.stdout
