"""Questions from files: which fields are found, what is refused, how answers are judged, how prompts become tokens."""

import importlib.util
import json
from pathlib import Path
from typing import Any

import pytest

from octavo.errors import BackendError, ConfigError, DataError
from octavo.models.chat import DEFAULT_CHAT_TEMPLATE
from octavo.models.tokenizer import char_tokenizer, train_bpe
from octavo.rl.rollout import score
from octavo.rl.tasks import Questions, TaskSection, answers, encode_prompts
from octavo.rl.tasks.answers import final_answer, last_tagged, make_verifier

CHAT = [{"role": "user", "content": "Solve: 1+1?"}]
ROWS = {
    "dapo-math": {"data_source": "math_dapo", "prompt": CHAT, "reward_model": {"ground_truth": "2", "style": "rule"}},
    "aime-2024": {"ID": "2024-I-1", "Problem": "Solve: 1+1?", "Solution": "One and one.", "Answer": 2},
    "aime-lower": {"id": 60, "problem": "Solve: 1+1?", "solution": "One and one are \\boxed{2}.", "answer": "2"},
    "gsm8k": {"question": "Solve: 1+1?", "answer": "One and one are <<1+1=2>>2.\n#### 2"},
    "slime": {"prompt": CHAT, "label": "2"},
    "boxed": {"problem": "Solve: 1+1?", "solution": "so \\boxed{2}"},
}


def write(path: Path, rows: list[Any]) -> Path:
    path.write_text("\n".join(map(json.dumps, rows)) + "\n", encoding="utf-8")
    return path


def many(n: int) -> list[dict[str, Any]]:
    return [{"question": f"{i}+0=", "answer": i} for i in range(n)]


@pytest.mark.parametrize("row", ROWS.values(), ids=ROWS)
def test_known_files(tmp_path: Path, row: dict[str, Any]) -> None:
    task = Questions(write(tmp_path / "a.jsonl", [row, row]), verifier="exact", heldout_share=0.0)
    (prompt,) = task.prompts("train", 1, 0)
    assert prompt == "Solve: 1+1?"
    assert task.messages(prompt) == CHAT
    assert task.score(prompt, "Well. Answer: 2") == 1.0
    assert task.score(prompt, "Answer: 3") == 0.0


def test_named_fields_and_a_system_prompt(tmp_path: Path) -> None:
    path = write(tmp_path / "a.jsonl", [{"task": {"text": "one?"}, "prompt": "no", "gold": 1, "answer": "no"}])
    keys = {"question_key": "task.text", "answer_key": "gold", "system_prompt": "Be brief."}
    task = Questions(path, verifier="exact", heldout_share=0.0, **keys)  # type: ignore[arg-type]
    (prompt,) = task.prompts("train", 1, 0)
    assert [m["content"] for m in task.messages(prompt)] == ["Be brief.", "one?"]
    assert task.score(prompt, "1") == 1.0


def test_json_and_parquet(tmp_path: Path) -> None:
    (tmp_path / "a.json").write_text(json.dumps(many(5)))
    assert len(Questions(tmp_path / "a.json", verifier="exact", heldout_share=0.0).prompts("train", 5, 0)) == 5
    pyarrow = pytest.importorskip("pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")
    parquet.write_table(pyarrow.Table.from_pylist([ROWS["dapo-math"]]), tmp_path / "a.parquet")
    task = Questions(tmp_path / "a.parquet", verifier="exact", heldout_share=0.0)
    assert task.score(task.prompts("train", 1, 0)[0], "\\boxed{2}") == 1.0


def test_parquet_needs_pyarrow(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "a.parquet").write_bytes(b"")
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(BackendError, match="parquet files need pyarrow; pip install pyarrow"):
        Questions(tmp_path / "a.parquet", verifier="exact")


def test_splits_share_nothing_and_order_is_the_seeds(tmp_path: Path) -> None:
    task = Questions(write(tmp_path / "a.jsonl", many(200)), verifier="exact", heldout_share=0.2)
    held = task._splits["heldout"]
    assert 20 < len(held) < 60
    train = task.prompts("train", 200 - len(held), 0)
    assert set(train).isdisjoint(held)
    assert task.prompts("train", 50, 1) == task.prompts("train", 50, 1) != task.prompts("train", 50, 2)


def test_a_file_of_its_own_for_evaluation(tmp_path: Path) -> None:
    first = write(tmp_path / "a.jsonl", many(8))
    second = write(tmp_path / "b.jsonl", [{"question": "?", "answer": "!"}])
    task = Questions(first, second, verifier="exact")
    assert len(task.prompts("train", 8, 0)) == 8
    assert task.prompts("heldout", 1, 0) == ["?"]
    with pytest.raises(DataError, match=r"1 questions are in .* both, such as '0\+0='"):
        Questions(first, write(tmp_path / "c.jsonl", many(1)), verifier="exact")


