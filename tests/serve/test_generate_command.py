"""`octavo generate`: text and a line of stats on stdout; the user's mistakes are one line on stderr."""

import sys
from pathlib import Path

import pytest

from octavo import LLM, SamplingParams, save_model
from octavo.cli import main
from octavo.errors import ConfigError
from octavo.models import char_tokenizer
from tests.serve.random_models import make_model


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("model") / "m"
    save_model(make_model("llama", "blockwise", num_layers=1), path, tokenizer=char_tokenizer("abcdefgh "))
    return path


def run(monkeypatch: pytest.MonkeyPatch, *arguments: object) -> int:
    monkeypatch.setattr(sys, "argv", ["octavo", "generate", *map(str, arguments), "--device", "cpu"])
    with pytest.raises(SystemExit) as ended:
        main()
    return int(ended.value.code or 0)


def test_prints_each_sample_and_the_stats(
    checkpoint: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    in_fp8 = ["--quantization=fp8", "--kv-cache-dtype=fp8", "--attention-dtype=fp8", "--exact"]
    texts = []
    for _ in range(2):
        assert (
            run(
                monkeypatch,
                checkpoint,
                "--prompt",
                "abc",
                "-p",
                "he",
                "--max-tokens=5",
                "-n",
                "2",
                "--no-progress",
                *in_fp8,
            )
            == 0
        )
        texts.append(capsys.readouterr().out)
    lines = texts[0].splitlines()
    assert [line[:3] for line in lines[:2]] == ["abc", "abc"]
    assert "tokens/s" in texts[0]
    assert "20 tokens in" in texts[0]
    assert texts[0].splitlines()[:4] == texts[1].splitlines()[:4]  # the same seed, the same text


@pytest.fixture
def run_folder(checkpoint: Path, tmp_path: Path) -> Path:
    """Of a training run, whose newest model is the checkpoint."""
    step = tmp_path / "run" / "checkpoints" / "step-00000002"
    step.mkdir(parents=True)
    (step / "model").symlink_to(checkpoint, target_is_directory=True)
    (step.parent / "LATEST").write_text(step.name)
    return tmp_path / "run"


def test_a_runs_folder_means_its_newest_model(
    run_folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(monkeypatch, run_folder, "-p", "abc", "--max-tokens", "2", "--no-progress") == 0
    assert f"{run_folder}: a run; reading {run_folder / 'checkpoints'}" in capsys.readouterr().err


@pytest.mark.parametrize("arguments", [["serve"], ["doctor"], ["doctor", "mismatch"]], ids=" ".join)
def test_so_it_does_for_other_commands(
    arguments: list[str], run_folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """As far as the line that says so; what comes then is another's test."""

    def stop(*_: object, **__: object) -> None:
        raise ConfigError("far enough")

    monkeypatch.setattr("octavo.cli.serve.check_checkpoint", stop)
    for module in ("octavo.cli.doctor.open_model_under_test", "octavo.cli.doctor_mismatch.open_policies"):
        monkeypatch.setattr(module, stop)
    monkeypatch.setattr(sys, "argv", ["octavo", *arguments, str(run_folder)])
    with pytest.raises(SystemExit) as ended:
        main()
    captured = capsys.readouterr()
    assert ended.value.code == 2 and "far enough" in captured.err
    assert f"{run_folder}: a run; reading {run_folder / 'checkpoints'}" in captured.err


@pytest.mark.parametrize(
    ("options", "text"),
    [
        (["--temperature", "-1"], "temperature must be"),
        (["--quantization", "tensorwise", "--exact"], "exact=True needs"),
        (["--attention-dtype", "fp8"], "needs kv_cache_dtype='fp8'"),
        (["--prompt", "a" * 600], "the model's context is 512"),
        (["--prompt", "?!"], "outside the tokenizer's alphabet"),
    ],
)
def test_mistakes_are_one_line_and_exit_code_2(
    checkpoint: Path,
    options: list[str],
    text: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert run(monkeypatch, checkpoint, "-p", "abc", "--no-progress", *options) == 2
    captured = capsys.readouterr()
    assert text in captured.err
    assert "Traceback" not in captured.err
    assert captured.out == ""


def test_an_output_that_the_context_cuts_is_said(
    checkpoint: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    prompt = "a" * 508
    assert run(monkeypatch, checkpoint, "-p", prompt, "-p", "abc", "--max-tokens", "6", "--no-progress") == 0
    captured = capsys.readouterr()
    assert captured.err.startswith("note: 1 of 2 samples end where the context does, after 4 tokens or more")
    assert "not at --max-tokens 6: prompt and output have 512 tokens together" in captured.err
    assert run(monkeypatch, checkpoint, "-p", prompt, "--max-tokens", "4", "--no-progress") == 0
    assert capsys.readouterr().err == ""


def test_a_checkpoint_without_tokenizer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    save_model(make_model("llama", num_layers=1), tmp_path / "m")
    assert run(monkeypatch, tmp_path / "m", "-p", "abc") == 2
    assert "tokenizer.json" in capsys.readouterr().err


TEMPLATE = "{% for m in messages %}{{ m.content }} {% endfor %}{% if add_generation_prompt %}h{% endif %}"


def test_chat_puts_prompts_into_the_template(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("transformers")
    tokenizer = char_tokenizer("abcdefgh ")
    tokenizer.chat_template = TEMPLATE
    model = make_model("llama", "blockwise", num_layers=1)
    save_model(model, tmp_path / "m", tokenizer=tokenizer)
    llm, greedy = LLM(tmp_path / "m", device="cpu"), SamplingParams(temperature=0, max_tokens=5)
    (answer,) = llm.chat([{"role": "user", "content": "abc"}], greedy)
    assert answer.prompt_token_ids == tokenizer.encode("abc h")
    assert llm.chat([[{"role": "user", "content": "abc"}]] * 2, greedy)[1].outputs == answer.outputs
    short = ["--max-tokens", "5", "--no-progress"]
    assert run(monkeypatch, tmp_path / "m", "-p", "abc", "--chat", "--temperature", "0", *short) == 0
    assert capsys.readouterr().out.startswith(f"abc\n{answer.outputs[0].text}")


def test_chat_without_a_template_takes_octavos(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    save_model(make_model("llama", num_layers=1), tmp_path / "m", tokenizer=char_tokenizer("abcsitnUerA:\n"))
    assert run(monkeypatch, tmp_path / "m", "-p", "abc", "--chat", "--max-tokens", "2", "--no-progress") == 0
    assert capsys.readouterr().out.startswith("abc\n")
