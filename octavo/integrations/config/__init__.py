"""Familiar configuration: verl's keys, and NeMo-RL's and slime's names around FP8, read as an octavo recipe.

A key that means the same is mapped; of verl's, sections that octavo does not run are ignored with a note each; every
other key is refused by name, with what to do.
"""

from octavo.integrations.config.command_line import resolve_recipe
from octavo.integrations.config.nemo import read_nemo
from octavo.integrations.config.slime import read_slime
from octavo.integrations.config.toml import to_toml
from octavo.integrations.config.verl import read_verl

__all__ = ["read_nemo", "read_slime", "read_verl", "resolve_recipe", "to_toml"]
