"""Compiled kernels on disk: what is damaged is made again, and a disk that takes nothing ends no process."""

import errno
import json
import logging
import multiprocessing
import os
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
import triton
import triton.language as tl
from triton import knobs
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.runtime.cache import FileCacheManager

from octavo.ops._runtime.kernel_cache import triton as kernel_cache
from octavo.ops._runtime.kernel_cache import use_checked_cache as use_checked_cache_for
from octavo.ops._runtime.kernel_cache.triton import CheckedCache, counting_compilations, use_checked_cache

FILES = {"k.cubin": b"code" * 100, "k.ptx": "text", "k.json": '{"name": "k"}'}


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    path = tmp_path / "cache"
    monkeypatch.setenv("TRITON_CACHE_DIR", str(path))
    kernel_cache._warn_of.cache_clear()
    monkeypatch.setattr(kernel_cache, "_own_folder", lambda: str(tmp_path / "own"))
    return path


def write(cache: FileCacheManager, files: dict[str, Any] = FILES) -> dict[str, str]:
    group = {name: cache.put(content, name) for name, content in files.items()}
    cache.put_group("k.json", group)
    return group


def test_what_was_written_is_found(folder: Path) -> None:
    group = write(CheckedCache("KEY"))
    assert CheckedCache("KEY").get_group("k.json") == group
    assert Path(group["k.cubin"]).read_bytes() == FILES["k.cubin"]
    assert CheckedCache("OTHER").get_group("k.json") is None
    assert not list(folder.rglob("tmp.*"))


