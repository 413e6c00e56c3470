"""Records as they lie on disk, looked up by case and metric, and as tables of Markdown."""

import dataclasses
import json
import re
from collections.abc import Callable, Collection, Iterable, Sequence
from pathlib import Path
from typing import Any

from octavo.errors import ConfigError, DataError

Row = dict[str, Any]
SOURCE = ("commit", "date")  # a row has its own where they are not the record's


@dataclasses.dataclass(frozen=True)
class Column:
    """One column of a table: its heading, the metric it shows, and the number's format."""

    heading: str
    metric: str
    form: str
    field: str = "value"


class Figures:
    """One record's rows.

    Args:
        document: what Record.save wrote.
    """

    def __init__(self, document: dict[str, Any]) -> None:
        self.document = document
        self._rows: dict[tuple[str, str], Row] = {(row["case"], row["metric"]): row for row in document["rows"]}

    @classmethod
    def load(cls, path: Path) -> "Figures":
        """Read a record.

        Raises:
            DataError: the file is no record.
        """
        try:
            return cls(json.loads(path.read_text(encoding="utf-8")))
        except (ValueError, KeyError, TypeError) as error:
            raise DataError(f"{path} is no benchmark record: {error!r}") from error

    @property
    def cases(self) -> list[str]:
        """Names of the cases, in order of the record."""
        return list(dict.fromkeys(case for case, _ in self._rows))

    def value(self, case: str, metric: str, field: str = "value") -> float | None:
        """A row's number, None where the record has none."""
        row = self._rows.get((case, metric))
        return None if row is None else row[field]

    def metrics_starting(self, prefix: str) -> list[str]:
        """Metrics whose name begins so, in order of the record."""
        return list(dict.fromkeys(metric for _, metric in self._rows if metric.startswith(prefix)))

    def table(self, columns: Sequence[Column], cases: Iterable[str] | None = None) -> str:
        """Markdown: a line a case, a dash where there is no figure."""
        names = self.cases if cases is None else list(cases)
        rows = [[name, *(self._cell(name, column) for column in columns)] for name in names]
        return markdown(["", *(column.heading for column in columns)], rows)

    def provenance(self) -> str:
        """Where the record comes from: one sentence, and one more for each commit and date of rows with their own."""
        d = self.document
        sentences = [f"{d['device']}, torch {d['torch']}, triton {d['triton']}, commit {d['commit']}, {d['date']}."]
        others: dict[str, list[str]] = {}
        for row in self._rows.values():
            if SOURCE[0] in row:
                others.setdefault(", ".join(row[key] for key in SOURCE), []).append(row["case"])
        for source, cases in others.items():
            split = {case.partition(": ")[0] for case in self.cases if case not in cases}  # workloads not all of it
            names = (case if (workload := case.partition(": ")[0]) in split else workload for case in cases)
            sentences.append(f"Of commit {source}: {'; '.join(dict.fromkeys(names))}.")
        return " ".join(sentences)

    def _cell(self, case: str, column: Column) -> str:
        value = self.value(case, column.metric, column.field)
        return "-" if value is None else format(value, column.form)


def markdown(headings: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A Markdown table, numbers aligned right."""
    lines = [headings, ["---", *["---:"] * (len(headings) - 1)], *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def with_keys_of_today(rows: Iterable[Row]) -> list[Row]:
    """Rows or curves of a file, where older trees called a variant an arm."""
    return [{"variant" if key == "arm" else key: value for key, value in row.items()} for row in rows]


def fill_marks(text: str, kind: str, known: Collection[str], make: Callable[[str], str]) -> str:
    """A page's text with what make(NAME) gives between every `<!-- kind NAME -->` and `<!-- end -->`.

    Raises:
        ConfigError: a mark of a name that is not known.
    """

    def section(match: re.Match[str]) -> str:
        begin, name, end = match.groups()
        if name not in known:
            raise ConfigError(f"the page marks a section {name!r}; known: {', '.join(known)}")
        body = make(name)
        return f"{begin}\n{body}\n\n{end}" if body else begin + end

    return re.sub(rf"(<!-- {kind} ([\w-]+) -->\n).*?(<!-- end -->)", section, text, flags=re.DOTALL)


def split_case(case: str) -> tuple[str, str]:
    """("16384x4096x14336", "octavo delayed") of a case that begins with a shape or a size."""
    first, _, rest = case.partition(" ")
    return first, rest
