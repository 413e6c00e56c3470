"""Familiar configuration: verl's keys, and NeMo-RL's and slime's names around FP8, read as an octavo config.

A key that means the same is mapped; of verl's, sections that octavo does not run are ignored with a note each; every
other key is refused by name, with what to do.
"""

from octavo.deprecation import former_names
from octavo.integrations.config.command_line import resolve_config
from octavo.integrations.config.nemo import read_nemo
from octavo.integrations.config.slime import read_slime
from octavo.integrations.config.toml import to_toml
from octavo.integrations.config.verl import read_verl

__all__ = ["read_nemo", "read_slime", "read_verl", "resolve_config", "to_toml"]


__getattr__ = former_names(__name__, resolve_recipe="resolve_config")
