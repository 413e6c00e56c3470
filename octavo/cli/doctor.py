"""`octavo doctor [MODEL]`: can this machine run octavo, and where does a model depart from bf16 in FP8."""

import json
import math
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

from octavo.cli.checkpoint_folder import newest_model
from octavo.cli.console import plain_console
from octavo.cli.ranks import start_ranks
from octavo.distributed.mesh import Mesh
from octavo.doctor.departure import DepartureReport, find_departure
from octavo.doctor.machine import Check, check_machine
from octavo.doctor.model_under_test import DEFAULT_TOKENS, open_model_under_test
from octavo.doctor.ranks import check_ranks
from octavo.doctor.recipes import RecipeCheck, check_recipes, require_here
from octavo.errors import ConfigError
from octavo.integrations.tested import check_ecosystem
from octavo.numerics.recipe import RECIPE_NAMES
from octavo.run.build import find_device

_COLOURS = {"ok": "green", "note": "yellow", "fail": "red"}
_WIDTH = 140


def command(
    model: Annotated[
        str | None, typer.Argument(help="A checkpoint directory, a TOML file of octavo train, or a recipe's name.")
    ] = None,
    recipe: Annotated[str | None, typer.Option(help=f"FP8 recipe to compare: {', '.join(RECIPE_NAMES[1:])}.")] = None,
    text: Annotated[str | None, typer.Option(help="What a checkpoint's model reads; else random tokens.")] = None,
    tokens: Annotated[
        int | None, typer.Option(min=2, help=f"How many tokens, at most; {DEFAULT_TOKENS}.", show_default=False)
    ] = None,
    threshold: Annotated[
        float | None,
        typer.Option(help="SQNR in dB below which a tensor has departed; 20 (an error of 10 %), or 12 under nvfp4."),
    ] = None,
    overrides: Annotated[
        list[str] | None, typer.Option("--set", metavar="SECTION.KEY=VALUE", help="Set a key of the TOML file.")
    ] = None,
    device: Annotated[str, typer.Option(help="cpu, cuda, cuda:1; empty takes a GPU where there is one.")] = "",
    ranks: Annotated[
        int, typer.Option(min=0, help="Start so many ranks on this machine, and measure how they reach each other.")
    ] = 0,
    ecosystem: Annotated[
        bool,
        typer.Option("--ecosystem", help="Which frameworks are installed, and which versions octavo was tested with."),
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object instead.")] = False,
) -> None:
    """Check driver, versions, recipes and Triton's compiler; with a MODEL, run it once in fp32, bf16 and FP8.

    The table names the first layer and operand whose FP8 error passes the threshold. Exits with 1 where a
    check failed or a layer departs, and with 2 where this machine lacks the recipe that was asked for.
    """
    is_bare = (model, recipe, text, tokens, threshold, overrides or None) == (None,) * 6
    if ecosystem and not (is_bare and not ranks):
        raise ConfigError("--ecosystem checks the frameworks alone and takes no model or option of one; leave them out")
    if ecosystem:
        _finish([Check(*found) for found in check_ecosystem()], "ecosystem", as_json)
        return
    if ranks and not is_bare:
        raise ConfigError("--ranks checks the ranks alone and takes no model or option of one; leave them out")
    if ranks:
        _report_ranks(ranks, device, as_json)
        return
    where = find_device(device)
    if model is None and not is_bare:
        raise ConfigError(
            "--recipe, --text, --tokens, --threshold and --set go with a MODEL: a checkpoint, a TOML file or a recipe"
        )
    if threshold is not None and not math.isfinite(threshold):
        raise ConfigError(f"--threshold must be a finite number of dB, got {threshold}")
    for name in {recipe, model} & set(RECIPE_NAMES) if model else ():
        require_here(str(name), where)
    report = None
    if model is not None:
        found = open_model_under_test(
            str(newest_model(Path(model))),
            where,
            recipe=recipe,
            text=text,
            num_tokens=tokens or DEFAULT_TOKENS,
            overrides=tuple(overrides or ()),
        )
        for note in found.notes:
            plain_console(stderr=True).print(f"note: {note}", soft_wrap=True)
        report = find_departure(found.model, found.run, found.recipe, threshold_db=threshold)
    checks, recipes = check_machine(where), check_recipes(where)
    is_well = all(check.status != "fail" for check in checks) and not any(found.problem for found in recipes)
    is_well = is_well and (report is None or report.first is None)
    if as_json:
        typer.echo(json.dumps(_plain(checks, recipes, report, is_well), indent=2, allow_nan=False))
    else:
        is_checkpoint = model is not None and Path(model).is_dir()
        said = ", whatever the model was trained with; --recipe names another" if is_checkpoint else ""
        _print(checks, recipes, report, is_well, said)
    if not is_well:
        raise typer.Exit(1)


def _report_ranks(num_ranks: int, device: str, as_json: bool) -> None:
    """The checks of a job of several ranks alone; the first rank prints."""
    arguments = ["doctor", "--ranks", str(num_ranks), *(["--device", device] if device else [])]
    code = start_ranks(num_ranks, [*arguments, *(["--json"] if as_json else [])])
    if code is not None:
        raise typer.Exit(code)
    mesh = Mesh.from_config(device=device)
    try:
        checks = check_ranks(mesh)
    finally:
        mesh.close()
    _finish(checks, "ranks", as_json, is_printed=mesh.is_first)


def _finish(checks: list[Check], key: str, as_json: bool, *, is_printed: bool = True) -> None:
    """Print checks that were asked for alone; exit with 1 where one failed."""
    is_well = all(check.status != "fail" for check in checks)
    if is_printed and as_json:
        typer.echo(json.dumps({"ok": is_well, key: [vars(check) for check in checks]}, indent=2))
    elif is_printed:
        _print_checks(plain_console(), checks)
    if not is_well:
        raise typer.Exit(1)


def _print_checks(console: Console, checks: list[Check]) -> None:
    for check in checks:
        console.print(f"{check.status:>4}", style=_COLOURS[check.status], end="")
        console.print(f"  {check.name}: {check.text}", soft_wrap=True)


def _plain(
    checks: list[Check], recipes: list[RecipeCheck], report: DepartureReport | None, is_well: bool
) -> dict[str, object]:
    return {
        "ok": is_well,
        "machine": [vars(check) for check in checks],
        "recipes": [{**vars(found.support), "sqnr_db": found.sqnr_db, "problem": found.problem} for found in recipes],
        "departure": None if report is None else report.as_dict(),
    }


def _print(
    checks: list[Check], recipes: list[RecipeCheck], report: DepartureReport | None, is_well: bool, said: str
) -> None:
    console = plain_console(min_width=_WIDTH)
    _print_checks(console, checks)
    table = Table("recipe", "here", "SQNR dB", "why", box=None, pad_edge=False, header_style="bold")
    for found in recipes:
        db = "" if found.sqnr_db is None else f"{found.sqnr_db:.1f}"
        table.add_row(found.name, found.support.how, db, found.problem or found.support.reason)
    console.print(table)
    if report is not None:
        console.print(f"in FP8: recipe {report.recipe!r}{said}", soft_wrap=True)
        console.print(_departures(report))
        console.print(report.verdict, style="green" if report.first is None else "red", soft_wrap=True)
    failed = [check.name for check in checks if check.status == "fail"]
    failed += [f"recipe {found.name}" for found in recipes if found.problem]
    if report is not None and report.first is not None:
        failed.append(f"layer {report.first.layer}")
    if is_well and report is not None and report.first_accumulated is not None:
        console.print(
            f"all is well: no layer is at fault. That errors add up beyond {report.threshold_db:g} dB, "
            f"{10 ** (-report.threshold_db / 20):.0%} of a tensor's magnitude, is usual in a sound model too; "
            "perplexity says what it costs (octavo quantize --eval-text)",
            style="green",
            soft_wrap=True,
        )
    else:
        console.print(
            "all is well" if is_well else f"not well: {', '.join(failed)}", style="green" if is_well else "red"
        )


def _departures(report: DepartureReport) -> Table:
    title = "SQNR in dB: own = this layer's codes and GEMMs alone; FP8 and bf16 against fp32, added up until here"
    table = Table("layer", "tensor", "own", "FP8", "bf16", box=None, pad_edge=False, header_style="bold", title=title)
    for row in report.rows:
        cells = ("" if db is None else f"{db:.1f}" for db in (row.own_db, row.fp8_db, row.bf16_db))
        table.add_row(row.layer, row.tensor, *cells, style="red" if row is report.first else None)
    return table