@pytest.mark.parametrize("name", [*FILES, "__grp__k.json"])
@pytest.mark.parametrize("damage", ["cut", "empty", "gone", "changed"])
@pytest.mark.parametrize("written_by", [CheckedCache, FileCacheManager])
def test_an_entry_that_is_not_whole_counts_as_missing(
    written_by: type[FileCacheManager], damage: str, name: str, folder: Path
) -> None:
    write(written_by("KEY"))
    path = folder / "KEY" / name
    content = path.read_bytes()
    if damage == "gone":
        path.unlink()
    else:
        path.write_bytes({"cut": content[: len(content) // 2], "empty": b"", "changed": content[:-1] + b"?"}[damage])
    found = CheckedCache("KEY").get_group("k.json")
    may_be_seen = written_by is CheckedCache or damage in ("empty", "gone") or name.endswith(".json")
    assert (found is None) == may_be_seen
    write(CheckedCache("KEY"))
    assert CheckedCache("KEY").get_group("k.json") is not None


@pytest.mark.parametrize("entry", ["[]", "{}", '{"child_paths": 3}', '{"child_paths": {"k.ptx": ""}, "sha256": 3}'])
def test_an_entry_of_another_form_counts_as_missing(entry: str, folder: Path) -> None:
    write(CheckedCache("KEY"))
    (folder / "KEY" / "__grp__k.json").write_text(entry)
    assert CheckedCache("KEY").get_group("k.json") is None


def test_a_folder_may_be_moved(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write(CheckedCache("KEY"))
    moved = folder.with_name("image")
    shutil.move(folder, moved)
    monkeypatch.setenv("TRITON_CACHE_DIR", str(moved))
    found = CheckedCache("KEY").get_group("k.json")
    assert found is not None and Path(found["k.cubin"]) == moved / "KEY" / "k.cubin"


@pytest.mark.parametrize("is_there", [False, True])
def test_a_disk_that_takes_nothing_ends_no_process(
    is_there: bool, folder: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    if is_there:
        write(CheckedCache("OLD"))
    put = FileCacheManager.put

    def refuse(cache: FileCacheManager, data: Any, filename: str, binary: bool = True) -> str:
        if cache.cache_dir.startswith(str(folder)):
            (Path(cache.cache_dir) / f"tmp.pid_{os.getpid()}_half").mkdir()
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return put(cache, data, filename, binary)

    monkeypatch.setattr(FileCacheManager, "put", refuse)
    for key in ("KEY", "KEY 2"):
        cache = CheckedCache(key)
        group = write(cache)
        assert Path(group["k.cubin"]).read_bytes() == FILES["k.cubin"]
        assert cache.get_group("k.json") == group
    assert not list(folder.rglob("tmp.*"))
    (warning,) = [record.getMessage() for record in caplog.records]
    assert f"cannot be kept in {folder} (No space left on device)" in warning
    assert (CheckedCache("OLD").get_group("k.json") is not None) == is_there


def test_so_does_a_folder_that_cannot_be_made(
    folder: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    folder.write_text("a file")
    cache = CheckedCache("KEY")
    assert cache.get_group("k.json") is None
    assert Path(write(cache)["k.ptx"]).read_text() == "text"
    assert len(caplog.records) == 1 and "set TRITON_CACHE_DIR" in caplog.text


def write_often(folder: str, number: int) -> None:
    os.environ["TRITON_CACHE_DIR"] = folder
    for _ in range(100):
        write(CheckedCache("KEY"), {name: f"{number}{content!r}" for name, content in FILES.items()})


def test_two_processes_that_write_at_once_leave_nothing_mixed(folder: Path) -> None:
    context = multiprocessing.get_context("fork")
    processes = [context.Process(target=write_often, args=(str(folder), number)) for number in range(2)]
    for process in processes:
        process.start()
    while any(process.is_alive() for process in processes):
        CheckedCache("KEY").get_group("k.json")
    for process in processes:
        process.join(60)
        assert process.exitcode == 0
    cache = CheckedCache("KEY")
    write(cache, FILES)
    assert cache.get_group("k.json") is not None


@triton.jit
def add_one(x, N, BLOCK: tl.constexpr):
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(x + i, tl.load(x + i, mask=i < N) + 1, mask=i < N)


def compile_for(arch: int, block: int = 128) -> Any:
    source = ASTSource(add_one, {"x": "*fp32", "N": "i32", "BLOCK": "constexpr"}, {"BLOCK": block})
    return triton.compile(source, target=GPUTarget("cuda", arch, 32))


@pytest.mark.skipif(knobs.runtime.interpret, reason="nothing compiles in the interpreter")
def test_triton_makes_a_damaged_kernel_again(
    folder: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    monkeypatch.setattr(knobs.cache, "manager_class", None)
    use_checked_cache()
    assert knobs.cache.manager_class is CheckedCache
    with counting_compilations() as found:
        cubin = compile_for(90).asm["cubin"]
        compile_for(80)  # another GPU's
        compile_for(90, block=256)
    assert [name for name, _ in found.compiled] == ["add_one"] * 3 and found.num_found == 0
    with counting_compilations() as found:
        compile_for(90)
    assert not found.compiled and found.num_found == 1
    assert knobs.compilation.listener is None
    (path,) = [p for p in folder.rglob("add_one.cubin") if p.read_bytes() == cubin]
    path.write_bytes(cubin[:100])
    with counting_compilations() as found:
        assert compile_for(90).asm["cubin"] == cubin
    assert len(found.compiled) == 1 and path.read_bytes() == cubin
    assert "is damaged and is made again" in caplog.text


def test_a_cpu_leaves_triton_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    for device, expected in (("cpu", None), ("cuda", CheckedCache)):
        monkeypatch.setattr(knobs.cache, "manager_class", None)
        use_checked_cache_for(torch.device(device))
        assert knobs.cache.manager_class is expected


def test_a_cache_manager_of_the_users_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(knobs.cache, "manager_class", FileCacheManager)
    use_checked_cache()
    assert knobs.cache.manager_class is FileCacheManager


def test_triton_reads_what_a_checked_cache_wrote(folder: Path) -> None:
    group = write(CheckedCache("KEY"))
    assert FileCacheManager("KEY").get_group("k.json") == group
    assert json.loads((folder / "KEY" / "__grp__k.json").read_text())["sha256"].keys() == FILES.keys()
