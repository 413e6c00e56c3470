"""A MismatchReport on a terminal."""

from rich.console import Console
from rich.table import Table

from octavo.doctor.mismatch import MismatchReport
from octavo.rl.health import Alert

_WIDTH = 150


def print_mismatch(
    console: Console, name: str, report: MismatchReport, alerts: tuple[Alert, ...] = (), note: str = ""
) -> None:
    """A row for each part, then the verdict.

    Args:
        name: of what was examined.
        alerts: limits that were passed.
        note: what else to know; empty for nothing.
    """
    wide = (
        console
        if console.is_terminal
        else Console(file=console.file, highlight=False, width=max(console.width, _WIDTH))
    )
    title = f"{name}: k3 KL a token over {report.num_tokens} tokens; alone = the trainer with this part of the sampler"
    table = Table("part", "trainer", "sampler", box=None, pad_edge=False, header_style="bold", title=title)
    for column in ("alone", "left without", "contribution", "max |delta| alone"):
        table.add_column(column, justify="right")
    for row in report.contributions:
        numbers = (row.alone, row.without, row.contribution, row.max_abs_delta)
        differs = row.alone > 0 or row.contribution != 0
        cells = [f"{number:.2e}" for number in numbers] if differs else ["same", "", "0", ""]
        style = "red" if row is report.largest else None
        table.add_row(row.label, row.trainer, row.sampler, *cells, style=style)
    wide.print(table)
    lines = [f"whole {report.total:.2e}, not explained by any part {report.residual:.2e}"]
    if report.routing_flip_share is not None:
        lines.append(f"experts differ for {report.routing_flip_share:.2%} of tokens and layers")
    if report.with_replayed_routing is not None:
        lines.append(
            f"with the sampler's experts replayed in the trainer {report.with_replayed_routing:.2e} would be left"
        )
    lines += [report.verdict, *(f"limit passed: {alert.text}" for alert in alerts)]
    lines += [f"note: {note}"] if note else []
    for line in lines:
        wide.print(line, markup=False, soft_wrap=True)
