"""Rules on single imports, read from the source: `make layers` holds the order of the packages."""

import ast
import re
from collections.abc import Iterator
from graphlib import TopologicalSorter
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

# torch.distributed has its own layers. amp.handle waits for its own.
COLLECTIVES = r"octavo\.((distributed|parallel)(\.\w+)*|amp\.handle)"

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


def uses_collectives(tree: ast.AST) -> bool:
    """Whether a module imports torch.distributed in any form, or reaches it through torch."""
    for node in ast.walk(tree):
        match node:
            case ast.Import(names=names) if any(f"{alias.name}.".startswith("torch.distributed.") for alias in names):
                return True
            case ast.ImportFrom(module=str(module), level=0, names=names):
                of_torch = module == "torch" and any(alias.name == "distributed" for alias in names)
                if of_torch or f"{module}.".startswith("torch.distributed."):
                    return True
            case ast.Attribute(value=ast.Name(id="torch"), attr="distributed"):
                return True
    return False


def offences(source: str, module: str) -> list[str]:
    tree = ast.parse(source)
    found = [
        f"{module} imports {package}; only {HOMES[package]} may"
        for package in imported_packages(tree)
        if package in HOMES and not re.fullmatch(HOMES[package], module)
    ]
    if uses_collectives(tree) and not re.fullmatch(COLLECTIVES, module):
        found.append(f"{module} uses torch.distributed; only octavo.distributed and octavo.parallel may")
    names = {ast.unparse(node) for node in ast.walk(tree) if isinstance(node, ast.Attribute)}
    if not re.fullmatch(ENVIRONMENT_READERS, module) and names & {"os.environ", "os.getenv"}:
        found.append(f"{module} reads an environment variable; only octavo.env may")
    return found


def imported_modules(source: str, known: set[str]) -> set[str]:
    """Modules of `known` that a source imports, at the top or in a function; not what is for type checkers alone."""
    tree = ast.parse(source)
    for node in ast.walk(tree):
        if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING":
            node.body = [ast.Pass()]
    found = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module is not None:
            names = {f"{node.module}.{alias.name}" for alias in node.names}
            found |= (names & known) | ({node.module} if names - known else set())
    return found & known


def test_no_module_imports_itself_by_way_of_others() -> None:
    known = {module_name(path) for path in SOURCES}
    graph = {module_name(path): imported_modules(path.read_text(), known) - {module_name(path)} for path in SOURCES}
    TopologicalSorter(graph).prepare()  # raises a CycleError that names the circle


def test_an_import_in_a_function_counts_and_one_for_types_does_not() -> None:
    known = {"octavo.a", "octavo.a.b", "octavo.c"}
    source = "from octavo.c import D\nif TYPE_CHECKING:\n    import octavo.a\ndef f():\n    from octavo.a import b\n"
    assert imported_modules(source, known) == {"octavo.a.b", "octavo.c"}


def test_modules_import_only_what_they_may() -> None:
    assert [line for path in SOURCES for line in offences(path.read_text(), module_name(path))] == []


@pytest.mark.parametrize(
    ("source", "module", "count"),
    [
        ("import triton.language as tl", "octavo.ops.quantize.triton", 0),
        ("import triton.language as tl", "octavo.ops.quantize", 1),
        ("def f():\n    from transformers import AutoConfig", "octavo.models.decoder", 1),
        ("from transformers import AutoConfig", "octavo.models.checkpoint.dialects", 0),
        ("import_module('fastapi')", "octavo.serve.llm", 1),
        ("import os\nos.environ['X']", "octavo.train.loop", 1),
        ("import torch.distributed as dist", "octavo.nn.linear", 1),
        ("from torch import distributed", "octavo.train.loop", 1),
        ("import torch\ntorch.distributed.barrier()", "octavo.rl.loop", 1),
        ("from torch.distributed.tensor import DTensor", "octavo.parallel.shard", 0),
        ("from octavo.ops.quantize import triton", "octavo.ops.quantize", 0),
    ],
)
def test_the_rules_catch_what_they_name(source: str, module: str, count: int) -> None:
    assert len(offences(source, module)) == count
