"""The page at / in a real headless browser: a prompt, its tokens with their probabilities, errors, the metrics."""

from collections.abc import Iterator

import pytest

from tests.serve.http.browser import PROGRAM, Browser, browser
from tests.serve.http.running import Running, running

pytestmark = [pytest.mark.slow, pytest.mark.skipif(PROGRAM is None, reason="needs Chromium")]

TOKENS = "document.querySelectorAll('.token').length"
IDLE = "!document.getElementById('go').disabled"


@pytest.fixture(scope="module")
def tab(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    with browser(tmp_path_factory.mktemp("profile")) as tab:
        yield tab


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
    assert tab.run("[...document.querySelectorAll('.token')].map((t) => t.textContent)") == expected["tokens"]
    tab.run("document.querySelector('.token').focus()")
    rows = tab.run("[...document.querySelectorAll('#detail tr')].map((row) => row.cells[1].textContent)")
    assert len(rows) == len(expected["top_logprobs"][0])
    shares = [float(row.removesuffix(" %")) for row in rows]
    assert shares == sorted(shares, reverse=True)
    tab.wait_for("/tokens generated/.test(document.getElementById('metrics').innerText)")
    tab.wait_for("[...document.querySelectorAll('#metrics b')].some((b) => +b.textContent >= 12)")
    assert tab.errors == []


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
