"""`octavo upload MODEL OWNER/NAME`: a checkpoint and its model card, to the Hugging Face Hub."""

from pathlib import Path
from typing import Annotated

import typer

from octavo.cli.checkpoint_folder import Checkpoint
from octavo.errors import ConfigError
from octavo.integrations.hub import model_card, upload, write_card


def command(
    model: Checkpoint,
    repo: Annotated[str, typer.Argument(help="OWNER/NAME on the Hub; made where it is missing.")],
    eval_file: Annotated[
        Path | None, typer.Option("--eval", help="What octavo eval --output wrote, for the card.")
    ] = None,
    base_model: Annotated[str, typer.Option(help="OWNER/NAME of the model that it was made from.")] = "",
    license: Annotated[str, typer.Option(help="The Hub's name of a license, such as apache-2.0.")] = "",
    private: Annotated[bool, typer.Option("--private", help="Make a repository that only its owner sees.")] = False,
    revision: Annotated[str, typer.Option(help="A branch; main by default.")] = "",
    card: Annotated[bool, typer.Option(help="Write README.md: recipe, fidelity and evaluation.")] = True,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Print the card, write and send nothing.")] = False,
) -> None:
    """Upload a checkpoint to the Hugging Face Hub, with a card that says recipe, fidelity and evaluation.

    Log in by `hf auth login` or HF_TOKEN. The card has what octavo quantize measured and what octavo eval --output
    wrote; what was not measured, it says so.
    """
    if not card and (eval_file is not None or base_model or license):
        raise ConfigError(
            "--eval, --base-model and --license are of the card, and --no-card writes none; leave them out"
        )
    text = model_card(model, base_model=base_model, license=license, scores=eval_file) if card else ""
    if dry_run:
        typer.echo(text)
        return
    if card:
        write_card(model, text)
    typer.echo(upload(model, repo, private=private, revision=revision))
