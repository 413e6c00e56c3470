"""The frozen public names: adding or removing one is a decision, made here and in the CHANGELOG."""

import ast
from importlib import import_module
from pathlib import Path

import pytest

import octavo

ROOT = Path(octavo.__file__).parent.parent

PUBLIC = {
    "DelayedScaling": "octavo.numerics",
    "Format": "octavo.numerics",
    "LLM": "octavo.serve",
    "Numerics": "octavo.numerics",
    "QuantizedTensor": "octavo.numerics",
    "Recipe": "octavo.numerics",
    "SamplingParams": "octavo.serve",
    "Scaling": "octavo.numerics",
    "__version__": "octavo",
    "amp": "octavo",
    "autocast": "octavo.nn",
    "convert": "octavo.nn",
    "get_recipe": "octavo.numerics",
    "load_model": "octavo.models",
    "nn": "octavo",
    "quantize": "octavo.ops.quantize",
    "save_model": "octavo.models",
    "sequence_logprobs": "octavo.models",
}


def exists(module: str) -> bool:
    path = ROOT.joinpath(*module.split("."))
    return (path / "__init__.py").exists() or path.with_suffix(".py").exists()


def test_all_is_frozen() -> None:
    assert sorted(octavo.__all__) == sorted(PUBLIC)
    assert set(octavo.__all__) <= set(dir(octavo))


@pytest.mark.parametrize("name", [name for name, home in PUBLIC.items() if exists(home) and name not in ("amp", "nn")])
def test_name_comes_from_its_home(name: str) -> None:
    assert getattr(octavo, name) is getattr(import_module(PUBLIC[name]), name)


@pytest.mark.parametrize("name", [name for name in ("amp", "nn") if exists(f"octavo.{name}")])
def test_submodule_is_reachable(name: str) -> None:
    assert getattr(octavo, name) is import_module(f"octavo.{name}")


def test_type_checkers_see_the_same_homes() -> None:
    tree = ast.parse(Path(octavo.__file__).read_text())
    seen = {
        alias.name: node.module
        for block in tree.body
        if isinstance(block, ast.If)
        for node in block.body
        if isinstance(node, ast.ImportFrom)
        for alias in node.names
    }
    assert seen == {name: home for name, home in PUBLIC.items() if name != "__version__"}


def test_unknown_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="module 'octavo' has no attribute 'quantise'"):
        octavo.quantise  # noqa: B018
