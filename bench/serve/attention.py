"""Attention over the paged cache alone, as the engine does it: decode in bytes a second, prefill in FLOP/s."""

import dataclasses
import functools
from collections.abc import Callable

import torch

from bench.record import Record, Timing, time_calls
from bench.speed.ceilings import Ceilings
from octavo.ops.attention import PAGE_SIZE, PagedKVLayer, allocate_kv_layer, write_kv
from octavo.serve.engine.paged_context import PagedContext

MAX_ERROR = 0.02  # root mean square, relative: fp16 products and a bf16 result, over the very keys of the cache


@dataclasses.dataclass(frozen=True)
class AttentionCase:
    """B sequences of L tokens, each with as many new tokens (its last); H query heads, KH kv heads of D elements."""

    batch: int
    seq_len: int
    new_tokens: int
    num_heads: int = 32
    num_kv_heads: int = 8
    head_dim: int = 128

    @property
    def label(self) -> str:
        kind = "decode" if self.new_tokens == 1 else "causal prefill"
        return f"{kind} attention {self.batch} x {self.seq_len}, {self.num_heads}/{self.num_kv_heads} heads"

    def num_bytes(self, kv_cache_dtype: str) -> int:
        """Keys and values with their scales, read once."""
        row_bytes = self.head_dim + 4 if kv_cache_dtype == "fp8" else 2 * self.head_dim
        return 2 * self.batch * self.seq_len * self.num_kv_heads * row_bytes

    @property
    def flops(self) -> float:
        """Of both products, each query over the keys that it sees."""
        pairs = self.new_tokens * (self.seq_len - (self.new_tokens - 1) / 2)
        return 4 * self.batch * self.num_heads * self.head_dim * pairs


DECODE, PREFILL = AttentionCase(128, 4096, 1), AttentionCase(2, 8192, 8192)
TOY_DECODE, TOY_PREFILL = AttentionCase(2, 100, 1, 4, 2, 32), AttentionCase(2, 70, 70, 4, 2, 32)


def measure_attention(record: Record, ceilings: Ceilings, device: str, *, quick: bool) -> str:
    """Check and time decode and prefill over FP8 and bf16 caches, exact and not; add their rows.

    Returns:
        What to print.
    Raises:
        AssertionError: attention is off.
    """
    lines = []
    for case in (TOY_DECODE, TOY_PREFILL) if quick else (DECODE, PREFILL):
        for kv_cache_dtype in ("fp8", "bf16"):
            calls = _make_calls(case, kv_cache_dtype, device)
            for name, timing in time_calls(calls, repeats=3 if quick else 20, device=device).items():
                lines.append(_add_row(record, case, kv_cache_dtype, name, timing, ceilings))
            del calls
    return "\n".join(lines)


def _add_row(
    record: Record, case: AttentionCase, kv_cache_dtype: str, name: str, timing: Timing, ceilings: Ceilings
) -> str:
    label = f"{case.label}: octavo {'FP8' if kv_cache_dtype == 'fp8' else 'bf16'} KV, {name}"
    if case.new_tokens > 1:
        rate, p20, p80 = timing.rate(case.flops / 1e12)
        record.add(label, "attention rate", "TFLOP/s", rate, p20, p80)
        return f"{label}: {rate:.0f} TFLOP/s"
    rate, p20, p80 = timing.rate(case.num_bytes(kv_cache_dtype) / 1e9)
    copy = ceilings.copy_bytes / 1e9
    record.add(label, "bandwidth", "GB/s", rate, p20, p80, peer="torch copy_", peer_value=copy)
    record.add(label, "share of copy bandwidth", "share", rate / copy, peer="torch copy_", peer_value=1.0)
    return f"{label}: {rate:,.0f} GB/s, {rate / copy:.2f} of a copy"


def _make_calls(case: AttentionCase, kv_cache_dtype: str, device: str) -> dict[str, Callable[[], torch.Tensor]]:
    """Exact and fast attention over one filled cache; both were checked."""
    torch.manual_seed(0)
    num_pages = -(-case.seq_len // PAGE_SIZE)
    layer = allocate_kv_layer(
        case.batch * num_pages, case.num_kv_heads, case.head_dim, kv_cache_dtype, torch.bfloat16, device
    )
    tables = torch.randperm(case.batch * num_pages, device=device).view(case.batch, num_pages).to(torch.int32)
    _fill(layer, tables, case, device)
    q = torch.randn(
        case.batch * case.new_tokens, case.num_heads, case.head_dim, dtype=torch.bfloat16, device=device
    )  # [T, H, D]
    spans = [(case.seq_len - case.new_tokens, case.seq_len)] * case.batch
    calls: dict[str, Callable[[], torch.Tensor]] = {}
    for name, exact in (("exact", True), ("fast", False)):
        context = PagedContext.build(spans, tables.tolist(), [layer], exact, torch.device(device))
        calls[name] = functools.partial(context.attend_cached, 0, q, softmax_scale=case.head_dim**-0.5)
    expected = _last_token_of_first(q, layer, tables[0].long(), case)
    for name, call in calls.items():
        got = call()[case.new_tokens - 1].float()
        error = ((got - expected).norm() / expected.norm()).item()
        assert error <= MAX_ERROR, f"{case.label}, {kv_cache_dtype}, {name}: relative error {error:.3g}"
    return calls


def _fill(layer: PagedKVLayer, tables: torch.Tensor, case: AttentionCase, device: str) -> None:
    positions = torch.arange(case.seq_len, device=device)
    shape = (case.seq_len, case.num_kv_heads, case.head_dim)
    for table in tables.long():
        k, v = (torch.randn(shape, dtype=torch.bfloat16, device=device) for _ in range(2))
        write_kv(layer, k, v, table[positions // PAGE_SIZE] * PAGE_SIZE + positions % PAGE_SIZE)


def _last_token_of_first(
    q: torch.Tensor, layer: PagedKVLayer, table: torch.Tensor, case: AttentionCase
) -> torch.Tensor:
    """Attention of the first sequence's last token in fp32: [H, D]."""
    group = case.num_heads // case.num_kv_heads
    query = q[case.new_tokens - 1].float().view(case.num_kv_heads, group, case.head_dim)
    k, v = (_read(x, s, table, case) for x, s in ((layer.k, layer.k_scale), (layer.v, layer.v_scale)))  # [KH, L, D]
    scores = query @ k.transpose(1, 2) * case.head_dim**-0.5  # [KH, G, L]
    return (scores.softmax(dim=-1) @ v).view(case.num_heads, case.head_dim)


def _read(x: torch.Tensor, scale: torch.Tensor | None, table: torch.Tensor, case: AttentionCase) -> torch.Tensor:
    """One sequence's rows of a cache, decoded: [KH, L, D] fp32."""
    pages = torch.stack([x[i].float() for i in table.tolist()])  # [P, KH, PAGE, D]; float8 has no gather on a CPU
    if scale is not None:
        pages = pages * scale[table][..., None]
    return pages.transpose(0, 1).flatten(1, 2)[:, : case.seq_len]
