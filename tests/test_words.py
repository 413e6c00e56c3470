"""Words of this house that a stranger has to look up stay out: whole words, counted."""

import re
from pathlib import Path

ROOT = Path(__file__).parents[1]
WORDS = re.compile(
    r"\b(anew|nobody|somebody|whoever|roads?|mend(s|ed)?|elsewhere|rehears(al|ed)s?|suspects?|recipe files?)\b",
    re.IGNORECASE,
)
MAX_WORDS = 20


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
    (tmp_path / "docs" / "page.md").write_text(
        "Whoever mends the road anew.\nA broadcast recommends no roadmap.\nA recipe file and its recipes.\n"
    )
    assert [line.split(": ")[1] for line in private_words(tmp_path)] == [
        "Whoever",
        "mends",
        "road",
        "anew",
        "recipe file",
    ]
