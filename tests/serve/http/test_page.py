"""The page at / in a real headless browser: prompts and chats, tokens with their probabilities, errors, the metrics."""

import math
import threading
from collections.abc import Iterator
from typing import Any

import pytest

from octavo import LLM
from octavo.models import Tokenizer
from octavo.serve.engine import Engine
from tests.serve.http.browser import PROGRAM, Browser, browser
from tests.serve.http.running import Running, byte_tokenizer, make_engine, make_server_model, running, script

pytestmark = [pytest.mark.slow, pytest.mark.skipif(PROGRAM is None, reason="needs Chromium")]

TOKENS = "document.querySelectorAll('.token').length"
IDLE = "!document.getElementById('go').disabled"
TURNS = "[...document.querySelectorAll('.turn')]"
ONE_TURN_ONLY = "{% if messages|length > 1 %}{{ raise_exception('one turn only') }}{% endif %}{{ messages[0].content }}"


@pytest.fixture(scope="module")
def module_tab(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    with browser(tmp_path_factory.mktemp("profile")) as tab:
        yield tab


@pytest.fixture
def tab(module_tab: Browser) -> Browser:
    module_tab.errors.clear()
    return module_tab


def fill(tab: Browser, **fields: object) -> None:
    for name, value in fields.items():
        tab.run(f"document.getElementById('{name}').value = {str(value)!r}")


def generate(tab: Browser, **fields: object) -> None:
    fill(tab, **fields)
    tab.run("document.getElementById('go').click()")


def test_a_prompt_gives_tokens_with_probabilities_and_live_metrics(server: Running, tab: Browser) -> None:
    tab.open(server.url)
    tab.wait_for("document.getElementById('status').innerText === 'serving'")
    assert tab.run("document.getElementById('model').innerText") == "tiny"
    generate(tab, prompt="tell me a story", max_tokens=12, seed=3)
    tab.wait_for(f"{TOKENS} > 0 && {IDLE}")
    fields = {"prompt": "tell me a story", "max_tokens": 12, "seed": 3, "logprobs": 5}
    expected = server.complete(**fields)["choices"][0]["logprobs"]
    tokens = expected["tokens"]
    shown = [place for place, token in enumerate(tokens) if token]  # "" is part of the character that comes
    texts = tab.run("[...document.querySelectorAll('.token')].map((t) => t.textContent)")
    assert texts == [tokens[place] for place in shown]
    alone = next(i for i in range(1, len(shown)) if shown[i] == shown[i - 1] + 1)
    tab.run(f"document.querySelectorAll('.token')[{alone}].focus()")
    rows = tab.run("[...document.querySelectorAll('#detail tr')].map((row) => row.cells[1].textContent)")
    assert len(rows) == len(expected["top_logprobs"][shown[alone]])
    shares = [float(row.removesuffix(" %")) for row in rows]
    assert shares == sorted(shares, reverse=True)
    tab.wait_for("/tokens generated/.test(document.getElementById('metrics').innerText)")
    tab.wait_for("[...document.querySelectorAll('#metrics b')].some((b) => +b.textContent >= 12)")
    assert tab.errors == []


def test_a_character_of_several_tokens_is_shown_once_and_whole(server: Running, tab: Browser) -> None:
    ids = byte_tokenizer().encode("a\U0001f30ab")
    assert len(ids) == 1 + 4 + 1
    tab.open(server.url)
    with script(server, ids):
        generate(tab, prompt="a", max_tokens=len(ids))
        tab.wait_for(f"{TOKENS} > 0 && {IDLE}")
    assert tab.run("[...document.querySelectorAll('.token')].map((t) => t.textContent)") == ["a", "\U0001f30a", "b"]
    tab.run("document.querySelectorAll('.token')[1].focus()")
    assert tab.run("document.querySelectorAll('#detail table').length") == 4


def test_stop_ends_the_request(server: Running, tab: Browser) -> None:
    tab.open(server.url)
    tab.wait_for("document.getElementById('status').innerText === 'serving'")
    before = server.service.engine.loop.num_ended["abort"]
    generate(tab, prompt="a", max_tokens=250, temperature=5)
    tab.wait_for(f"{TOKENS} > 2")
    tab.run("document.getElementById('stop').click()")
    tab.wait_for(IDLE)
    server.assert_at_rest()
    assert server.service.engine.loop.num_ended["abort"] == before + 1


def test_refusals_are_shown(tab: Browser) -> None:
    with running(api_keys=("sesame",)) as server:
        tab.open(server.url)
        tab.wait_for("document.getElementById('status').innerText === 'serving'")
        generate(tab, prompt="a", max_tokens=4)
        tab.wait_for("/a key is needed/.test(document.querySelector('.error')?.innerText)")
        generate(tab, key="sesame", max_tokens=9999)
        tab.wait_for("/the context holds/.test(document.querySelector('.error')?.innerText)")
        generate(tab, max_tokens=4)
        tab.wait_for(f"{TOKENS} > 0 && {IDLE} && !document.querySelector('.error')")


def open_chat(tab: Browser, url: str, **fields: object) -> None:
    tab.open(url)
    tab.run("document.getElementById('chat').click()")
    fill(tab, **fields)


def say(tab: Browser, text: str) -> None:
    tab.run("document.getElementById('message').focus()")
    tab.type(text)
    tab.press_enter()


def chat_answer(server: Running, *contents: str, **fields: Any) -> dict[str, Any]:
    """The choice that a conversation of the user's and the assistant's turns has."""
    roles = ("user", "assistant") * len(contents)
    messages = [{"role": role, "content": content} for role, content in zip(roles, contents, strict=False)]
    answer = server.post("/v1/chat/completions", messages=messages, logprobs=True, top_logprobs=5, **fields)
    assert answer.status_code == 200, answer.text
    choice: dict[str, Any] = answer.json()["choices"][0]
    return choice


def tokens_of(choice: dict[str, Any]) -> list[str]:
    """What the page shows: a token without a text of its own is part of the character that comes."""
    return [entry["token"] for entry in choice["logprobs"]["content"] if entry["token"]]


def test_a_chat_sends_its_earlier_turns_along(server: Running, tab: Browser) -> None:
    sampling: dict[str, Any] = {"max_tokens": 10, "seed": 3}
    open_chat(tab, server.url, **sampling)
    tab.wait_for("document.getElementById('status').innerText === 'serving'")
    assert not tab.run("document.getElementById('prompt').checkVisibility()")
    say(tab, "tell me a story")
    tab.wait_for(f"{TOKENS} > 0 && {IDLE}")
    first = chat_answer(server, "tell me a story", **sampling)
    say(tab, "go on")
    tab.wait_for(f"{TURNS}.length === 4 && {IDLE}")
    second = chat_answer(server, "tell me a story", first["message"]["content"], "go on", **sampling)
    assert tokens_of(second) != tokens_of(chat_answer(server, "go on", **sampling))

    shown = tab.run(f"{TURNS}.map((turn) => [...turn.querySelectorAll('.token')].map((t) => t.textContent))")
    assert shown == [[], tokens_of(first), [], tokens_of(second)]
    roles = tab.run(f"{TURNS}.map((turn) => turn.querySelector('b').innerText)")
    assert roles == ["user", "assistant", "user", "assistant"]
    content = second["logprobs"]["content"]
    shown = [place for place, entry in enumerate(content) if entry["token"]]
    alone = next(i for i in range(1, len(shown)) if shown[i] == shown[i - 1] + 1)  # no part of a character before it
    tab.run(f"{TURNS}[3].querySelectorAll('.token')[{alone}].focus()")
    sampled = content[shown[alone]]
    best = {entry["logprob"] for entry in sampled["top_logprobs"]}
    rows = tab.run("[...document.querySelectorAll('#detail tr')].map((row) => row.cells[1].textContent)")
    assert rows == [f"{100 * math.exp(p):.2f} %" for p in sorted(best | {sampled["logprob"]}, reverse=True)]
    assert tab.run("document.querySelectorAll('.token')[0].style.background") != ""

    tab.run("document.getElementById('new').click()")
    assert tab.run(f"{TURNS}.length") == 0
    say(tab, "go on")
    tab.wait_for(f"{TOKENS} > 0 && {IDLE}")
    shown = tab.run("[...document.querySelectorAll('.token')].map((t) => t.textContent)")
    assert shown == tokens_of(chat_answer(server, "go on", **sampling))
    assert tab.errors == []


def test_shift_enter_makes_a_line_and_the_modes_keep_what_they_hold(server: Running, tab: Browser) -> None:
    open_chat(tab, server.url, max_tokens=3)
    tab.run("document.getElementById('message').focus()")
    tab.press_enter()
    assert tab.run(f"{TURNS}.length") == 0, "there is nothing to send"
    tab.type("a")
    tab.press_enter(shift=True)
    say(tab, "b")
    tab.wait_for(f"{TURNS}.length === 2 && {TOKENS} > 0 && {IDLE}")
    assert tab.run(f"{TURNS}[0].querySelector('div').textContent") == "a\nb"
    tab.run("document.getElementById('complete').click()")
    generate(tab, prompt="a")
    tab.wait_for(f"document.querySelectorAll('#output .token').length > 0 && {IDLE}")
    assert not tab.run("document.getElementById('conversation').checkVisibility()")
    assert tab.run(f"{TURNS}.length") == 2


def test_a_stopped_answer_counts_as_far_as_it_came(server: Running, tab: Browser) -> None:
    open_chat(tab, server.url, max_tokens=230, temperature=5)
    say(tab, "a")
    tab.wait_for(f"{TOKENS} > 2")
    tab.run("document.getElementById('stop').click()")
    tab.wait_for(IDLE)
    server.assert_at_rest()
    assert tab.run("messages.map((message) => message.role)") == ["user", "assistant"]
    assert tab.run("messages[1].content") != ""
    assert tab.run("document.getElementById('message').value") == ""


def test_a_turn_that_the_template_refuses_is_shown_and_not_sent_along(tab: Browser) -> None:
    own = Tokenizer(byte_tokenizer().backend, eos_id=0, chat_template=ONE_TURN_ONLY)
    with running(lambda: make_engine(own)) as server:
        open_chat(tab, server.url, max_tokens=4)
        say(tab, "a")
        tab.wait_for(f"{TOKENS} > 0 && {IDLE}")
        for _ in range(2):
            say(tab, "b")
            tab.wait_for(f"/one turn only/.test(document.querySelector('.error')?.innerText) && {IDLE}")
            assert tab.run(f"{TURNS}.length") == 4
            assert tab.run("document.getElementById('message').value") == "b"
            tab.run("document.getElementById('message').value = ''")
        tab.run("document.getElementById('new').click()")
        say(tab, "b")
        tab.wait_for(f"{TOKENS} > 0 && {IDLE} && !document.querySelector('.error')")


def test_a_model_that_reads_no_text_refuses_a_chat(tab: Browser) -> None:
    def build() -> Engine:
        model = make_server_model()
        return LLM(model, None, max_num_seqs=8, num_kv_pages=40, max_model_len=256).engine

    with running(build) as server:
        open_chat(tab, server.url)
        say(tab, "a")
        tab.wait_for("/has no tokenizer/.test(document.querySelector('#conversation .error')?.innerText)")


def test_a_chat_needs_the_key_and_a_server_that_has_started(tab: Browser) -> None:
    go_on = threading.Event()

    def build() -> Engine:
        assert go_on.wait(30)
        return make_engine()

    with running(build, wait=False, api_keys=("sesame",)) as server:
        try:
            open_chat(tab, server.url, max_tokens=4)
            say(tab, "a")
            tab.wait_for("/a key is needed/.test(document.querySelector('.error')?.innerText)")
            fill(tab, key="sesame")
            tab.run("document.getElementById('go').click()")
            tab.wait_for("/is starting/.test(document.querySelector('.error')?.innerText)")
        finally:
            go_on.set()
        tab.wait_for("document.getElementById('status').innerText === 'serving'")
        tab.run("document.getElementById('go').click()")
        tab.wait_for(f"{TOKENS} > 0 && {IDLE} && !document.querySelector('.error')")
        assert tab.run(f"{TURNS}.length") == 2
