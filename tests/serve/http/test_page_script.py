"""The page's script, without a browser: how it joins the tokens of a character. test_page has the whole page."""

import json
import re
import shutil
import subprocess
from pathlib import Path

import pytest

from octavo.serve import http

NODE = shutil.which("node")
PAGE = Path(http.__file__).with_name("page.html")
# as much of a document as its functions touch
DOCUMENT = """
const element = () => ({
  style: {}, children: [], append(...more) { this.children.push(...more); },
  replaceChildren(...all) { this.children = all; },
  insertRow() { const row = element(); row.insertCell = () => (row.append(element()), row.children.at(-1));
                this.append(row); return row; },
});
const all = {};
const document = { getElementById: (id) => all[id] ??= element(), createElement: element };
"""


@pytest.mark.skipif(NODE is None, reason="needs node")
def test_a_character_of_several_tokens_is_one_with_all_their_details() -> None:
    text = PAGE.read_text(encoding="utf-8")
    script = re.search(r"<script>(.*?)\nfunction showError", text, re.DOTALL)
    assert script is not None
    # of the emoji's four tokens the last one has its text
    steps = """
    const half = Math.log(0.5);
    for (const token of ["a", "", "", "", "\\u{1f30a}", "b"]) addToken(token, half, [["x", -3]]);
    const spans = all.output.children;
    spans[1].onfocus();
    console.log(JSON.stringify([spans.map((s) => [s.textContent, s.title]), all.detail.children.length, parts.length]));
    """
    assert NODE is not None
    done = subprocess.run([NODE, "-e", DOCUMENT + script[1] + steps], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    shown = [["a", "50.00 %"], ["\U0001f30a", "6.25 %"], ["b", "50.00 %"]]
    assert json.loads(done.stdout) == [shown, 4, 0]
