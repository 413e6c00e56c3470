"""`octavo bench WHAT`: speed, memory and energy on this GPU beside peers, with records and plots."""

from pathlib import Path
from typing import Annotated

import typer

from bench import BENCHMARKS, BenchOptions, profiling, run_benchmark
from bench.options import FP8_RECIPES, RECORDS
from bench.ranks import ON_RANKS, run_on_ranks
from bench.serve_options import DEFAULT_RATE, DEFAULT_READY_S, ServeOptions
from octavo.env import api_key_from_env
from octavo.errors import ConfigError, did_you_mean

_ALL = BENCHMARKS | ON_RANKS | profiling.PROFILE
_LIST = "; ".join(f"{name}: {summary}" for name, summary in _ALL.items())
_PAGE = Path("docs/performance.md")


def command(
    what: Annotated[str, typer.Argument(help=f"{_LIST}; plot: draw records, and fill the page's tables with them.")],
    records: Annotated[Path, typer.Argument(help="plot: folder of the records.")] = RECORDS,
    out: Annotated[Path | None, typer.Option(help="Folder of the record; for plot, of the page.")] = None,
    commit: Annotated[str | None, typer.Option(help="Of the tree that is measured, where git is not at hand.")] = None,
    recipe: Annotated[list[str], typer.Option(help="FP8 recipes; repeat it for several.")] = list(FP8_RECIPES),  # noqa: B006
    filters: Annotated[
        list[str], typer.Option("--filter", help="Only cases whose name contains this; repeatable.")
    ] = [],  # noqa: B006
    quick: Annotated[bool, typer.Option(help="Toy sizes, few repeats: does it run at all?")] = False,
    device: Annotated[str, typer.Option(help="cuda, or cpu together with --quick.")] = "cuda",
    compiled: Annotated[bool, typer.Option(help="Stacks: also octavo's layers under torch.compile.")] = False,
    layers: Annotated[
        int | None, typer.Option(min=1, help="Stacks: layers; serve, rl, profile: layers of the models.")
    ] = None,
    batch: Annotated[int | None, typer.Option(min=1, help="Stacks: sequences a step.")] = None,
    seq_len: Annotated[int | None, typer.Option(min=1, help="Stacks: tokens a sequence.")] = None,
    passes: Annotated[
        int | None, typer.Option(min=1, help="Stacks: passes over the variants; rl: timed steps; profile: steps.")
    ] = None,
    write_table: Annotated[Path | None, typer.Option(help="linear: write where FP8 wins to this JSON file.")] = None,
    workload: Annotated[
        list[str], typer.Option(help="serve, rl, profile: a workload; repeatable, all by default.")
    ] = [],  # noqa: B006
    variant: Annotated[
        list[str], typer.Option(help="serve, rl, profile: such as bf16, fp8, fp8-kv or exact; repeatable.")
    ] = [],  # noqa: B006
    scale: Annotated[float, typer.Option(help="serve, rl: share of the requests, up to 1.")] = 1.0,
    num_requests: Annotated[
        int | None, typer.Option(min=1, help="serve, rl, profile: requests of each workload.")
    ] = None,
    time_limit: Annotated[float | None, typer.Option(help="serve, rl: seconds; what does not fit is left out.")] = None,
    rate: Annotated[float, typer.Option(help="serve: requests a second of the workload online.")] = DEFAULT_RATE,
    prompt_len: Annotated[int | None, typer.Option(help="serve: tokens of a prompt of online.")] = None,
    output_len: Annotated[int | None, typer.Option(help="serve: tokens that a request of online asks for.")] = None,
    url: Annotated[str | None, typer.Option(help="serve: a server that runs already, for online.")] = None,
    api_key: Annotated[str | None, typer.Option(help="serve: of that server. Also OCTAVO_API_KEY.")] = None,
    ready_timeout: Annotated[float, typer.Option(help="serve: seconds until the server must be up.")] = DEFAULT_READY_S,
    gpus: Annotated[
        list[int],
        typer.Option(min=2, help="scale: its parts on so many GPUs, one command each; repeatable, the fewest first."),
    ] = [],  # noqa: B006
    parts: Annotated[list[str], typer.Option(help="scale --gpus: this part; repeatable, all by default.")] = [],  # noqa: B006
    checkpoint: Annotated[Path | None, typer.Option(help="serve: checkpoint of cold-start; random by default.")] = None,
) -> None:
    """Measure octavo beside its peers in one run, correctness checked first; print a table and write a record.

    A partial run (--filter, --recipe, --quick, other sizes) writes a record only where --out is given. Exits with 1
    where a variant failed or a result is off, with the other variants measured.
    """
    if what == "plot":
        from bench.page import update_page

        for path in update_page(records, _PAGE if out is None else out / _PAGE.name):
            typer.echo(f"wrote {path}")
        return
    if what not in _ALL:
        known = (*_ALL, "plot")
        raise ConfigError(f"unknown benchmark {what!r}; known: {', '.join(known)}{did_you_mean(what, known)}")
    options = BenchOptions(
        device=device,
        quick=quick,
        recipes=tuple(recipe),
        filters=tuple(filters),
        out=out,
        commit=commit,
        compiled=compiled,
        layers=layers,
        batch=batch,
        seq_len=seq_len,
        passes=passes,
        write_table=write_table,
        serve=ServeOptions(
            workloads=tuple(workload),
            variants=tuple(variant),
            scale=scale,
            num_requests=num_requests,
            time_limit_s=time_limit,
            rate=rate,
            prompt_len=prompt_len,
            output_len=output_len,
            url=url,
            api_key=api_key or (api_key_from_env() if url is not None else None),
            ready_timeout_s=ready_timeout,
            checkpoint=checkpoint,
        ),
    )
    if gpus or parts:
        if what != "scale" or not gpus or filters:
            raise ConfigError(
                "--gpus and --parts belong together and to scale, without --filter: octavo bench scale --gpus 4 "
                f"--parts whole; got octavo bench {what} with --gpus {gpus}, --parts {parts}, --filter {filters}"
            )
        from bench.speed.scale.parts import run_parts

        if not run_parts(gpus, parts, options):
            raise typer.Exit(1)
        return
    if what in profiling.PROFILE:
        is_well = profiling.run(options)
    else:
        is_well = (run_on_ranks if what in ON_RANKS else run_benchmark)(what, options)
    if not is_well:
        raise typer.Exit(1)
