"""The documents work: every python block of README.md and docs/ runs, links lead to files, every config parses.

A block tagged `python no-run` is left alone. Blocks run one by one, each in a process of its own, a fork of one that
has imported torch. Its working directory is empty but for a link to configs/.
"""

import ast
import functools
import os
import re
import runpy
import signal
import subprocess
import sys
import tomllib
import types
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from typing import Any, get_args

import pytest

from octavo.cli import COMMANDS, load_command
from octavo.config import Config, load_config
from octavo.models.families import FAMILIES
from octavo.numerics.recipe import RECIPE_NAMES
from octavo.rl.tasks import TaskSection

ROOT = Path(__file__).parent.parent
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]
BLOCK = re.compile(r"^```python[ \t]*\n(.*?)^```[ \t]*$", re.MULTILINE | re.DOTALL)
# [text](path), with an anchor or without; no link to another site
LINK = re.compile(r"\[([^\]\[]+)\]\((?!https?:)([^)#\s]+)(?:#[^)]*)?\)")
NAME = re.compile(r"`(\w+(?:\.\w+)*)`")
COMMAND = re.compile(r"^octavo ([a-z]+(?: mismatch)?)\b(.*)", re.MULTILINE)
README_LINES = 120

# How a config's file name begins -> the config class that must take it.
CONFIG_CLASSES = {
    "train": "octavo.train.config:TrainConfig",
    "lora": "octavo.train.config:TrainConfig",
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
CONFIGS = sorted((ROOT / "configs").rglob("*.toml"))


# Forks a process for each folder that it reads. octavo is not imported: a block has to import what it uses.
SERVER = """
import os, runpy, sys
import pydantic, rich, safetensors.torch, tokenizers, torch._dynamo
for folder in sys.stdin:
    if not (child := os.fork()):
        break
    print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)
else:
    sys.exit()
os.chdir(folder.rstrip() + "/empty")
for stream in (1, 2):
    os.dup2(os.open("../log", os.O_WRONLY | os.O_CREAT | os.O_APPEND), stream)
runpy.run_path("../block.py", run_name="__main__")
"""


@pytest.fixture(scope="module")
def server() -> "Iterator[subprocess.Popen[str]]":
    command, environment = [sys.executable, "-c", SERVER], os.environ | {"PYTHONPATH": str(ROOT)}
    pipes: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True, "bufsize": 1}
    with subprocess.Popen(command, env=environment, start_new_session=True, **pipes) as process:
        yield process
        os.killpg(process.pid, signal.SIGKILL)  # with a block that has not ended in time


@pytest.mark.slow
@pytest.mark.parametrize("code", [pytest.param(code, id=place) for place, code in BLOCKS])
def test_block_runs(code: str, tmp_path: Path, server: "subprocess.Popen[str]") -> None:
    assert server.stdin is not None and server.stdout is not None
    (tmp_path / "empty").mkdir()
    (tmp_path / "empty" / "configs").symlink_to(ROOT / "configs")
    (tmp_path / "block.py").write_text(code, encoding="utf-8")
    print(tmp_path, file=server.stdin)
    assert server.stdout.readline() == "0\n", (tmp_path / "log").read_text(encoding="utf-8")


def test_links_lead_to_files_and_to_the_functions_that_they_name() -> None:
    """A link whose text is a name in code font leads to the Python file that defines it."""
    wrong = []
    for page in PAGES:
        for text, path in LINK.findall(without_code(page.read_text(encoding="utf-8"))):
            target, name = (page.parent / path).resolve(), NAME.fullmatch(text)
            is_code = name is not None and target.suffix == ".py" and name[1] != target.name
            if not target.exists() or (is_code and name[1] not in defined_in(target)):
                wrong.append(f"{page.relative_to(ROOT)}: [{text}]({path})")
    assert not wrong, "\n".join(wrong)


def test_the_files_that_contributors_are_told_of_exist() -> None:
    text = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
    named = re.findall(r"`((?:octavo|tests|bench|docs)/[\w/.-]+)`", text)
    assert len(named) > 10
    assert [path for path in named if not (ROOT / path).exists()] == []


def test_every_family_recipe_and_task_has_a_row() -> None:
    tasks = get_args(TaskSection.model_fields["name"].annotation)
    for page, names in {"models.md": FAMILIES, "numerics.md": RECIPE_NAMES, "rl.md": tasks}.items():
        first_cells = re.findall(r"^\|([^|]*)\|", (ROOT / "docs" / page).read_text(encoding="utf-8"), re.MULTILINE)
        missing = set(names) - set(re.findall(r'`"?(\w+)"?`', "\n".join(first_cells)))
        assert not missing, f"docs/{page}: no table has a row of {missing}"


