"""A list of kernels beside Triton's cache: complete where each can be read, and of one choice of everything."""

import dataclasses
import hashlib
import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("triton", reason="triton is only packaged for Linux")

from triton import knobs
from triton.runtime.cache import get_cache_manager

import octavo
from octavo.ops._runtime.kernel_cache.triton import use_checked_cache
from octavo.ops._runtime.kernel_requests import triton as kernel_requests
from octavo.ops._runtime.kernel_requests.triton import CacheEntry
from octavo.serve.engine import EngineConfig
from octavo.serve.kernel_list import KernelList
from tests.serve.random_models import make_config

CONFIG = EngineConfig(max_num_seqs=4, max_num_batched_tokens=64)
ASKED: dict[str, Any] = {
    "quantization": None,
    "kv_cache_dtype": "auto",
    "exact": None,
    "device": None,
    "attention_dtype": "auto",
    "dtype": None,
    "kv_scales": "auto",
}
CUDA = torch.device("cuda")


@pytest.fixture(autouse=True)
def gpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Triton's cache in a folder of the test, and a GPU with a name."""
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setattr(knobs.cache, "manager_class", None)
    use_checked_cache()
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda _: "H200")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (9, 0))


def listed(folder: Path, asked: dict[str, Any] = ASKED, config: EngineConfig = CONFIG, **overrides: Any) -> KernelList:
    (folder / "config.json").write_text(json.dumps(make_config("qwen3", **overrides).to_hf()))
    return KernelList(folder, asked, config, CUDA)


def compiled(name: str) -> CacheEntry:
    """A kernel in the cache."""
    entry = CacheEntry(hashlib.sha256(name.encode()).hexdigest(), f"{name}.json")
    manager = get_cache_manager(entry.key)
    files = {file: manager.put(b"{}", file) for file in (entry.file, f"{name}.cubin")}
    manager.put_group(entry.file, files)
    return entry


def test_it_is_complete_while_all_its_kernels_are_there(tmp_path: Path) -> None:
    kernels = listed(tmp_path)
    assert not kernels.is_complete()
    entries = {compiled("norm"), compiled("gemm")}
    kernels.write({*entries, CacheEntry("ab" * 32, "missing.json")})
    assert not kernels.is_complete()
    kernels.write(entries)
    assert kernels.is_complete() and listed(tmp_path).is_complete()
    assert kernels.file.parent.parent == tmp_path / "cache"
    assert kernels.file.stat().st_mode & 0o044 == 0o044, "an image's is root's, and read by others"
    (cubin,) = (tmp_path / "cache").rglob("gemm.cubin")
    cubin.write_bytes(b"cut")
    assert not kernels.is_complete()


@pytest.mark.parametrize(
    "content", ["", "[", "[]", "{}", "null", "3", '[["ab"]]', "[[1, 2]]", '[["x", "y"]]', "\udcff"]
)
def test_a_damaged_list_is_not_complete(content: str, tmp_path: Path) -> None:
    kernels = listed(tmp_path)
    kernels.write({compiled("norm")})
    kernels.file.write_bytes(content.encode(errors="surrogateescape"))
    assert not kernels.is_complete()


def test_it_is_of_one_choice_of_everything(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first = listed(tmp_path)
    first.write({compiled("norm")})
    assert first.is_complete()
    limits = {"max_num_seqs": 3, "max_num_batched_tokens": 65, "max_model_len": 32, "enforce_eager": True}
    limits |= {"enable_return_routed_experts": True, "warm_up": False}
    asked = {"quantization": "fp8", "exact": True, "kv_cache_dtype": "fp8", "dtype": torch.float32}
    others = [listed(tmp_path, config=dataclasses.replace(CONFIG, **{name: x})) for name, x in limits.items()]
    others += [listed(tmp_path, ASKED | {name: x}) for name, x in asked.items()]
    others.append(listed(tmp_path, ASKED | {"kv_cache_dtype": "fp8", "kv_scales": "engine"}))
    others.append(listed(tmp_path, hidden_size=512))
    for name, found in (("get_device_name", "H100"), ("get_device_capability", (10, 0))):
        with monkeypatch.context() as patch:
            patch.setattr(torch.cuda, name, lambda _, found=found: found)
            others.append(listed(tmp_path))
    for owner, name in ((torch, "__version__"), (kernel_requests, "__version__")):
        with monkeypatch.context() as patch:
            patch.setattr(owner, name, "0.0")
            others.append(listed(tmp_path))
    assert len({kernels.file for kernels in (first, *others)}) == 1 + len(others)
    assert not any(kernels.is_complete() for kernels in others)


def test_it_is_one_where_the_same_is_asked_for_in_other_words(tmp_path: Path) -> None:
    """Nor does it matter what kernels do not depend on."""
    said = {"quantization": "bf16", "kv_cache_dtype": "bf16", "exact": False, "device": "cuda:0"}
    said |= {"attention_dtype": "bf16", "kv_scales": "per_token_head"}
    config = dataclasses.replace(CONFIG, seed=3, num_kv_pages=9, max_num_mixed_tokens=7)
    assert listed(tmp_path, ASKED | said, config).file == listed(tmp_path).file


def test_it_is_of_one_state_of_the_sources(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "octavo"
    monkeypatch.setattr(octavo, "__file__", str(folder / "__init__.py"))
    files = [folder / part / "deep" / "x.py" for part in ("models", "nn", "numerics", "ops", "serve")]
    for file in files:
        file.parent.mkdir(parents=True)
        file.write_text("x = 1\n")
    found = {listed(tmp_path).file}
    for file in files:
        file.write_text("x = 2\n")
        found.add(listed(tmp_path).file)
    assert len(found) == 6
    os.utime(files[0], (0, 0))  # an image's copy has other times
    assert listed(tmp_path).file in found


@pytest.mark.parametrize("fails", ["mkdir", "fsync", "replace"])
def test_a_disk_that_takes_nothing_is_no_error(fails: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    kernels, entry, other = listed(tmp_path), compiled("norm"), compiled("gemm")
    if fails != "mkdir":
        kernels.write({entry})

    def fail(*_: Any, **__: Any) -> None:
        raise OSError("no space left on device")

    with monkeypatch.context() as patch:
        owner = {"mkdir": Path, "fsync": os, "replace": os}[fails]
        patch.setattr(owner, fails, fail)
        kernels.write({entry, other})
    left = list(kernels.file.parent.glob("*"))
    assert left == ([] if fails == "mkdir" else [kernels.file])
    assert kernels.is_complete() == (fails != "mkdir")
