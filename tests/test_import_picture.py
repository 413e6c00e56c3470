"""The import picture of `make layers`: arrows are counted; one that points up, and a circle, are told."""

import runpy
from pathlib import Path

picture = runpy.run_path(str(Path(__file__).parents[1] / "docs" / "tools" / "import_picture.py"))["picture"]
LAYERS = [["top"], ["left", "right"], ["low"]]
DOWN = {
    "octavo.top": {"octavo.left.a", "octavo.low"},
    "octavo.left.a": {"octavo.left.b", "octavo.low"},
    "octavo.left.b": {"octavo.low"},
    "octavo.right": set(),
    "octavo.low": set(),
}


def test_arrows_are_counted() -> None:
    text, faults = picture(LAYERS, DOWN)
    lines = ["  top -> left 1, low 1", " left -> low 2", "right -> -", "  low -> -", "4 arrows between packages"]
    assert (text.split("\n"), faults) == (lines, [])


def test_arrows_that_do_not_point_down() -> None:
    sideways = DOWN | {"octavo.right": {"octavo.left.b"}}
    assert picture(LAYERS, sideways)[1] == ["right -> left does not point down"]
    up = picture(LAYERS, DOWN | {"octavo.low": {"octavo.right"}})[1]
    assert up == ["low -> right does not point down"]


def test_a_circle_within_a_package() -> None:
    (fault,) = picture(LAYERS, DOWN | {"octavo.left.b": {"octavo.left.a"}})[1]
    assert fault in (
        "a circle: octavo.left.a -> octavo.left.b -> octavo.left.a",
        "a circle: octavo.left.b -> octavo.left.a -> octavo.left.b",
    )
