"""Commands that are in bench/: in the source repository, and not in the wheel."""

import sys
from collections.abc import Callable
from importlib import import_module
from pathlib import Path

import octavo
from octavo.errors import ConfigError


def find_root(command: str) -> Path:
    """The folder that bench/ is in: the checkout that octavo was installed from, else the working directory.

    Args:
        command: which needs it, for the message.
    Raises:
        ConfigError: it is in neither.
    """
    places = (Path(octavo.__file__).resolve().parent.parent, Path.cwd())
    for place in places:
        if all((place / name).is_file() for name in ("bench/command.py", "octavo/__init__.py")):  # octavo's, no other
            return place
    looked = " and ".join(str(place) for place in dict.fromkeys(places))
    raise ConfigError(
        f"octavo {command} needs the folder bench/ of octavo's source repository, which the wheel does not hold; "
        f"looked in {looked}: run it in a checkout, or install octavo from one with pip install -e ."
    )


def load_command(name: str, module: str) -> Callable[..., None]:
    """The command of a module in bench/, imported.

    Raises:
        ConfigError: there is no bench/.
    """
    root = str(find_root(name))
    if root not in sys.path:
        sys.path.insert(0, root)
    command: Callable[..., None] = import_module(module).command
    return command
