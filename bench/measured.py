"""The figures of README.md and docs/, made of bench/measured.md and the records: `python -m bench.measured`.

That template has sections (`<!-- section NAME -->`), and a page shows one between `<!-- measured NAME -->` and
`<!-- end -->`. Its links begin at the root of the repository, on every page. In a section a figure is
`{NAME;METRIC;FORM}`: NAME stands for a record and a case ("NAME = RECORD: CASE" at the template's top), FORM is
Python's format of the row's value, with a word before it for another number: "peer" (the value of what was measured
beside it), "gap" (the value less that), "low" and "high" (the row's spread), "percent" (100 times the value), "change"
(100 times what it is above 1), "sequences" (tokens as sequences of 8192); one of the last three may follow another
word. A link to a record that is older than the code that it measured (bench.record_age) has the dates of its rows
behind it. In a page's prose a figure follows its mark, `<!-- {NAME;METRIC;FORM} -->`, and ends at `<!-- -->`. A test
holds the pages to this.
"""

import argparse
import json
import re
import sys
from collections.abc import Callable
from pathlib import Path

from bench.figures import Figures, fill_marks
from bench.record_age import RECORDS, load_older
from octavo.errors import ConfigError

ROOT = Path(__file__).parent.parent
TEMPLATE = ROOT / "bench" / "measured.md"
README = ROOT / "README.md"
PAGES = (README, *(ROOT / "docs" / f"{name}.md" for name in ("results", "serving", "convergence")))
_SECTION = re.compile(r"^<!-- section (\w+) -->\n", re.MULTILINE)
_FIGURE = re.compile(r"\{([^{};]+);([^{};]+);(?:(\w+(?: \w+)?) )?([^{};]+)\}")
_INLINE = re.compile(rf"(<!-- ({_FIGURE.pattern}) -->).*?(<!-- -->)", re.DOTALL)
_NAMES = re.compile(r"<!--\n(.*?)-->\n", re.DOTALL)
_LINK = re.compile(r"(\((?:\.\./)?bench/records/(\w+)\.json\))( \(\d{4}-\d\d-\d\d(?: to [\d-]+)?\))?")
_FIELDS = {"peer": "peer_value", "low": "p20", "high": "p80"}
_NUMBERS: dict[str, Callable[[float], float]] = {
    "percent": lambda value: 100.0 * value,
    "change": lambda value: 100.0 * (value - 1.0),
    "sequences": lambda value: value / 8192,
}


def main(arguments: list[str] | None = None) -> int:
    """Write the figures of every page."""
    parser = argparse.ArgumentParser(prog="python -m bench.measured", description=__doc__)
    parser.add_argument("pages", nargs="*", type=Path, default=PAGES, help="default: all with figures of records")
    for page in parser.parse_args(arguments).pages:
        in_docs = page.resolve().parent == ROOT / "docs"
        page.write_text(fill(page.read_text(encoding="utf-8"), in_docs=in_docs), encoding="utf-8")
    return 0


def fill(text: str, template: Path = TEMPLATE, records: Path = RECORDS, *, in_docs: bool = False) -> str:
    """A page's text with its sections and figures as the records say.

    Args:
        in_docs: the page lies in docs/, not at the root of the repository.

    Raises:
        ConfigError: a figure that no record has, or a section that the template lacks.
    """
    source = template.read_text(encoding="utf-8")
    head = _NAMES.match(source)
    names = head.group() if head else ""
    parts = _SECTION.split(source)
    sections = dict(zip(parts[1::2], parts[2::2], strict=True))

    def section(name: str) -> str:
        body = render(names + sections[name], records).strip()
        if in_docs:
            body = body.replace("](docs/", "](").replace("](bench/", "](../bench/").replace("](tests/", "](../tests/")
        return body

    def inline(match: re.Match[str]) -> str:
        return f"{match.group(1)}{render(names + match.group(2), records)}<!-- -->"

    return _mark_older(_INLINE.sub(inline, fill_marks(text, "measured", sections, section)))


def render(template: str, records: Path = RECORDS) -> str:
    """The template with its figures."""
    head = _NAMES.match(template)
    lines = head.group(1).splitlines() if head else []
    names = {name.strip(): where for name, _, where in (line.partition("=") for line in lines)}
    loaded: dict[str, Figures] = {}

    def figure(match: re.Match[str]) -> str:
        name, metric, given, form = match.groups()
        words = (given or "").split()
        record, _, case = names.get(name, "").strip().partition(": ")
        if record not in loaded:
            path = records / f"{record}.json"
            if not path.is_file():
                raise ConfigError(f"{match.group()} names no record: {name} = {record or '?'}")
            loaded[record] = Figures.load(path)
        field = next((_FIELDS[word] for word in words if word in _FIELDS), "value")
        value = loaded[record].value(case, metric, field)
        beside = loaded[record].value(case, metric, "peer_value") if "gap" in words else 0.0
        if value is None or beside is None:
            raise ConfigError(f"{record}.json has no {metric!r} of {case!r}, which {match.group()} wants")
        value -= beside
        for word in words:
            value = _NUMBERS[word](value) if word in _NUMBERS else value
        return format(value, form)

    return _mark_older(_FIGURE.sub(figure, template[head.end() :] if head else template))


def _mark_older(text: str) -> str:
    older = load_older()

    def mark(link: re.Match[str]) -> str:
        return link.group(1) + (f" ({_dates_of(link.group(2))})" if link.group(2) in older else "")

    return _LINK.sub(mark, text)


def _dates_of(record: str) -> str:
    document = json.loads((RECORDS / f"{record}.json").read_text())
    dates = sorted({row.get("date", document["date"]) for row in document["rows"]})
    return " to ".join(dict.fromkeys((dates[0], dates[-1])))


if __name__ == "__main__":
    sys.exit(main())
