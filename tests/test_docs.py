"""The documents work: every python block of README.md and docs/ runs, every recipe parses.

A block tagged `python no-run` is left alone. Blocks run one by one, each in a process of its own whose
working directory is empty but for a link to recipes/.
"""

import os
import re
import subprocess
import sys
from importlib import import_module
from pathlib import Path

import pytest

from octavo.config import Config, load_config

ROOT = Path(__file__).parent.parent
PAGES = [page for page in [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))] if page.exists()]
BLOCK = re.compile(r"^```python[ \t]*\n(.*?)^```[ \t]*$", re.MULTILINE | re.DOTALL)

# How a recipe's file name begins -> the config class that must take it.
RECIPE_CLASSES = {
    "train": "octavo.train.config:TrainConfig",
    "sft": "octavo.train.config:TrainConfig",
    "rl": "octavo.rl.config:RLConfig",
}


def blocks(page: Path) -> list[tuple[str, str]]:
    """(page:line, code) of each block that is to run."""
    text = page.read_text(encoding="utf-8")
    return [
        (f"{page.relative_to(ROOT)}:{text.count(chr(10), 0, match.start()) + 1}", match.group(1))
        for match in BLOCK.finditer(text)
    ]


BLOCKS = [block for page in PAGES for block in blocks(page)]
RECIPES = sorted((ROOT / "recipes").rglob("*.toml"))


@pytest.mark.slow
@pytest.mark.parametrize("code", [pytest.param(code, id=place) for place, code in BLOCKS])
def test_block_runs(code: str, tmp_path: Path) -> None:
    (tmp_path / "recipes").symlink_to(ROOT / "recipes")
    done = subprocess.run(
        [sys.executable, "-c", code],
        cwd=tmp_path,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("path", RECIPES, ids=lambda path: path.name)
def test_recipe_parses(path: Path) -> None:
    targets = [target for prefix, target in RECIPE_CLASSES.items() if path.name.startswith(prefix)]
    assert targets, f"{path.name}: a recipe's name begins with one of {', '.join(RECIPE_CLASSES)}"
    module, name = targets[0].split(":")
    cls = getattr(import_module(module), name)
    assert issubclass(cls, Config)
    assert isinstance(load_config(cls, path), cls)


def test_only_plain_python_blocks_run() -> None:
    text = "```python\nx = 1\n```\n```python no-run\nboom()\n```\n```bash\nmake\n```\n```python\ny = 2\n```\n"
    assert BLOCK.findall(text) == ["x = 1\n", "y = 2\n"]
