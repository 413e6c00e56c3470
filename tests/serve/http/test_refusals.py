"""What is not honoured is refused, in OpenAI's shape, with the field's name; and nothing is left behind."""

import re
import threading

import httpx
import pytest

from octavo.errors import ConfigError
from octavo.serve.http import ServerConfig
from tests.serve.http.running import Running, make_engine, running

CHAT = {"messages": [{"role": "user", "content": "a"}]}


def schema_of(schema: dict[str, object]) -> dict[str, object]:
    return {"type": "json_schema", "json_schema": {"schema": schema}}


# what SamplingParams or the engine refuses is refused here by one of its kind; their own tests have the others
BAD_COMPLETIONS: dict[str, tuple[object, ...]] = {
    "prompt": (5, [], [[]], "", [1, "a"], [1, 320], "a " * 600, ["a"] * 9),
    "max_tokens": (-1, 300, 2**70, "5", True),
    "temperature": (1e-9, "hot"),
    "top_k": (1.5,),
    "n": (0, 5),
    "seed": (2**63,),
    "logprobs": (21, True),
    "stop": ("", ["a"] * 17, [1]),
    "stop_token_ids": ([-1], [1] * 17),
    "logit_bias": ({"a": 1}, {"-1": 1}, {"320": 1}, {"1": 101}, {"1": "x"}),
    "response_format": ({"type": "xml"}, {"type": "json_schema"}, schema_of({"type": "x"})),
    "best_of": (2,),
    "suffix": ("x",),
    "tools": ([],),
    "top_logprobs": (2,),
    "no_such_field": (None,),
}
BAD_TOGETHER = [
    ({}, "prompt"),
    ({"stream": True, "stream_options": {"colour": 1}}, "stream_options"),
    ({"response_format": {"type": "json_object"}, "ignore_eos": True}, "response_format"),
    *(({name: value}, name) for name, values in BAD_COMPLETIONS.items() for value in values),
]

USER = {"role": "user", "content": "a"}
BAD_MESSAGES: list[dict[str, object]] = [
    {"role": "user"},
    {"role": "tool", "content": "a"},
    USER | {"content": None},
    USER | {"tool_call_id": "b"},
    USER | {"content": [{"type": "image_url", "image_url": {"url": "x"}}]},
    USER | {"content": "a " * 600},
]
BAD_CHATS = [
    *(({"messages": [message]}, "messages") for message in BAD_MESSAGES),
    ({"messages": []}, "messages"),
    ({"max_tokens": 0}, "max_tokens"),
    ({"max_completion_tokens": 0}, "max_completion_tokens"),
    ({"max_completion_tokens": -1}, "max_completion_tokens"),
    ({"prompt": "a"}, "prompt"),
    ({"echo": True}, "echo"),
    ({"logprobs": 1}, "logprobs"),
    ({"top_logprobs": 2}, "top_logprobs"),
    ({"logprobs": True, "top_logprobs": 21}, "top_logprobs"),
    ({"logprobs": True, "top_logprobs": -1}, "top_logprobs"),
    ({"max_tokens": 1, "max_completion_tokens": 2}, "max_completion_tokens"),
    ({"tools": [{"type": "function"}]}, "tools"),
    ({"tool_choice": "required"}, "tool_choice"),
    ({"chat_template_kwargs": {"loud": True}}, "messages"),
]


@pytest.fixture(scope="module")
def strict():  # type: ignore[no-untyped-def]
    limits = {"max_n": 4, "max_prompts": 8, "max_body_bytes": 20_000, "max_num_waiting": 0}
    with running(lambda: make_engine(max_num_seqs=6), **limits) as server:
        yield server
        server.assert_at_rest()
        assert server.service.engine.loop.num_ended["error"] == 0


def assert_refused(answer: httpx.Response, param: str | None, status: int = 400) -> None:
    assert answer.status_code == status, answer.text
    error = answer.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert error["param"] == param, error
    assert len(error["message"]) < 1000


@pytest.mark.parametrize(("fields", "param"), BAD_TOGETHER, ids=lambda value: str(value)[:40])
def test_completions(strict: Running, fields: dict[str, object], param: str) -> None:
    assert_refused(strict.post("/v1/completions", **({"prompt": "a"} if fields else {}) | fields), param)
    assert strict.service.engine.loop.num_open == 0


