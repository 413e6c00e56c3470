"""LLM: what it takes and refuses, text in and out, streaming, refit."""

import copy
import dataclasses
import json
import pickle
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from safetensors.torch import load_file, save_file

from octavo import LLM, SamplingParams, save_model, sequence_logprobs
from octavo.errors import (
    CheckpointError,
    ConfigError,
    DataError,
    KeywordError,
    NonFiniteError,
    RecipeError,
    RequestError,
)
from octavo.models import Decoder, Tokenizer, char_tokenizer, train_bpe
from octavo.nn import live_tensors
from octavo.serve.engine import Engine, EngineConfig
from octavo.serve.outputs import with_texts
from tests.fallback_tokenizer import fallback_tokenizer
from tests.serve.random_models import make_model

ALPHABET = "abcdefghijklmnopqrstuvwxyz .,!?"  # fewer tokens than the model's vocabulary: the rest has no text


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return char_tokenizer(ALPHABET)


@pytest.fixture(scope="module")
def model() -> Decoder:
    return make_model("llama", "rowwise", num_layers=1)


@pytest.fixture(scope="module")
def llm(model: Decoder, tokenizer: Tokenizer) -> LLM:
    return LLM(model, tokenizer, num_kv_pages=12)


@pytest.mark.parametrize(
    ("call", "text"),
    [
        (lambda llm: llm.generate([[]]), "at least one token"),
        (lambda llm: llm.generate(["abc", ""]), "at least one token"),
        (lambda llm: llm.generate([[1, 96]]), "from 0 to 95, got 96"),
        (lambda llm: llm.generate([[1, -1]]), "got -1"),
        (lambda llm: llm.generate([[1, 2.0]]), "got 2.0"),
        (lambda llm: llm.generate([[1, True]]), "got True"),
        (lambda llm: llm.generate([1, 2, 3]), r"\[\[1, 2, 3\]\]"),
        (lambda llm: llm.generate([[1] * 512]), "the model's context is 512"),
        (lambda llm: llm.generate([{"prompt": "a", "seed": 1}]), r"and nothing else; got \['prompt', 'seed'\]"),
        (lambda llm: llm.generate([{"prompt_ids": [1]}]), r"got \['prompt_ids'\]"),
        (lambda llm: llm.generate([{"prompt": None}]), r"got \['prompt'\]"),
        (lambda llm: llm.generate(["a", "b"], [SamplingParams()]), "2 prompts need as many"),
        (lambda llm: llm.generate("a", {"n": 2}), r"must be SamplingParams, or a list of them, got \{'n': 2\}"),
        (lambda llm: llm.generate(["a"], ["b"]), "must be SamplingParams, or a list of them, got 'b'"),
        (lambda llm: llm.chat([{"role": "user", "content": [{"type": "image_url"}]}]), "got {'type': 'image_url'"),
        (lambda llm: llm.chat([{"role": "user", "content": [{"type": "text"}]}]), "alone, .*; got {'type': 'text'}"),
        (lambda llm: llm.chat("hello"), "a message must be a dict of role and content, got 'h'"),
        (lambda llm: llm.generate("a", 5), "must be SamplingParams, or a list of them, got 5"),
    ],
)
def test_bad_requests_are_refused_and_leave_nothing_behind(llm: LLM, call: Callable[[LLM], object], text: str) -> None:
    before = llm.stats.num_requests
    with pytest.raises(RequestError, match=text):
        call(llm)
    assert not llm.engine.has_unfinished
    assert llm.stats.num_requests == before


def test_prompts_may_be_dicts(llm: LLM) -> None:
    params = SamplingParams(max_tokens=3, temperature=0.0)
    plain = llm.generate(["abc", [1, 2, 3]], params)
    found = llm.generate([{"prompt": "abc"}, {"prompt_token_ids": [1, 2, 3]}], params)
    assert [(out.prompt, out.outputs) for out in found] == [(out.prompt, out.outputs) for out in plain]
    assert [*llm.stream({"prompt": "abc"}, params)][-1].outputs == plain[0].outputs
    assert llm.generate({"prompt": "abc", "multi_modal_data": None}, params)[0].outputs == plain[0].outputs
    (both,) = llm.generate({"prompt": "its text", "prompt_token_ids": [1, 2, 3]}, params)
    assert (both.prompt, both.prompt_token_ids, both.outputs) == ("its text", [1, 2, 3], plain[1].outputs)


