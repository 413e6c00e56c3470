"""verl's configuration as octavo's: single keys by a table, those that mean something together by a function each."""

from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from octavo.integrations.config import verl_async, verl_loss, verl_routes, verl_run
from octavo.integrations.config.document import Setting, read_document
from octavo.integrations.config.reader import Reader
from octavo.integrations.config.verl_inert import INERT, MIRRORS, READ, UNREAD
from octavo.integrations.config.verl_keys import GROUPED, KEYS, UNSET
from octavo.integrations.config.verl_remedies import REMEDIES
from octavo.rl.config import RLConfig

_BASES = {"_self_", "ppo_trainer", "ppo_megatron_trainer"}


def read_verl(
    path: Path | None,
    overrides: Iterable[str],
    base: RLConfig | None = None,
    *,
    set_keys: RLConfig | None = None,
    drop_refused: bool = False,
) -> tuple[RLConfig, list[str]]:
    """The recipe that a verl configuration means.

    Args:
        path: a YAML file; None for none. overrides: verl's, as on its command line.
        base: an octavo recipe, over which the keys go; what no key names stays as it is there. Without one it has
            verl's own default.
        set_keys: without a recipe, what --set said, which verl's defaults leave alone.
        drop_refused: go on without the keys that are refused.
    Returns:
        (the recipe, one line for each key that was mapped or dropped).
    Raises:
        ConfigError: keys that octavo does not honour, by name and with what to do; a value that does not fit.
        BackendError: a YAML file without PyYAML.
    """
    reader = Reader("verl", read_document(path, overrides), base or set_keys or RLConfig(), has_recipe=base is not None)
    _skip_what_verl_never_reads(reader)
    _take_inert(reader)
    for key in KEYS:
        default = None if key.default is UNSET else key.default
        value = reader.take(key.name, key.kind, default, tuple(key.values))
        if value is not None:
            reader.put(key.to, key.values.get(value, value), key.name)
    for group in _GROUPS:
        group(reader)
    reader.refuse_rest((*(key.name for key in KEYS), *GROUPED, *INERT), REMEDIES)
    return reader.finish(drop_refused=drop_refused), reader.notes


def _skip_what_verl_never_reads(reader: Reader) -> None:
    document = reader.document
    for name, setting in document.items():
        if name.endswith("._target_") or (
            name == "defaults" and isinstance(setting.value, list) and _BASES.issuperset(map(str, setting.value))
        ):
            reader.skip(name)
        for prefix, switch in UNREAD.items():
            is_below = name.startswith(prefix) and not name.startswith(READ)
            is_off = switch is None or not document.get(switch, Setting(None, "")).value
            if is_below and is_off:
                reader.skip(name)


def _take_inert(reader: Reader) -> None:
    for name, values in INERT.items():
        if name in reader.document and any(_same(reader.document[name].value, value) for value in values):
            reader.skip(name)
    for name, other in MIRRORS.items():
        both = reader.is_given(name) and reader.is_given(other)
        if both and _same(reader.document[name].value, reader.document[other].value):
            reader.skip(name)


def _same(value: Any, other: Any) -> bool:
    """Equal, and not 1 for true."""
    return bool(value == other) and isinstance(value, bool) == isinstance(other, bool)


_GROUPS: tuple[Callable[[Reader], None], ...] = (
    verl_run.read_samples,
    verl_run.read_minibatches,
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
