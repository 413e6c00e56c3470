"""A class name means one thing: no top-level class of octavo/ has the name of another one."""

import ast
import collections

from tests.test_layers import parsed


def test_no_class_name_is_used_twice() -> None:
    places = collections.defaultdict(list)
    for module, tree in parsed().items():
        for node in tree.body:
            if isinstance(node, ast.ClassDef):
                places[node.name].append(f"{module}:{node.lineno}")
    assert {name: found for name, found in places.items() if len(found) > 1} == {}