@pytest.mark.parametrize("num_best", [0, 2])
def test_logprobs_have_the_texts_of_their_tokens(model: Decoder, llm: LLM, tokenizer: Tokenizer, num_best: int) -> None:
    params = SamplingParams(max_tokens=6, logprobs=num_best, prompt_logprobs=num_best, ignore_eos=True, seed=1)
    (output,) = llm.generate("abc", params)
    rows = [*(output.outputs[0].logprobs or ()), *(row for row in output.prompt_logprobs or () if row)]
    assert len(rows) == 6 + 2
    for row in rows:
        for token_id, entry in row.items():
            assert entry.decoded_token == tokenizer.decode([token_id], skip_special_tokens=False)
    (without,) = LLM(model, num_kv_pages=4).generate([output.prompt_token_ids], params)
    assert {entry.decoded_token for row in without.prompt_logprobs or () if row for entry in row.values()} == {None}
    for kept in (pickle.loads(pickle.dumps(output)), copy.deepcopy(output)):
        texts = [[entry.decoded_token for entry in row.values()] for row in kept.outputs[0].logprobs]
        assert texts == [[entry.decoded_token for entry in row.values()] for row in rows[:6]]


def test_the_tokenizer_of_transformers(model: Decoder) -> None:
    letters = char_tokenizer(ALPHABET)
    letters.chat_template = "{{ messages[0]['content'] }}{% if add_generation_prompt %}?{% endif %}"
    found = LLM(model, letters, num_kv_pages=4).get_tokenizer()
    messages = [{"role": "user", "content": "hello"}]
    assert found.apply_chat_template(messages, tokenize=False, add_generation_prompt=True) == "hello?"
    assert found.encode("hello") == letters.encode("hello") and found.eos_token_id == letters.eos_id
    with pytest.raises(RequestError, match="has no tokenizer"):
        LLM(model, num_kv_pages=4).get_tokenizer()


def test_what_vllms_llm_has_beyond_octavos_says_what_to_do(llm: LLM) -> None:
    for name, text in (
        ("embed", "'embed'; an LLM generates"),
        ("reset_prefix_cache", r"llm.engine.reset_prefix_cache\(\) does it"),
        ("beam_search", "sample n answers"),
        ("nothing_of_the_kind", "'LLM' object has no attribute 'nothing_of_the_kind'$"),
    ):
        with pytest.raises(AttributeError, match=text):
            getattr(llm, name)
    assert not hasattr(llm, "sleep")
    with pytest.raises(AttributeError, match="no attribute 'generate_'") as caught:
        llm.generate_  # noqa: B018
    assert (caught.value.name, caught.value.obj) == ("generate_", llm)  # by which Python says: did you mean 'generate'?
    with pytest.raises(AttributeError, match="no attribute 'engine'"):  # what is missing behind a property
        LLM.__new__(LLM).model  # noqa: B018


def test_a_prompt_longer_than_the_whole_cache(model: Decoder) -> None:
    llm = LLM(model, num_kv_pages=2)
    with pytest.raises(RequestError, match=r"128 tokens, but the whole KV cache holds 128 \(2 pages of 64\)"):
        llm.generate([[1] * 128])
    assert len(llm.generate([[1] * 127], SamplingParams(ignore_eos=True))[0].outputs[0].token_ids) == 1
    with pytest.raises(RequestError, match="max_model_len is 10"):
        LLM(model, max_model_len=10).generate([[1] * 10])


def test_text_needs_a_tokenizer(model: Decoder) -> None:
    llm = LLM(model)
    with pytest.raises(RequestError, match="needs a tokenizer"):
        llm.generate("abc")
    with pytest.raises(RequestError, match="stop strings need a tokenizer"):
        llm.generate([[1, 2]], SamplingParams(stop="a"))
    assert llm.generate([[1, 2]], SamplingParams(max_tokens=2))[0].outputs[0].text == ""


