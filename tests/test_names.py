"""A class name means one thing: no top-level class of octavo/ has the name of another one."""

import ast
import collections
from pathlib import Path

ROOT = Path(__file__).parent.parent / "octavo"

# Names that two classes may share, each with the reason.
SHARED = {
    "Decoder": "the model is public; the engine's turns token ids into text",
    "Format": "octavo.Format is a number format; the server's is the shape of an answer",
    "Generation": "a prompt's samples in octavo.rl.engines; a request's stream in octavo.serve",
}


def test_no_class_name_is_used_twice() -> None:
    places = collections.defaultdict(list)
    for path in sorted(ROOT.rglob("*.py")):
        for node in ast.parse(path.read_text(encoding="utf-8")).body:
            if isinstance(node, ast.ClassDef):
                places[node.name].append(f"{path.relative_to(ROOT)}:{node.lineno}")
    assert {name: found for name, found in places.items() if len(found) > 1 and name not in SHARED} == {}
