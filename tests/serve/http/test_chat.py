"""/v1/chat/completions through the openai client, /tokenize and /detokenize."""

import threading
import time
from collections.abc import Iterator

import httpx
import openai
import pytest

from octavo.models.chat import render
from octavo.models.tokenizer import Tokenizer
from octavo.serve.http import schema
from octavo.serve.http.texts import Texts
from tests.fallback_tokenizer import fallback_tokenizer
from tests.serve.http.running import NAME, VOCAB, Running, byte_tokenizer, make_engine, running, script

MESSAGES = [{"role": "system", "content": "be brief"}, {"role": "user", "content": "tell me"}]


@pytest.fixture
def client(server: Running) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as client:
        yield client


def create(client: openai.OpenAI, **fields: object):  # type: ignore[no-untyped-def]
    wanted = {"model": NAME, "messages": MESSAGES, "seed": 7, "max_tokens": 9, **fields}
    return client.chat.completions.create(**wanted, extra_body={"ignore_eos": True})


def is_text(entry: object, sampled: object) -> bool:
    """Whether an alternative is shown by its text, and not by its id; the sampled one's text depends on its place."""
    return not entry.token.startswith("token_id:") and entry.token != sampled.token  # type: ignore[attr-defined]


def test_an_answer_with_logprobs(client: openai.OpenAI) -> None:
    answer = create(client, logprobs=True, top_logprobs=3, n=2)
    assert [choice.index for choice in answer.choices] == [0, 1]
    prompt = render(byte_tokenizer(), MESSAGES, add_generation_prompt=True)
    assert answer.usage.prompt_tokens == len(byte_tokenizer().encode(prompt))
    for choice in answer.choices:
        assert choice.message.role == "assistant"
        assert len(choice.logprobs.content) == 9
        for entry in choice.logprobs.content:
            values = [other.logprob for other in entry.top_logprobs]
            assert len(values) == 3
            assert values == sorted(values, reverse=True)
            assert entry.logprob <= values[0]
            assert all(bytes(e.bytes).decode() == e.token for e in entry.top_logprobs if is_text(e, entry))


def test_a_stream_is_the_same_answer(client: openai.OpenAI) -> None:
    whole = create(client, logprobs=True)
    chunks = [*create(client, logprobs=True, stream=True, stream_options={"include_usage": True})]
    assert chunks[0].choices[0].delta.role == "assistant"
    parts = [chunk.choices[0] for chunk in chunks[1:-1]]
    assert "".join(part.delta.content for part in parts) == whole.choices[0].message.content
    content = [entry for part in parts for entry in part.logprobs.content]
    assert content == whole.choices[0].logprobs.content
    assert parts[-1].finish_reason == whole.choices[0].finish_reason
    assert chunks[-1].usage == whole.usage


def test_max_completion_tokens_and_the_context_as_the_limit(server: Running) -> None:
    fields = {"messages": [{"role": "user", "content": "sea " * 190}], "ignore_eos": True}
    short = server.post("/v1/chat/completions", max_completion_tokens=3, **fields).json()
    assert short["usage"]["completion_tokens"] == 3
    whole = server.post("/v1/chat/completions", **fields).json()
    assert whole["usage"]["total_tokens"] == server.engine.max_model_len


def test_what_an_answer_held_can_be_sent_back(client: openai.OpenAI) -> None:
    message = create(client).choices[0].message
    parts = {"role": "user", "content": [{"type": "text", "text": "tell "}, {"type": "text", "text": "me"}]}
    answer = create(client, messages=[*MESSAGES, message.model_dump(), parts])
    assert answer.usage.completion_tokens == 9


TEMPLATE = (
    "{% for m in messages %}[{{ m.role }}]{{ m.content }}{% endfor %}{% if loud %}!{% endif %}"
    "{% if add_generation_prompt %}[assistant]{% endif %}"
    "{% if messages|length > 3 %}{{ raise_exception('too many') }}{% endif %}"
    "{% if messages[0].content == 'loop' %}{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}"
    "{% endfor %}{% endif %}"
)


@pytest.fixture(scope="module")
def templated() -> Iterator[Running]:
    """A server whose tokenizer has a template of its own, which may run for half a second."""
    own = Tokenizer(byte_tokenizer().backend, eos_id=0, chat_template=TEMPLATE)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("octavo.serve.http.texts.CHAT_S", 0.5)
        with running(lambda: make_engine(own)) as server:
            yield server


def test_what_renders_it_starts_with_the_server(templated: Running) -> None:
    nursery = templated.service.texts._nursery
    deadline = time.monotonic() + 60
    while nursery._control is None and time.monotonic() < deadline:
        time.sleep(0.01)
    assert nursery._process is not None and nursery._process.poll() is None
    began = nursery._process.pid
    assert templated.post("/tokenize", messages=MESSAGES).status_code == 200
    assert nursery._process.pid == began
    assert not any(thread.name == "octavo-nursery" for thread in threading.enumerate())
    texts = Texts(lambda: None)
    for tokenizer in (None, byte_tokenizer()):  # which has none: nothing will be rendered there
        texts.prepare(tokenizer)
        assert not any(thread.name == "octavo-nursery" for thread in threading.enumerate())
    texts.close()