@pytest.mark.parametrize(
    ("given", "text"),
    [
        ({"quantization": "blockwise"}, "quantization='blockwise'.*'rowwise'"),
        ({"quantization": "bf16"}, "quantization='bf16'.*'rowwise'"),
        ({"kv_cache_dtype": "bf16"}, "kv_cache_dtype='bf16'.*'fp8'"),
        ({"attention_dtype": "fp8"}, "attention_dtype='fp8'.*'bf16'"),
        ({"kv_scales": "engine"}, "kv_scales='engine'.*'per_token_head'"),
        ({"exact": False}, "exact=False.*True"),
        ({"device": "cuda"}, "device='cuda'.*cpu"),
    ],
)
def test_a_models_numerics_are_its_own(model: Decoder, given: dict[str, object], text: str) -> None:
    with pytest.raises(ConfigError, match=text):
        LLM(model, **given)  # type: ignore[arg-type]


def test_asking_for_what_the_model_is_is_fine(model: Decoder) -> None:
    same = LLM(model, quantization="rowwise", kv_cache_dtype="fp8_e4m3", exact=True, device="cpu", num_kv_pages=4)
    assert same.model is model
    assert LLM(model, quantization="fp8", kv_cache_dtype="auto", num_kv_pages=4).model.numerics == model.numerics


@pytest.mark.parametrize(
    ("given", "text"),
    [
        ({"max_num_seqs": 0}, "max_num_seqs"),
        ({"max_num_seqs": 64, "max_num_batched_tokens": 32}, "at least max_num_seqs=64"),
        ({"max_model_len": 513}, "max_position_embeddings=512"),
        ({"max_model_len": 200, "num_kv_pages": 3}, "192 tokens of the KV cache"),
        ({"num_kv_pages": 0}, "num_kv_pages"),
        ({"gpu_memory_utilization": 0.0}, "gpu_memory_utilization"),
        ({"seed": 1.5}, "seed"),
    ],
)
def test_limits_that_do_not_fit_together(model: Decoder, given: dict[str, object], text: str) -> None:
    with pytest.raises(ConfigError, match=text):
        LLM(model, **given)  # type: ignore[arg-type]


VLLM = {
    "tensor_parallel_size": 1, "dtype": "bfloat16", "trust_remote_code": True, "swap_space": 4, "max_seq_len": 100,
    "block_size": 64, "num_gpu_blocks_override": 4, "enable_lora": False, "enable_chunked_prefill": True,
    "revision": None,
}  # fmt: skip


def test_keywords_of_other_libraries_that_mean_what_is_so(model: Decoder) -> None:
    llm = LLM(model, recipe="rowwise", **VLLM)  # type: ignore[arg-type]
    assert (llm.engine.max_model_len, llm.stats.num_kv_pages, llm.model) == (100, 4, model)
    (output,) = llm.generate([[1, 2]], SamplingParams(max_tokens=2), use_tqdm=False, lora_request=None)  # type: ignore[call-arg]
    assert len(output.outputs) == 1


@pytest.mark.parametrize(
    ("call", "text"),
    [
        (lambda m: LLM(m, max_new_tokens=5), r"not take max_new_tokens=5; .*SamplingParams\(max_tokens=...\)"),
        (lambda m: LLM(m, temperature=0), r"SamplingParams\(temperature=...\)"),
        (lambda m: LLM(m, best_of=2), "SamplingParams"),
        (lambda m: LLM(m, data_parallel_size=2), "does not take data_parallel_size=2; give tensor_parallel_size"),
        (lambda m: LLM(m, recipe="rowwise", quantization="fp8"), "recipe is another name of quantization"),
        (lambda m: LLM(m, kv_cache_memory_bytes=9), "give num_kv_pages"),
        (lambda m: LLM(m, enable_prefix_cashing=True), "did you mean 'enable_prefix_caching'"),
        (lambda m: LLM(m).generate([[1]], max_new_tokens=5), r"LLM.generate does .*SamplingParams\(max_tokens="),
        (lambda m: LLM(m).generate([[1]], use_progres=True), "LLM.generate has no keyword 'use_progres'; did you mean"),
        (lambda m: LLM(m).chat([], tools=[{}]), "octavo renders no tools"),
    ],
)
def test_other_keywords_are_refused_with_what_to_do(model: Decoder, call: Callable[[Decoder], LLM], text: str) -> None:
    with pytest.raises(KeywordError, match=text) as caught:
        call(model)
    assert isinstance(caught.value, TypeError)


