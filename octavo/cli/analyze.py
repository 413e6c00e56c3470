"""`octavo analyze`: where a checkpoint's weights fall in an 8-bit format's range, before training or serving in it."""

from collections.abc import Iterator
from pathlib import Path
from typing import Annotated

import torch
import typer
from rich.console import Console
from rich.progress import track
from safetensors import SafetensorError, safe_open

from octavo.cli.checkpoint_folder import newest_model
from octavo.errors import CheckpointError, ConfigError, did_you_mean
from octavo.numerics.analysis import TensorReport, analyze, format_table
from octavo.numerics.analysis_plot import plot_exponents
from octavo.numerics.recipe import RECIPE_NAMES, get_recipe
from octavo.numerics.scaling import BLOCK_SIZES, Scaling

# those whose weights are FP8 codes; the emulated ones have formats of their own
FP8_RECIPES = tuple(name for name in RECIPE_NAMES if get_recipe(name).is_fp8 and not get_recipe(name).is_emulated)
CODE_DTYPES = (torch.float8_e4m3fn, torch.float8_e5m2)
SCALE_SUFFIXES = ("_scale_inv", "_scale")  # of weights that are FP8 codes already
SOURCE_DTYPES = (torch.bfloat16, torch.float16, torch.float32, torch.float64)


def command(
    path: Annotated[
        Path, typer.Argument(help="A .safetensors file, or a directory of them, or a run's.", callback=newest_model)
    ],
    scaling: Annotated[
        str, typer.Option(help=f"A recipe ({', '.join(FP8_RECIPES)}) or a block shape ({', '.join(BLOCK_SIZES)}).")
    ] = "blockwise",
    scale_format: Annotated[
        str | None, typer.Option(help="fp32, or e8m0 for power-of-two scales; the recipe's own by default.")
    ] = None,
    plot: Annotated[
        Path | None, typer.Option(help="Also draw the exponents over the format's range, to this file.")
    ] = None,
) -> None:
    """Print what FP8 loses of each 2-D weight: SQNR, underflow, subnormals, clipping."""
    chosen = weight_scaling(scaling, scale_format)
    reports: list[TensorReport] = []
    num_skipped = num_codes = 0
    for name, weight in track(weights(path), "analyzing", console=Console(stderr=True), transient=True):
        if weight.dim() == 2 and weight.dtype in SOURCE_DTYPES and not name.endswith(SCALE_SUFFIXES):
            reports.append(analyze(weight.to(torch.bfloat16), chosen, name))
        else:
            num_skipped += 1
            num_codes += weight.dtype in CODE_DTYPES
    codes = f"; {num_codes} of them are FP8 codes already: give the bf16 checkpoint for those" if num_codes else ""
    if not reports:
        raise CheckpointError(
            f"{path} holds no 2-D weight in bf16, fp16 or fp32, but {num_skipped} tensors{codes}; `octavo inspect` "
            "lists them"
        )
    typer.echo(format_table(reports))
    num_noted = sum(bool(report.notes) for report in reports)
    analyzed = "1 weight" if len(reports) == 1 else f"{len(reports)} weights"
    typer.echo(f"{analyzed}, {num_noted} with a note; {num_skipped} other tensors skipped{codes}")
    if plot is not None:
        plot_exponents(reports, plot)
        typer.echo(f"drawn to {plot}")


def weight_scaling(name: str, scale_format: str | None) -> Scaling:
    """The weight scaling of a recipe, or the scaling of a block shape; None for the format that these have."""
    asked = {} if scale_format is None else {"scale_format": scale_format}
    if name in FP8_RECIPES:
        recipe_scaling = get_recipe(name, **asked).weight
        assert recipe_scaling is not None, f"recipe {name!r} quantizes no weight"
        return recipe_scaling
    if name in BLOCK_SIZES:
        return Scaling.of_kind(name, **asked)  # type: ignore[arg-type]
    if name in RECIPE_NAMES:
        raise ConfigError(
            f"recipe {name!r} has no weights in plain FP8 codes; --scaling mx_1x32 --scale-format e8m0 comes nearest "
            "to mxfp8, and octavo doctor measures a model under either"
        )
    known = (*FP8_RECIPES, *BLOCK_SIZES)
    raise ConfigError(f"unknown scaling {name!r}; known: {', '.join(known)}{did_you_mean(name, known)}")


def weights(path: Path) -> Iterator[tuple[str, torch.Tensor]]:
    """Every tensor of a checkpoint, one at a time."""
    files = sorted(path.glob("*.safetensors")) if path.is_dir() else [path]
    if not files or not files[0].is_file():
        raise CheckpointError(f"{path} is no .safetensors file and no directory that holds one")
    for file in files:
        try:
            with safe_open(file, framework="pt") as tensors:
                for name in tensors.keys():  # noqa: SIM118 - not a dict
                    yield name, tensors.get_tensor(name)
        except SafetensorError as error:
            raise CheckpointError(f"{file} is not a whole safetensors file: {error}") from error
