"""Files on the disk: damage of every kind is refused by name, writing is whole or nothing."""

import json
import os
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from octavo.errors import CheckpointError
from octavo.models.checkpoint.atomic import atomic_directory
from octavo.models.checkpoint.safetensors_io import INDEX_FILE, SINGLE_FILE, SafetensorsReader, write_tensors
from tests.assertions import assert_raises

TENSORS = {
    "a.weight": torch.arange(12, dtype=torch.float32).view(3, 4),
    "b.weight": torch.randn(5, 8, generator=torch.Generator().manual_seed(0)).bfloat16(),
    "c.codes": torch.tensor([[1.0, -2.0], [0.5, 448.0]]).to(torch.float8_e4m3fn),
    "d": torch.tensor(3.0, dtype=torch.float16),
}


def same(a: torch.Tensor, b: torch.Tensor) -> bool:
    return a.dtype == b.dtype and torch.equal(a.reshape(-1).view(torch.uint8), b.reshape(-1).view(torch.uint8))


@pytest.mark.parametrize(("max_shard_bytes", "num_files"), [(10**9, 1), (90, 3), (1, 5)])
def test_written_tensors_are_read_back(tmp_path: Path, max_shard_bytes: int, num_files: int) -> None:
    files = write_tensors(tmp_path, TENSORS, max_shard_bytes)
    assert sorted(files) == sorted(os.listdir(tmp_path))
    assert len(files) == num_files
    reader = SafetensorsReader(tmp_path)
    assert set(reader.entries) == set(TENSORS)
    for name, tensor in TENSORS.items():
        assert reader.entries[name].shape == tuple(tensor.shape)
        assert same(reader.load(name), tensor)


def test_every_truncation_is_refused_and_names_the_tensor(tmp_path: Path) -> None:
    write_tensors(tmp_path, TENSORS)
    file = tmp_path / SINGLE_FILE
    whole = file.read_bytes()
    for size in (0, 7, 8, 50, len(whole) - 100, len(whole) - 1):
        file.write_bytes(whole[:size])
        named = {len(whole) - 100: "a.weight", len(whole) - 1: "c.codes"}.get(size)
        match = f"truncated: {named} ends at byte" if named else r"truncated|not a safetensors file"
        with pytest.raises(CheckpointError, match=match):
            SafetensorsReader(tmp_path)


@pytest.mark.parametrize(
    ("header", "text"),
    [
        (b"not json", "malformed header"),
        (b"[1, 2]", "malformed header"),
        (b'{"a": {"dtype": "F32"}}', "malformed header"),
        (b'{"a": {"dtype": "F4", "shape": [1], "data_offsets": [0, 4]}}', "F4"),
        (b'{"a": {"dtype": "F32", "shape": [2], "data_offsets": [0, 4]}}', "do not fit its shape"),
        (b'{"a": {"dtype": "F32", "shape": [1], "data_offsets": [4, 8]}}', "do not fit its shape"),
        (b"{}", "follow the last tensor"),
    ],
    ids=["text", "list", "no-offsets", "dtype", "shape", "gap", "trailing"],
)
def test_malformed_headers_are_refused(tmp_path: Path, header: bytes, text: str) -> None:
    file = tmp_path / "x.safetensors"
    file.write_bytes(len(header).to_bytes(8, "little") + header + bytes(4))
    with pytest.raises(CheckpointError, match=text):
        SafetensorsReader(file)


def test_a_missing_shard_is_named_with_its_tensors(tmp_path: Path) -> None:
    write_tensors(tmp_path, TENSORS, 1)
    (tmp_path / "model-00002-of-00004.safetensors").unlink()
    with pytest.raises(CheckpointError, match=r"model-00002-of-00004.*missing.*b\.weight"):
        SafetensorsReader(tmp_path)


@pytest.mark.parametrize(
    ("change", "text"),
    [
        (lambda index: index["weight_map"].update({"e": "model-00001-of-00004.safetensors"}), "e should be in"),
        (lambda index: index.pop("weight_map"), "not an index"),
    ],
)
def test_an_index_that_does_not_fit_is_refused(tmp_path: Path, change: Callable[[dict], None], text: str) -> None:
    write_tensors(tmp_path, TENSORS, 1)
    index = json.loads((tmp_path / INDEX_FILE).read_text())
    change(index)
    (tmp_path / INDEX_FILE).write_text(json.dumps(index))
    with pytest.raises(CheckpointError, match=text):
        SafetensorsReader(tmp_path)


