"""A class name means one thing: no top-level class of octavo/ has the name of another one."""

import ast
import collections
from pathlib import Path

ROOT = Path(__file__).parent.parent / "octavo"


def test_no_class_name_is_used_twice() -> None:
    places = collections.defaultdict(list)
    for path in sorted(ROOT.rglob("*.py")):
        for node in ast.parse(path.read_text(encoding="utf-8")).body:
            if isinstance(node, ast.ClassDef):
                places[node.name].append(f"{path.relative_to(ROOT)}:{node.lineno}")
    assert {name: found for name, found in places.items() if len(found) > 1} == {}
