"""`octavo serve`: what it says before a server runs; tests/serve/http/test_chaos.py runs it whole."""

import importlib.util
import json
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("fastapi")

from octavo.cli.serve import Asked, default_names
from octavo.env import admin_key_from_env, api_key_from_env
from octavo.errors import BackendError, CheckpointError, ConfigError, KeywordError
from octavo.models import char_tokenizer, save_model
from octavo.serve import SamplingParams
from octavo.serve.engine import EngineConfig, served_tokens
from octavo.serve.engine.driver import EngineDriver
from octavo.serve.http import ServerConfig
from tests.conftest import RunOctavo
from tests.serve.random_models import make_config, make_model

HOW = {"quantization": None, "kv_cache_dtype": "auto", "attention_dtype": "auto", "exact": False, "device": "cpu"}


def test_without_the_extra(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, run_octavo: RunOctavo) -> None:
    find = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "fastapi" else find(name))
    ended = run_octavo("serve", tmp_path)
    assert ended.code == 2
    assert "octavo serve needs fastapi; run pip install -e '.[serve]' in octavo's checkout" in ended.err


@pytest.mark.parametrize(
    ("options", "text"),
    [
        (["--max-n", "0"], "--max-n must be at least 1"),
        (["--weights-dir", "."], "--weights-dir must be a folder, and goes with an admin key"),
        (["--api-key", " "], "--api-key must not be empty"),
        (["--host", "no such host"], "cannot listen at no such host"),
        (["--kv-cache-dtype", "fp9"], "--kv-cache-dtype must be auto, bf16 or fp8, got 'fp9'"),
        (["--attention-dtype", "fp8"], "needs --kv-cache-dtype fp8, got 'bf16'"),
        (["--quantization", "int4"], "unknown recipe 'int4'"),
        (["--quantization", "tensorwise", "--exact"], "--exact needs activation scales of one token each"),
        (["--device", "tpu9"], "device must be 'cpu', 'cuda' or 'cuda:N', got 'tpu9'"),
        (["--max-num-seqs", "0"], "--max-num-seqs must be an integer of at least 1"),
        (["--max-model-len", "600"], "--max-model-len 600 is more than the model's max_position_embeddings=512"),
        (["--num-kv-pages", "1", "--max-model-len", "100"], "--max-model-len 100 is more than the 64 tokens of the KV"),
        (["--tokenizer", "nowhere.json"], "--tokenizer: there is no nowhere.json"),
        (["--chat-template", "nowhere.jinja"], "--chat-template must be a file with a Jinja template, got 'nowhere.ji"),
        (["--dtype", "half"], "dtype must be 'auto', 'bfloat16' or 'float32', got 'half'"),
        (["--quantization", "awq"], "leave it out: a checkpoint's own format is read from its config.json"),
        (["--num-kv-pages", "1000000000"], "--num-kv-pages 1000000000 takes"),
        (["--data-parallel-size", "0"], "Invalid value for '--data-parallel-size'"),
        (["-dp=2", "--max-num-seqs", "0"], "--max-num-seqs must be an integer of at least 1"),
        (["--pipeline-parallel-size", "2"], "2; give --tensor-parallel-size, make one LLM a GPU, or start octavo"),
        (["-tp", "2", "--tensor-parallel-mode", "sum"], "error: --tensor-parallel-mode must be one of ('gather', 're"),
        (["--swap-space"], "octavo serve: --swap-space needs a value"),
        (["--enable-auto-tool-choice"], "does not take --enable-auto-tool-choice; octavo renders no tools"),
        (["--tool_call_parser", "hermes"], "octavo serve does not take --tool-call-parser hermes"),
        (["--no-enable-chunked-prefill"], "does not take --no-enable-chunked-prefill; long prompts always come in pi"),
        (
            ["--max-model-len", "64", "--max_seq_len=32"],
            "octavo serve: --max-model-len 64 and --max_seq_len 32 are one option by two names; give one of them",
        ),
        (["--num-gpu-blocks-override", "7", "--num-kv-pages=8"], "-blocks-override 7 and --num-kv-pages 8 are one opt"),
        (["-q", "fp8", "--quantization", "rowwise"], "-q fp8 and --quantization rowwise are one option by two names"),
        (["--no-such-flag"], "No such option: --no-such-flag"),
    ],
)
def test_mistakes_are_one_line_and_exit_code_2(
    options: list[str], text: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, run_octavo: RunOctavo
) -> None:
    # no weights lie there: what is refused is refused before anything is loaded
    (tmp_path / "config.json").write_text(json.dumps(make_config("llama", num_layers=1).to_hf()))
    monkeypatch.setattr("octavo.cli.serve.LLM", lambda *_, **__: pytest.fail("a model was loaded"))
    ended = run_octavo("serve", tmp_path, *options)
    assert ended.code == 2 and text in ended.err


