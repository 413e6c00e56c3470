"""`octavo generate`: text and a line of stats on stdout; the user's mistakes are one line on stderr."""

import dataclasses
from pathlib import Path

import pytest

from octavo import LLM, SamplingParams, save_model
from octavo.errors import ConfigError
from octavo.models import char_tokenizer
from octavo.serve import RequestOutput
from tests.conftest import RunOctavo
from tests.serve.random_models import make_model


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("model") / "m"
    save_model(make_model("llama", "blockwise", num_layers=1), path, tokenizer=char_tokenizer("abcdefgh "))
    return path


@pytest.fixture
def generate(run_octavo: RunOctavo) -> RunOctavo:
    return lambda *arguments: run_octavo("generate", *arguments, "--device", "cpu", "--no-progress")


def test_prints_each_sample_and_the_stats(checkpoint: Path, generate: RunOctavo) -> None:
    options = ["--quantization=fp8", "--kv-cache-dtype=fp8", "--attention-dtype=fp8", "--exact", "--max-tokens=5"]
    first, again = (generate(checkpoint, "--prompt", "abc", "-p", "he", "-n", 2, *options) for _ in range(2))
    assert first.code == 0
    lines = first.out.splitlines()
    assert [line[:3] for line in lines[:2]] == ["abc", "abc"]
    assert "tokens/s" in first.out and "20 tokens in" in first.out
    assert lines[:4] == again.out.splitlines()[:4]  # the same seed, the same text


@pytest.fixture
def run_folder(checkpoint: Path, tmp_path: Path) -> Path:
    """Of a training run, whose newest model is the checkpoint."""
    step = tmp_path / "run" / "checkpoints" / "step-00000002"
    step.mkdir(parents=True)
    (step / "model").symlink_to(checkpoint, target_is_directory=True)
    (step.parent / "LATEST").write_text(step.name)
    return tmp_path / "run"


@pytest.mark.parametrize("arguments", [["generate"], ["serve"], ["doctor"], ["doctor", "mismatch"]], ids=" ".join)
def test_a_runs_folder_means_its_newest_model(
    arguments: list[str], run_folder: Path, monkeypatch: pytest.MonkeyPatch, run_octavo: RunOctavo
) -> None:
    """As far as the line that says so; what comes then is another's test."""

    def stop(*_: object, **__: object) -> None:
        raise ConfigError("far enough")

    monkeypatch.setattr("octavo.cli.serve.check_checkpoint", stop)
    for module in ("generate.LLM", "doctor.open_model_under_test", "doctor_mismatch.open_policies"):
        monkeypatch.setattr(f"octavo.cli.{module}", stop)
    ended = run_octavo(*arguments, run_folder, *(["-p", "a"] if arguments == ["generate"] else []))
    assert ended.code == 2 and "far enough" in ended.err
    assert f"{run_folder}: a run; reading {run_folder / 'checkpoints'}" in ended.err


@pytest.mark.parametrize(
    ("options", "text"),
    [
        (["--temperature", "-1"], "temperature must be"),
        (["--quantization", "tensorwise", "--exact"], "--exact needs"),
        (["--attention-dtype", "fp8"], "needs --kv-cache-dtype fp8"),
        (
            ["--exact", "--tensor-parallel-size", "2", "--tensor-parallel-mode", "reduce"],
            "the model's numerics are; use --tensor-parallel-mode gather",
        ),
        (["--prompt", "a" * 600], "the model's context is 512"),
        (["--prompt", "?!"], "outside the tokenizer's alphabet"),
    ],
)
def test_mistakes_are_one_line_and_exit_code_2(
    checkpoint: Path, options: list[str], text: str, generate: RunOctavo
) -> None:
    ended = generate(checkpoint, "-p", "abc", *options)
    assert ended.code == 2 and ended.out == ""
    assert text in ended.err and "Traceback" not in ended.err


def test_an_output_that_the_context_cuts_is_said(checkpoint: Path, generate: RunOctavo) -> None:
    prompt = "a" * 508
    said = generate(checkpoint, "-p", prompt, "-p", "abc", "--max-tokens", "6").err
    assert said.startswith("note: 1 of 2 samples end where the context does, after 4 tokens or more")
    assert "not at --max-tokens 6: prompt and output have 512 tokens together" in said
    assert generate(checkpoint, "-p", prompt, "--max-tokens", "4").err == ""


def test_a_checkpoint_without_tokenizer(tmp_path: Path, generate: RunOctavo) -> None:
    save_model(make_model("llama", num_layers=1), tmp_path / "m")
    ended = generate(tmp_path / "m", "-p", "abc")
    assert ended.code == 2 and "tokenizer.json" in ended.err


def test_the_summary_is_one_line_where_80_columns_are_too_few(checkpoint: Path, generate: RunOctavo) -> None:
    *_, last = generate(checkpoint, "-p", "abc", "--max-tokens", "2").out.splitlines()
    assert last.startswith("2 tokens in ") and last.endswith(" KV pages")


TEMPLATE = "{% for m in messages %}{{ m.content }} {% endfor %}{% if add_generation_prompt %}h{% endif %}"


def test_chat_puts_prompts_into_the_template(tmp_path: Path, generate: RunOctavo) -> None:
    pytest.importorskip("transformers")
    tokenizer = char_tokenizer("abcdefgh ")
    tokenizer.chat_template = TEMPLATE
    save_model(make_model("llama", "blockwise", num_layers=1), tmp_path / "m", tokenizer=tokenizer)
    llm, greedy = LLM(tmp_path / "m", device="cpu"), SamplingParams(temperature=0, max_tokens=5)
    (answer,) = llm.chat([{"role": "user", "content": "abc"}], greedy)
    assert answer.prompt_token_ids == tokenizer.encode("abc h")
    assert llm.chat([[{"role": "user", "content": "abc"}]] * 2, greedy)[1].outputs == answer.outputs
    shown = generate(tmp_path / "m", "-p", "abc", "--chat", "--temperature", "0", "--max-tokens", "5").out
    assert shown.startswith(f"abc\n{answer.outputs[0].text}")


def test_text_is_printed_as_it_is(checkpoint: Path, generate: RunOctavo, monkeypatch: pytest.MonkeyPatch) -> None:
    """No tab becomes spaces, no colons an emoji, no carriage return is lost."""
    text, plainly = "[x]\t:x:\r\x1b[0m \n", LLM.generate

    def say(llm: LLM, prompts: list[str], *args: object, **options: object) -> list[RequestOutput]:
        outputs = plainly(llm, ["a"] * len(prompts), *args, **options)
        (sample,) = outputs[0].outputs
        outputs[0].outputs[:] = [dataclasses.replace(sample, text=text)]
        return outputs

    monkeypatch.setattr(LLM, "generate", say)
    assert f"\t:x:{text}\n" in generate(checkpoint, "-p", "\t:x:", "--max-tokens", 1).out