def test_a_tensor_in_two_shards_is_refused(tmp_path: Path) -> None:
    write_tensors(tmp_path, TENSORS, 1)
    both = {name: TENSORS[name] for name in ("b.weight", "a.weight")}
    save_file(both, tmp_path / "model-00002-of-00004.safetensors")
    with pytest.raises(CheckpointError, match=r"a\.weight is in"):
        SafetensorsReader(tmp_path)


@pytest.mark.parametrize("where", ["nowhere", "."])
def test_nothing_there(tmp_path: Path, where: str) -> None:
    with pytest.raises(CheckpointError, match=SINGLE_FILE):
        SafetensorsReader(tmp_path / where)


@pytest.mark.parametrize(
    "bad",
    [
        torch.tensor([1.0, float("nan")]),
        torch.tensor([1.0, float("-inf")], dtype=torch.bfloat16),
        torch.tensor([float("inf"), 0.0], dtype=torch.float16),
        torch.tensor([0x7F, 0], dtype=torch.uint8).view(torch.float8_e4m3fn),
        torch.tensor([0xFF, 0], dtype=torch.uint8).view(torch.float8_e4m3fn),
        torch.tensor([0xFC, 0], dtype=torch.uint8).view(torch.float8_e5m2),
        torch.tensor([0xFF, 0], dtype=torch.uint8).view(torch.float8_e8m0fnu),
    ],
    ids=lambda t: f"{t.dtype}",
)
def test_values_that_are_not_finite_are_refused(tmp_path: Path, bad: torch.Tensor) -> None:
    save_file({"layer.weight": bad}, tmp_path / SINGLE_FILE)
    with pytest.raises(CheckpointError, match=r"layer\.weight holds 1 NaN or infinite values of 2"):
        SafetensorsReader(tmp_path).load("layer.weight")
    (tmp_path / "new").mkdir()
    with pytest.raises(CheckpointError, match=r"layer\.weight"):
        write_tensors(tmp_path / "new", {"good": torch.ones(2), "layer.weight": bad})
    assert os.listdir(tmp_path / "new") == []


def never(_: Path) -> bool:
    return False


def test_atomic_directory_replaces_only_what_it_may(tmp_path: Path) -> None:
    target = tmp_path / "out"
    target.mkdir()
    with atomic_directory(target, never) as directory:  # empty: no one's
        (directory / "sub").mkdir()
        (directory / "sub" / "file").write_text("old")
    with pytest.raises(CheckpointError, match="not replaced"), atomic_directory(target, never):
        pass
    with atomic_directory(target, lambda path: (path / "sub").is_dir()) as directory:
        (directory / "file").write_text("new")
    assert os.listdir(tmp_path) == ["out"]
    assert os.listdir(target) == ["file"]


def test_atomic_directory_leaves_what_another_process_wrote_meanwhile(tmp_path: Path) -> None:
    target = tmp_path / "run"

    def write_both() -> None:
        with atomic_directory(target, lambda _: False) as directory:
            (directory / "mine").write_text("")
            target.mkdir()
            (target / "theirs").write_text("")

    assert_raises(CheckpointError, "not replaced", write_both)
    assert [path.name for path in tmp_path.rglob("*")] == ["run", "theirs"]


def test_atomic_directory_keeps_the_old_one_when_the_swap_fails(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    target = tmp_path / "out"
    target.mkdir()
    (target / "file").write_text("old")
    rename = Path.rename

    def failing(self: Path, to: Path) -> Path:
        if ".tmp-" in self.name:
            raise OSError("disk full")
        return rename(self, to)

    monkeypatch.setattr(Path, "rename", failing)
    with pytest.raises(OSError, match="disk full"), atomic_directory(target, lambda _: True):
        pass
    assert os.listdir(tmp_path) == ["out"]
    assert (target / "file").read_text() == "old"
