"""The cache's size: what a page takes, and how many are planned for."""

import pytest
import torch

from octavo import LLM
from octavo.errors import BackendError
from octavo.serve.engine import kv_cache
from octavo.serve.engine.config import EngineConfig
from octavo.serve.engine.kv_cache import allocate_kv_cache, page_bytes, plan_num_pages
from tests.serve.random_models import make_model


@pytest.mark.parametrize("kv_cache_dtype", ["bf16", "fp8"])
def test_page_bytes_are_what_a_page_takes(kv_cache_dtype: str) -> None:
    model = make_model(kv_cache_dtype=kv_cache_dtype)
    layers = allocate_kv_cache(model, 3)
    assert len(layers) == model.config.num_layers
    assert sum(layer.num_bytes for layer in layers) == 3 * page_bytes(model)


def test_an_fp8_page_is_little_more_than_half() -> None:
    ratio = page_bytes(make_model(kv_cache_dtype="fp8")) / page_bytes(make_model(kv_cache_dtype="bf16"))
    assert ratio == (32 + 4) / (2 * 32)


def test_planned_pages(monkeypatch: pytest.MonkeyPatch) -> None:
    model = make_model()
    assert plan_num_pages(model, EngineConfig(num_kv_pages=5)) == 5
    # no more than max_num_seqs of the longest sequences need
    assert plan_num_pages(model, EngineConfig(max_num_seqs=3)) == 3 * 8
    assert plan_num_pages(model, EngineConfig(max_num_seqs=3, max_model_len=65)) == 3 * 2
    # no more than the memory holds, but always one sequence
    monkeypatch.setattr(kv_cache, "CPU_CACHE_BYTES", 20 * page_bytes(model))
    assert plan_num_pages(model, EngineConfig()) == 20
    monkeypatch.setattr(kv_cache, "CPU_CACHE_BYTES", 1)
    assert plan_num_pages(model, EngineConfig()) == 8


@pytest.mark.gpu
def test_positions_may_be_fewer_than_a_page_has() -> None:
    model = make_model(device="cuda", max_position_embeddings=20)
    assert plan_num_pages(model, EngineConfig(max_num_seqs=3)) == 3


@pytest.mark.gpu
def test_a_gpu_s_cache_is_bounded_by_its_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    model = make_model(device="cuda", max_position_embeddings=1 << 20)
    total = 1 << 34  # not what the card has: other workers hold some of it
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device=None: (total - (1 << 30), total))
    num_pages = plan_num_pages(model, EngineConfig(gpu_memory_utilization=0.5))
    assert 0.3 * total < num_pages * page_bytes(model) < 0.5 * total


def test_more_pages_than_the_memory_holds_are_refused_at_once() -> None:
    with pytest.raises(BackendError, match=r"num_kv_pages=1000000000 takes .* in which \d+ pages fit"):
        LLM(make_model("llama", "bf16", "bf16"), num_kv_pages=1_000_000_000)
