"""The cache's size: what a page takes, and how many are planned for."""

from unittest import mock

import pytest
import torch

from octavo import LLM
from octavo.errors import BackendError
from octavo.models import Decoder
from octavo.serve.engine import decode_graphs, kv_cache
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


class TwoRanks:
    """Stands for the ranks of a head that is cut."""

    size = 2

    def __init__(self, least_bytes: int) -> None:
        self.least_bytes, self.gathered = least_bytes, list[tuple[int, int]]()

    def is_long(self, num_bytes: int) -> bool:
        return num_bytes >= self.least_bytes

    def gather(self, own: torch.Tensor) -> torch.Tensor:
        return own

    def deal_columns(self, own: torch.Tensor) -> torch.Tensor:
        return own[: len(own) // 2]

    def gather_rows(self, share: torch.Tensor, num_rows: int) -> torch.Tensor:
        self.gathered.append((len(share), num_rows))
        return share


@pytest.mark.parametrize(
    ("least_rows", "enforce_eager", "dealt"),
    [(2, False, [20]), (20, False, [20]), (21, False, []), (2, True, [])],
)
def test_sizing_takes_what_dealt_logits_of_the_largest_step_need(
    least_rows: int, enforce_eager: bool, dealt: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    model, calls = make_model("llama", "bf16", "bf16"), []
    group = TwoRanks(4 * least_rows * model.config.vocab_size // 2)
    logits, free = type(model).logits, [8 << 30]

    def logits_of(model: Decoder, hidden: torch.Tensor, *, deals_rows: bool = False) -> torch.Tensor:
        calls.append((len(hidden), deals_rows))
        free[0] -= deals_rows << 27
        return logits(model, hidden, deals_rows=deals_rows)

    for name, value in {"memory_allocated": 0, "max_memory_allocated": 0, "mem_get_info": None}.items():
        given = (lambda _: (free[0], 16 << 30)) if value is None else lambda _, value=value: value
        monkeypatch.setattr(torch.cuda, name, given)
    for name in ("empty_cache", "reset_peak_memory_stats"):
        monkeypatch.setattr(torch.cuda, name, lambda *_: None)
    monkeypatch.setattr(type(model), "logits", logits_of)
    config = EngineConfig(max_num_seqs=20, max_num_batched_tokens=64, enforce_eager=enforce_eager)
    monkeypatch.setattr(type(model), "head_group", property(lambda _: None))
    whole = kv_cache._cuda_bytes(model, config)
    assert calls == [(20, False)]
    monkeypatch.setattr(type(model), "head_group", property(lambda _: group))
    monkeypatch.setattr(decode_graphs, "captures_steps", lambda _, config: not config.enforce_eager)
    assert kv_cache._cuda_bytes(model, config) == whole - (len(dealt) << 27)
    assert calls[1:] == [(20, False), *[(rows, True) for rows in dealt]]
    assert group.gathered == [(rows // 2, rows) for rows in dealt]
    with mock.patch.object(type(model), "logits", autospec=True) as asked:  # and so does a captured step
        decode_graphs.decode_logits(model, torch.zeros(20, model.config.hidden_size, dtype=model.dtype))
    assert asked.call_args.kwargs == {"deals_rows": least_rows <= 20}