def test_several_files_are_one_list(tmp_path: Path) -> None:
    files = [str(write(tmp_path / f"{i}.jsonl", many(9)[3 * i : 3 * i + 3])) for i in range(3)]
    task = Questions(files[:2], files[2:], verifier="exact")
    assert (task.num_prompts("train"), task.num_prompts("heldout")) == (6, 3)
    assert set(task.prompts("train", 6, 0)) == {f"{i}+0=" for i in range(6)}
    section = TaskSection(name="questions", path=files, heldout_path=files[0], verifier="exact")
    with pytest.raises(DataError, match="3 questions are in"):
        section.build()
    assert TaskSection(name="questions", path=files, verifier="exact", heldout_share=0.5).build().prompts("train", 1, 0)


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        ([{"question": "1"}], r"row 0 has no field .*answer.* its fields are question: name one by task.question_key"),
        ([{"answer": "1"}], "row 0 has no field prompt, question"),
        ([{"question": "1", "answer": "1"}, {"question": "1", "answer": "2"}], "row 1: '1' has two answers"),
        ([{"question": "1", "answer": {"a": 1}}], "an answer must be a text or a number"),
        ([{"question": [1], "answer": "1"}], "a question must be a text or a list of messages"),
        (["text"], "line 1: must be an object"),
        ([], "has no rows"),
    ],
)
def test_bad_rows_are_named(tmp_path: Path, rows: list[Any], message: str) -> None:
    with pytest.raises(DataError, match=message):
        Questions(write(tmp_path / "a.jsonl", rows), verifier="exact")


def test_bad_files(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"no such file; give task.path"):
        Questions(tmp_path / "none.jsonl", verifier="exact")
    (tmp_path / "a.csv").write_text("a")
    with pytest.raises(DataError, match=r"must end in .jsonl, .json or .parquet"):
        Questions(tmp_path / "a.csv", verifier="exact")
    (tmp_path / "a.jsonl").write_text('{"question": "1", "answer": "1"}\n{nonsense\n')
    with pytest.raises(DataError, match=r"a.jsonl, line 2: not valid JSON"):
        Questions(tmp_path / "a.jsonl", verifier="exact")
    with pytest.raises(ConfigError, match="the heldout split of these questions has 0, fewer than the 4"):
        Questions(write(tmp_path / "b.jsonl", many(3)), verifier="exact", heldout_share=0.0).prompts("heldout", 4, 0)


@pytest.mark.parametrize(
    ("text", "answer"),
    [
        ("so \\boxed{\\frac{1}{2}} it is", "\\frac{1}{2}"),
        ("\\boxed{1} and \\boxed{2}", "2"),
        ("steps\nAnswer: $42$.\nmore", "42"),
        ("#### 7", "7"),
        (" 95 ", "95"),
        ("\\boxed{unclosed", "\\boxed{unclosed"),
    ],
)
def test_final_answer(text: str, answer: str) -> None:
    assert final_answer(text) == answer


def test_last_tagged() -> None:
    assert last_tagged("<answer>1</answer> <answer> 2\n</answer>", "answer") == "2"
    assert last_tagged("none", "answer") is None


def ratio(prompt: str, completion: str, answer: str) -> float:
    """A verifier in octavo's form."""
    return len(completion) / len(answer)


def compute_score(data_source: str, solution_str: str, ground_truth: str, extra_info: Any = None) -> dict[str, Any]:
    """A verifier in verl's form."""
    return {"score": float(solution_str == ground_truth), "acc": data_source == "math_dapo"}


def with_bonus(data_source: str, solution_str: str, ground_truth: str, extra_info: Any, bonus: float) -> float:
    return float(solution_str == ground_truth) + bonus


def open_score(solution_str: str, ground_truth: str, **kwargs: Any) -> float:
    assert set(kwargs) == {"data_source", "extra_info"}
    return float(solution_str == ground_truth)


def wrong_dict(prompt: str, completion: str, answer: str) -> dict[str, float]:
    return {"reward": 1.0}


def raises(prompt: str, completion: str, answer: str) -> float:
    raise ZeroDivisionError("no digits")


