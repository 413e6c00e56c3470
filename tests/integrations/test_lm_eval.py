"""The harness's requests beside scoring and generation by hand; a task of local files where it is installed."""

import importlib.util
import json
import math
import string
import tomllib
import types
from pathlib import Path

import pytest
import torch
from tokenizers import processors

from octavo.errors import BackendError, ConfigError, RequestError
from octavo.integrations.lm_eval import HarnessRequests, make_lm, require_harness, run_tasks
from octavo.models import ModelConfig, Tokenizer, char_tokenizer, load_model, sequence_logprobs
from octavo.nn import PackedContext
from octavo.numerics import Numerics, get_recipe
from octavo.serve import LLM, SamplingParams

ROOT = Path(__file__).parents[2]
ALPHABET = string.ascii_lowercase + " .:"
MAX_LEN = 24
needs_harness = pytest.mark.skipif(
    importlib.util.find_spec("lm_eval") is None, reason="lm-evaluation-harness is not installed (extra eval)"
)


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    tokenizer = char_tokenizer(ALPHABET)
    tokenizer.bos_token = "<|endoftext|>"
    tokenizer.backend.post_processor = processors.TemplateProcessing(
        single="<|endoftext|> $A", special_tokens=[("<|endoftext|>", 0)]
    )
    return tokenizer


@pytest.fixture(scope="module")
def llm(tokenizer: Tokenizer) -> LLM:
    model = load_model(ModelConfig("llama", 30, 64, 64, 2, 2, 2, 32, max_position_embeddings=64, eos_token_ids=()))
    with torch.no_grad():
        model.lm_head.weight *= 20  # far from ties
    model.set_numerics(Numerics(get_recipe("bf16"), exact=True))
    return LLM(model, tokenizer, max_model_len=MAX_LEN)


def requests(*args: tuple[object, ...]) -> list[types.SimpleNamespace]:
    return [types.SimpleNamespace(args=each) for each in args]


def by_hand(llm: LLM, ids: list[int], num_scored: int) -> tuple[float, bool]:
    """Log-probability of the last tokens, and whether each is the most probable."""
    model = llm.model
    with torch.no_grad():
        logprobs = sequence_logprobs(model, [ids])[0][-num_scored:]
        context = PackedContext.from_lengths([len(ids) - 1], model.numerics)
        best = model.logits(model(torch.tensor(ids[:-1]), context)).argmax(dim=1)[-num_scored:]
    return sum(logprobs.tolist()), best.tolist() == ids[-num_scored:]


def greedy(llm: LLM, prompt: list[int], num_tokens: int) -> list[int]:
    return llm.generate([prompt], SamplingParams(temperature=0.0, max_tokens=num_tokens))[0].outputs[0].token_ids


def test_loglikelihood_is_scorings(llm: LLM, tokenizer: Tokenizer) -> None:
    likely = tokenizer.decode(greedy(llm, [0, *tokenizer.encode("abc")], 3))
    found = HarnessRequests(llm).loglikelihood(
        requests(("abc", "de"), ("abc", likely), ("abc ", "d"), ("", "xyz"), ("ab", ""))
    )
    ids = tokenizer.encode
    expected = [
        by_hand(llm, [0, *ids("abcde")], 2),
        by_hand(llm, [0, *ids("abc" + likely)], 3),
        by_hand(llm, [0, *ids("abc d")], 2),  # the space is scored
        by_hand(llm, [0, *ids("xyz")], 3),
    ]
    assert found == [*expected, (0.0, True)]
    assert found[1][1]
    assert not found[0][1]


def test_a_long_context_loses_its_beginning(llm: LLM, tokenizer: Tokenizer) -> None:
    context = (ALPHABET * 2).replace(" ", "")
    found = HarnessRequests(llm).loglikelihood(requests((context, "xyz")))
    assert found == [by_hand(llm, tokenizer.encode(context + "xyz")[-(MAX_LEN - 1) :], 3)]
    with pytest.raises(RequestError, match="continuation of 23 tokens does not fit into the 23"):
        HarnessRequests(llm).loglikelihood(requests(("a", "b" * 23)))


def test_generate_until_is_generate(llm: LLM, tokenizer: Tokenizer) -> None:
    prompt = [0, *tokenizer.encode("hello")]
    text = tokenizer.decode(greedy(llm, prompt, 8))
    until = text[4:6]
    found = HarnessRequests(llm).generate_until(
        requests(
            ("hello", {"max_gen_toks": 8, "until": []}),
            ("hello", {"max_gen_toks": 8, "until": [until, ""], "do_sample": False, "temperature": 0.0}),
            ("q" * 40, {"max_gen_toks": 4, "until": None}),
        )
    )
    assert found[:2] == [text, text[: text.index(until)]]
    assert found[2] == tokenizer.decode(greedy(llm, tokenizer.encode("q" * (MAX_LEN - 4)), 4))
    assert HarnessRequests(llm).generate_until([]) == []


