"""Former names of keywords, which functions and classes take for one more release."""

import functools
import warnings
from collections.abc import Callable
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
                text = f"{name}({former}=...) leaves octavo with the next release; use {current[former]}"
                warnings.warn(text, DeprecationWarning, stacklevel=2)
                keywords[current[former]] = keywords.pop(former)
            return function(*args, **keywords)

        if not isinstance(target, type):
            return call  # type: ignore[return-value]
        target.__init__ = call  # type: ignore[misc]
        return target

    return decorate
