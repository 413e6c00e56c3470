"""The `octavo` command: a table of subcommands, each imported only when it is run.

A subcommand lives in `octavo/cli/<name>.py` (one of two words in `<first>_<second>.py`), which
exposes `command`, a function with typer annotations, and has one line in `COMMANDS`. The table
holds its summary too, so that `octavo --help` imports no torch. `command` parses, builds and runs;
what goes wrong by the user's doing it raises as an OctavoError, which `main` prints as one red line,
exit code 2.
"""

import errno
import functools
import sys
import warnings
from collections.abc import Callable, Mapping
from importlib import import_module
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import typer
from typer.core import TyperGroup

from octavo import __version__
from octavo.cli.console import plain_console
from octavo.cli.foreign_options import refuse_options_of, translate_options
from octavo.cli.option_names import name_options
from octavo.deprecation import rename_options
from octavo.errors import OctavoError

# What a disk answers where a file cannot be made or written, whichever command asked. A write that finds no space names
# no file.
_FULL = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}
_OF_FILES = _FULL | {
    *(errno.EROFS, errno.EACCES, errno.EPERM, errno.ENOTDIR, errno.EISDIR, errno.EEXIST, errno.ENAMETOOLONG),
}
_python_shows = warnings.showwarning
_PACKAGE = Path(__file__).parents[1]


class Entry(NamedTuple):
    """A subcommand.

    Attributes:
        target: where it lives, as `module:function`.
        summary: its line in `octavo --help`.
        former_options: names that options had and what stands for each today; they are taken for one more release,
            with a warning.
        foreign_options: the table of options that another library's command has, as `module:name`.
        part_of: another subcommand, whose other options are refused in one line.
        keywords: name_options', of a command whose options are keywords of the library; None leaves its errors alone.
    """

    target: str
    summary: str
    former_options: Mapping[str, str] = {}
    foreign_options: str = ""
    part_of: str = ""
    keywords: Mapping[str, str] | None = None


# keywords that options of `generate` and `serve` have other names for
_OF_AN_LLM = {"mode": "tensor_parallel_mode", "recipe": "quantization"}
_DEVICE = {"run.device": "device"}

COMMANDS = {
    "demo": Entry(
        "octavo.cli.demo:command",
        "Train, sample and reinforce a small model in bf16 and FP8; writes a report.",
    ),
    "train": Entry("octavo.cli.train:command", "Train a language model from one TOML file."),
    "generate": Entry("octavo.cli.generate:command", "Generate text from a checkpoint.", keywords=_OF_AN_LLM),
    "serve": Entry(
        "octavo.cli.serve:command",
        "Serve a checkpoint over OpenAI's HTTP API.",
        {
            "--prefix-caching": "--enable-prefix-caching",
            "--no-prefix-caching": "--no-enable-prefix-caching",
            "--max-queue": "--max-num-waiting",
        },
        "octavo.serve.keywords:SERVE_NAMES",
        keywords=_OF_AN_LLM | {"api_keys": "api_key"},
    ),
    "warm": Entry(
        "octavo.cli.warm:command",
        "Compile the kernels that serving a checkpoint will need, for an image or a fleet.",
        foreign_options="octavo.serve.keywords:SERVE_NAMES",
        part_of="serve",
        keywords={"recipe": "quantization"},
    ),
    "rl": Entry(
        "octavo.cli.rl:command",
        "Reinforce a checkpoint by GRPO from one TOML file.",
        {
            "--verl": "--config-format verl",
            "--nemo": "--config-format nemo-rl",
            "--slime": "--config-format slime",
            "--drop-refused": "--ignore-unsupported",
        },
    ),
    "quantize": Entry(
        "octavo.cli.quantize:command",
        "Quantize a checkpoint to FP8, and measure what it costs.",
        {"--samples": "--num-calibration-samples", "--seq-len": "--max-seq-length", "--exclude": "--ignore"},
        keywords=_DEVICE,
    ),
    "eval": Entry(
        "octavo.cli.eval:command", "Run lm-evaluation-harness tasks, one precision beside another.", keywords={}
    ),
    "upload": Entry("octavo.cli.upload:command", "Upload a checkpoint to the Hugging Face Hub, with a model card."),
    "inspect": Entry(
        "octavo.cli.inspect:command", "Print every tensor of a checkpoint: scheme, scales, what is missing."
    ),
    "bench": Entry(
        "octavo.cli.bench:command",
        "Measure speed, memory and energy on this GPU beside peers.",
        {"--cases": "--filter", "--arm": "--variant"},
    ),
    "doctor": Entry(
        "octavo.cli.doctor:command",
        "Check this machine, and find the layer where FP8 departs from bf16.",
        keywords=_DEVICE,
    ),
    "doctor mismatch": Entry(
        "octavo.cli.doctor_mismatch:command",
        "Find out which part of trainer and sampler makes them differ.",
        keywords=_DEVICE,
    ),
    "analyze": Entry(
        "octavo.cli.analyze:command",
        "Show where tensors fall in a format's range, before training in it.",
        keywords={},
    ),
}


