"""/v1/completions, by hand and through the openai client: text, tokens, logprobs, echo, streams, penalties, schemas."""

import json
from collections.abc import Iterator
from typing import Any

import openai
import pytest
import torch

from octavo import sequence_logprobs
from tests.fallback_tokenizer import fallback_tokenizer
from tests.serve.http.running import NAME, Running, byte_tokenizer, make_engine, running, script

PROMPT = "tell me a story"


@pytest.fixture
def client(server: Running) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as client:
        yield client


def test_openai_client(client: openai.OpenAI) -> None:
    answer = client.completions.create(model=NAME, prompt=PROMPT, max_tokens=5, n=2, seed=3, logprobs=2)
    assert answer.object == "text_completion"
    assert answer.model == NAME
    assert [choice.index for choice in answer.choices] == [0, 1]
    assert answer.usage is not None
    assert answer.usage.prompt_tokens == len(byte_tokenizer().encode(PROMPT))
    assert answer.usage.total_tokens == answer.usage.prompt_tokens + answer.usage.completion_tokens
    for choice in answer.choices:
        assert choice.finish_reason in ("stop", "length")
        assert choice.logprobs is not None and choice.logprobs.tokens is not None
        assert len(choice.logprobs.tokens) == len(choice.logprobs.token_logprobs or []) <= 5


def test_openai_client_streams(client: openai.OpenAI) -> None:
    wanted = {"model": NAME, "prompt": PROMPT, "max_tokens": 12, "seed": 5, "extra_body": {"ignore_eos": True}}
    whole = client.completions.create(**wanted)  # type: ignore[call-overload]
    wanted |= {"stream": True, "stream_options": {"include_usage": True}}
    chunks = [*client.completions.create(**wanted)]  # type: ignore[call-overload]
    assert "".join(chunk.choices[0].text for chunk in chunks[:-1]) == whole.choices[0].text
    assert chunks[-2].choices[0].finish_reason == whole.choices[0].finish_reason == "length"
    assert chunks[-1].choices == []
    assert chunks[-1].usage == whole.usage
    assert len({chunk.id for chunk in chunks}) == 1


def test_openai_client_raises_its_own_errors(client: openai.OpenAI) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        client.completions.create(model=NAME, prompt=PROMPT, temperature=-1)
    assert caught.value.param == "temperature"
    with pytest.raises(openai.NotFoundError):
        client.completions.create(model="gpt-9", prompt=PROMPT)


def stream(server: Running, path: str = "/v1/completions", **fields: object) -> list[dict]:  # type: ignore[type-arg]
    """The events of a stream that ends well."""
    answer = server.post(path, stream=True, **fields)
    assert answer.status_code == 200, answer.text
    assert answer.headers["content-type"].startswith("text/event-stream")
    lines = [line.removeprefix("data: ") for line in answer.text.split("\n\n") if line]
    assert lines.pop() == "[DONE]"
    return [json.loads(line) for line in lines]


def test_logprobs_keep_their_bits_in_streams_and_among_neighbours(server: Running) -> None:
    fields = {"prompt": PROMPT, "max_tokens": 20, "seed": 1, "logprobs": 3, "ignore_eos": True, "stop": ["zzzz"]}
    alone = server.complete(**fields)["choices"][0]["logprobs"]
    events = [event["choices"][0]["logprobs"] for event in stream(server, **fields)]
    for name, values in alone.items():
        assert [item for event in events for item in event[name]] == values
    neighbours = [PROMPT, "the sea and the sky", "hello " * 30, "x"]
    among = server.complete(**{**fields, "prompt": neighbours, "n": 2})["choices"]
    assert among[0]["logprobs"] == alone
    assert among[1]["logprobs"] != alone


def test_echo_gives_the_logprobs_that_a_trainer_gives(server: Running) -> None:
    fields = {"prompt": "the sky and the sea" * 8, "max_tokens": 2, "temperature": 0.7, "logprobs": 1, "echo": True}
    fields |= {"seed": 0, "return_token_ids": True, "ignore_eos": True}
    for _ in range(2):  # the second one would find its prompt in the prefix cache
        (choice,) = server.complete(**fields)["choices"]
        ids, given = choice["token_ids"], choice["logprobs"]["token_logprobs"]
        expected = sequence_logprobs(server.engine.model, [ids], 0.7)[0]
        assert given[0] is None
        assert torch.equal(torch.tensor(given[1:]), expected.detach())
        assert choice["text"].startswith(fields["prompt"])
        assert len(choice["logprobs"]["tokens"]) == len(choice["logprobs"]["text_offset"]) == len(ids)