def test_callables_judge(tmp_path: Path) -> None:
    path = write(tmp_path / "a.jsonl", [ROWS["dapo-math"]])
    prompt = "Solve: 1+1?"
    assert Questions(path, verifier=f"{__file__}:ratio").score(prompt, "xyz") == 3.0
    assert Questions(path, verifier=f"{__file__}:compute_score").score(prompt, "2") == 1.0
    assert Questions(path, verifier=f"{__file__}:compute_score").score(prompt, "3") == 0.0
    assert Questions(path, verifier=f"{__file__}:open_score").score(prompt, "2") == 1.0
    bonus = Questions(path, verifier=f"{__file__}:with_bonus", verifier_options={"bonus": 0.5})
    assert (bonus.score(prompt, "2"), bonus.score(prompt, "3")) == (1.5, 0.5)
    assert make_verifier("operator:countOf") is not None  # a module's name works too
    task = Questions(path, verifier=f"{__file__}:raises")
    with pytest.raises(DataError, match=r"task 'questions', sample 17 .*raised ZeroDivisionError: no digits"):
        score(task, prompt, "x", 17)
    with pytest.raises(DataError, match=r"puts the reward under 'score', got \['reward'\]"):
        Questions(path, verifier=f"{__file__}:wrong_dict").score(prompt, "x")


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("maths", "task.verifier must be 'math', 'exact' or module:function, got 'maths'; did you mean 'math'"),
        ("no_such_module:f", "No module named 'no_such_module'"),
        ("/nowhere/x.py:f", "no such file"),
        ("operator:nothing", "operator has no function 'nothing'"),
        (":f", "named as module:function"),
    ],
)
def test_bad_verifiers(name: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        make_verifier(name)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("math", "task.verifier_options are a function's, and task.verifier is 'math'; leave them out"),
        (f"{__file__}:ratio", "with task.verifier_options .*: got an unexpected keyword argument 'bonus'"),
    ],
)
def test_options_that_no_verifier_takes(name: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        make_verifier(name, {"bonus": 0.5})


def test_math_verify_is_optional_and_its_absence_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(BackendError, match=r"pip install math-verify, or set task.verifier = 'exact'"):
        make_verifier("math")


def test_math_verify_decides(tmp_path: Path) -> None:
    pytest.importorskip("math_verify")
    task = Questions(write(tmp_path / "a.jsonl", [{"problem": "half?", "answer": "\\frac{1}{2}"}]), heldout_share=0.0)
    assert task.score("half?", "It is \\boxed{0.5}") == 1.0
    assert task.score("half?", "It is \\boxed{0.6}") == 0.0
    assert task.score("half?", "no idea") == 0.0


def test_math_verify_is_called_with_a_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    """A stand-in of its two functions: what they are given, and what an answer that cannot be read comes to."""
    calls: list[Any] = []

    class Library:
        @staticmethod
        def parse(text: str, parsing_timeout: int | None) -> list[str]:
            calls.append((text, parsing_timeout))
            return [] if "?" in text else [text]

        @staticmethod
        def verify(gold: list[str], found: list[str], timeout_seconds: int | None) -> bool:
            return gold == ["\\boxed{4}"] and found == ["four: 4"]

    monkeypatch.setattr(answers.importlib, "import_module", lambda name: Library)
    answers._parse_gold.cache_clear()
    assert answers.verify_math("four: 4", "$4$") == 1.0
    assert calls == [("\\boxed{4}", answers.MATH_TIMEOUT), ("four: 4", answers.MATH_TIMEOUT)]
    with pytest.raises(DataError, match=r"math-verify cannot read the right answer '\?'"):
        answers.verify_math("1", "?")
    answers._parse_gold.cache_clear()


def test_prompts_go_through_the_chat_template(tmp_path: Path) -> None:
    task = Questions(write(tmp_path / "a.jsonl", many(3)), verifier="exact", heldout_share=0.0)
    bpe = train_bpe(["User: 0+0=\nAssistant:\n"], 257)
    plain = encode_prompts(task, ["2+0="], bpe)
    assert plain == [bpe.encode("2+0=")]
    bpe.chat_template = DEFAULT_CHAT_TEMPLATE
    (ids,) = encode_prompts(task, ["2+0="], bpe)
    assert bpe.decode(ids) == "User:\n2+0=\nAssistant:\n"  # type: ignore[arg-type]
    task.max_prompt_tokens = 4
    with pytest.raises(DataError, match=r"prompt '2\+0=' has \d+ tokens, more than task.max_prompt_tokens = 4"):
        encode_prompts(task, ["2+0="], bpe)
    with pytest.raises(DataError, match="an engine without a tokenizer cannot read"):
        encode_prompts(task, ["2+0="], None)


def test_a_new_model_learns_a_files_own_characters(tmp_path: Path) -> None:
    path = write(tmp_path / "a.jsonl", many(30))
    task = Questions(path, verifier="exact", end="\n", heldout_share=0.2)
    assert task.alphabet == "\n+0123456789="
    prompt, answer = task.examples("train", 1, 0)[0]
    assert answer == prompt.partition("+")[0] + "\n"
    assert task.score(prompt, answer) == 1.0
    tokenizer = char_tokenizer(task.alphabet)
    assert encode_prompts(task, [prompt], tokenizer) == [tokenizer.encode(prompt)]


def test_a_file_for_models_with_a_tokenizer_has_no_warm_start(tmp_path: Path) -> None:
    task = Questions(write(tmp_path / "a.jsonl", many(30)), verifier="exact")
    with pytest.raises(ConfigError, match=r"set warmup.steps = 0"):
        task.examples("train", 1, 0)
    with pytest.raises(ConfigError, match=r"set task.end = '\\n'"):
        task.alphabet  # noqa: B018


def test_the_section_builds_it(tmp_path: Path) -> None:
    path = str(write(tmp_path / "a.jsonl", many(30)))
    task = TaskSection(name="questions", path=path, verifier="exact", max_prompt_tokens=9).build()
    assert isinstance(task, Questions) and task.max_prompt_tokens == 9
