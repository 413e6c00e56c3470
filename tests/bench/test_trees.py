"""The comparisons of two trees run, this tree beside itself, and their records hold both."""

import json
from pathlib import Path

import pytest

from bench.speed import tree_loops, trees

CASES = (
    (trees, ("--filter", "linear", "--rounds", "1", "--record", "trees"), "trees", "time"),
    (tree_loops, ("--filter", "server", "--rounds", "1"), "tree_loops", "inter-token latency, p99"),
)


@pytest.mark.largest
@pytest.mark.parametrize(("program", "arguments", "name", "metric"), CASES, ids=["trees", "tree_loops"])
def test_a_tree_beside_itself(program, arguments, name, metric, tmp_path: Path) -> None:  # type: ignore[no-untyped-def]
    common = ["--device", "cpu", "--name", "abc", "--commit", "def", "--out", str(tmp_path)]
    assert program.main([str(trees.ROOT), *common, *arguments]) == 0
    document = json.loads((tmp_path / f"{name}.json").read_text())
    (row,) = [row for row in document["rows"] if row["metric"] == metric]
    assert document["commit"] == "def" and row["peer"] == "octavo at abc" and row["value"] > 0 and row["peer_value"] > 0
