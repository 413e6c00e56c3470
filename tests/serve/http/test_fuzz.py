"""A fuzz of every route by the schema of its body: whatever is sent, no answer is a 5xx and nothing is left behind."""

import json
from typing import Any
from urllib.parse import quote

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.serve.http.running import Running

ROUTES = ("/v1/completions", "/v1/chat/completions", "/tokenize", "/detokenize")
# values that a schema does not think of
ODD = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(),
    st.sampled_from([2**63, -(2**70), 1e308, -0.0, 1e-300, "", "\x00", "\ud83d\ude00", [], {}, [[]], [None], {"": ""}]),
    st.floats(allow_nan=False, allow_infinity=False),
    st.text(max_size=8),
    st.lists(st.integers(-5, 400), max_size=4),
)
TEXT = st.text(st.characters(codec="utf-8"), max_size=20)


def values(schema: dict[str, Any], defs: dict[str, Any]) -> st.SearchStrategy[Any]:
    """Values that a JSON schema of pydantic's allows, mostly small."""
    if "$ref" in schema:
        return values(defs[schema["$ref"].rpartition("/")[2]], defs)
    if "anyOf" in schema:
        return st.one_of([values(option, defs) for option in schema["anyOf"]])
    if "enum" in schema or "const" in schema:
        return st.sampled_from(schema.get("enum") or [schema["const"]])
    match schema.get("type"):
        case "object" if "properties" in schema:
            return objects(schema, defs)
        case "object":
            extra = schema.get("additionalProperties")
            inner = values(extra, defs) if isinstance(extra, dict) else ODD
            return st.dictionaries(st.one_of(TEXT, st.integers(0, 400).map(str)), inner, max_size=3)
        case "array":
            least = schema.get("minItems", 0)
            return st.lists(values(schema["items"], defs), min_size=least, max_size=3)
        case "integer":
            return st.one_of(st.integers(-1, 20), st.integers(-(2**63), 2**63 - 1))
        case "number":
            return st.one_of(st.floats(-2, 2), st.floats(allow_nan=False, allow_infinity=False))
    return {"string": TEXT, "boolean": st.booleans(), "null": st.none()}.get(schema.get("type", ""), ODD)


def objects(schema: dict[str, Any], defs: dict[str, Any]) -> st.SearchStrategy[dict[str, Any]]:
    """Objects with what is required, and now and then with some of the rest."""
    fields = {name: values(field, defs) for name, field in schema["properties"].items()}
    required = {name: fields.pop(name) for name in schema.get("required", [])}
    chosen = st.lists(st.sampled_from(sorted(fields)), max_size=4, unique=True) if fields else st.just([])
    rest = chosen.flatmap(lambda names: st.fixed_dictionaries({name: fields[name] for name in names}))
    return st.tuples(st.fixed_dictionaries(required), rest).map(lambda pair: pair[0] | pair[1])


def bodies(schema: dict[str, Any]) -> st.SearchStrategy[Any]:
    """Bodies that fit the schema, bodies with one odd value in them, and bodies that are anything at all."""
    fitting = objects(schema, schema.get("$defs", {}))
    name = st.one_of(st.sampled_from(sorted(schema["properties"])), TEXT)
    spoilt = st.tuples(fitting, name, ODD).map(lambda parts: parts[0] | {parts[1]: parts[2]})
    return st.one_of(fitting, spoilt, ODD)


def shorten(body: Any) -> Any:
    """Keep an answer that is granted short: the fuzz is after refusals and crashes."""
    if isinstance(body, dict) and body.get("max_tokens") is None and "tokens" not in body:
        names = {"max_completion_tokens"} & set(body)
        return body | {"max_tokens": 2} if not names else body
    return body


def post(server: Running, route: str, body: Any) -> None:
    answer = server.client.post(route, content=json.dumps(body), headers={"Content-Type": "application/json"})
    assert answer.status_code in (200, 400, 404, 413), (answer.status_code, answer.text, body)
    if answer.status_code != 200:
        assert answer.json()["error"]["message"]
    elif answer.headers["content-type"].startswith("text/event-stream"):
        assert '"error"' not in answer.text or "response_format" in answer.text, (answer.text, body)
        assert answer.text.endswith("data: [DONE]\n\n")


@pytest.mark.parametrize("route", ROUTES)
def test_no_5xx(server: Running, route: str) -> None:
    fuzz(server, route, 25)


@pytest.mark.slow
@pytest.mark.parametrize("route", ROUTES)
def test_no_5xx_for_long(server: Running, route: str) -> None:
    fuzz(server, route, 300)


def schemas(server: Running) -> dict[str, Any]:
    """The schema of each route's body, as the server publishes it."""
    paths = server.client.get("/openapi.json").json()["paths"]
    posts = {path: methods["post"] for path, methods in paths.items() if "requestBody" in methods.get("post", {})}
    return {path: post["requestBody"]["content"]["application/json"]["schema"] for path, post in posts.items()}


def test_every_route_with_a_body_is_here(server: Running) -> None:
    assert set(schemas(server)) == set(ROUTES)


def fuzz(server: Running, route: str, count: int) -> None:
    schema = schemas(server)[route]

    @settings(max_examples=count, deadline=None, database=None, suppress_health_check=list(HealthCheck))
    @given(bodies(schema))
    def run(body: Any) -> None:
        post(server, route, shorten(body))

    run()
    server.assert_at_rest()
    assert server.service.engine.loop.num_ended["error"] == 0


@pytest.mark.parametrize("path", ["/", "/health", "/ready", "/metrics", "/version", "/v1/models", "/tokenizer_info"])
def test_routes_without_a_body(server: Running, path: str) -> None:
    for method in ("GET", "POST", "PUT", "DELETE", "HEAD", "OPTIONS"):
        answer = server.client.request(method, path, content=b"\xff\x00", headers={"Content-Type": "application/json"})
        assert answer.status_code in (200, 405), (method, answer.text)


@settings(max_examples=30, deadline=None, database=None, suppress_health_check=list(HealthCheck))
@given(name=st.text(st.characters(codec="utf-8"), min_size=1, max_size=12))
def test_model_names(shared: Running, name: str) -> None:
    answer = shared.client.get(f"/v1/models/{quote(name)}", follow_redirects=True)
    assert answer.status_code in (200, 404)
