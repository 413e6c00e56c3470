"""A config as the TOML file that would give it."""

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from octavo.rl.config import RLConfig

# what a precision level decides, where the config does not say it too
_OF_LEVEL = (
    ("rollout", "kv_cache_dtype"),
    ("rollout", "attention_dtype"),
    ("rollout", "recipe"),
    ("trainer", "recipe"),
    ("trainer", "backward"),
)


def to_toml(config: RLConfig) -> str:
    """Every key with its value, sections as tables; keys without a value (None) are left out.

    load_config of the text gives an equal configuration.
    """
    data = config.model_dump()
    if config.trainer.mini_batch_size is not None:
        del data["trainer"]["minibatches"]
    if config.trainer.epochs is not None and "steps" not in config.trainer.model_fields_set:
        del data["trainer"]["steps"]  # which would end the epochs
    if config.precision:
        for section, name in _OF_LEVEL:
            if name not in getattr(config, section).model_fields_set:
                del data[section][name]
    return "\n".join(_table(data, "")).strip() + "\n"


def _table(data: Mapping[str, Any], prefix: str) -> Iterator[str]:
    tables = {name: value for name, value in data.items() if isinstance(value, Mapping)}
    for name, value in data.items():
        if name not in tables and value is not None:
            yield f"{_key(name)} = {_value(value)}"
    for name, table in tables.items():
        if table:
            path = f"{prefix}{_key(name)}"
            yield f"\n[{path}]"
            yield from _table(table, f"{path}.")


def _key(name: str) -> str:
    return name if name.replace("_", "").replace("-", "").isalnum() and name.isascii() else json.dumps(name)


def _value(value: Any) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, int | float):
        return repr(value)
    if isinstance(value, list | tuple):
        return "[" + ", ".join(_value(item) for item in value) + "]"
    if isinstance(value, Mapping):
        return "{" + ", ".join(f"{_key(k)} = {_value(v)}" for k, v in value.items() if v is not None) + "}"
    if isinstance(value, str | Path):
        return json.dumps(str(value), ensure_ascii=False).replace("\x7f", "\\u007f")
    raise TypeError(f"a configuration holds no {type(value).__name__}")
