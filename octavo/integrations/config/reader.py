"""Reader: takes the keys of another framework one by one, and keeps what they set, what they said and what was refused.

Every key of a document must be taken by a translator; what is left over is refused by name.
"""

import difflib
import warnings
from collections.abc import Collection, Mapping
from typing import Any

from octavo.errors import ConfigError
from octavo.integrations.config.document import Document
from octavo.rl.config import RLConfig

_KINDS = {bool: "true or false", int: "an integer", float: "a number", str: "text", list: "a list"}


class Reader:
    """One translation.

    Args:
        framework: its name, for messages.
        document: its keys.
        base: octavo's config under them.
        has_base: base was given by the user: what no key names stays as it is there. Otherwise it has the framework's
            own default, but for what base has set (by --set).

    Attributes:
        settings: octavo's key -> value.
        notes: "key = value -> octavo's key = value", one for each that was given.
        refused: key -> why, and what to do.
    """

    def __init__(self, framework: str, document: Document, base: RLConfig, *, has_base: bool) -> None:
        self.framework, self.document, self.base, self.has_base = framework, document, base, has_base
        self.settings: dict[str, Any] = {}
        self.notes: list[str] = []
        self.refused: dict[str, str] = {}
        self._taken: set[str] = set()
        self._sources: dict[str, str] = {}
        self._defaults: dict[str, str] = {}  # refused, and not given

    def is_given(self, *names: str) -> bool:
        """Whether the document has one of these keys."""
        return any(name in self.document for name in names)

    def is_active(self, *names: str) -> bool:
        """Whether keys that belong together have anything to say."""
        return not self.has_base or self.is_given(*names)

    def take(self, name: str, kind: type, default: Any = None, choices: Collection[Any] = ()) -> Any:
        """The value of a key, checked; its default where it is not given, or where it is refused."""
        if name not in self.document:
            return default
        self._taken.add(name)
        value = self.document[name].value
        if value is None and default is None:
            return None
        if kind is float and isinstance(value, int) and not isinstance(value, bool):
            value = float(value)
        if kind is str and isinstance(value, int | float) and not isinstance(value, bool):
            value = str(value)
        if kind is list and isinstance(value, str):
            value = [value]
        if not isinstance(value, kind) or (kind is int and isinstance(value, bool)):
            self.refuse(name, f"it must be {_KINDS[kind]}")
            return default
        if choices and value not in choices:
            self.refuse(name, f"octavo has {' or '.join(map(_show, choices))}")
            return default
        return value

    def skip(self, name: str) -> None:
        """Count a key as taken."""
        self._taken.add(name)

    def left_over(self) -> list[str]:
        """The keys that are not taken yet."""
        return [name for name in self.document if name not in self._taken]

    def refuse(self, name: str, why: str, default: str = "", key: str = "") -> None:
        """Refuse a key that is given; or, with `default`, the framework's default where octavo's `key` is not set."""
        if not self.is_given(name):
            if not default or self.has_base or is_set(self.base, key):
                return
            self._defaults[name] = default
        self._taken.add(name)
        self.refused.setdefault(name, why)

    def forget(self, key: str) -> None:
        """Take back what was put into octavo's key."""
        self.settings.pop(key, None)
        self._sources.pop(key, None)
        self.notes = [note for note in self.notes if f" -> {key} = " not in note]

    def put(self, key: str, value: Any, *names: str) -> None:
        """Set octavo's key from the framework's; from defaults alone only where it is not set yet."""
        given = [name for name in names if name in self.document and name not in self.refused]
        if not given and (self.has_base or is_set(self.base, key)):
            return
        if key in self.settings and self._sources.get(key) and given and self.settings[key] != value:
            self.refuse(given[0], f"{self._sources[key]} sets {key} to {_show(self.settings[key])}; make them agree")
            return
        if given or key not in self.settings:
            self.settings[key] = value
        if given:
            self._sources[key] = given[0]
            shown = ", ".join(f"{name} = {_show(self.document[name].value)}" for name in given)
            self.notes.append(f"{shown} -> {key} = {_show(value)}")

    def held(self, key: str) -> Any:
        """The value of octavo's key as it stands: by a key before, else of the base."""
        if key in self.settings:
            return self.settings[key]
        value: Any = self.base
        for part in key.split("."):
            value = getattr(value, part)
        return value

    def refuse_rest(self, known: Collection[str], remedies: Mapping[str, str]) -> None:
        """Refuse every key that was not taken.

        Args:
            known: the keys that octavo knows, to name the nearest.
            remedies: beginning of a key -> why, and what to do; the longest that fits counts.
        """
        for name in self.left_over():
            self.refuse(name, _remedy(name, known, remedies))

    def finish(self, *, ignore_unsupported: bool) -> RLConfig:
        """The config.

        Args:
            ignore_unsupported: leave refused keys out, and say so in the notes.
        Raises:
            ConfigError: keys that are refused, each with the reason; or octavo's own rules over what was set.
        """
        lines = [f"{self._named(name)} is refused: {why}" for name, why in self.refused.items()]
        if lines and not ignore_unsupported:
            raise ConfigError("\n".join(lines) + "\n(--ignore-unsupported goes on without these keys)")
        self.notes += [f"dropped: {line}" for line in lines]
        data = self.base.model_dump(exclude_unset=True)
        if "trainer.mini_batch_size" in self.settings:  # in place of the base's
            data.get("trainer", {}).pop("minibatches", None)
        for key, value in self.settings.items():
            *sections, name = key.split(".")
            table = data
            for section in sections:
                table = table.setdefault(section, {})
            table[name] = value
        try:
            return RLConfig(**data)
        except ConfigError as error:
            raise ConfigError(f"{self.framework}'s keys make a config that octavo refuses: {error}") from None

    def _named(self, name: str) -> str:
        if name in self._defaults:
            return f"{self.framework}'s {name} = {self._defaults[name]} (its default)"
        setting = self.document[name]
        return f"{self.framework}'s {name} = {_show(setting.value)} ({setting.origin})"


def former_drop_refused(drop_refused: bool | None, ignore_unsupported: bool) -> bool:
    """ignore_unsupported, or what its former name says, with a warning."""
    if drop_refused is None:
        return ignore_unsupported
    warnings.warn(
        "drop_refused leaves octavo with the next release; use ignore_unsupported", DeprecationWarning, stacklevel=3
    )
    return drop_refused


def _remedy(name: str, known: Collection[str], remedies: Mapping[str, str]) -> str:
    fits = [prefix for prefix in remedies if name.startswith(prefix)]
    best = max(fits, key=len, default=None)
    section, _, last = name.rpartition(".")
    siblings = {key.rpartition(".")[2]: key for key in known if key.rpartition(".")[0] == section}
    near = difflib.get_close_matches(last, list(siblings), n=1, cutoff=0.8)
    if near and name not in known and best != name:
        return f"octavo does not know this key; did you mean {siblings[near[0]]}?"
    if best is not None:
        return remedies[best]
    near = difflib.get_close_matches(name, list(known), n=1, cutoff=0.8)
    hint = f"did you mean {near[0]}?" if near else "leave it out, or set octavo's own key by --set"
    return f"octavo does not know this key; {hint}"


def is_set(config: Any, key: str) -> bool:
    """Whether a key was set by hand."""
    for part in key.split("."):
        if part not in config.model_fields_set:
            return False
        config = getattr(config, part)
    return True


def _show(value: Any) -> str:
    """A value as YAML has it."""
    return "null" if value is None else str(value).lower() if isinstance(value, bool) else str(value)
