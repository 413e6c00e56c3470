"""Reading another framework's configuration: YAML, Hydra's overrides, references."""

import importlib.util
from pathlib import Path
from typing import Any

import pytest

from octavo.errors import BackendError, ConfigError
from octavo.integrations.config.document import parse_value, read_document


def values(path: Path | None, *overrides: str) -> dict[str, Any]:
    return {key: setting.value for key, setting in read_document(path, overrides).items()}


@pytest.fixture
def file(tmp_path: Path) -> Path:
    pytest.importorskip("yaml")
    path = tmp_path / "config.yaml"
    path.write_text(
        "data:\n  max_response_length: 64\n  files: [a, b]\n  kwargs: {}\n"
        "actor:\n  lr: 1e-6\n  flag: true\n  nothing: null\n  twice: ${data.max_response_length}\n"
        "  sibling: ${.lr}\n  chosen: ${oc.select:data.absent,[1,2]}\n  section: ${oc.select:data,null}\n"
        "  path: out/${data.max_response_length}/${.flag}\n  nested: ${oc.select:x.y,${oc.select:x.z,5}}\n"
    )
    return path


def test_a_file(file: Path) -> None:
    assert values(file) == {
        "data.max_response_length": 64, "data.files": ["a", "b"], "data.kwargs": {}, "actor.lr": 1e-6,
        "actor.flag": True, "actor.nothing": None, "actor.twice": 64, "actor.sibling": 1e-6, "actor.chosen": [1, 2],
        "actor.section": {}, "actor.path": "out/64/True", "actor.nested": 5,
    }  # fmt: skip


def test_overrides_go_over_the_file(file: Path) -> None:
    found = values(file, "data.max_response_length=8", "+actor.new=x", "++actor.lr=2", "~actor.nothing", "~data.files")
    assert found["data.max_response_length"] == found["actor.twice"] == 8
    assert (found["actor.new"], found["actor.lr"]) == ("x", 2)
    assert not {"actor.nothing", "data.files"} & set(found)
    assert read_document(file, ["actor.lr=3"])["actor.lr"].origin == "the command line"
    assert values(None, "a.b=1", "a=null") == {"a": None}


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("1e-6", 1e-6), ("5", 5), ("-1", -1), ("0.5", 0.5), ("True", True), ("null", None), ("'5'", "5"),
        ('["console","wandb"]', ["console", "wandb"]), ("[]", []), ("{}", {}), ("0.5_2.0", "0.5_2.0"),
        ("~/models/x", "~/models/x"),
    ],
)  # fmt: skip
def test_values_of_a_command_line(text: str, value: Any) -> None:
    assert parse_value(text) == value
    assert type(parse_value(text)) is type(value)


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["a"], "has the form key=value"),
        (["a..b=1"], "has the form key=value"),
        (["~a.b"], "there is no key a.b to take away"),
        (["a=${b.c}"], "a: .* refers to b.c, which is not set"),
        (["a=${oc.env:HOME}"], "is not understood; write the value itself"),
        (["a=${b}", "b=${a}"], "its references lead in a circle"),
    ],
)
def test_bad_overrides(overrides: list[str], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        read_document(None, overrides)


def test_bad_files(tmp_path: Path) -> None:
    pytest.importorskip("yaml")
    path = tmp_path / "config.yaml"
    with pytest.raises(ConfigError, match="cannot read this file"):
        read_document(path, [])
    path.write_text("a: [1")
    with pytest.raises(ConfigError, match="not valid YAML"):
        read_document(path, [])
    path.write_text("- a")
    with pytest.raises(ConfigError, match="must be a mapping of sections, got list"):
        read_document(path, [])
    path.write_text("")
    assert read_document(path, []) == {}


def test_yaml_is_optional(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(BackendError, match=r"pip install pyyaml, or give the keys on the command line"):
        read_document(tmp_path / "config.yaml", [])
    assert values(None, "a=1") == {"a": 1}
