"""Rules on single imports, read from the source: `make layers` holds the order of the packages."""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent

# Third-party package -> the only modules that may import it, at the top, in a function or for typing.
HOMES = {
    "triton": r"octavo\.ops(\.\w+)+\.triton(\.\w+)*|octavo\.testing\.\w+",
    "transformers": r"octavo\.models\.(checkpoint(\.\w+)*|tokenizer)",
    "fastapi": r"octavo\.serve\.http(\.\w+)*",
    "uvicorn": r"octavo\.serve\.http(\.\w+)*",
    "onnx": r"octavo\.qdq\.onnx(\.\w+)*",
    "bench": r"octavo\.cli\.bench",
    "lm_eval": r"octavo\.integrations\.lm_eval",
}

# The test support sets triton's own switches for child processes.
ENVIRONMENT_READERS = r"octavo\.(env|testing\.\w+)"

SOURCES = sorted((ROOT / "octavo").rglob("*.py"))


def module_name(path: Path) -> str:
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def imported_packages(tree: ast.AST) -> Iterator[str]:
    """Top-level packages of every import statement and of import_module("...") with a literal."""
    for node in ast.walk(tree):
        match node:
            case ast.Import(names=names):
                yield from (alias.name.split(".")[0] for alias in names)
            case ast.ImportFrom(module=str(module), level=0):
                yield module.split(".")[0]
            case ast.Call(
                func=ast.Name(id="import_module") | ast.Attribute(attr="import_module"),
                args=[ast.Constant(value=str(module)), *_],
            ):
                yield module.split(".")[0]


def offences(source: str, module: str) -> list[str]:
    tree = ast.parse(source)
    found = [
        f"{module} imports {package}; only {HOMES[package]} may"
        for package in imported_packages(tree)
        if package in HOMES and not re.fullmatch(HOMES[package], module)
    ]
    names = {ast.unparse(node) for node in ast.walk(tree) if isinstance(node, ast.Attribute)}
    if not re.fullmatch(ENVIRONMENT_READERS, module) and names & {"os.environ", "os.getenv"}:
        found.append(f"{module} reads an environment variable; only octavo.env may")
    return found


@pytest.mark.parametrize("path", SOURCES, ids=module_name)
def test_module_imports_only_what_it_may(path: Path) -> None:
    assert offences(path.read_text(), module_name(path)) == []


@pytest.mark.parametrize(
    ("source", "module", "count"),
    [
        ("import triton.language as tl", "octavo.ops.quantize.triton", 0),
        ("import triton.language as tl", "octavo.ops.quantize", 1),
        ("def f():\n    from transformers import AutoConfig", "octavo.models.decoder", 1),
        ("from transformers import AutoConfig", "octavo.models.checkpoint.dialects", 0),
        ("import_module('fastapi')", "octavo.serve.llm", 1),
        ("import os\nos.environ['X']", "octavo.train.loop", 1),
        ("from octavo.ops.quantize import triton", "octavo.ops.quantize", 0),
    ],
)
def test_the_rules_catch_what_they_name(source: str, module: str, count: int) -> None:
    assert len(offences(source, module)) == count
