"""`octavo rl`: reinforce a policy from one config."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.table import Table

from octavo.cli.console import plain_console
from octavo.config import refuse_empty
from octavo.env import torchrun_place
from octavo.errors import ConfigError
from octavo.integrations.config import resolve_config, to_toml
from octavo.integrations.config.command_line import ConfigFormat
from octavo.rl.config import RLConfig

if TYPE_CHECKING:  # which loads torch
    from octavo.rl.trainer import RLResult


def command(
    file: Annotated[
        str | None,
        typer.Argument(metavar="CONFIG", help="octavo's TOML (configs/rl_arithmetic.toml), or another's YAML."),
    ] = None,
    keys: Annotated[
        list[str] | None, typer.Argument(metavar="KEY=VALUE", help="Over the file, in its format; slime's flags.")
    ] = None,
    config_format: Annotated[
        ConfigFormat, typer.Option(help="Whose words CONFIG and KEY=VALUE are; slime's flags stand after --.")
    ] = "octavo",
    base: Annotated[Path | None, typer.Option(help="octavo's TOML file under another framework's keys.")] = None,
    overrides: Annotated[list[str] | None, typer.Option("--set", help="section.key=value, over octavo's file.")] = None,
    ignore_unsupported: Annotated[
        bool, typer.Option("--ignore-unsupported", help="Go on without those of their keys that mean nothing here.")
    ] = False,
    resume: Annotated[
        bool, typer.Option("--resume/--no-resume", help="Resume from run.dir's last checkpoint, if it has one.")
    ] = True,
    report: Annotated[bool, typer.Option("--report", help="Only write report.html of the run in run.dir.")] = False,
    quiet: Annotated[bool, typer.Option("--quiet", help="Show no progress.")] = False,
    show_config: Annotated[
        bool, typer.Option("--show-config", help="Print the whole config as TOML, and run nothing.")
    ] = False,
) -> None:
    """Reinforce a language model by GRPO: sample, verify, learn, refit.

    Ctrl-C and SIGTERM save after the step under way; the exit code is then 130 or 143, and the same command goes on.
    Before the first step (a warm start counts as none) there is nothing to save. With `exact = true` the trainer's
    logprobs equal the sampler's bit for bit: every step checks its first minibatch, and all of it as often as
    trainer.check_exact_every says. Under torchrun each rank samples and learns its share, and the first one prints.
    """
    if config_format == "octavo" and file is not None and "=" in file and not Path(file).exists():
        raise ConfigError(
            f"CONFIG must be a TOML file, got {file}; verl's and NeMo-RL's keys go with --config-format verl or "
            "nemo-rl, octavo's with --set behind the file"
        )
    config, notes = resolve_config(
        [text for text in (file, *(keys or ())) if text is not None],
        config_format,
        overrides or [],
        base=base,
        ignore_unsupported=ignore_unsupported,
    )
    for note in notes:
        _say(note)
    if show_config:
        typer.echo(to_toml(config), nl=False)
        return
    from octavo.distributed.mesh import end_job
    from octavo.rl.checkpoint import FinishedRunError
    from octavo.rl.loop import run
    from octavo.rl.report import write_report
    from octavo.run.stopping import StoppedBeforeStepError, exit_code

    if report:
        typer.echo(f"report: {write_report(config.run.dir)}")
        return
    if config_format == "octavo" and file is not None:
        refuse_empty(file, [*(keys or ()), *(overrides or ())], "configs/rl_arithmetic.toml")
    try:
        result = run(config, progress=not quiet, resume=resume)
    except FinishedRunError as finished:
        for change in finished.changes:
            _say(change)
        _echo(f"{finished}\ncheckpoint: {finished.model_path}")
        return
    except StoppedBeforeStepError as stopped:
        saved = _what_goes_on(config, resume)
        _say(f"{stopped}: nothing was saved{f'; {saved}' if saved else ''}")
        raise typer.Exit(stopped.exit_code) from None
    except KeyboardInterrupt:
        _say(f"stopped at once; {_what_goes_on(config, resume) or 'nothing was saved'}")
        raise
    end_job()
    if result.stopped_by:
        again = "the same command goes on" if resume else "the same command without --no-resume goes on"
        _echo(f"stopped by {result.stopped_by} after step {result.history[-1].step}; {again}")
        raise typer.Exit(exit_code(result.stopped_by))
    if _is_first():
        _print_result(result, config)


def _print_result(result: "RLResult", config: RLConfig) -> None:
    """A run's first and last step, and where its files are."""
    from octavo.report.axes import number
    from octavo.rl.report import REPORT_FILE
    from octavo.rl.step_table import SUMMARY

    first, last = result.history[0], result.history[-1]
    now = f", {len(result.history) - result.first_step} of them now" if result.first_step else ""
    title = f"{len(result.history)} steps{now}, {last.seconds:.0f} s"
    heldout = (result.heldout_reward_before, result.heldout_reward_after)
    table = Table("", "first step", "last step", title=title)
    for label, name, digits in SUMMARY:
        table.add_row(label, number(first[name], digits), number(last[name], digits))
    table.add_row("mean reward (held-out)", *(f"{value:.3f}" for value in heldout), style="bold")
    console = plain_console()
    console.print(table)
    console.print(f"metrics: {config.run.dir / 'metrics.jsonl'}", soft_wrap=True)
    if config.run.report:
        console.print(f"report: {config.run.dir / REPORT_FILE}", soft_wrap=True)
    if result.checkpoint is not None:
        console.print(f"checkpoint: {result.checkpoint}", soft_wrap=True)


def _what_goes_on(config: RLConfig, resume: bool) -> str:
    """How to go on from the last checkpoint in run.dir; empty where there is none, and on all ranks but the first."""
    if not _is_first():  # to look for it removes what another rank's save has half written
        return ""
    from octavo.rl.checkpoint import open_store

    found = open_store(config).find_latest()
    if found is None:
        return ""
    return f"the same command{'' if resume else ' without --no-resume'} goes on from {found.path}"


def _is_first() -> bool:
    """Whether this process speaks for all that torchrun has started."""
    place = torchrun_place()
    return place is None or place.rank == 0


def _echo(text: str) -> None:
    if _is_first():
        typer.echo(text)


def _say(text: str) -> None:
    if _is_first():
        plain_console(stderr=True).print(text, soft_wrap=True)