SAMPLES = "there is no beam search: ask for n answers with logprobs"
UNKNOWN, CHOICES = " is not a field that this server honours", "choices are {'enum': [...]}"


@pytest.mark.parametrize(
    ("fields", "text"),
    [
        ({"best_of": 2}, f"best_of is honoured as 1 alone, got 2; {SAMPLES}"),
        ({"priority": 2}, "priority is honoured as 0 alone, got 2; requests run in the order in which they come"),
        ({"guided_regex": "a"}, f"guided_regex{UNKNOWN}; give response_format of the type json_schema; {CHOICES}"),
        ({"prompt_logprobs": 1}, f"prompt_logprobs{UNKNOWN}; give echo and logprobs to /v1/completions"),
        ({"xyzzy": 1}, f"xyzzy{UNKNOWN}; remove it"),
        ({"stream_options": {"colour": 1}}, f"stream_options.colour{UNKNOWN}; remove it"),
        ({"temperature": "1"}, 'temperature: Input should be a valid number, got "1"'),
        ({"logit_bias": {"1": "x" * 90}}, f'logit_bias.1: Input should be a valid number, got "{"x" * 79}...'),
        ({"min_token": 1}, "min_token is not a field that this server honours; did you mean 'min_tokens'?"),
    ],
)  # fmt: skip
def test_a_refusal_says_what_was_sent(strict: Running, fields: dict[str, object], text: str) -> None:
    assert strict.post("/v1/completions", prompt="a", **fields).json()["error"]["message"] == text


def test_a_tool_call_is_refused_with_what_to_do(strict: Running) -> None:
    called = {"role": "assistant", "content": "", "tool_calls": [{"id": "1"}]}
    for fields in ({"messages": [called]}, CHAT | {"tools": [{"type": "function"}]}):
        error = strict.post("/v1/chat/completions", **fields).json()["error"]
        assert error["message"].endswith("calls: describe them in a message, and ask for JSON by response_format")


def test_a_misspelt_field_is_named_beside_the_one_that_is_missing(strict: Running) -> None:
    error = strict.post("/v1/completions", prompts="a").json()["error"]
    said = "prompt is missing; prompts is not a field that this server honours; did you mean 'prompt'?"
    assert (error["message"], error["param"]) == (said, "prompt")


@pytest.mark.parametrize(("fields", "param"), BAD_CHATS, ids=lambda value: str(value)[:40])
def test_chat(strict: Running, fields: dict[str, object], param: str) -> None:
    assert_refused(strict.post("/v1/chat/completions", **CHAT | fields), param)
    assert strict.service.engine.loop.num_open == 0


@pytest.mark.parametrize(
    "body",
    [b"", b"{", b"[]", b"5", b"null", b"\xff\xfe", b'{"prompt": NaN}', b'{"prompt": "\\ud800"}', b"[" * 9000, b"{}x"],
    ids=lambda body: repr(body[:12]),
)
@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions", "/tokenize", "/detokenize"])
def test_malformed_bodies(strict: Running, path: str, body: bytes) -> None:
    answer = strict.client.post(path, content=body, headers={"Content-Type": "application/json"})
    assert_refused(answer, None)


def test_other_content_types(strict: Running) -> None:
    assert_refused(strict.client.post("/v1/completions", content=b'{"prompt": "a"}'), None, 415)
    assert_refused(strict.client.post("/v1/completions", data={"prompt": "a"}), None, 415)


def test_bodies_that_are_too_large(strict: Running) -> None:
    assert_refused(strict.post("/v1/completions", prompt="a" * 20_000), None, 413)

    def chunks():  # type: ignore[no-untyped-def]
        yield from [b'{"prompt": "'] + [b"a" * 1000] * 21

    # without a length in front the server finds out while it reads
    try:
        answer = strict.client.post("/v1/completions", content=chunks(), headers={"Content-Type": "application/json"})
    except httpx.WriteError:
        return  # it closed the connection while we were writing
    assert_refused(answer, None, 413)


def test_unknown_places(strict: Running) -> None:
    nothing = strict.client.get("/v1/nothing")
    assert_refused(nothing, None, 404)
    said = "there is no route /v1/nothing; /openapi.json lists those of this server"
    assert nothing.json()["error"]["message"] == said
    assert_refused(strict.client.get("/v1/completions"), None, 405)
    assert_refused(strict.client.get("/v1/models/gpt-9"), "model", 404)
    assert_refused(strict.post("/v1/completions", model="gpt-9", prompt="a"), "model", 404)
    assert_refused(strict.post("/admin/sleep"), None, 404)


