"""`octavo doctor mismatch MODEL`: which part of trainer and sampler makes their logprobs differ."""

import json
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from octavo.cli.checkpoint_folder import newest_model
from octavo.doctor.mismatch import find_mismatch
from octavo.doctor.mismatch_table import print_mismatch
from octavo.doctor.policies import SamplerOptions, draw, open_policies
from octavo.numerics import get_recipe
from octavo.numerics.contract import named_kv_scales
from octavo.rl.health import HealthMonitor, HealthSection
from octavo.run.build import find_device

_FOREIGN = "of a remote engine: octavo's own never does"


def command(
    model: Annotated[str, typer.Argument(help="A checkpoint directory, a TOML file of octavo rl, or a recipe.")],
    recipe: Annotated[str | None, typer.Option(help="The sampler's linears; blockwise by default.")] = None,
    trainer_recipe: Annotated[str | None, typer.Option(help="The trainer's linears; bf16 by default.")] = None,
    kv_cache_dtype: Annotated[str | None, typer.Option(help="The sampler's: fp8 (the default) or bf16.")] = None,
    kv_scales: Annotated[
        str | None,
        typer.Option(
            callback=lambda name: name and named_kv_scales(name),
            help="Of an FP8 cache: per_token_head, engine or trainer; --kv-scale gives a number.",
        ),
    ] = None,
    attention_dtype: Annotated[str | None, typer.Option(help="The sampler's: bf16 (the default) or fp8.")] = None,
    sampler_weights: Annotated[
        Path | None, typer.Option(help="A checkpoint with the sampler's weights: what an older policy costs.")
    ] = None,
    kv_scale: Annotated[float | None, typer.Option(help=f"One scale for all K and V, {_FOREIGN}.")] = None,
    head_recipe: Annotated[str | None, typer.Option(help=f"Quantize the head, {_FOREIGN}.")] = None,
    router_recipe: Annotated[str | None, typer.Option(help=f"Quantize the routers, {_FOREIGN}.")] = None,
    prompt: Annotated[list[str] | None, typer.Option(help="What the sampler answers; repeatable.")] = None,
    num_prompts: Annotated[int, typer.Option(min=1, help="Of the file's task, or random ones.")] = 16,
    samples: Annotated[int, typer.Option(min=1, help="Completions of each prompt.")] = 2,
    max_tokens: Annotated[int, typer.Option(min=1, help="Of each completion.")] = 64,
    temperature: Annotated[float | None, typer.Option(help="Of both sides; the file's own, else 1.")] = None,
    seed: Annotated[int, typer.Option(help="Of prompts and sampling.")] = 0,
    overrides: Annotated[
        list[str] | None, typer.Option("--set", metavar="SECTION.KEY=VALUE", help="Set a key of the TOML file.")
    ] = None,
    device: Annotated[str, typer.Option(help="cpu, cuda, cuda:1; empty takes a GPU where there is one.")] = "",
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object instead.")] = False,
) -> None:
    """Sample with one side, score with the other, and share the KL between them out to what they do differently.

    Parts are turned on and off one at a time. Exits with 1 where a limit of octavo rl's section health is passed.
    """
    options = SamplerOptions(
        recipe,
        kv_cache_dtype,
        kv_scales,
        attention_dtype,
        None if sampler_weights is None else newest_model(sampler_weights),
        None if head_recipe is None else get_recipe(head_recipe),
        None if router_recipe is None else get_recipe(router_recipe),
        kv_scale,
    )
    policies = open_policies(
        str(newest_model(Path(model))),
        find_device(device),
        options,
        trainer_recipe=trainer_recipe,
        temperature=temperature,
        prompts=tuple(prompt or ()),
        num_prompts=num_prompts,
        overrides=tuple(overrides or ()),
        seed=seed,
    )
    sequences, lens, reported = draw(policies, samples=samples, max_tokens=max_tokens, seed=seed)
    is_foreign = any(x is not None for x in (kv_scale, head_recipe, router_recipe))
    report = find_mismatch(policies.trainer, policies.sampler, sequences, lens, None if is_foreign else reported)
    alerts = HealthMonitor(HealthSection()).check(0, report.measured).alerts
    if as_json:
        # subject: the former name of model, which leaves with the next release
        found = {
            "model": policies.name,
            "subject": policies.name,
            "note": policies.note,
            "findings": [alert.as_dict() for alert in alerts],
        }
        typer.echo(json.dumps(found | report.as_dict(), indent=2))
    else:
        print_mismatch(Console(highlight=False), policies.name, report, alerts, policies.note)
    if alerts:
        raise typer.Exit(1)
