"""`octavo train`: one TOML file in, checkpoints and metrics out."""

import inspect
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any, Literal

import typer

from octavo.cli.console import plain_console
from octavo.config import load_config, refuse_empty, sections_of
from octavo.distributed.mesh import end_job
from octavo.env import torchrun_place
from octavo.errors import ConfigError
from octavo.integrations.config.megatron import apply_flags
from octavo.integrations.config.megatron_flags import FLAGS, ONLY_ONE, REFUSED
from octavo.models.tokenizer import load_tokenizer
from octavo.run.stopping import exit_code
from octavo.train import TrainConfig, TrainResult, train
from octavo.train.config import DataSection
from octavo.train.corpus import STDLIB, walk
from octavo.train.tasks import TASKS

_RL_SECTIONS = {"task", "rollout", "algorithm", "trainer"}  # sections that a training config never has


def command(
    file: Annotated[Path, typer.Argument(metavar="CONFIG", help="A TOML file; see configs/.")],
    overrides: Annotated[
        list[str] | None, typer.Option("--set", metavar="SECTION.KEY=VALUE", help="Set a key of the config.")
    ] = None,
    resume: Annotated[
        bool, typer.Option("--resume/--no-resume", help="Go on from run.dir's last checkpoint, if it has one.")
    ] = True,
    device: Annotated[str | None, typer.Option(help="Short for --set run.device=...: cpu, cuda, cuda:1.")] = None,
    plan: Annotated[
        bool, typer.Option("--plan", help="Print what the run would hold in memory, and train nothing.")
    ] = False,
    observe: Annotated[
        bool, typer.Option("--observe", help="With --plan: run two steps as well, and print what they really held.")
    ] = False,
    **flags: Any,
) -> None:
    """Train or fine-tune a language model from one TOML file.

    A run that is interrupted, in whatever way, goes on from its last checkpoint when the same command is given
    again, and ends with the same bits. Ctrl-C and SIGTERM save first; the exit code is then 130 or 143. --no-resume
    moves the earlier run aside and starts from nothing. Megatron-LM's flags go over the file and over --set.
    """
    _refuse_rl(file)
    place = torchrun_place()
    is_first = place is None or place.rank == 0
    chosen = [*(overrides or []), *([f"run.device={device}"] if device else [])]
    config = load_config(TrainConfig, file, chosen)
    given = {
        f"--{k.replace('_', '-')}": value for k, value in flags.items() if value is not None and value is not False
    }
    if given:
        config, notes = apply_flags(config, given)
        if is_first:
            plain_console(stderr=True).print("Megatron's flags: " + ", ".join(notes), soft_wrap=True)
    refuse_empty(file, [*chosen, *given], "configs/train_tiny.toml")
    if plan or observe:
        from octavo.train.memory_report import print_plan

        print_plan(config, observe=observe)
    else:
        for note in _left_unread(config.data) if is_first else ():
            plain_console(stderr=True).print(note, soft_wrap=True)
        result = train(config, resume=resume)
        end_job()
        if is_first:
            print_result(result, resume)
        if result.stopped_by:
            raise typer.Exit(exit_code(result.stopped_by))


def print_result(result: TrainResult, resume: bool = True) -> None:
    """What a run came to, and where it is; resume is the command's option."""
    console = plain_console()
    if result.stopped_by:
        again = "the same command" if resume else "the same command without --no-resume"
        console.print(f"stopped by {result.stopped_by} after step {result.step}; {again} goes on from there")
    elif result.step == result.first_step:
        console.print(
            f"already at step {result.step} of {result.step}, nothing was trained; raise run.steps, or --no-resume / "
            "another run.dir",
            soft_wrap=True,
        )
    if result.val_loss is not None and result.step > result.first_step:  # else it is an earlier run's
        when = "" if result.val_step == result.step else f", after step {result.val_step}"
        console.print(f"validation loss {result.val_loss:.4f}, perplexity {result.val_ppl:.2f}{when}")
    console.print(f"checkpoint {result.checkpoint}", soft_wrap=True)
    model = result.merged or result.checkpoint / "model"
    if not model.is_dir():  # of a run with adapters that has not ended
        return
    chat = "--chat " if (model / "tokenizer.json").is_file() and load_tokenizer(model).chat_template else ""
    run = result.checkpoint.parent.parent
    console.print(f'sample from it: octavo generate {run} {chat}-p "..."; serve it: octavo serve {run}', soft_wrap=True)


def _left_unread(data: DataSection) -> Iterator[str]:
    """A line for each file or directory of text that is larger than data.max_bytes."""
    if not data.max_bytes:
        return
    suffixes = (".jsonl",) if data.format == "chat" else data.suffixes
    for path in dict.fromkeys((data.path, data.validation_path)):
        if path in ("", STDLIB, TASKS):
            continue
        files = walk(Path(path), suffixes, {"__pycache__"}) if Path(path).is_dir() else [Path(path)]
        num_bytes = sum(file.stat().st_size for file in files if file.is_file())
        if num_bytes > data.max_bytes:
            yield (
                f"note: {path} has {num_bytes:,} bytes, and text beyond data.max_bytes = {data.max_bytes:,} is not "
                "read; raise it, or --set data.max_bytes=0 to read all"
            )


def _refuse_rl(file: Path) -> None:
    """A config for reinforcement learning is another command's; what else is wrong with the file, load_config says."""
    if sections := _RL_SECTIONS & sections_of(file):
        named = ", ".join(f"[{section}]" for section in sorted(sections))
        raise ConfigError(f"{file} is a config for reinforcement learning (it has {named}); run: octavo rl {file}")


def _option(name: str, kind: Any, **fields: Any) -> inspect.Parameter:
    default, kind = (False, bool) if kind is bool else (None, kind | None)
    annotation = Annotated[kind, typer.Option(name, **fields)]  # type: ignore[valid-type]
    parameter = name.removeprefix("--").replace("-", "_")
    return inspect.Parameter(parameter, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=annotation)


def _signature() -> inspect.Signature:
    """command's own parameters and one for each flag of Megatron's table: what typer makes options of."""
    own = [p for p in inspect.signature(command).parameters.values() if p.kind is not inspect.Parameter.VAR_KEYWORD]
    panel = {"rich_help_panel": "Megatron-LM's flags"}
    kinds: list[Any] = [Literal.__getitem__(flag.choices) if flag.choices else flag.kind for flag in FLAGS]
    taken = [_option(f.name, kind, help=f.help, **panel) for f, kind in zip(FLAGS, kinds, strict=True)]
    refused = [_option(name, str if has_value else bool, hidden=True) for name, (has_value, _) in REFUSED.items()]
    only_one = [_option(name, int, hidden=True) for name in ONLY_ONE]
    return inspect.Signature([*own, *taken, *refused, *only_one])


command.__signature__ = _signature()  # type: ignore[attr-defined]
