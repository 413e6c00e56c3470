"""The report's page: one HTML file that needs nothing from anywhere, in the reader's light or dark theme."""

import dataclasses
import re
from collections.abc import Sequence
from html import escape

from octavo.report.charts import CHART_CSS

_CSS = (
    """
:root{--back:#fff;--ink:#1c2430;--soft:#5b6675;--rule:#dde2e8;--tint:#f5f7f9;--good:#047857}
@media (prefers-color-scheme:dark){:root{--back:#14181d;--ink:#dfe5ec;--soft:#94a0ae;--rule:#2d353f;--tint:#1b2128;
--good:#5fd7a7}}
*{box-sizing:border-box}
body{margin:0 auto;padding:32px 20px 80px;max-width:860px;background:var(--back);color:var(--ink);
font:16px/1.55 system-ui,-apple-system,"Segoe UI",sans-serif}
h1{font-size:28px;margin:0 0 4px}h2{font-size:20px;margin:44px 0 8px;padding-top:12px;border-top:1px solid var(--rule)}
h3{font-size:16px;margin:24px 0 4px}p{margin:8px 0}.soft,figcaption{color:var(--soft)}figcaption{font-size:14px}
figure{margin:16px 0 20px}nav{margin:14px 0;font-size:14px}nav a{color:var(--soft);margin-right:14px}
.wide{overflow-x:auto}table{border-collapse:collapse;font-size:14px;margin:10px 0}
th,td{text-align:left;padding:5px 14px 5px 0;border-bottom:1px solid var(--rule);vertical-align:top}
th{color:var(--soft);font-weight:600}td.number,th.number{text-align:right;font-variant-numeric:tabular-nums}
pre{background:var(--tint);padding:12px 14px;overflow-x:auto;font:13px/1.45 ui-monospace,Menlo,Consolas,monospace;
border-radius:6px;margin:8px 0}pre b{color:var(--good)}details summary{cursor:pointer;color:var(--soft)}
body:has(.plots){max-width:1120px}p{max-width:80ch}
.plots{display:grid;grid-template-columns:repeat(2,minmax(0,1fr));gap:8px 32px}
.plots svg.chart{max-width:560px}.plots h3{margin:10px 0 0}.plots figure{margin:4px 0 8px}
.plots figcaption{font-size:13px;line-height:1.4}
@media (max-width:820px){.plots{grid-template-columns:minmax(0,1fr)}}
"""
    + CHART_CSS
)


@dataclasses.dataclass(frozen=True)
class Section:
    """A heading, the name that links lead to, and ready HTML."""

    key: str
    title: str
    body: str


def render(title: str, lead: str, sections: Sequence[Section], css: str = "") -> str:
    """The whole page.

    Args:
        lead: ready HTML under the title.
        css: rules of the sections' own.
    """
    links = "".join(f'<a href="#{section.key}">{escape(section.title)}</a>' for section in sections)
    bodies = "".join(
        f'<section id="{section.key}"><h2>{escape(section.title)}</h2>{section.body}</section>\n'
        for section in sections
    )
    return (
        f'<!DOCTYPE html>\n<html lang="en"><head><meta charset="utf-8"><title>{escape(title)}</title>'
        f'<meta name="viewport" content="width=device-width,initial-scale=1"><meta name="color-scheme" '
        f'content="light dark"><style>{_CSS}{css}</style></head>\n<body><h1>{escape(title)}</h1>{lead}'
        f"<nav>{links}</nav>\n{bodies}</body></html>\n"
    )


def paragraph(text: str) -> str:
    """Plain text as a paragraph."""
    return f"<p>{escape(text)}</p>"


def figure(svg: str, caption: str) -> str:
    """A chart, and in words what it means and what to look for."""
    return f"<figure>{svg}<figcaption>{escape(caption)}</figcaption></figure>"


def plots(figures: Sequence[tuple[str, str]]) -> str:
    """Small figures in two columns, in one where the window is narrow.

    Args:
        figures: each one's heading, plain text, and figure().
    """
    cells = (f"<div><h3>{escape(heading)}</h3>{ready}</div>" for heading, ready in figures)
    return f'<div class="plots">{"".join(cells)}</div>'


def over_steps(window: int) -> str:
    """How a running mean is described."""
    return "not smoothed" if window == 1 else f"running mean over {window} steps"


def table(head: Sequence[str], rows: Sequence[Sequence[object]]) -> str:
    """A table; a column whose cells all look like numbers is aligned to the right."""
    texts = [[str(cell) for cell in row] for row in rows]
    is_number = [all(_looks_like_number(row[i]) for row in texts) and bool(texts) for i in range(len(head))]
    lines = [_row("th", head, is_number), *(_row("td", row, is_number) for row in texts)]
    return f'<div class="wide"><table>{"".join(lines)}</table></div>'


def folded(summary: str, text: str) -> str:
    """Long plain text behind a line that opens it."""
    return f"<details><summary>{escape(summary)}</summary><pre>{escape(text)}</pre></details>"


def _row(tag: str, cells: Sequence[str], is_number: Sequence[bool]) -> str:
    inner = (
        f"<{tag}{' class=number' if number else ''}>{escape(cell)}</{tag}>"
        for cell, number in zip(cells, is_number, strict=True)
    )
    return f"<tr>{''.join(inner)}</tr>"


def _looks_like_number(text: str) -> bool:
    return re.fullmatch(r"([+-]?[\d,.]+(e[+-]?\d+)?( %)?)?", text) is not None
