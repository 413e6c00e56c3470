"""verl's configuration as octavo's: single keys by a table, those that mean something together by a function each."""

from collections import Counter
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from octavo.integrations.config import verl_async, verl_loss, verl_routes, verl_run
from octavo.integrations.config.document import read_document
from octavo.integrations.config.reader import Reader, former_drop_refused
from octavo.integrations.config.verl_ignored import IGNORED
from octavo.integrations.config.verl_keys import GROUPED, KEYS, UNSET
from octavo.integrations.config.verl_refused import REFUSED, REMEDIES, SAME_AS
from octavo.rl.config import RLConfig

_BASES = {"_self_", "ppo_trainer", "ppo_megatron_trainer"}
_PLACES = (*IGNORED, *REFUSED)


def read_verl(
    path: Path | None,
    overrides: Iterable[str],
    base: RLConfig | None = None,
    *,
    set_keys: RLConfig | None = None,
    ignore_unsupported: bool = False,
    drop_refused: bool | None = None,
) -> tuple[RLConfig, list[str]]:
    """The octavo config that a verl config means.

    Args:
        path: a YAML file; None for none.
        overrides: verl's, as on its command line.
        base: an octavo config, over which the keys go; what no key names stays as it is there. Without one it has
            verl's own default.
        set_keys: without base, what --set said, which verl's defaults leave alone.
        ignore_unsupported: go on without the keys that are refused.
        drop_refused: the former name of ignore_unsupported, which leaves octavo with the next release.
    Returns:
        (the config, one line for each key that was mapped or dropped, and for each section of which keys were ignored).
    Raises:
        ConfigError: keys that octavo does not honour, by name and with what to do; a value that does not fit.
        BackendError: a YAML file without PyYAML.
    """
    ignore_unsupported = former_drop_refused(drop_refused, ignore_unsupported)
    reader = Reader("verl", read_document(path, overrides), base or set_keys or RLConfig(), has_base=base is not None)
    for key in KEYS:
        default = None if key.default is UNSET else key.default
        value = reader.take(key.name, key.kind, default, tuple(key.values))
        if value is not None:
            reader.put(key.to, key.values.get(value, value), key.name)
    for group in _GROUPS:
        group(reader)
    _take_agreed(reader)
    _ignore(reader)
    reader.refuse_rest((*(key.name for key in KEYS), *GROUPED, *_PLACES), REMEDIES)
    return reader.finish(ignore_unsupported=ignore_unsupported), reader.notes


def _take_agreed(reader: Reader) -> None:
    """Keys whose value is what octavo does."""
    for name in reader.left_over():
        value = reader.document[name].value
        accepted = [*REFUSED[name][0]] if name in REFUSED else []
        if reader.is_given(SAME_AS.get(name, "")):
            accepted.append(reader.document[SAME_AS[name]].value)
        is_base = name == "defaults" and isinstance(value, list) and _BASES.issuperset(map(str, value))
        if is_base or any(_same(value, each) for each in accepted):
            reader.skip(name)


def _ignore(reader: Reader) -> None:
    """Keys of what octavo does not run: one note for each section."""
    counts: Counter[str] = Counter()
    for name in reader.left_over():
        # the place itself, what is below it, and for one with a trailing _ what begins so
        places = (p for p in _PLACES if name == p or name.startswith(p if p.endswith("_") else f"{p}."))
        place = max(places, key=len, default="")
        if place in IGNORED or name.endswith("._target_"):
            section, why = IGNORED.get(place, ("_target_", "verl's own classes"))
            counts[f"{section} ({why})"] += 1
            reader.skip(name)
    reader.notes += [f"ignored: {count} of verl's keys in {section}" for section, count in counts.items()]


def _same(value: Any, other: Any) -> bool:
    """Equal, and not 1 for true."""
    return bool(value == other) and isinstance(value, bool) == isinstance(other, bool)


_GROUPS: tuple[Callable[[Reader], None], ...] = (
    verl_run.read_samples,
    verl_run.read_mini_batch_size,
    verl_run.read_warmup,
    verl_run.read_betas,
    verl_async.read_asynchronous,
    verl_run.read_precision,
    verl_routes.read_router_replay,
    verl_loss.read_clipping,
    verl_loss.read_reference,
    verl_loss.read_advantages,
    verl_loss.read_correction,
    verl_loss.read_overlong,
    verl_run.read_files,
    verl_run.read_run,
)