def test_echo_streams_the_prompt_first(server: Running) -> None:
    fields = {"prompt": ["hello", "sea"], "max_tokens": 3, "logprobs": 1, "echo": True, "n": 2, "seed": 1}
    whole = server.complete(**fields)["choices"]
    sums: dict[int, str] = {}
    for event in stream(server, **fields):
        (choice,) = event["choices"]
        sums[choice["index"]] = sums.get(choice["index"], "") + choice["text"]
    assert sums == {choice["index"]: choice["text"] for choice in whole}
    assert all(choice["text"].startswith(["hello", "sea"][choice["index"] // 2]) for choice in whole)


@pytest.mark.parametrize("echo", [False, True])
@pytest.mark.parametrize("prompt", ["\u00e9t\u00e9 \U0001f600", [5, 200, 0, 310, 77]], ids=["text", "ids"])
def test_texts_of_tokens_join_to_the_text_and_offsets_point_into_it(server: Running, prompt: Any, echo: bool) -> None:
    said = "\U0001f600 sea \U0001f30a\u00e9!"
    ids = [*byte_tokenizer().encode(said), 0, 310, 77]  # an end of sequence and an id without text within
    fields = {"prompt": prompt, "max_tokens": len(ids), "temperature": 0, "logprobs": 5, "echo": echo}
    fields |= {"ignore_eos": True, "return_token_ids": True}
    with script(server, ids):
        (choice,) = server.complete(**fields)["choices"]
        events = [event["choices"][0]["logprobs"] for event in stream(server, **fields)]
    text, found = choice["text"], choice["logprobs"]
    assert text.endswith(said + byte_tokenizer().decode([77]))
    for name, values in found.items():
        assert [item for event in events for item in event[name]] == values
    without_text = {0, 310}
    shown = ["" if i in without_text else t for i, t in zip(choice["token_ids"], found["tokens"], strict=True)]
    num_echoed = len(choice["token_ids"]) - len(ids)
    if not (echo and isinstance(prompt, list)):  # a prompt of ids is echoed with its special tokens
        assert "".join(shown) == text
    echoed = "".join(found["tokens"][:num_echoed]).replace("token_id:310", "")
    assert echoed == text[: len(text) - len("".join(shown[num_echoed:]))]
    for token, offset in zip(shown, found["text_offset"], strict=True):
        assert text[offset:].startswith(token)
    assert found["text_offset"] == sorted(found["text_offset"])


def test_no_alternative_is_lost_where_two_tokens_have_one_text(server: Running) -> None:
    fields = {"prompt": "a", "max_tokens": 30, "seed": 1, "logprobs": 20, "temperature": 4, "ignore_eos": True}
    found = server.complete(**fields)["choices"][0]["logprobs"]
    for token, logprob, top in zip(found["tokens"], found["token_logprobs"], found["top_logprobs"], strict=True):
        assert len(top) in (20, 21)  # with the sampled one, where it is not among the best
        assert top[token] == logprob
        assert "\ufffd" not in "".join(set(top) - {token})


@pytest.mark.parametrize("echo", [True, False])
def test_max_tokens_0_scores_the_prompt(server: Running, echo: bool) -> None:
    prompts = ["the sea", "hello", "x"]
    fields = {"prompt": prompts, "max_tokens": 0, "logprobs": 2, "echo": echo, "return_token_ids": True, "n": 2}
    answer = server.complete(**fields)
    one_more = server.complete(**{**fields, "max_tokens": 1})
    assert answer["usage"]["completion_tokens"] == 0
    for choice, other in zip(answer["choices"], one_more["choices"], strict=True):
        assert choice["finish_reason"] == "length"
        assert choice["token_ids"] == (other["token_ids"][:-1] if echo else [])
        assert other["text"].startswith(choice["text"])
        for name, values in choice["logprobs"].items():
            assert values == (other["logprobs"][name][:-1] if echo else [])
    events = stream(server, **fields)
    assert sum(event["choices"][0]["finish_reason"] == "length" for event in events) == 6
    first = [event["choices"][0]["text"] for event in events if event["choices"][0]["index"] == 0]
    assert "".join(first) == ("the sea" if echo else "")


def test_stop_strings_and_ids(server: Running) -> None:
    fields = {"prompt": PROMPT, "max_tokens": 40, "seed": 2, "ignore_eos": True, "return_token_ids": True}
    free = server.complete(**fields)["choices"][0]
    stop = free["text"][4:7]
    cut = server.complete(stop=[stop], **fields)["choices"][0]
    assert (cut["text"], cut["finish_reason"]) == (free["text"][: free["text"].find(stop)], "stop")
    assert cut["stop_reason"] == stop
    token = free["token_ids"][6]
    by_id = server.complete(stop_token_ids=[token], **fields)["choices"][0]
    assert by_id["token_ids"] == free["token_ids"][: free["token_ids"].index(token) + 1]
    assert by_id["stop_reason"] == token


def test_logit_bias_and_penalties_change_the_draw_and_not_the_logprobs(server: Running) -> None:
    fields = {"prompt": PROMPT, "temperature": 0, "max_tokens": 8, "logprobs": 0, "ignore_eos": True}
    fields |= {"return_token_ids": True}
    plain = server.complete(**fields)["choices"][0]
    first = plain["token_ids"][0]
    banned = server.complete(logit_bias={str(first): -100}, **fields)["choices"][0]
    assert first not in banned["token_ids"]
    forced = server.complete(logit_bias={"77": 100}, **fields)["choices"][0]
    assert forced["token_ids"] == [77] * 8
    fresh = server.complete(logit_bias={"77": 100}, presence_penalty=2, frequency_penalty=2, **fields)["choices"][0]
    assert fresh["token_ids"] == [77] * 8  # 100 is more than they take off in 8 tokens
    ids = byte_tokenizer().encode(PROMPT) + forced["token_ids"]
    expected = sequence_logprobs(server.engine.model, [ids], 1.0)[0][-8:]
    assert torch.equal(torch.tensor(forced["logprobs"]["token_logprobs"]), expected.detach())


def test_min_tokens_holds_the_end_back(server: Running) -> None:
    fields = {"prompt": PROMPT, "max_tokens": 12, "seed": 4, "logit_bias": {"0": 100}, "return_token_ids": True}
    assert server.complete(**fields)["choices"][0]["token_ids"] == [0]  # the end of sequence at once
    held = server.complete(min_tokens=5, **fields)["choices"][0]["token_ids"]
    assert len(held) == 6
    assert held[-1] == 0


@pytest.mark.parametrize("seed", range(3))
def test_json_schema(server: Running, seed: int) -> None:
    pytest.importorskip("llguidance")
    schema = {
        "type": "object",
        "properties": {"name": {"type": "string", "maxLength": 5}, "age": {"type": "integer", "maximum": 99}},
        "required": ["name", "age"],
        "additionalProperties": False,
    }
    form = {"type": "json_schema", "json_schema": {"name": "person", "schema": schema, "strict": True}}
    # at random, much of it blanks: a line and its indentation between any two parts
    fields = {"prompt": PROMPT, "max_tokens": 248, "seed": seed, "top_k": 5}
    answer = server.complete(response_format=form, **fields)["choices"][0]
    assert answer["finish_reason"] == "stop"
    content = json.loads(answer["text"])
    assert set(content) == {"name", "age"}
    assert isinstance(content["age"], int) and content["age"] <= 99


def test_json_object_cannot_end_early(server: Running) -> None:
    pytest.importorskip("llguidance")
    answer = server.complete(prompt=PROMPT, max_tokens=3, seed=0, response_format={"type": "json_object"})
    assert answer["choices"][0]["text"].lstrip().startswith("{")


def test_token_ids_instead_of_texts(server: Running) -> None:
    fields = {"prompt": [5, 6, 7], "max_tokens": 3, "seed": 1, "logprobs": 2, "return_token_ids": True}
    (choice,) = server.complete(return_tokens_as_token_ids=True, **fields)["choices"]
    assert choice["logprobs"]["tokens"] == [f"token_id:{token}" for token in choice["token_ids"]]
    assert choice["weight_versions"] == [server.engine.weight_version] * len(choice["token_ids"])


def test_neutral_values_of_other_fields_are_fine(server: Running) -> None:
    server.complete(prompt="a", max_tokens=1, best_of=1, suffix=None, stop=None, logit_bias=None, top_k=0, user="me")
    of_vllm = {"skip_special_tokens": True, "include_stop_str_in_output": False, "spaces_between_special_tokens": True}
    server.complete(prompt="a", max_tokens=1, priority=0, structured_outputs=None, bad_words=[], **of_vllm)


def test_usage_counts_the_tokens_that_the_prefix_cache_had() -> None:
    with running() as server:
        prompts = [[7 + i % 20 for i in range(150)], [5, 6]]
        for wanted in (0, 128):
            usage = server.complete(prompt=prompts, max_tokens=2, n=2)["usage"]
            assert usage["prompt_tokens_details"] == {"cached_tokens": wanted}
            assert usage["prompt_tokens"] == 152


def test_a_completion_keeps_the_space_that_it_begins_with() -> None:
    tokenizer = fallback_tokenizer()
    ids = [*tokenizer.encode(" a \U0001f600"), 0]
    with running(lambda: make_engine(tokenizer)) as server, script(server, ids):
        fields = {"prompt": "ab", "max_tokens": len(ids) - 1, "logprobs": 0}
        (choice,) = server.complete(**fields)["choices"]
        assert choice["text"] == "".join(choice["logprobs"]["tokens"]) == " a \U0001f600"
        lines = server.post("/v1/completions", **fields, stream=True).text.split("\n\n")[:-2]
        streamed = [json.loads(line.removeprefix("data: "))["choices"][0] for line in lines]
        assert (
            [part["text"] for part in streamed] == choice["logprobs"]["tokens"] == [" a", " ", "", "", "", "\U0001f600"]
        )
        (echoed,) = server.complete(**fields, echo=True)["choices"]
        assert echoed["text"] == "".join(echoed["logprobs"]["tokens"]) == "ab a \U0001f600"
