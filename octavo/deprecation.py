"""Former names of keywords and options, which functions, classes and commands take for one more release."""

import functools
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
                _warn(f"{name}({former}=...)", current[former])
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
            _warn(name, current[name])
            *words, last = current[name].split()
            renamed += [*words, last + equals + value]
        else:
            renamed.append(argument)
    return [*renamed, *arguments[end:]]


def _warn(former: str, today: str) -> None:
    """For the caller of the caller."""
    warnings.warn(f"{former} leaves octavo with the next release; use {today}", DeprecationWarning, stacklevel=3)