class LazyGroup(TyperGroup):
    """Lists the placeholders of `COMMANDS` and swaps in the real command when one is run."""

    def resolve_command(self, ctx: Any, args: list[str]) -> tuple[str | None, Any, list[str]]:
        if " ".join(args[:2]) in COMMANDS:  # of two words
            args = [" ".join(args[:2]), *args[2:]]
        name, placeholder, rest = super().resolve_command(ctx, args)
        if name not in COMMANDS:
            return name, placeholder, rest
        command, entry = load_command(name), COMMANDS[name]
        if entry.keywords is not None:
            ctx.ensure_object(list).append(functools.partial(name_options, command=command, keywords=entry.keywords))
        rest = rename_options(rest, entry.former_options)
        if entry.foreign_options:
            module, table = entry.foreign_options.split(":")
            rest = translate_options(command, rest, getattr(import_module(module), table))
        if entry.part_of:
            refuse_options_of(load_command(entry.part_of), command, rest)
        return name, command, rest


def load_command(name: str) -> Any:
    """Import a subcommand's module and build its click command."""
    module, function = COMMANDS[name].target.split(":")
    single = typer.Typer(**_HOW)
    single.command(name)(getattr(import_module(module), function))
    return typer.main.get_command(single)


# rich cuts the names of options where a terminal has 80 columns
_HOW: dict[str, Any] = {"add_completion": False, "pretty_exceptions_enable": False, "rich_markup_mode": None}
app = typer.Typer(cls=LazyGroup, no_args_is_help=True, **_HOW)


def _print_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"octavo {__version__}")
        raise typer.Exit


@app.callback()
def _options(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    """Train, serve and reinforcement-learn language models in FP8 under one numerics contract."""


def _placeholder() -> None:
    """What `octavo --help` lists; LazyGroup never runs it."""


for _name, _entry in COMMANDS.items():
    app.command(_name, short_help=_entry.summary)(_placeholder)


def main() -> None:
    """Entry point of the `octavo` script."""
    in_words_of_command: list[Callable[[str], str]] = []

    def show_warning(message: Warning | str, category: type[Warning], filename: str, *place: Any, **named: Any) -> None:
        """One line for a former name and what octavo itself warns of, and Python's own text for other warnings."""
        if issubclass(category, DeprecationWarning) or Path(filename).is_relative_to(_PACKAGE):
            said = str(message)
            for translate in in_words_of_command:
                said = translate(said)
            _say(f"warning: {said}", "yellow")
        else:
            _python_shows(message, category, filename, *place, **named)

    try:
        with warnings.catch_warnings():
            # Python hides a DeprecationWarning of any other file than the one that is run
            warnings.filterwarnings("default", r".*\boctavo\b", DeprecationWarning)
            warnings.showwarning = show_warning
            app(prog_name="octavo", obj=in_words_of_command)
    except OctavoError as error:
        _say_error(error, *in_words_of_command)
        sys.exit(2)
    except OSError as error:
        if error.errno not in (_FULL if error.filename is None else _OF_FILES):
            raise
        remedy = "change its permissions" if error.errno in (errno.EACCES, errno.EPERM) else "free some space"
        where = "a file or the standard output" if error.filename is None else error.filename
        _say_error(f"{where}: {error.strerror}; choose another path, or {remedy}")
        sys.exit(2)


def _say_error(error: OctavoError | str, translate: Callable[[str], str] = str) -> None:
    """One red line, and one for each note on the error."""
    said = translate(str(error))
    for line in (f"error: {said}", *map(translate, getattr(error, "__notes__", ()))):
        _say(line, "bold red")


def _say(line: str, style: str) -> None:
    plain_console(stderr=True).print(line, style=style, soft_wrap=True)