def test_a_checkpoint_without_a_tokenizer_is_said_at_the_start(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "config.json").write_text(json.dumps(make_config("llama", num_layers=1).to_hf()))
    said = [f"{tmp_path} has no tokenizer.json: token ids only, which return_token_ids asks for; --tokenizer names one"]
    for tokenizer, messages in ((None, said), (tmp_path, [])):
        caplog.clear()
        Asked(tmp_path, tokenizer, HOW, EngineConfig()).check()
        assert caplog.messages == messages


def test_a_folder_that_is_no_checkpoint(tmp_path: Path, run_octavo: RunOctavo) -> None:
    ended = run_octavo("serve", tmp_path)
    assert ended.code == 2 and "no config.json there" in ended.err


@pytest.mark.parametrize(
    ("path", "wanted"),
    [
        ("runs/mine/checkpoints/step-00000200/model", ["mine-step-200", "mine"]),
        ("runs/mine/checkpoints/step-00000000/model", ["mine-step-0", "mine"]),
        ("runs/mine/checkpoints/step-00000200", ["step-00000200"]),
        ("Qwen3-8B/model", ["model"]),
        ("Qwen3-8B", ["Qwen3-8B"]),
    ],
)
def test_the_names_that_a_model_is_served_under(tmp_path: Path, path: str, wanted: list[str]) -> None:
    assert default_names(tmp_path / path) == wanted


def test_keys_from_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("OCTAVO_API_KEY", raising=False)
    monkeypatch.setenv("OCTAVO_ADMIN_KEY", "secret")
    assert api_key_from_env() is None
    assert admin_key_from_env() == "secret"


@pytest.mark.parametrize(
    ("max_num_seqs", "asked", "wanted"),
    [(1, None, (1024, 512)), (256, None, (1024, 512)), (1500, None, (1500, 750)), (1, 1, (1, 1)), (8, 64, (64, 32))],
)
def test_a_step_behind_a_server_is_short(max_num_seqs: int, asked: int | None, wanted: tuple[int, int]) -> None:
    config = EngineConfig(**served_tokens(max_num_seqs, asked), max_num_seqs=max_num_seqs)
    assert (config.max_num_batched_tokens, config.max_num_mixed_tokens) == wanted


def test_options_of_vllm_that_ask_for_what_is_so_anyway_are_taken(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, run_octavo: RunOctavo
) -> None:
    found: list[object] = []

    def check(self: Asked) -> None:
        found.extend((self.model, self.how["quantization"], self.how["kv_cache_dtype"], self.dtype))
        found.extend((self.limits.max_model_len, self.limits.enforce_eager))
        raise BackendError("far enough")

    monkeypatch.setattr(Asked, "check", check)
    harmless = ("--trust-remote-code", "--pipeline-parallel-size=1", "--swap-space", "4", "--disable-log-requests")
    ours = ("--kv_cache_dtype=fp8", "--max_model_len", "64", "-q", "fp8", "--torch-dtype", "float32", "--enforce-eager")
    ours += ("--max-seq-len=64",)  # by two names, with one value
    *notes, error = run_octavo("serve", *harmless, "--model", tmp_path, *ours).err.splitlines()
    assert found == [tmp_path, "fp8", "fp8", "float32", 64, True]
    names = ("--trust-remote-code", "--pipeline-parallel-size", "--swap-space", "--disable-log-requests")
    assert notes == [f"{name} is taken and changes nothing here" for name in names]
    assert error == "error: far enough"