def test_the_ends_of_sequence_of_a_generation_config_end_an_output(tmp_path: Path) -> None:
    save_model(make_model("llama", "bf16", num_layers=1), tmp_path)
    params = SamplingParams(temperature=0, max_tokens=8)
    token_ids = LLM(tmp_path, device="cpu").generate([[5, 6, 7]], params)[0].outputs[0].token_ids
    end = next(token for token in token_ids if token_ids.index(token) > 0)
    file = tmp_path / "generation_config.json"
    for ids in (end, [95, end]):
        file.write_text(json.dumps({"eos_token_id": ids}))
        llm = LLM(tmp_path, device="cpu")
        found = llm.generate([[5, 6, 7]], params)[0].outputs[0]
        assert (found.token_ids, found.finish_reason) == (token_ids[: token_ids.index(end) + 1], "stop")
        llm.update_weights(tmp_path)  # whose config.json names no end
    for text in ("[]", "{", '{"eos_token_id": ["a"]}'):
        file.write_text(text)
        with pytest.raises(CheckpointError, match=r"generation_config\.json: .*correct it or remove it"):
            LLM(tmp_path, device="cpu")
    file.write_text("{}")
    assert LLM(tmp_path, device="cpu").generate([[5, 6, 7]], params)[0].outputs[0].token_ids == token_ids


def test_dtype(tmp_path: Path, model: Decoder) -> None:
    with pytest.raises(ConfigError, match=r"dtype=torch.float32 is not the given model's, which is torch.bfloat16"):
        LLM(model, dtype="float32")
    for wrong in ("float16", "half", 16, ["auto"]):
        with pytest.raises(ConfigError, match="dtype must be 'auto', 'bfloat16' or 'float32'"):
            LLM(model, dtype=wrong)  # type: ignore[arg-type]
    save_model(make_model("llama", "bf16", num_layers=1), tmp_path / "m")
    assert next(LLM(tmp_path / "m", device="cpu").model.parameters()).dtype == torch.bfloat16
    assert next(LLM(tmp_path / "m", device="cpu", dtype="float32").model.parameters()).dtype == torch.float32


def test_a_runs_folder_is_its_newest_model(
    tmp_path: Path, tokenizer: Tokenizer, caplog: pytest.LogCaptureFixture
) -> None:
    model = make_model("llama", "bf16", num_layers=1)
    newest = tmp_path / "checkpoints" / "step-00000002"
    save_model(model, newest / "model", tokenizer=tokenizer)
    (tmp_path / "checkpoints" / "LATEST").write_text("step-00000002\n")
    params = SamplingParams(temperature=0, max_tokens=4, logprobs=0, ignore_eos=True)
    expected = LLM(newest / "model", device="cpu").generate("abc", params)[0].outputs
    for folder in (tmp_path, tmp_path / "checkpoints", str(newest)):
        caplog.clear()
        with caplog.at_level("INFO", logger="octavo.models"):
            assert LLM(folder, device="cpu").generate("abc", params)[0].outputs == expected
        assert caplog.messages == [f"{folder}: a run; reading {newest / 'model'}"]


@pytest.mark.parametrize("async_scheduling", [False, True])
def test_max_tokens_0_scores_the_prompt(model: Decoder, tokenizer: Tokenizer, async_scheduling: bool) -> None:
    limits = {"num_kv_pages": 8, "max_model_len": 150, "max_num_batched_tokens": 64, "max_num_seqs": 4}
    llm = LLM(model, tokenizer, async_scheduling=async_scheduling, **limits)  # type: ignore[arg-type]
    prompts = [[1 + i % 30 for i in range(150)], [3], [5, 6, 7]]  # as many tokens as the context holds, too
    scoring = SamplingParams(max_tokens=0, prompt_logprobs=2)
    found = llm.generate(prompts, [scoring, scoring, SamplingParams(max_tokens=0, prompt_logprobs=0, n=2)])
    assert [len(output.prompt_logprobs or []) for output in found] == [150, 1, 3]
    for output in found:
        for sample in output.outputs:
            assert (sample.text, sample.token_ids, sample.finish_reason) == ("", [], "length")
        scored = sequence_logprobs(model, [output.prompt_token_ids], 1.0)[0].tolist()
        rows = (output.prompt_logprobs or [])[1:]
        assert [row[t].logprob for row, t in zip(rows, output.prompt_token_ids[1:], strict=True) if row] == scored
    assert llm.stats.output_tokens == 0
    (state,) = llm.stream([5, 6, 7], scoring)
    assert state.finished and state.prompt_logprobs is not None
    llm.engine.check_integrity()
    assert llm.stats.num_kv_pages_used == 0
    with pytest.raises(RequestError, match="150 tokens"):
        llm.generate([prompts[0]], SamplingParams(max_tokens=1))