def test_commands_have_the_options_that_pages_name() -> None:
    """In bash blocks and in code within a line; `octavo bench` has its options in bench/."""
    wrong = []
    for page in PAGES:
        text = page.read_text(encoding="utf-8")
        code = re.findall(r"^```bash\n(.*?)^```", text, re.MULTILINE | re.DOTALL) + re.findall(
            r"`(octavo [^`]*)`", text
        )
        for words, line in COMMAND.findall("\n".join(code)):
            name = words if words in COMMANDS else words.split()[0]
            if name == "bench":
                continue
            if name not in COMMANDS:
                wrong.append(f"{page.name}: no command {words!r}")
                continue
            named = re.findall(r"(?<![\w-])--[a-z][a-z0-9-]+", re.split(r"#| -- ", line)[0])
            wrong += [f"{page.name}: octavo {name} has no {option}" for option in set(named) - options_of(name)]
    assert wrong == []


@functools.cache
def options_of(command: str) -> set[str]:
    return {
        option for parameter in load_command(command).params for option in (*parameter.opts, *parameter.secondary_opts)
    }


def test_torchrun_on_one_host_is_written_one_way() -> None:
    """With --standalone, which picks a free port, unless --nnodes says that there are several hosts."""
    places = [*PAGES, *CONFIGS, *(ROOT / "examples").rglob("*.py")]
    lines = [line for path in places for line in re.findall(r"torchrun --[^\n]*", path.read_text(encoding="utf-8"))]
    assert len(lines) > 10
    assert [line for line in lines if not re.match(r"torchrun --(standalone|nnodes) ", line)] == []


def test_toml_blocks_parse_and_make_has_the_targets_that_pages_name() -> None:
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE))
    for page in PAGES:
        text = page.read_text(encoding="utf-8")
        for block in re.findall(r"^```toml\n(.*?)^```", text, re.MULTILINE | re.DOTALL):
            tomllib.loads(block)
        named = set(re.findall(r"(?:^|`)make ([a-z-]+)", text, re.MULTILINE))
        assert named <= targets, f"{page.name}: make has no {named - targets}"


def test_the_readme_is_short() -> None:
    assert len((ROOT / "README.md").read_text(encoding="utf-8").splitlines()) <= README_LINES


def test_the_sizes_are_near_the_trees() -> None:
    """A package whose lines changed by an eighth wants `make size`; so does a file of a feature that moved."""
    rows = re.findall(
        r"^\| `(\w+)/` \| ([\d,]+) \|", (ROOT / "docs" / "size.md").read_text(encoding="utf-8"), re.MULTILINE
    )
    shown = {name: int(lines.replace(",", "")) for name, lines in rows}
    folders = [path.parent for path in (ROOT / "octavo").glob("*/__init__.py")]
    real = {f.name: sum(p.read_bytes().count(b"\n") for p in f.rglob("*.py")) for f in folders}
    assert shown.keys() == real.keys()
    far = {name: (shown[name], real[name]) for name in real if abs(shown[name] - real[name]) > 100 + real[name] / 8}
    assert not far, f"run `make size`: {far}"
    size = runpy.run_path(str(ROOT / "docs" / "tools" / "size.py"))
    for patterns in [files for _, files, _ in size["JOBS"]] + [
        f for part in size["FEATURES"].values() for f in part.values()
    ]:
        assert size["files_of"](patterns)


@functools.cache
def defined_in(path: Path) -> set[str]:
    """Functions and classes of a file, and the methods of its classes as Class.method."""
    kinds = (ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    found = set()
    for top in ast.parse(path.read_text(encoding="utf-8")).body:
        if isinstance(top, kinds):
            found |= {top.name, *(f"{top.name}.{inner.name}" for inner in top.body if isinstance(inner, kinds))}
    return found


def without_code(text: str) -> str:
    return re.sub(r"^```.*?^```", "", text, flags=re.MULTILINE | re.DOTALL)


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.name)
def test_config_parses(path: Path) -> None:
    targets = [target for prefix, target in CONFIG_CLASSES.items() if path.name.startswith(prefix)]
    assert targets, f"{path.name}: a config's name begins with one of {', '.join(CONFIG_CLASSES)}"
    module, name = targets[0].split(":")
    cls = getattr(import_module(module), name)
    assert issubclass(cls, Config)
    assert isinstance(load_config(cls, path), cls)


def test_the_site_has_no_word_to_the_tests(monkeypatch: pytest.MonkeyPatch) -> None:
    reader = types.SimpleNamespace(Object=object, Alias=object)  # of the API's pages, which make docs installs
    monkeypatch.setitem(sys.modules, "griffe", reader)
    site = runpy.run_path(str(ROOT / "docs" / "tools" / "site.py"))
    source = ROOT / "docs" / "page.md"
    for fence in ("```python", "```bash", "  ```bash"):
        assert site["_relinked"](f"{fence} no-run\nx\n```\n", source, "page.md") == f"{fence}\nx\n```\n"


def test_only_plain_python_blocks_run() -> None:
    text = "```python\nx = 1\n```\n```python no-run\nboom()\n```\n```bash\nmake\n```\n```python\ny = 2\n```\n"
    assert BLOCK.findall(text) == ["x = 1\n", "y = 2\n"]
