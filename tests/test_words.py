"""Words of this house that a stranger has to look up stay out, and docstrings have one name a line."""

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
WORDS = re.compile(
    r"\b(anew|nobody|somebody|whoever|roads?|mend(s|ed)?|elsewhere|rehears(al|ed)s?|suspects?|recipe files?)\b",
    re.IGNORECASE,
)
MAX_WORDS = 20
HEADER_WITH_TEXT = re.compile(r"(?m)^(?:.*\. )?((?:(?:Args|Attributes|Raises|Returns|Yields|Source)(?:, )?)+: *\S.*)$")
ENTRIES = re.compile(r"(?m)^(?:Args|Attributes|Raises):\n((?: .*\n?|\n(?= ))*)")
NO_ENTRY = re.compile(r"(?m)^ {4}(?!\*{0,2}[\w.]+: )\S.*$")
SECOND_ENTRY = re.compile(r"[.;](?: |\n {5,})((?:[a-z]\w*|\w+Error)(?:, \w+)*: .*)")


def private_words(folder: Path) -> list[str]:
    """file:line: word of each whole word in Python files and pages below a folder."""
    return [
        f"{path.relative_to(folder)}:{number}: {match[0]}"
        for pattern in ("octavo/**/*.py", "docs/**/*.md")
        for path in sorted(folder.glob(pattern))
        for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1)
        for match in WORDS.finditer(line)
    ]


def test_the_code_and_its_pages_use_plain_words() -> None:
    found = private_words(ROOT)
    assert len(found) < MAX_WORDS, "\n".join(found)


def test_the_count_sees_them(tmp_path: Path) -> None:
    (tmp_path / "docs").mkdir()
    (tmp_path / "docs" / "page.md").write_text("Whoever mends the road anew.\nA recipe file, no recommended roadmap.\n")
    words = [line.split(": ")[1] for line in private_words(tmp_path)]
    assert words == ["Whoever", "mends", "road", "anew", "recipe file"]


def packed_lines(folder: Path) -> list[str]:
    """file: line of each docstring line that Sphinx and griffe do not read as one name and its text."""
    kinds = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    found = []
    for path in sorted(folder.rglob("*.py")):
        nodes = [node for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))) if isinstance(node, kinds)]
        for text in filter(None, map(ast.get_docstring, nodes)):
            bodies = "\n".join(ENTRIES.findall(text))
            packed = [*HEADER_WITH_TEXT.findall(text), *NO_ENTRY.findall(bodies), *SECOND_ENTRY.findall(bodies)]
            found += [f"{path.relative_to(folder)}: {line}" for line in packed]
    return found


@pytest.mark.parametrize("folder", ["octavo", "bench"])
def test_docstrings_have_one_name_a_line(folder: str) -> None:
    assert packed_lines(ROOT / folder) == []


def test_a_packed_line_is_found(tmp_path: Path) -> None:
    plain = "Args:\n    x: of y: 1.\n    *rest: more. None: of all.\n        y for short.\nReturns:\n    x."
    packed = ["Args:\n    x, y: 1.", "Args:\n    x: 1. y: 2.", "Attributes:\n    x: a\n        text;\n        y: 2."]
    packed += ["Raises:\n    ShapeError.", "Raises:\n    ShapeError: 1. DtypeError: 2.", "See x. Returns: y."]
    for text, num_packed in ((plain, 0), *((section, 1) for section in packed)):
        (tmp_path / "module.py").write_text(f'"""Do.\n\n{text}\n"""\n')
        assert len(packed_lines(tmp_path)) == num_packed, text