def test_an_empty_prompt_begins_with_the_bos_token(model: Decoder) -> None:
    with_bos = char_tokenizer(ALPHABET)
    with_bos.bos_token = "<|endoftext|>"
    llm = LLM(model, with_bos, num_kv_pages=4)
    assert llm.generate("", SamplingParams(max_tokens=2))[0].prompt_token_ids == [0]
    assert with_bos.encode("") == []


def test_a_chat_without_a_template_takes_the_servers(
    llm: LLM, model: Decoder, caplog: pytest.LogCaptureFixture
) -> None:
    letters = char_tokenizer(ALPHABET + "UA:\n")
    llm = LLM(model, letters, num_kv_pages=4)
    with caplog.at_level("INFO", logger="octavo.serve.llm"):
        for _ in range(2):
            (output,) = llm.chat([{"role": "user", "content": "hello"}], SamplingParams(max_tokens=1))
    assert letters.decode(output.prompt_token_ids) == "User:\nhello\nAssistant:\n"
    (line,) = caplog.messages
    assert "no chat template; octavo's default is used" in line
    assert output.prompt == "User:\nhello\nAssistant:\n"
    parts = [{"type": "text", "text": "hel"}, {"type": "text", "text": "lo"}]
    (output,) = llm.chat([{"role": "user", "content": parts}], add_generation_prompt=False)
    assert output.prompt == "User:\nhello\n"
    with pytest.raises(DataError, match="needs a role and a content"):
        llm.chat([{"content": "hello"}])
    with pytest.raises(DataError, match="has no variable 'enable_thinking'"):
        llm.chat([{"role": "user", "content": "a"}], chat_template_kwargs={"enable_thinking": False})


def test_text_in_and_out(llm: LLM, tokenizer: Tokenizer) -> None:
    (output,) = llm.generate("hello, world", SamplingParams(seed=1, max_tokens=20, ignore_eos=True))
    assert output.prompt == "hello, world"
    assert output.prompt_token_ids == tokenizer.encode("hello, world")
    known = [t for t in output.outputs[0].token_ids if t < tokenizer.vocab_size]
    assert output.outputs[0].text == tokenizer.decode(known)
    assert len(known) < 20  # the model sampled ids that no text has, and nothing broke


def test_a_text_keeps_the_space_that_it_begins_with() -> None:
    tokenizer = fallback_tokenizer()
    llm = LLM(make_model("llama", "rowwise", num_layers=1, vocab_size=tokenizer.vocab_size), tokenizer, num_kv_pages=4)
    (word,) = tokenizer.encode(" a")
    for stop in (None, "b"):
        params = SamplingParams(max_tokens=2, logit_bias={word: 100.0}, temperature=0, stop=stop)
        assert llm.generate("ab", params)[0].outputs[0].text == " a a"
        assert [state.outputs[0].text for state in llm.stream("ab", params)] == [" a", " a a"]


def test_a_stop_string_over_tokens_cuts_the_text(llm: LLM) -> None:
    free = SamplingParams(seed=2, max_tokens=60, ignore_eos=True)
    whole = llm.generate("abc", free)[0].outputs[0]
    stop = whole.text[5:8]
    params = SamplingParams(seed=2, max_tokens=60, ignore_eos=True, stop=["#", stop])
    cut = llm.generate("abc", params)[0].outputs[0]
    assert cut.text == whole.text[: whole.text.find(stop)]
    assert (cut.finish_reason, cut.stop_reason) == ("stop", stop)
    assert cut.token_ids == whole.token_ids[: len(cut.token_ids)]
    assert len(cut.token_ids) < 60


