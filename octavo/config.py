"""What every config shares: a frozen base that refuses unknown keys, and the loading of TOML files.

Each package defines its own subclasses of `Config` next to the code that they build; the CLI loads
them with `load_config(TrainConfig, path, overrides)`.
"""

import copy
import json
import re
import tomllib
from collections.abc import Collection, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, ClassVar, TypeVar, get_args

from pydantic import BaseModel, ConfigDict, ValidationError
from pydantic_core import ErrorDetails
from rich.console import Console

from octavo.deprecation import warn_of_former
from octavo.errors import ConfigError, did_you_mean, nearest


class Config(BaseModel):
    """A frozen set of typed keys; nested sections are fields that are themselves a `Config`.

    Attributes:
        other_names: other frameworks' name of a key -> the key, for the refusal of an unknown one.
    Raises:
        ConfigError: for an unknown key (naming the nearest known one), a missing one, a value of the wrong type and a
            number that is not finite.
    """

    other_names: ClassVar[Mapping[str, str]] = {}
    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False, protected_namespaces=())

    def __init__(self, **values: Any) -> None:
        try:
            super().__init__(**values)
        except ValidationError as error:
            raise ConfigError(_explain(type(self), error, type(self).__name__)) from None

    # Sections are then validated by pydantic itself, which knows each key's full path.
    __init__.__pydantic_base_init__ = True  # type: ignore[attr-defined]

    @classmethod
    def drop_displaced(cls, data: dict[str, Any], file: Mapping[str, Any], overridden: Collection[str]) -> list[str]:
        """Remove keys of the file that have no meaning beside an overridden one. A config without such keys drops none.

        Args:
            data: the file's data with --set over it, not yet validated; changed in place.
            file: the file's data alone.
            overridden: the dotted keys that --set gave; these are never removed.
        Returns:
            a line for a person on what was removed.
        """
        return []


C = TypeVar("C", bound=Config)


def load_config(cls: type[C], path: str | Path, overrides: Iterable[str] = ()) -> C:
    """Read a TOML file into a config.

    Args:
        cls: the config class whose keys the file may set.
        path: the TOML file.
        overrides: `section.key=value` texts, applied in order over the file. The value is read as TOML
            (`3e-4`, `true`, `["a", "b"]`) and is a plain string where it is no TOML (`runs/first`).
    Returns:
        the config; values are taken strictly (`"5"` is no integer, an integer is a number). Keys of the file that an
        override leaves without meaning (`cls.drop_displaced`) are removed, and named on standard error.
    Raises:
        ConfigError: names the file or the command line, the key, what was got and what is allowed.
    """
    if (found := _of_today(Path(path))) != Path(path):
        warn_of_former(str(path), str(found))
        path = found
    file = _read_toml(found)
    data = copy.deepcopy(file)
    overridden = {_apply_override(data, override) for override in overrides}
    for note in cls.drop_displaced(data, file, overridden):
        Console(stderr=True).print(f"{path}: {note}", markup=False, highlight=False, soft_wrap=True)
    try:
        # By way of JSON, because pydantic's strict mode then takes lists for tuples and text for paths.
        return cls.model_validate_json(json.dumps(data, default=str), strict=True)
    except ValidationError as error:
        raise ConfigError(_explain(cls, error, str(path), overridden)) from None


def sections_of(path: str | Path) -> set[str]:
    """The names of a TOML file's sections and top keys; none where load_config cannot read it, and says why."""
    try:
        return set(_read_toml(_of_today(Path(path))))
    except ConfigError:
        return set()


def refuse_empty(path: str | Path, overrides: Iterable[str], example: str) -> None:
    """Before a run from a TOML file: refuse one that sets no key: it was cut short, or is another.

    Args:
        overrides: as load_config takes them; one is enough.
        example: of the configs, to start from.
    Raises:
        ConfigError: neither the file nor an override sets a key.
    """
    if not sections_of(path) and not any(overrides):
        raise ConfigError(
            f"{path} sets no key: every one would have its default; start from {example}, or set one with --set"
        )


def _of_today(path: Path) -> Path:
    """Where a file lies that a path finds; a missing recipes/NAME.toml is configs/NAME.toml for one release."""
    today = path.parent.with_name("configs") / path.name if path.parent.name == "recipes" else path
    return today if today.is_file() and not path.exists() else path


def _read_toml(path: Path) -> dict[str, Any]:
    try:
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ConfigError(f"{path}: no such config file; {_suggest_file(path)}") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path}: not valid TOML: {error}") from None
    except OSError as error:
        raise ConfigError(f"{path}: cannot read this config file: {error.strerror}") from None


