"""Short tables for people: right-aligned numbers under headings."""

import re
from collections.abc import Sequence

NOT_MEASURED = "-"


def format_table(headings: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """One line a row; the first column is aligned left, the others right."""
    widths = [max(len(row[i]) for row in (headings, *rows)) for i in range(len(headings))]
    return "\n".join(_line(row, widths) for row in (headings, *rows))


def number(value: float | None, form: str = ".1f") -> str:
    """value in a format, or a dash where there is none.

    A value below 1 of which a fixed-point format leaves fewer than two digits is shown with two.
    """
    if value is None:
        return NOT_MEASURED
    shown = format(value, form)
    is_fixed, num_digits = form.endswith("f"), len(re.sub(r"\D", "", shown).lstrip("0"))
    if not is_fixed or num_digits >= 2 or not 0 < abs(value) < 1:
        return shown
    return format(value, "#.2g").rjust(len(shown))


def _line(row: Sequence[str], widths: Sequence[int]) -> str:
    cells = [row[0].ljust(widths[0]), *(cell.rjust(width) for cell, width in zip(row[1:], widths[1:], strict=True))]
    return "  ".join(cells).rstrip()
