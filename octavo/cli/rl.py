"""`octavo rl`: reinforce a policy from one TOML file."""

from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

from octavo.config import load_config
from octavo.rl.config import RLConfig


def command(
    recipe: Annotated[Path, typer.Argument(help="A TOML file: see recipes/rl_arithmetic.toml.")],
    overrides: Annotated[list[str] | None, typer.Option("--set", help="section.key=value, over the file.")] = None,
    quiet: Annotated[bool, typer.Option("--quiet", help="Show no progress.")] = False,
) -> None:
    """Reinforce a language model by GRPO: sample, verify, learn, refit.

    With `exact = true` the trainer's logprobs equal the sampler's bit for bit, and every step checks it.
    """
    from octavo.rl.loop import RLResult, run

    config = load_config(RLConfig, recipe, overrides or [])
    result: RLResult = run(config, progress=not quiet)
    first, last = result.history[0], result.history[-1]
    table = Table("", "first step", "last step", title=f"{len(result.history)} steps, {last.seconds:.0f} s")
    for label, name, digits in (
        ("mean reward (sampled)", "reward/mean", ".3f"),
        ("entropy, nats a token", "actor/entropy", ".3f"),
        ("response length", "response_length/mean", ".1f"),
        ("max |delta logprob|", "mismatch/logprob_abs_diff_max", ".2e"),
        ("mismatch KL (k3)", "rollout_corr/k3_kl", ".2e"),
    ):
        table.add_row(label, format(first[name], digits), format(last[name], digits))
    table.add_row("held-out accuracy", f"{result.accuracy_before:.3f}", f"{result.accuracy_after:.3f}", style="bold")
    console = Console()
    console.print(table)
    console.print(f"metrics: {config.run.dir / 'metrics.jsonl'}", highlight=False, soft_wrap=True)
    if result.checkpoint is not None:
        console.print(f"checkpoint: {result.checkpoint}", highlight=False, soft_wrap=True)
