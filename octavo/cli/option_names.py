"""A command's errors name its options: the library that raised them knows keywords of Python, such as `exact=True`."""

import re
from collections.abc import Iterable, Mapping

import click

# of an attribute, a quoted key, a path, or an option
_NEITHER_BEFORE, _NOR_BEHIND = r"(?<![\w.'\"\[/-])", r"(?!\w|\.\w|['\"\]/=])"


def name_options(text: str, command: click.Command, keywords: Mapping[str, str]) -> str:
    """An error's text in which keywords that a command has as options are named as these.

    `exact=True` becomes `--exact`, `kv_cache_dtype='fp8'` `--kv-cache-dtype fp8`, `lower max_num_seqs` `lower
    --max-num-seqs`. A name of one word is a keyword where a value follows, or where the text begins with a rule of it.

    Args:
        keywords: keyword, or key of a config, -> the option's name in Python, where the two differ.
    """
    options = {p.name: p for p in command.params if p.name and any(opt.startswith("--") for opt in p.opts)}
    options |= {name: options[ours] for name, ours in keywords.items()}
    names, of_words = _any_of(options), _any_of(name for name in options if "_" in name or "." in name)
    valued = rf"{_NEITHER_BEFORE}({names}) ?= ?('[^']*'|\"[^\"]*\"|\w+(?:[.:/-]\w+)*)"
    bare = rf"{_NEITHER_BEFORE}({of_words}){_NOR_BEHIND}|^({names})(?= must )"
    text = re.sub(valued, lambda found: _given(options[found[1]], found[2].strip("'\"")), text)
    return re.sub(bare, lambda found: options[found[1] or found[2]].opts[0], text)


def _any_of(names: Iterable[str]) -> str:
    return "|".join(map(re.escape, sorted(names, key=len, reverse=True)))


def _given(option: click.Parameter, value: str) -> str:
    """An option as it is typed with a value."""
    on, off = option.opts[0], next(iter(option.secondary_opts), f"no {option.opts[0]}")
    return {"True": on, "False": off}.get(value, f"{on} {value}")