def test_requests_that_cannot_be_answered_are_refused(llm: LLM) -> None:
    with pytest.raises(RequestError, match="options num_beams are not known"):
        HarnessRequests(llm).generate_until(requests(("a", {"num_beams": 4})))
    with pytest.raises(RequestError, match="leaves no room for a prompt in 24 tokens"):
        HarnessRequests(llm).generate_until(requests(("a", {})))
    with pytest.raises(ConfigError, match="no tokenizer"):
        HarnessRequests(LLM(llm.model))


def test_without_the_harness_the_error_names_the_extra(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    for run in (require_harness, lambda: make_lm(llm), lambda: run_tasks(llm, ["arc_easy"])):
        with pytest.raises(BackendError, match=r"\[eval\]"):
            run()


@needs_harness
@pytest.mark.filterwarnings("ignore")
def test_rolling_predicts_every_token_once(llm: LLM, tokenizer: Tokenizer) -> None:
    text = (ALPHABET * 3)[:60]
    found = make_lm(llm).loglikelihood_rolling(requests((text,), ("ab",)))
    ids, window = tokenizer.encode(text), MAX_LEN - 2
    total = by_hand(llm, [0, *ids[:window]], window)[0]
    total += by_hand(llm, ids[window - 1 : 2 * window], window)[0]
    rest = len(ids) - 2 * window
    total += by_hand(llm, ids[-window - 1 :], rest)[0]
    assert found[0] == pytest.approx(total, rel=1e-9)
    assert found[1] == by_hand(llm, [0, *tokenizer.encode("ab")], 2)[0]


def test_the_extra_brings_what_the_harness_needs_of_a_server() -> None:
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    assert any(entry.startswith("lm-eval[api]") for entry in extras["eval"])


@needs_harness
@pytest.mark.filterwarnings("ignore")
def test_local_completions_scores_over_a_server(tokenizer: Tokenizer, llm: LLM) -> None:
    pytest.importorskip("tenacity")
    from lm_eval.models.openai_completions import LocalCompletionsAPI

    from tests.serve.http.running import running

    with running(lambda: LLM(llm.model, tokenizer, max_model_len=MAX_LEN).engine) as server:
        url = f"{server.url}/v1/completions"
        model = LocalCompletionsAPI(base_url=url, model="tiny", tokenizer_backend="remote", max_length=MAX_LEN)
        ids = [[0, *tokenizer.encode(text)] for text in ("abcde", "xyz")]
        answer = model.model_call(ids, generate=False)
        found = model.parse_logprobs(answer, ids, ctxlens=[3, 1])
    expected = [by_hand(llm, ids[0], 3), by_hand(llm, ids[1], 3)]
    assert [greedy for _, greedy in found] == [greedy for _, greedy in expected]
    assert [value for value, _ in found] == pytest.approx([value for value, _ in expected], rel=1e-6)


TASK = """
task: local_{kind}
dataset_path: json
dataset_kwargs: {{data_files: {{test: {file}}}}}
test_split: test
doc_to_text: "{{{{question}}}}"
doc_to_target: "{{{{answer}}}}"
target_delimiter: ""
{rest}
"""
CHOICES = 'output_type: multiple_choice\ndoc_to_choice: "{{choices}}"\nmetric_list: [{metric: acc}]'
GENERATION = """output_type: generate_until
generation_kwargs: {max_gen_toks: 4, until: ['!']}
metric_list: [{metric: exact_match}]"""


@pytest.mark.slow
@needs_harness
@pytest.mark.filterwarnings("ignore")
def test_a_task_of_local_files(llm: LLM, tokenizer: Tokenizer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path / "cache"))
    questions = ["abc", "hello", "xyz", "fox"]
    answers = [tokenizer.decode(greedy(llm, [0, *tokenizer.encode(q)], 4)) for q in questions]
    wrong = ["qqqq", "zzzz"]
    rows = [{"question": q, "choices": [a, *wrong], "answer": 0} for q, a in zip(questions, answers, strict=True)]
    rows[3]["answer"] = 1  # the model prefers the other
    (tmp_path / "choice.jsonl").write_text("\n".join(map(json.dumps, rows)))
    generated = [
        {"question": q, "answer": a if q != "fox" else "qqqq"} for q, a in zip(questions, answers, strict=True)
    ]
    (tmp_path / "generate.jsonl").write_text("\n".join(map(json.dumps, generated)))
    tasks = tmp_path / "tasks"
    tasks.mkdir()
    for kind, rest in (("choice", CHOICES), ("generate", GENERATION)):
        (tasks / f"{kind}.yaml").write_text(TASK.format(kind=kind, file=tmp_path / f"{kind}.jsonl", rest=rest))
    scores = run_tasks(llm, ["local_choice", "local_generate"], task_dir=tasks)
    assert [(s.task, s.metric, s.value) for s in scores] == [
        ("local_choice", "acc", 0.75),
        ("local_generate", "exact_match", 0.75),
    ]
    assert all(s.stderr is not None and math.isfinite(s.stderr) for s in scores)
    assert run_tasks(llm, ["local_choice"], task_dir=tasks, limit=2)[0].value == 1.0
    with pytest.raises(ConfigError, match="no task to run"):
        run_tasks(llm, [], task_dir=tasks)