def test_a_checkpoints_own_template_and_its_variables(templated: Running) -> None:
    def tokenize(**fields: object):  # type: ignore[no-untyped-def]
        return templated.post("/tokenize", messages=MESSAGES[1:], **fields).json()

    def text(**fields: object) -> str:
        return str(templated.post("/detokenize", tokens=tokenize(**fields)["tokens"]).json()["prompt"])

    assert text() == "[user]tell me[assistant]"
    assert text(add_generation_prompt=False) == "[user]tell me"
    assert text(chat_template_kwargs={"loud": True}) == "[user]tell me![assistant]"
    for name in ("quiet", "tokenize", "add_generation_prompt"):
        assert tokenize(chat_template_kwargs={name: True})["error"]["param"] == "messages"
    refused = templated.post("/v1/chat/completions", messages=MESSAGES * 2)
    assert refused.status_code == 400
    assert "too many" in refused.json()["error"]["message"]


def test_a_template_that_loops_is_ended_and_others_are_rendered(templated: Running) -> None:
    def ask(text: str) -> httpx.Response:
        return templated.post("/v1/chat/completions", messages=[{"role": "user", "content": text}], max_tokens=2)

    assert ask("hello").status_code == 200
    looping = templated.post_meanwhile("/v1/chat/completions", messages=[{"role": "user", "content": "loop"}])
    assert ask("hello").status_code == 200
    assert templated.client.get("/health").status_code == 200
    assert not looping.done(), "they waited for the loop's end"
    assert looping.result(30).status_code == 400
    assert "the chat template took more than 0.5 s" in looping.result().text
    assert ask("hello").status_code == 200


def test_tokens_of_characters_that_are_split_join_to_the_content(server: Running) -> None:
    ids = byte_tokenizer().encode("\U0001f600 a\u00e9!")
    fields = {"messages": MESSAGES, "max_tokens": len(ids), "temperature": 0, "logprobs": True, "top_logprobs": 3}
    with script(server, ids):
        choice = server.post("/v1/chat/completions", **fields).json()["choices"][0]
    entries = choice["logprobs"]["content"]
    assert choice["message"]["content"] == "".join(entry["token"] for entry in entries) == "\U0001f600 a\u00e9!"
    assert bytes(byte for entry in entries for byte in entry["bytes"]).decode() == "\U0001f600 a\u00e9!"
    assert "\ufffd" not in str(entries)


def test_bytes_of_tokens_have_the_space_that_a_decoder_strips() -> None:
    tokenizer = fallback_tokenizer()
    tokenizer.chat_template = "{% for message in messages %}{{ message.content }}{% endfor %}"
    ids = [*tokenizer.encode(" a \U0001f600 a"), 0]
    with running(lambda: make_engine(tokenizer)) as server, script(server, ids):
        fields = {"messages": MESSAGES, "max_tokens": len(ids) - 1, "logprobs": True}
        choice = server.post("/v1/chat/completions", **fields).json()["choices"][0]
    entries = choice["logprobs"]["content"]
    text = bytes(byte for entry in entries for byte in entry["bytes"]).decode()
    assert text == choice["message"]["content"] == " a \U0001f600 a"


HARMLESS = {"store": True, "metadata": {"run": "1"}, "name": "me", "prompt_cache_key": "k", "safety_identifier": "s"}
HARMLESS |= {"reasoning_effort": "high", "user": "me", "service_tier": "flex", "parallel_tool_calls": True}


def test_harmless_fields_are_taken_and_noted_once(server: Running, caplog: pytest.LogCaptureFixture) -> None:
    schema._noted.clear()
    fields = {"max_tokens": 4, "seed": 1, "ignore_eos": True}
    plain = server.post("/v1/chat/completions", messages=MESSAGES, **fields).json()["choices"]
    named = [message | {"name": "ann"} for message in MESSAGES]
    options = {"stream_options": {"include_usage": True}}
    with caplog.at_level("INFO", logger="octavo.serve.http.schema"):
        for _ in range(2):
            answer = server.post("/v1/chat/completions", messages=named, **fields, **HARMLESS, **options)
            assert answer.status_code == 200, answer.text
            assert answer.json()["choices"] == plain
            rest = {name: value for name, value in HARMLESS.items() if name != "parallel_tool_calls"}
            assert server.complete(prompt="a", max_tokens=1, **rest)
    noted = [line.split()[5].rstrip(":") for line in caplog.messages]
    assert sorted(noted) == sorted([*HARMLESS, "stream_options"])


def test_tokenize_and_back(server: Running) -> None:
    text = "hello, sea \u00e9\u4e2d"
    answer = server.post("/tokenize", prompt=text, return_token_strs=True).json()
    assert answer["tokens"] == byte_tokenizer().encode(text)
    assert answer["count"] == len(answer["tokens"]) == len(answer["token_strs"])
    assert answer["max_model_len"] == server.engine.max_model_len
    assert server.post("/detokenize", tokens=answer["tokens"]).json() == {"prompt": text}
    known_to_the_model = [*answer["tokens"], 310]  # beyond the tokenizer's vocabulary
    assert server.post("/detokenize", tokens=known_to_the_model).json() == {"prompt": text}
    assert server.post("/detokenize", tokens=[VOCAB]).status_code == 400
    assert server.post("/detokenize", tokens=[-1]).status_code == 400
    info = server.client.get("/tokenizer_info").json()
    assert info["eos_token"] == "<|endoftext|>"
