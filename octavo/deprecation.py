"""Former names of keywords, options, module members, attributes and files, which are taken for one more release."""

import functools
import sys
import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

F = TypeVar("F", bound=Callable[..., Any])


def former_keywords(**current: str) -> Callable[[F], F]:
    """Let a function or a class take keywords under former names too, with a DeprecationWarning.

    Args:
        current: former name -> the name of today. A call that gives both raises a TypeError.
    """

    def decorate(target: F) -> F:
        function: Any = target.__init__ if isinstance(target, type) else target  # type: ignore[misc]
        name = target.__name__

        @functools.wraps(function)
        def call(*args: Any, **keywords: Any) -> Any:
            for former in current.keys() & keywords.keys():
                if current[former] in keywords:
                    raise TypeError(f"{name}: {former} is the former name of {current[former]}; give the latter alone")
                warn_of_former(f"{name}({former}=...)", current[former])
                keywords[current[former]] = keywords.pop(former)
            return function(*args, **keywords)

        if not isinstance(target, type):
            return call  # type: ignore[return-value]
        target.__init__ = call  # type: ignore[misc]
        return target

    return decorate


def rename_options(arguments: Sequence[str], current: Mapping[str, str]) -> list[str]:
    """A command's arguments with today's options; a DeprecationWarning for each before a `--` that had another name.

    Args:
        current: former name -> the name of today, or several words: --verl -> --config-format verl.
    """
    end = list(arguments).index("--") if "--" in arguments else len(arguments)
    renamed: list[str] = []
    for argument in arguments[:end]:
        name, equals, value = argument.partition("=")
        if name in current:
            warn_of_former(name, current[name])
            *words, last = current[name].split()
            renamed += [*words, last + equals + value]
        else:
            renamed.append(argument)
    return [*renamed, *arguments[end:]]


def rename_keys(section: str, data: Any, current: Mapping[str, str]) -> Any:
    """A config section's keys by today's names; a DeprecationWarning for each that had another one.

    Args:
        data: what the section is made of; anything but a mapping passes through.
        current: former name -> the name of today.
    Raises:
        ValueError: a key by both names.
    """
    if not isinstance(data, Mapping) or not (given := current.keys() & data.keys()):
        return data
    for former in given:
        if current[former] in data:
            raise ValueError(f"{section}.{former} is the former name of {current[former]}; give the latter alone")
        warn_of_former(f"{section}.{former}", f"{section}.{current[former]}")
    return {current.get(key, key): value for key, value in data.items()}


def former_names(module: str, **current: str) -> Callable[[str], Any]:
    """A module's `__getattr__` that knows its names by former ones too, with a DeprecationWarning.

    Args:
        current: former name -> the name of today.
    """

    def read(name: str) -> Any:
        if name not in current:
            raise AttributeError(f"module {module!r} has no attribute {name!r}")
        warn_of_former(f"{module}.{name}", current[name])
        return getattr(sys.modules[module], current[name])

    return read


def former_attribute(owner: str, former: str, current: str) -> Any:
    """A property that reads an attribute by its former name, with a DeprecationWarning."""

    def read(instance: object) -> Any:
        warn_of_former(f"{owner}.{former}", current)
        return getattr(instance, current)

    return property(read, doc=f"The former name of {current}, which leaves octavo with the next release.")


def warn_of_former(former: str, today: str) -> None:
    """A DeprecationWarning where the caller was called, that names what to use today."""
    warnings.warn(f"{former} leaves octavo with the next release; use {today}", DeprecationWarning, stacklevel=3)
