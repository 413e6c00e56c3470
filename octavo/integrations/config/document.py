"""Another framework's configuration as one flat table: dotted key -> value, from a YAML file and Hydra's overrides."""

import dataclasses
import importlib
import importlib.util
import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from octavo.errors import BackendError, ConfigError

COMMAND_LINE = "the command line"
_NUMBER = re.compile(r"[-+]?(\d+(\.\d*)?|\.\d+)([eE][-+]?\d+)?")
_REFERENCE = re.compile(r"\$\{((?:[^${}]|\{\})*)\}")
_WORDS = {"null": None, "none": None, "~": None, "true": True, "false": False}
_MAX_DEPTH = 20  # of references to references


@dataclasses.dataclass(frozen=True)
class Setting:
    """A value and where it was written."""

    value: Any
    origin: str


Document = dict[str, Setting]


def read_document(path: Path | None, overrides: Iterable[str]) -> Document:
    """A YAML file and what goes over it.

    Args:
        path: the file; None for none.
        overrides: `key=value` in Hydra's forms: `+key=value` and `++key=value` mean the same, `~key` takes a key and
            all below it away.
    Returns:
        Every leaf by its dotted key, references (`${data.max_prompt_length}`, `${oc.select:key,default}`) replaced.
    Raises:
        BackendError: PyYAML is not installed.
        ConfigError: no such file, no YAML, a bad override, or a reference to what is not there.
    """
    document = {} if path is None else dict(_flatten(_load_yaml(path), str(path)))
    for override in overrides:
        _override(document, override)
    return {key: Setting(_resolve(setting.value, key, document), setting.origin) for key, setting in document.items()}


def parse_value(text: str) -> Any:
    """A value as Hydra reads it on a command line: null, true, 5, 1e-6, 'text', [a, b]; anything else is text."""
    text = text.strip()
    if text.lower() in _WORDS:
        return _WORDS[text.lower()]
    if len(text) >= 2 and text[0] == text[-1] and text[0] in "'\"":
        return text[1:-1]
    if text.startswith("[") and text.endswith("]"):
        inner = text[1:-1].strip()
        return [parse_value(part) for part in inner.split(",")] if inner else []
    if text == "{}":
        return {}
    return _as_number(text)


def _override(document: Document, text: str) -> None:
    if text.startswith("~"):
        key = text[1:].partition("=")[0]
        gone = [known for known in document if known == key or known.startswith(f"{key}.")]
        if not gone:
            raise ConfigError(f"{text}: there is no key {key} to take away")
        for known in gone:
            del document[known]
        return
    key, equals, value = text.lstrip("+").partition("=")
    if not equals or not all(key.split(".")):
        raise ConfigError(f"{text!r}: an override has the form key=value")
    for known in [known for known in document if known.startswith(f"{key}.")]:
        del document[known]
    document[key] = Setting(parse_value(value), COMMAND_LINE)


def _load_yaml(path: Path) -> Mapping[str, Any]:
    if importlib.util.find_spec("yaml") is None:
        raise BackendError(
            f"{path}: reading YAML needs PyYAML; pip install pyyaml, or give the keys on the command line as key=value"
        )
    yaml: Any = importlib.import_module("yaml")
    try:
        data = yaml.safe_load(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"{path}: cannot read this file: {error.strerror}") from None
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path}: not valid YAML: {error}") from None
    if data is None:
        return {}
    if not isinstance(data, dict):
        raise ConfigError(f"{path}: must be a mapping of sections, got {type(data).__name__}")
    return data


def _flatten(data: Mapping[Any, Any], origin: str, prefix: str = "") -> Iterable[tuple[str, Setting]]:
    for name, value in data.items():
        key = f"{prefix}{name}"
        if isinstance(value, dict) and value:
            yield from _flatten(value, origin, f"{key}.")
        else:
            # YAML 1.1 reads 1e-6 as text, OmegaConf and everybody who writes it as a number
            is_float = isinstance(value, str) and re.fullmatch(r"[-+]?\d+[eE][-+]?\d+", value)
            yield key, Setting(float(value) if is_float else value, origin)


def _as_number(text: str) -> Any:
    if not _NUMBER.fullmatch(text):
        return text
    return int(text) if re.fullmatch(r"[-+]?\d+", text) else float(text)


def _resolve(value: Any, key: str, document: Document, depth: int = 0) -> Any:
    """A value without references; a text that is one reference takes the other's type."""
    if depth > _MAX_DEPTH:
        raise ConfigError(f"{key}: its references lead in a circle")
    if isinstance(value, list):
        return [_resolve(item, key, document, depth) for item in value]
    while isinstance(value, str) and (match := _REFERENCE.search(value)):  # the innermost first
        found = _look_up(match[1], key, document, depth)
        if match[0] == value:
            return found
        value = value.replace(match[0], "null" if found is None else str(found))
    return value


def _look_up(reference: str, key: str, document: Document, depth: int) -> Any:
    body, has_default, default = reference, False, ""
    if reference.startswith("oc.select:"):
        body, comma, default = reference.removeprefix("oc.select:").partition(",")
        has_default = bool(comma)
    elif ":" in reference:
        raise ConfigError(f"{key}: ${{{reference}}} is not understood; write the value itself")
    target = body.strip()
    if target.startswith("."):  # of the key's own section
        target = f"{key.rpartition('.')[0]}{target}"
    if target in document:
        return _resolve(document[target].value, target, document, depth + 1)
    if any(known.startswith(f"{target}.") for known in document):  # a section, whose keys speak for themselves
        return {}
    if has_default:
        return parse_value(default)
    if reference.startswith("oc.select:"):
        return None
    raise ConfigError(f"{key}: ${{{reference}}} refers to {target}, which is not set; set it, or write the value")
