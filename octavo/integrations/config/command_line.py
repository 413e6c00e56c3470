"""What stands behind `octavo rl`: an octavo recipe, another framework's file, its overrides, or some of each."""

import os
import tomllib
from collections.abc import Iterable, Sequence
from pathlib import Path

from octavo.config import load_config
from octavo.errors import ConfigError
from octavo.integrations.config.nemo import read_nemo
from octavo.integrations.config.slime import read_slime
from octavo.integrations.config.verl import read_verl
from octavo.rl.config import RLConfig

_YAML = (".yaml", ".yml")


def resolve_recipe(
    arguments: Sequence[str], framework: str = "", overrides: Iterable[str] = (), *, drop_refused: bool = False
) -> tuple[RLConfig, list[str]]:
    """The recipe of a command line.

    Args:
        arguments: an octavo recipe (.toml), and for a framework its file (.yaml) and its overrides or flags, in any
            order.
        framework: "verl", "nemo", "slime", or empty.
        overrides: octavo's own section.key=value, over its recipe and under the framework's keys.
        drop_refused: go on without the framework's keys that octavo does not honour.
    Returns:
        (the recipe, one line for each of the framework's keys that was mapped or dropped).
    Raises:
        ConfigError: what cannot be read, or is refused by name.
    """
    recipes = [text for text in arguments if text.endswith(".toml") and "=" not in text]
    files = [text for text in arguments if text.endswith(_YAML) and "=" not in text] if framework != "slime" else []
    keys = [text for text in arguments if text not in recipes and text not in files]
    if not framework:
        if len(arguments) != 1:
            raise ConfigError(
                "octavo rl takes one recipe, a TOML file, and --set section.key=value over it; verl's, NeMo-RL's or "
                f"slime's own keys go with --verl, --nemo or --slime; got {' '.join(arguments) or 'nothing'}"
            )
        _refuse_training(Path(arguments[0]))
        return load_config(RLConfig, arguments[0], overrides), []
    if len(recipes) > 1 or len(files) > 1:
        raise ConfigError(f"one recipe and one file of the framework's, got {', '.join(recipes + files)}")
    try:
        config = load_config(RLConfig, recipes[0] if recipes else os.devnull, overrides)
    except ConfigError as error:
        if recipes:
            raise
        why = f"--set is read before {framework}'s keys: what they would name, such as task.name, name by --set too"
        raise ConfigError(f"{error} ({why})") from None
    base, set_keys = (config, None) if recipes else (None, config)
    if framework == "slime":
        return read_slime(keys, base, set_keys=set_keys, drop_refused=drop_refused)
    read = {"verl": read_verl, "nemo": read_nemo}[framework]
    path = Path(files[0]) if files else None
    return read(path, keys, base, set_keys=set_keys, drop_refused=drop_refused)


def _refuse_training(recipe: Path) -> None:
    """A training recipe is another command's; what else is wrong with the file, load_config says."""
    try:
        sections = {"data", "schedule", "optimizer"} & set(tomllib.loads(recipe.read_text(encoding="utf-8")))
    except (OSError, ValueError):
        return
    if sections:
        named = ", ".join(f"[{section}]" for section in sorted(sections))
        raise ConfigError(f"{recipe} is a recipe for training (it has {named}); run: octavo train {recipe}")