def test_a_full_queue_is_429(strict: Running) -> None:
    # what there could never be room for is no matter of trying again
    assert_refused(strict.post("/v1/completions", prompt=["a"] * 2, n=4, max_tokens=1), "prompt", 400)
    ready, go_on = threading.Event(), threading.Event()

    def hold(engine: object) -> None:
        ready.set()
        go_on.wait(30)

    strict.service.engine.loop.run(hold)
    assert ready.wait(30)
    answer = strict.post_meanwhile("/v1/completions", prompt="a", n=4, max_tokens=2)
    try:
        strict.wait_until(lambda: strict.service.engine.loop.num_open == 4)
        refused = strict.post("/v1/completions", prompt="b", n=3)
    finally:
        go_on.set()
    assert_refused(refused, None, 429)
    assert int(refused.headers["Retry-After"]) >= 1
    assert answer.result(30).status_code == 200
    assert 'octavo:requests_refused_total{model_name="tiny",status="429"}' in strict.client.get("/metrics").text


OPEN = {"/", "/health", "/ready", "/metrics", "/version", "/openapi.json"}


def no_keys(key: str, other: str) -> list[str]:
    """What is no key: nothing, true prefixes, a suffix, more on either side, other letters, two keys, another's."""
    wrong = ["", key[0], key[:3], key[:-1], key[1:], f"{key}1", f"0{key}", key.title(), f"{key},{key}", f"{key}{key}"]
    return [*wrong, key.replace(key[2], "5"), other]


def test_a_key_ends_with_any_letter() -> None:
    """The last byte of an "\u00e0" in UTF-8 is a space in latin-1."""
    with running(api_keys=("voil\u00e0",)) as server:
        headers = {"Authorization": "Bearer \t voil\u00e0".encode()}
        assert server.client.get("/v1/models", headers=headers).status_code == 200


def test_no_part_of_a_key_opens_a_route() -> None:
    """Each route but the open ones wants a whole key: /admin the admin key, the others one of the API keys."""
    with running(api_keys=("first", "zweit\u00e9"), admin_key="admin") as server:

        def status(method: str, path: str, key: str | None, scheme: str = "Bearer") -> int:
            headers = {} if key is None else {"Authorization": f"{scheme} {key}".strip().encode()}
            return server.client.request(method, path, json={"prompt": "a"}, headers=headers).status_code

        paths = server.client.get("/openapi.json").json()["paths"]
        routes = [(method.upper(), path) for path, methods in paths.items() for method in methods]
        assert {path.split("/")[1] for _, path in routes} >= {"v1", "tokenize", "detokenize", "tokenizer_info", "admin"}
        for method, path in routes:
            if path in OPEN:
                assert status(method, path, None) == 200, path
                continue
            is_admin, path = path.startswith("/admin"), re.sub("{.*?}", "tiny", path)
            wrong = no_keys("admin", "first") if is_admin else [*no_keys("first", "admin"), "zweit"]
            found = {key: status(method, path, key) for key in (None, *wrong)}
            assert found == dict.fromkeys(found, 401), path
            if not is_admin:
                assert status(method, path, "first", scheme="Basic") == 401, path
                assert 401 not in [status(method, path, key) for key in ("first", "zweit\u00e9")], path
        assert status("POST", "/admin/reset_prefix_cache", "admin") == 200


@pytest.mark.parametrize(
    ("fields", "text"),
    [
        ({"model_names": ()}, "names"),
        ({"api_keys": ("",)}, "api_keys"),
        ({"admin_key": " "}, "admin_key"),
        ({"api_keys": ("key", "from-a-file\n")}, "api_keys must not be empty, nor begin or end with whitespace"),
        ({"max_n": 0}, "max_n must be at least 1"),
        ({"step_timeout_s": float("nan")}, "step_timeout_s"),
    ],
)
def test_configurations_that_make_no_sense(fields: dict[str, object], text: str) -> None:
    with pytest.raises(ConfigError, match=text):
        ServerConfig(**{"model_names": ("m",)} | fields)  # type: ignore[arg-type]
