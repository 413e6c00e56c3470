"""Rules on single imports, read from the source: `make layers` holds the order of the packages."""

import ast
import functools
import re
from collections.abc import Iterator
from graphlib import TopologicalSorter
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent

# Third-party package -> the only modules that may import it, at the top, in a function or for typing.
HOMES = {
    "triton": r"octavo\.ops(\.\w+)+\.triton(\.\w+)*|octavo\.testing\.\w+",
    "transformers": r"octavo\.models\.(checkpoint(\.\w+)*|tokenizer)|octavo\.integrations\.huggingface",
    "fastapi": r"octavo\.serve\.(http|router)(\.\w+)*",
    "uvicorn": r"octavo\.serve\.(http|router)(\.\w+)*",
    "onnx": r"octavo\.qdq\.onnx(\.\w+)*",
    "bench": r"octavo\.cli\.bench",
    "lm_eval": r"octavo\.integrations\.lm_eval",
    "peft": r"octavo\.integrations\.peft",
    "deepspeed": r"octavo\.integrations\.deepspeed",
    "colossalai": r"octavo\.integrations\.colossalai",
    "megatron": r"octavo\.integrations\.megatron(\.\w+)*",
    "lightning": r"octavo\.integrations\.lightning",
    "torchtitan": r"octavo\.integrations\.torchtitan",
    "nemo_automodel": r"octavo\.integrations\.nemo",
    "wandb": r"octavo\.run\.sinks",
    "mlflow": r"octavo\.run\.sinks",
}

# torch.distributed has its own layers. amp.handle waits for its own.
COLLECTIVES = r"octavo\.((distributed|parallel)(\.\w+)*|amp\.handle)"

# The test support sets triton's own switches for child processes.
ENVIRONMENT_READERS = r"octavo\.(env|testing\.\w+)"


@functools.cache
def parsed() -> dict[str, ast.Module]:
    """Module -> its source."""
    paths = {path.relative_to(ROOT).with_suffix("").parts: path for path in sorted((ROOT / "octavo").rglob("*.py"))}
    return {".".join(parts).removesuffix(".__init__"): ast.parse(path.read_text()) for parts, path in paths.items()}


def imported_packages(nodes: list[ast.AST]) -> Iterator[str]:
    """Top-level packages of every import statement and of import_module("...") with a literal."""
    for node in nodes:
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


def uses_collectives(nodes: list[ast.AST]) -> bool:
    """Whether a module imports torch.distributed in any form, or reaches it through torch."""
    for node in nodes:
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


def reads_environment(node: ast.AST) -> bool:
    match node:
        case ast.Attribute(value=ast.Name(id="os"), attr="environ" | "getenv"):
            return True
    return False


def offences(tree: ast.AST, module: str) -> list[str]:
    nodes = list(ast.walk(tree))
    found = [
        f"{module} imports {package}; only {HOMES[package]} may"
        for package in imported_packages(nodes)
        if package in HOMES and not re.fullmatch(HOMES[package], module)
    ]
    if uses_collectives(nodes) and not re.fullmatch(COLLECTIVES, module):
        found.append(f"{module} uses torch.distributed; only octavo.distributed and octavo.parallel may")
    if not re.fullmatch(ENVIRONMENT_READERS, module) and any(map(reads_environment, nodes)):
        found.append(f"{module} reads an environment variable; only octavo.env may")
    return found


def imported_modules(tree: ast.AST, known: set[str]) -> set[str]:
    """Modules of `known` that a source imports, at the top or in a function; not what is for type checkers alone."""
    found: set[str] = set()
    waiting: list[ast.AST] = [tree]
    while waiting:
        match node := waiting.pop():
            case ast.Import(names=names):
                found |= {alias.name for alias in names}
            case ast.ImportFrom(module=str(module), names=imported):
                names = {f"{module}.{alias.name}" for alias in imported}
                found |= (names & known) | ({module} if names - known else set())
            case ast.If(test=ast.Name(id="TYPE_CHECKING"), orelse=rest):
                waiting += rest
            case ast.expr():
                pass  # holds no import
            case _:
                waiting += ast.iter_child_nodes(node)
    return found & known


def test_no_module_imports_itself_by_way_of_others() -> None:
    known = set(parsed())
    graph = {module: imported_modules(tree, known) - {module} for module, tree in parsed().items()}
    TopologicalSorter(graph).prepare()  # raises a CycleError that names the circle


def test_an_import_in_a_function_counts_and_one_for_types_does_not() -> None:
    known = {"octavo.a", "octavo.a.b", "octavo.c"}
    source = "from octavo.c import D\nif TYPE_CHECKING:\n    import octavo.a\ndef f():\n    from octavo.a import b\n"
    assert imported_modules(ast.parse(source), known) == {"octavo.a.b", "octavo.c"}


def test_modules_import_only_what_they_may() -> None:
    assert [line for module, tree in parsed().items() for line in offences(tree, module)] == []


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
    assert len(offences(ast.parse(source), module)) == count