def test_stream_gives_the_same_tokens_step_by_step(llm: LLM) -> None:
    params = SamplingParams(seed=3, max_tokens=12, n=2, ignore_eos=True, stop="zz", logprobs=0)
    (expected,) = llm.generate("stream me", params)
    states = list(llm.stream("stream me", params))
    assert [s.token_ids for s in states[-1].outputs] == [s.token_ids for s in expected.outputs]
    assert [s.text for s in states[-1].outputs] == [s.text for s in expected.outputs]
    assert [s.logprobs for s in states[-1].outputs] == [s.logprobs for s in expected.outputs]
    assert states[-1].finished
    assert not states[0].finished
    assert [len(s.outputs[0].token_ids) for s in states[:3]] == [1, 2, 3]


def test_a_stream_looks_up_the_texts_of_its_prompt_once(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    params = SamplingParams(max_tokens=5, prompt_logprobs=1, ignore_eos=True, seed=1)
    (expected,) = llm.generate("abc", params)
    count = Mock(wraps=with_texts)
    monkeypatch.setattr("octavo.serve.engine.completion.with_texts", count)
    states = list(llm.stream("abc", params))
    assert len(states) == 5 and count.call_count == 2  # of the prompt's tokens but the first
    for state in states:
        assert repr(state.prompt_logprobs) == repr(expected.prompt_logprobs)


def test_a_stream_closed_early_leaves_no_page_behind(llm: LLM) -> None:
    stream = llm.stream("abc", SamplingParams(max_tokens=50, ignore_eos=True))
    next(stream)
    assert llm.stats.num_kv_pages_used > 0
    stream.close()
    assert llm.stats.num_kv_pages_used == 0
    assert not llm.engine.has_unfinished
    llm.engine.check_integrity()


def test_a_stream_survives_a_generate_in_its_midst(llm: LLM) -> None:
    params = SamplingParams(seed=4, max_tokens=6, ignore_eos=True)
    stream = llm.stream("abc", params)
    next(stream)
    llm.generate("xyz", params)
    assert list(stream)[-1].outputs[0].token_ids == llm.generate("abc", params)[0].outputs[0].token_ids


def test_a_stream_that_is_aborted_says_so(tmp_path: Path) -> None:
    model = make_model("llama", "rowwise", num_layers=1)
    save_model(model, tmp_path)
    llm = LLM(model, num_kv_pages=12)
    stream = llm.stream([1, 2, 3], SamplingParams(max_tokens=6, ignore_eos=True))
    before = next(stream).outputs[0]
    llm.update_weights(tmp_path, running="abort")
    (last,) = stream
    assert last.finished and last.outputs[0].finish_reason == "abort"
    assert last.outputs[0].token_ids == before.token_ids


def test_calls_from_several_threads(llm: LLM) -> None:
    """Each steps what the others ask for, too, and one of them takes the last step."""

    def generate(prompt: int) -> list[int]:
        params = SamplingParams(temperature=0, max_tokens=1 + prompt % 5, ignore_eos=True)
        return llm.generate([[prompt]], params)[0].outputs[0].token_ids

    prompts = list(range(1, 31))
    with ThreadPoolExecutor(3) as threads:
        found = list(threads.map(generate, prompts))
    assert found == [generate(prompt) for prompt in prompts]
    assert llm.stats.num_kv_pages_used == 0


@pytest.mark.parametrize("stage", ["launch", "collect"])
def test_a_failing_step_leaves_a_clean_engine(model: Decoder, stage: str, monkeypatch: pytest.MonkeyPatch) -> None:
    llm = LLM(model, num_kv_pages=12)
    params = SamplingParams(seed=0, max_tokens=4, ignore_eos=True)
    prompt = list(range(1, 90))
    expected = LLM(model).generate([prompt], params)[0].outputs[0].token_ids

    def fail(chunks: object) -> None:
        raise RuntimeError("out of luck")

    with monkeypatch.context() as patch:
        patch.setattr(llm.engine.model_runner, stage, fail)
        with pytest.raises(RuntimeError, match="out of luck"):
            llm.generate([prompt], params)
    llm.engine.check_integrity()
    assert not llm.engine.has_unfinished
    assert llm.generate([prompt], params)[0].outputs[0].token_ids == expected
    # the page that was promised but never written is not found again
    assert stage == "collect" or llm.stats.num_prefix_hit_tokens == 0


def test_tokens_that_cannot_be_taken_in_before_an_update_leave_a_clean_engine(
    model: Decoder, monkeypatch: pytest.MonkeyPatch
) -> None:
    llm = LLM(model, num_kv_pages=12, async_scheduling=True)
    params = SamplingParams(seed=0, max_tokens=8, ignore_eos=True)
    (expected,) = llm.generate([[1, 2, 3]], params)
    stream = llm.stream([1, 2, 3], params)
    next(stream)

    def fail(launched: object) -> None:
        raise RuntimeError("out of luck")

    with monkeypatch.context() as patch:
        patch.setattr(llm.engine.model_runner, "collect", fail)
        with pytest.raises(RuntimeError, match="out of luck"):
            llm.engine.replace_weights(lambda: model.weight_version, "keep")
    assert not llm.engine.has_unfinished and [state.outputs[0].finish_reason for state in stream] == ["abort"]
    llm.engine.check_integrity()
    assert llm.generate([[1, 2, 3]], params)[0].outputs == expected.outputs


def test_from_a_checkpoint(tmp_path: Path, tokenizer: Tokenizer) -> None:
    model = make_model("qwen3", "blockwise", hidden_size=128, intermediate_size=256, num_layers=1)
    save_model(model, tmp_path / "bf16", tokenizer=tokenizer)
    save_model(model, tmp_path / "fp8", dialect="fp8-block", tokenizer=tokenizer)
    params = SamplingParams(temperature=0, max_tokens=8, logprobs=0, ignore_eos=True)
    expected = LLM(model, tokenizer).generate("hello", params)[0].outputs[0]
    plain = LLM(tmp_path / "bf16", device="cpu")
    assert plain.model.numerics.recipe.name == "bf16"
    assert plain.generate("hello", params)[0].prompt_token_ids == tokenizer.encode("hello")
    assert LLM(tmp_path / "bf16", quantization="fp8", device="cpu").model.numerics.recipe.name == "rowwise"
    blockwise, fp8 = {"quantization": "blockwise"}, {"quantization": "fp8"}  # an FP8 checkpoint keeps its recipe
    for path, given in (("bf16", blockwise), ("fp8", {}), ("fp8", blockwise), ("fp8", fp8)):
        llm = LLM(tmp_path / path, kv_cache_dtype="fp8", exact=True, device="cpu", **given)  # type: ignore[arg-type]
        assert llm.model.numerics == model.numerics
        got = llm.generate("hello", params)[0].outputs[0]
        assert (got.token_ids, got.logprobs, got.text) == (expected.token_ids, expected.logprobs, expected.text)


def test_checkpoints_and_recipes_that_are_none(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"config\.json"):
        LLM(tmp_path)
    with pytest.raises(CheckpointError, match=r"config\.json"):
        LLM("Qwen/Qwen3-8B")
    save_model(make_model("llama", num_layers=1), tmp_path / "m")
    bad: tuple[tuple[dict[str, Any], str], ...] = (
        ({"quantization": "rowwize"}, "rowwize.*rowwise"),
        ({"quantization": "compressed-tensors"}, "or a recipe's name, got 'compressed-tensors'; leave it out"),
        ({"quantization": "awq"}, "or a recipe's name, got 'awq'; leave it out"),
        ({"kv_cache_dtype": "int8"}, "kv_cache_dtype"),
        ({"attention_dtype": "fp8"}, "needs kv_cache_dtype='fp8'"),
        ({"kv_scales": "engine"}, "kv_scales='engine' scales an FP8 cache"),
        ({"exact": "no"}, "exact must be True or False, got 'no'"),
    )
    for given, text in bad:
        with pytest.raises(RecipeError, match=text):
            LLM(tmp_path / "m", device="cpu", **given)


def test_fp8_attention_from_a_checkpoint_and_of_a_live_model(tmp_path: Path) -> None:
    model = make_model("llama", attention_dtype="fp8", num_layers=1)
    save_model(model, tmp_path / "m", dialect="fp8-block")
    record = json.loads((tmp_path / "m" / "octavo" / "numerics.json").read_text())
    assert record["numerics"]["attention_dtype"] == "fp8"
    params = SamplingParams(temperature=0, max_tokens=8, logprobs=0, ignore_eos=True)
    expected = LLM(model).generate([[5, 6, 7]], params)[0].outputs[0]
    given = {"kv_cache_dtype": "fp8", "exact": True, "device": "cpu"}
    got = LLM(tmp_path / "m", attention_dtype="fp8", **given).generate([[5, 6, 7]], params)[0].outputs[0]  # type: ignore[arg-type]
    assert got.logprobs == expected.logprobs
    other = LLM(tmp_path / "m", **given).generate([[5, 6, 7]], params)[0].outputs[0]  # type: ignore[arg-type]
    assert other.logprobs != expected.logprobs


def test_one_kv_scale_a_layer_from_a_checkpoint_and_of_a_live_model(tmp_path: Path) -> None:
    model = make_model("llama", num_layers=1)
    save_model(model, tmp_path)
    params = SamplingParams(temperature=0, max_tokens=8, logprobs=0, ignore_eos=True)
    model.set_numerics(dataclasses.replace(model.numerics, kv_scales="engine"))
    expected = LLM(model).generate([[5, 6, 7]], params)[0].outputs
    loaded = LLM(tmp_path, kv_cache_dtype="fp8", kv_scales="engine", exact=True, quantization="blockwise", device="cpu")
    assert loaded.generate([[5, 6, 7]], params)[0].outputs == expected
    assert loaded.model.kv_table is not None and loaded.model.kv_table.versions == [loaded.model.weight_version]


def test_progress_bar(llm: LLM, capsys: pytest.CaptureFixture[str]) -> None:
    llm.generate("abc", SamplingParams(max_tokens=2), use_progress=True)
    assert "1/1" in capsys.readouterr().out


@pytest.mark.parametrize("recipe", ["bf16", "tensorwise", "rowwise", "blockwise"])
def test_weights_that_are_not_finite_are_refused_by_name(recipe: str) -> None:
    model = make_model("llama", recipe, kv_cache_dtype="bf16", exact=False)
    weight, params = model.layers[1].mlp.down_proj.weight, SamplingParams(max_tokens=2, temperature=0.0)
    llm = LLM(model, num_kv_pages=12)
    before = llm.generate([[1, 2]], params)[0].outputs[0].token_ids
    good = weight[3, 5].clone()
    for bad in (torch.inf, -torch.inf, torch.nan):
        with torch.no_grad():
            weight[3, 5] = bad
        model.mark_weights_updated()
        with pytest.raises(NonFiniteError, match=r"parameter layers\.1\.mlp\.down_proj\.weight, shape .*1"):
            LLM(model, num_kv_pages=12)
        for call in (llm.refit, lambda: llm.generate([[1, 2]], params)):
            with pytest.raises(NonFiniteError, match=r"layers\.1\.mlp\.down_proj\.weight"):
                call()
    with torch.no_grad():
        weight[3, 5] = good
    model.mark_weights_updated()
    assert llm.generate([[1, 2]], params)[0].outputs[0].token_ids == before


def test_an_update_that_is_not_finite_changes_nothing(tmp_path: Path) -> None:
    model = make_model("llama", "blockwise", kv_cache_dtype="bf16", exact=False)
    save_model(model, tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    tensors["model.layers.1.mlp.down_proj.weight"][3, 5] = torch.inf
    llm = LLM(model, num_kv_pages=12)
    before = {name: tensor.clone() for name, tensor in live_tensors(model).items()}
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    for weights in (tensors, tmp_path):
        with pytest.raises(CheckpointError, match=r"model\.layers\.1\.mlp\.down_proj\.weight holds 1 NaN or infinite"):
            llm.update_weights(weights)
    after = live_tensors(model)
    assert all(torch.equal(_bits(before[name]), _bits(after[name])) for name in before)


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.contiguous().view(torch.uint8)


def test_an_end_beyond_the_vocabulary_is_no_grammars() -> None:
    """llguidance takes no such id, so every JSON schema would fail."""
    tokenizer = train_bpe(["say {} or []"], 270)
    model = make_model("llama", "bf16", num_layers=1, vocab_size=tokenizer.vocab_size)
    engine = Engine(model, tokenizer, EngineConfig(num_kv_pages=4), eos_ids=(10**6,))
    assert engine.grammars.make('{"type": "object"}').error is None
