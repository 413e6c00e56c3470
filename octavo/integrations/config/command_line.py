"""What stands behind `octavo rl`: octavo's own config, or another framework's with octavo's under it."""

import os
import warnings
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Literal, get_args

from octavo.config import load_config, sections_of
from octavo.errors import ConfigError
from octavo.integrations.config.nemo import read_nemo
from octavo.integrations.config.reader import former_drop_refused
from octavo.integrations.config.slime import read_slime
from octavo.integrations.config.verl import read_verl
from octavo.rl.config import RLConfig

ConfigFormat = Literal["octavo", "verl", "nemo-rl", "slime"]
_YAML = (".yaml", ".yml")
_FORMER_FORMATS = {"": "octavo", "nemo": "nemo-rl"}


def resolve_config(
    arguments: Sequence[str],
    config_format: str = "octavo",
    overrides: Iterable[str] = (),
    *,
    base: Path | None = None,
    ignore_unsupported: bool = False,
    drop_refused: bool | None = None,
) -> tuple[RLConfig, list[str]]:
    """The config of a command line.

    Args:
        arguments: a file and keys over it, in the words of the format: octavo's TOML file and key=value; the YAML file
            of verl or NeMo-RL, if there is one, and key=value; slime's flags.
        config_format: "octavo", "verl", "nemo-rl" or "slime".
        overrides: octavo's own section.key=value, over its config and under the framework's keys.
        base: octavo's TOML file under the framework's keys.
        ignore_unsupported: go on without the framework's keys that octavo does not honour.
        drop_refused: the former name of ignore_unsupported, which leaves octavo with the next release.
    Returns:
        (the config, one line for each of the framework's keys that was mapped or dropped).
    Raises:
        ConfigError: what cannot be read, or is refused by name.
    """
    ignore_unsupported = former_drop_refused(drop_refused, ignore_unsupported)
    config_format = _FORMER_FORMATS.get(config_format, config_format)
    if config_format == "octavo":
        return _own(arguments, overrides, base), []
    if config_format not in get_args(ConfigFormat):
        raise ConfigError(f"config_format must be one of {', '.join(get_args(ConfigFormat))}, got {config_format!r}")
    bases = [text for text in arguments if text.endswith(".toml") and "=" not in text]
    files = [text for text in arguments if text.endswith(_YAML) and "=" not in text]
    if config_format == "slime":
        files = []
    if bases:
        warnings.warn(
            f"{bases[0]} beside another framework's keys leaves octavo with the next release; use --base {bases[0]}",
            DeprecationWarning,
            stacklevel=2,
        )
    keys = [text for text in arguments if text not in bases and text not in files]
    bases += [] if base is None else [str(base)]
    if len(bases) > 1 or len(files) > 1:
        raise ConfigError(f"one config of octavo's and one file of the framework's, got {', '.join(bases + files)}")
    try:
        config = load_config(RLConfig, bases[0] if bases else os.devnull, overrides)
    except ConfigError as error:
        if bases:
            raise
        why = f"--set is read before {config_format}'s keys: what they would name, such as task.name, name by --set too"
        raise ConfigError(f"{error} ({why})") from None
    given, set_keys = (config, None) if bases else (None, config)
    if config_format == "slime":
        return read_slime(keys, given, set_keys=set_keys, ignore_unsupported=ignore_unsupported)
    read = {"verl": read_verl, "nemo-rl": read_nemo}[config_format]
    path = Path(files[0]) if files else None
    return read(path, keys, given, set_keys=set_keys, ignore_unsupported=ignore_unsupported)


def _own(arguments: Sequence[str], overrides: Iterable[str], base: Path | None) -> RLConfig:
    """octavo's own config, which is not one for training."""
    if not arguments or arguments[0].endswith(_YAML):
        raise ConfigError(
            "octavo rl takes a TOML file and section.key=value over it; another framework's file or keys need "
            f"--config-format verl, nemo-rl or slime; got {' '.join(arguments) or 'nothing'}"
        )
    if base is not None:
        raise ConfigError(
            f"--base {base} goes under another framework's keys; give --config-format too, or {base} alone"
        )
    path, *keys = arguments
    if sections := {"data", "schedule", "optimizer"} & sections_of(path):
        named = ", ".join(f"[{section}]" for section in sorted(sections))
        raise ConfigError(f"{path} is a config for training (it has {named}); run: octavo train {path}")
    return load_config(RLConfig, path, [*overrides, *keys])