def test_a_chat_template_of_ones_own(tmp_path: Path) -> None:
    tokenizer = char_tokenizer("ab")
    tokenizer.chat_template = "{{ messages }}"
    save_model(make_model("llama", "bf16", num_layers=1), tmp_path / "m", tokenizer=tokenizer)
    (tmp_path / "own.jinja").write_text("{{ messages[0]['content'] }}")
    save_model(make_model("llama", "bf16", num_layers=1), tmp_path / "ids alone")
    for template, wanted in ((None, "{{ messages }}"), (tmp_path / "own.jinja", "{{ messages[0]['content'] }}")):
        asked = Asked(tmp_path / "m", None, HOW, EngineConfig(num_kv_pages=4), chat_template=template, dtype="float32")
        engine = asked.build()
        assert engine.tokenizer is not None and engine.tokenizer.chat_template == wanted
        assert next(engine.model.parameters()).dtype == torch.float32
    with pytest.raises(ConfigError, match=r"--chat-template needs a tokenizer, and .* has none; give --tokenizer"):
        Asked(tmp_path / "ids alone", None, HOW, EngineConfig(), chat_template=tmp_path / "own.jinja").check()
    (tmp_path / "latin1.jinja").write_bytes(b"\xe9{{ messages }}")
    with pytest.raises(ConfigError, match=r"--chat-template must be a file with a Jinja template, got .* can't decode"):
        Asked(tmp_path / "m", None, HOW, EngineConfig(), chat_template=tmp_path / "latin1.jinja").check()