def _suggest_file(path: Path) -> str:
    """The file of the nearest name in the same folder or in configs/, else what to give."""
    configs = Path("configs")
    by_stem = {file.stem: file for folder in (configs, path.parent) for file in sorted(folder.glob("*.toml"))}
    if near := nearest(path.stem, by_stem):
        return f"did you mean {by_stem[near]}?"
    remedy = "give the path of a TOML file"
    if path.parts[:1] == configs.parts:
        return f"configs/ lies in the project's checkout: run the command there, or {remedy}"
    return remedy


def _apply_override(data: dict[str, Any], override: str) -> str:
    """Set one `section.key=value` in the file's data; returns the dotted key."""
    key, equals, text = override.partition("=")
    key = key.strip()
    *sections, name = key.split(".")
    if not equals or not name or not all(sections):
        raise ConfigError(f"--set {override!r}: must have the form section.key=value")
    for depth, section in enumerate(sections, start=1):
        data = data.setdefault(section, {})
        if not isinstance(data, dict):
            raise ConfigError(f"--set {override!r}: {'.'.join(sections[:depth])} is a value, not a section")
    data[name] = _parse_value(text.strip())
    return key


def _parse_value(text: str) -> Any:
    try:
        parsed = tomllib.loads(f"value = {text}")
    except tomllib.TOMLDecodeError:
        return text
    return parsed["value"] if len(parsed) == 1 else text


def _explain(cls: type[Config], error: ValidationError, source: str, overridden: Collection[str] = ()) -> str:
    """One line for each thing that is wrong."""
    lines = []
    for detail in error.errors(include_url=False):
        key = ".".join(map(str, detail["loc"]))
        is_override = any(f"{key}.".startswith(f"{other}.") or other.startswith(f"{key}.") for other in overridden)
        if key:
            origin = "command line" if is_override else source
        else:  # a rule over several keys, of which some may have come from outside
            origin = f"{source} with {', '.join(sorted(overridden))} of the command line" if overridden else source
        lines.append(f"{origin}: {_explain_one(cls, detail, key)}")
    return "\n".join(lines)


def _explain_one(cls: type[Config], detail: ErrorDetails, key: str) -> str:
    if detail["type"] == "extra_forbidden":
        return f"unknown key {key}; {_suggest(cls, detail['loc'])}"
    if detail["type"] == "missing":
        return f"{key} is required and is not set"
    message = detail["msg"].removeprefix("Value error, ").replace("Input should be", "must be", 1)
    # A check of a whole section has no key, and its text says what it got.
    if detail["type"] == "value_error":
        return f"{key}: {message}" if key else message
    got = detail["input"]
    hint = ""
    if detail["type"] == "literal_error" and isinstance(got, str):
        hint = did_you_mean(got, re.findall(r"'([^']+)'", detail["ctx"]["expected"]))
    return f"{key} {message}, got {json.dumps(got, default=repr)[:80]} ({type(got).__name__}){hint}"


def _suggest(cls: type[Config], loc: tuple[int | str, ...]) -> str:
    """The nearest key of the section, else those of that name below it or in other sections; else all of it."""
    *parents, unknown = map(str, loc)
    sections = _sections_at(cls, parents)
    known = sorted({name for section in sections for name in section.model_fields})
    prefix = "".join(f"{parent}." for parent in parents)
    other_names = {name: key for section in sections for name, key in section.other_names.items()}
    if near := other_names.get(unknown) or nearest(unknown, known):
        return f"did you mean {prefix}{near}?"
    if namesakes := [key for key in dict.fromkeys(_dotted_keys(cls)) if key.split(".")[-1] == unknown]:
        below = [key for key in namesakes if key.startswith(prefix)]
        return f"did you mean {' or '.join(below or namesakes)}?"
    return f"the known keys here are {', '.join(prefix + name for name in known)}"


def _sections_at(cls: type[Config], parents: list[str]) -> list[type[Config]]:
    """The config classes that a path of keys leads to; list indices and union tags lead nowhere new."""
    sections = [cls]
    for parent in parents:
        fields = [section.model_fields[parent] for section in sections if parent in section.model_fields]
        named = [section for section in sections if section.__name__ == parent]
        sections = [inner for field in fields for inner in _configs_in(field.annotation)] or named or sections
    return sections


def _configs_in(annotation: Any) -> list[type[Config]]:
    if isinstance(annotation, type) and issubclass(annotation, Config):
        return [annotation]
    return [config for inner in get_args(annotation) for config in _configs_in(inner)]


def _dotted_keys(cls: type[Config], prefix: str = "") -> Iterator[str]:
    for name, field in cls.model_fields.items():
        yield prefix + name
        for section in _configs_in(field.annotation):
            yield from _dotted_keys(section, f"{prefix}{name}.")
