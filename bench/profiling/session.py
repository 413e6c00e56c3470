"""Goes through the workloads of `octavo bench profile`: tables as they come, a JSON file a workload under --out."""

import dataclasses
import json
import traceback
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

from bench.options import BenchOptions
from bench.profiling.cold_start import ColdProfile, profile_cold_start
from bench.profiling.engine_steps import DECODES, profile_decode, profile_prefill
from bench.profiling.settings import Settings
from bench.profiling.step_profile import Profile
from bench.profiling.training_steps import STEP_VARIANTS, profile_rl, profile_step
from bench.record import Record
from bench.rl.workloads import LOOP_VARIANTS
from bench.serve.workloads import VARIANTS, check_names
from bench.serve_options import ServeOptions
from octavo.errors import ConfigError
from octavo.run.atomic import write_atomic

_WHAT = "Kernels of steps by torch's profiler, in ms a step; figures were measured without it, floors at the ceilings."


class ProfileWorkload(NamedTuple):
    """A workload: the names of its variants, those that run where --variant names none, and what profiles one."""

    known: Iterable[str]
    variants: tuple[str, ...]
    profile: Callable[[Settings, str, str], Iterable[Profile | ColdProfile]]


PARTS = {
    **{name: ProfileWorkload(VARIANTS, workload.variants, profile_decode) for name, workload in DECODES.items()},
    "prefill": ProfileWorkload(VARIANTS, ("fp8-kv", "exact"), profile_prefill),
    "step": ProfileWorkload(STEP_VARIANTS, ("fp8-adamw",), profile_step),
    "cold-start": ProfileWorkload(VARIANTS, ("fp8-kv",), profile_cold_start),
    "rl-step": ProfileWorkload(LOOP_VARIANTS, ("fp8",), profile_rl),
}


def run_workloads(options: BenchOptions) -> bool:
    """Profile what was asked for, print it, write it where --out says; whether all went well.

    Raises:
        ConfigError: an option that no profile has, or a name that is none.
    """
    names = _check(options)
    settings = Settings.of(options)
    print(settings.ceilings)
    is_well = True
    for name in names:
        documents: list[dict[str, Any]] = []
        for variant in options.serve.variants or PARTS[name].variants:
            is_well = _attempt(settings, name, variant, documents) and is_well
        if options.out is not None:
            document = Record(name, _WHAT, device=options.device).document(options.commit)
            del document["rows"]
            document |= {"ceilings": dataclasses.asdict(settings.ceilings), "profiles": documents}
            options.out.mkdir(parents=True, exist_ok=True)
            write_atomic(options.out / f"profile-{name}.json", json.dumps(document, indent=1) + "\n")
    if options.device == "cpu":
        print("on a CPU operators stand for kernels, and contain each other: this says that it runs, no more")
    return is_well


def _check(options: BenchOptions) -> tuple[str, ...]:
    asked = options.serve
    others = dataclasses.replace(asked, workloads=(), variants=(), num_requests=None)
    if others != ServeOptions() or options.filters or options.compiled or options.write_table:
        raise ConfigError(
            "octavo bench profile takes --workload, --variant, --recipe, --layers, --batch, --seq-len, --passes and "
            "--num-requests beside --device, --quick, --out and --commit; leave other options out"
        )
    names = check_names(asked.workloads, tuple(PARTS))
    for name in names:
        if unknown := [variant for variant in asked.variants if variant not in PARTS[name].known]:
            known = ", ".join(PARTS[name].known)
            raise ConfigError(f"--variant of --workload {name} must be one of {known}, got {unknown[0]!r}")
    return names


def _attempt(settings: Settings, name: str, variant: str, documents: list[dict[str, Any]]) -> bool:
    try:
        for profile in PARTS[name].profile(settings, name, variant):
            print(profile.format(), flush=True)
            documents.append(profile.document())
    except Exception as error:  # the others are worth having; the exit code is 1
        traceback.print_exc()
        print(f"COMPLAINT: {name}, {variant}: {type(error).__name__}: {error}")
    else:
        return True
    settings.host.free()  # not while an error's frames hold what is to be freed
    return False