def test_what_is_served_is_said(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    save_model(make_model("llama", "bf16", num_layers=1), tmp_path)
    how = HOW | {"quantization": "rowwise", "kv_cache_dtype": "fp8", "exact": True}
    with caplog.at_level("INFO"):
        Asked(tmp_path, None, how, EngineConfig(num_kv_pages=4)).build()
    assert caplog.messages[-1] == "linears rowwise, attention bf16, 4 KV pages in fp8, exact"


@pytest.mark.parametrize("recipe", ["bf16", "blockwise"])
def test_the_recipe_of_training_is_said_where_another_one_is_served(
    recipe: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    save_model(make_model("llama", recipe, num_layers=1), tmp_path)
    with caplog.at_level("INFO"):
        for quantization in (None, "blockwise"):
            Asked(tmp_path, None, HOW | {"quantization": quantization}, EngineConfig(num_kv_pages=4)).build()
    said = [text for text in caplog.messages if text.startswith("trained")]
    assert said == ["trained under blockwise; --quantization blockwise serves it so"] * (recipe == "blockwise")


def test_the_ends_of_sequence_of_a_generation_config(tmp_path: Path) -> None:
    save_model(make_model("llama", "bf16", num_layers=1), tmp_path)
    how = HOW | {"kv_cache_dtype": "fp8"}
    file, limits = tmp_path / "generation_config.json", EngineConfig(num_kv_pages=4)
    file.write_text("[]")
    with pytest.raises(CheckpointError, match=r"generation_config\.json: .*correct it or remove it"):
        Asked(tmp_path, None, how, limits).check()
    file.write_text(json.dumps({"eos_token_id": [*range(96), 10**6]}))  # whatever comes first
    for kind in ("per_token_head", "engine"):
        engine = Asked(tmp_path, None, how | {"kv_scales": kind}, limits).build()
        (request,) = EngineDriver(engine).run([engine.make_input([5, 6, 7], SamplingParams(max_tokens=8))])
        assert [seq.num_tokens for seq in request.sequences] == [4], kind


def test_the_limits_that_were_asked_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, run_octavo: RunOctavo) -> None:
    found = []

    def check(self: Asked) -> None:
        limits = self.limits
        found.append((limits.max_num_batched_tokens, limits.num_kv_pages, limits.enable_prefix_caching))
        raise BackendError("far enough")

    monkeypatch.setattr(Asked, "check", check)
    run_octavo("serve", tmp_path)
    run_octavo("serve", tmp_path, "--max-num-batched-tokens", "4096", "--no-enable-prefix-caching")
    run_octavo("serve", tmp_path, "--num-gpu-blocks-override", "7", "--enable-prefix-caching")
    assert found == [(1024, None, True), (4096, None, False), (1024, 7, True)]


@pytest.mark.parametrize(
    ("options", "wanted", "ours"),
    [
        (["--no-prefix-caching"], (False, 1024), "--no-enable-prefix-caching"),
        (["--prefix-caching"], (True, 1024), "--enable-prefix-caching"),
        (["--max-queue", "7"], (True, 7), "--max-num-waiting"),
        (["--max-queue=7"], (True, 7), "--max-num-waiting"),
        (["--max-num-waiting", "7"], (True, 7), ""),
    ],
    ids=str,
)
def test_former_names_of_options_are_taken_with_a_warning(
    options: list[str],
    wanted: object,
    ours: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    run_octavo: RunOctavo,
) -> None:
    found = []
    monkeypatch.setattr(Asked, "check", lambda self: found.append(self.limits.enable_prefix_caching))
    monkeypatch.setattr("octavo.serve.http.run_server", lambda build, config, *_: found.append(config.max_num_waiting))
    warned = run_octavo("serve", tmp_path, *options).err
    said = f"warning: {options[0].partition('=')[0]} leaves octavo with the next release; use {ours}\n" if ours else ""
    assert (tuple(found), warned) == (wanted, said)


@pytest.mark.parametrize("options", [(), ("-tp", "2")])
def test_kernels_are_compiled_by_a_fork_from_before_the_server(
    options: tuple[str, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, run_octavo: RunOctavo
) -> None:
    """But for a model that is cut, which compiles none beside its loading."""
    told: list[object] = []
    monkeypatch.setattr(Asked, "check", lambda _: None)
    monkeypatch.setattr("octavo.cli.serve.fork_ahead", told.append)
    monkeypatch.setattr("octavo.serve.http.run_server", lambda *_: told.append("server") or 0)
    assert run_octavo("serve", tmp_path, "--device", "cpu", *options).code == 0
    assert told == [*([] if options else [torch.device("cpu")]), "server"]


def test_replicas_are_told_what_one_server_would_be(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, run_octavo: RunOctavo
) -> None:
    save_model(make_model("llama", "rowwise", num_layers=1), tmp_path / "model")
    found: list[Any] = []

    def run(build: Any, config: ServerConfig, *address: object, devices: list[str | None]) -> int:
        found.extend((pickle.loads(pickle.dumps(build)).__self__, config, address, devices))
        return 3

    monkeypatch.setattr("octavo.serve.router.run_router", run)
    options = ("--device", "cpu", "--max-num-seqs", "7", "--port", "1234", "--max-n", "5", "-tp", "2")
    assert run_octavo("serve", tmp_path / "model", "--data-parallel-size", "3", *options).code == 3
    asked, config, address, devices = found
    assert (asked.model, asked.limits.max_num_seqs, asked.tensor_parallel) == (tmp_path / "model", 7, (2, None))
    assert (config.max_n, address, devices) == (5, ("127.0.0.1", 1234), [None] * 3)


def test_the_former_name_of_a_servers_limit_is_taken_with_a_warning() -> None:
    with pytest.warns(DeprecationWarning, match=r"max_queue=...\) leaves .*; use max_num_waiting") as said:
        assert ServerConfig(("m",), max_queue=7).max_num_waiting == 7  # type: ignore[call-arg]
    assert said[0].filename == __file__
    with pytest.raises(KeywordError, match="give max_num_waiting alone"):
        ServerConfig(("m",), max_queue=7, max_num_waiting=7)  # type: ignore[call-arg]
