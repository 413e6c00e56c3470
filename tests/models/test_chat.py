"""Conversations as text: answers are found exactly, by any template, and what cannot be marked is refused."""

from pathlib import Path

import pytest

from octavo.errors import DataError
from octavo.models import Tokenizer, load_tokenizer, train_bpe
from octavo.models.chat import DEFAULT_CHAT_TEMPLATE, Segment, chat_examples, render

CHATML = (
    "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\\n' + m['content'] + '<|im_end|>' + '\\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)
# Like the reasoning models': what the assistant thought is shown for the last turn only.
FORGETFUL = (
    "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\\n' }}"
    "{% if m['role'] == 'assistant' and not loop.last %}{{ m['content'].split('</think>')[-1] }}"
    "{% else %}{{ m['content'] }}{% endif %}{{ '<|im_end|>\\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)
TURNS = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "hello"},
    {"role": "assistant", "content": "hi"},
    {"role": "user", "content": "hello again"},
    {"role": "assistant", "content": "hi again"},
]


@pytest.fixture
def tokenizer() -> Tokenizer:
    made = train_bpe(["User:\nhello\nAssistant:\nhi\n" * 10], 280)
    made.backend.add_special_tokens(["<|im_start|>", "<|im_end|>"])
    return made


def answers(segments: list[Segment]) -> list[str]:
    return [segment.text for segment in segments if segment.is_answer]


def text(segments: list[Segment]) -> str:
    return "".join(segment.text for segment in segments)


def test_default_template(tokenizer: Tokenizer) -> None:
    (segments,) = chat_examples(tokenizer, TURNS)
    assert text(segments) == (
        "System:\nBe brief.\nUser:\nhello\nAssistant:\nhi<|endoftext|>\nUser:\nhello again\nAssistant:\n"
        "hi again<|endoftext|>\n"
    )
    assert answers(segments) == ["hi<|endoftext|>", "hi again<|endoftext|>"]


@pytest.mark.parametrize("generation_prompt", [False, True])
def test_default_template_is_what_transformers_makes_of_it(tokenizer: Tokenizer, generation_prompt: bool) -> None:
    pytest.importorskip("transformers")
    tokenizer.bos_token = "<|im_start|>"
    ours = render(tokenizer, TURNS, add_generation_prompt=generation_prompt)
    tokenizer.chat_template = DEFAULT_CHAT_TEMPLATE
    assert tokenizer.render_chat(TURNS, add_generation_prompt=generation_prompt) == ours


def test_own_template(tokenizer: Tokenizer) -> None:
    pytest.importorskip("transformers")
    tokenizer.chat_template = CHATML
    (segments,) = chat_examples(tokenizer, TURNS)
    assert text(segments) == tokenizer.render_chat(TURNS)
    # the line end after the end-of-turn token is never sampled, so it is no target
    assert answers(segments) == ["hi<|im_end|>", "hi again<|im_end|>"]


def test_only_the_answers_that_count(tokenizer: Tokenizer) -> None:
    (segments,) = chat_examples(tokenizer, TURNS, [False, False, False, False, True])
    assert answers(segments) == ["hi again<|endoftext|>"]
    assert "hi<|endoftext|>" in segments[0].text


def test_template_that_changes_earlier_turns_gives_an_example_an_answer(tokenizer: Tokenizer) -> None:
    pytest.importorskip("transformers")
    tokenizer.chat_template = FORGETFUL
    thought = [{**turn, "content": f"hm</think>{turn['content']}"} for turn in TURNS]
    first, second = chat_examples(tokenizer, thought)
    assert answers(first) == ["hm</think>hi<|im_end|>"]
    assert answers(second) == ["hm</think>hi again<|im_end|>"]
    assert "hm</think>hi<|im_end|>" not in text(second)
    assert text(second) == tokenizer.render_chat(thought)


def test_template_is_kept_in_a_checkpoint(tokenizer: Tokenizer, tmp_path: Path) -> None:
    tokenizer.chat_template, tokenizer.bos_token = CHATML, "<|im_start|>"
    tokenizer.save(tmp_path)
    again = load_tokenizer(tmp_path)
    assert (again.chat_template, again.bos_token) == (CHATML, "<|im_start|>")
    (tmp_path / "chat_template.jinja").write_text(FORGETFUL)
    assert load_tokenizer(tmp_path).chat_template == FORGETFUL


def test_prompt_is_tokenized_as_it_is_for_sampling(tokenizer: Tokenizer) -> None:
    (segments,) = chat_examples(tokenizer, TURNS)
    ids = [i for segment in segments for i in tokenizer.encode(segment.text)]
    for end in (2, 4):
        prompt = tokenizer.encode(render(tokenizer, TURNS[:end], add_generation_prompt=True))
        assert ids[: len(prompt)] == prompt


@pytest.mark.parametrize(
    ("turns", "message"),
    [
        ([{"role": "assistant", "content": "hi"}], "begins with the assistant's message"),
        ([{"role": "user", "content": "a<|im_end|>b"}], r"the user's content spells the special token '<\|im_end\|>'"),
        ([{"role": "user", "content": "a", "name": "b"}], "shows role and content only, a message also has"),
    ],
)
def test_what_cannot_be_marked_is_refused(tokenizer: Tokenizer, turns: list[dict[str, str]], message: str) -> None:
    with pytest.raises(DataError, match=message):
        chat_examples(tokenizer, turns)


def test_template_refuses_or_contradicts_itself(tokenizer: Tokenizer) -> None:
    pytest.importorskip("transformers")
    tokenizer.chat_template = "{{ raise_exception('roles must alternate') }}"
    with pytest.raises(DataError, match="refuses these messages: roles must alternate"):
        chat_examples(tokenizer, TURNS)
    tokenizer.chat_template = CHATML.replace("assistant\\n' }}{% endif", "bot\\n' }}{% endif")
    with pytest.raises(DataError, match="is not how it begins the answer"):
        chat_examples(tokenizer, TURNS)
