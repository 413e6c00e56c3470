"""`octavo bench WHAT` hands over to bench/, which is in the source repository and not in the wheel."""

import sys
from collections.abc import Callable
from importlib import import_module
from pathlib import Path

import octavo
from octavo.errors import ConfigError


def find_root() -> Path:
    """The folder that bench/ is in: the checkout that octavo was installed from, else the working directory.

    Raises:
        ConfigError: it is in neither.
    """
    places = (Path(octavo.__file__).resolve().parent.parent, Path.cwd())
    for place in places:
        if all((place / name).is_file() for name in ("bench/command.py", "octavo/__init__.py")):  # octavo's, no other
            return place
    looked = " and ".join(str(place) for place in dict.fromkeys(places))
    raise ConfigError(
        "octavo bench needs the folder bench/ of octavo's source repository, which the wheel does not hold; looked in "
        f"{looked}: run it in a checkout, or install octavo from one with pip install -e ."
    )


def load_command() -> Callable[..., None]:
    """The command of bench/, imported."""
    root = str(find_root())
    if root not in sys.path:
        sys.path.insert(0, root)
    command: Callable[..., None] = import_module("bench.command").command
    return command


command = load_command()  # this module is imported when the command is run
