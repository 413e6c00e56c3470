"""The kernel for ragged prompts compiles for Hopper to 16-bit wgmma, fetched by the tensor memory unit."""

import pytest
import torch

from octavo.numerics import Scaling
from octavo.ops.attention import PackedLengths
from octavo.ops.attention.varlen import VarlenBatch, empty_codes, rows_of
from octavo.ops.attention.varlen import triton as kernels
from octavo.ops.attention.varlen.triton.backward import attend_backward
from tests.ops.attention.varlen.spans import MIXED, NEW, draw
from tests.ops.compiled import compiled, launched

CPU = torch.device("cpu")


def attend(heads: tuple[int, int, int], makes_codes: bool) -> None:
    for num_decodes, spans in ((0, MIXED), (1, NEW), (16, [(16, 32)])):
        q, k, v = draw(spans, heads, torch.bfloat16, CPU)
        codes = empty_codes(num_decodes + len(q), heads[0] * heads[2], Scaling.block_1x128(), CPU)
        out = rows_of(codes, num_decodes, num_decodes + len(q)) if makes_codes else torch.empty_like(q)
        kernels.attention_varlen(q, k, v, VarlenBatch.of(spans, CPU), 0.1, out)


@pytest.mark.parametrize(
    ("heads", "makes_codes"), [((32, 4, 128), False), ((32, 4, 128), True), ((8, 2, 64), False)], ids=str
)
def test_steps_of_all_sizes_take_one_kernel(heads: tuple[int, int, int], makes_codes: bool) -> None:
    (launch,) = launched(lambda: attend(heads, makes_codes), 1)
    report = compiled(launch)
    assert "wgmma.mma_async" in report.ptx and "cp.async.bulk.tensor" in report.ptx
    assert 2 * report.shared_bytes <= 227 * 1024 and 2 * 128 * report.registers <= 65536, "two programs fit"


def test_the_gradient_of_packs_takes_one_kernel_a_way() -> None:
    def backward() -> None:
        for lengths in ([130, 4], [16]):
            q, k, v = draw([(0, n) for n in lengths], (8, 2, 128), torch.bfloat16, CPU)
            batch, lse = PackedLengths.from_lengths(lengths).varlen, torch.empty(q.shape[:2])
            attend_backward(q, q, k, v, q, lse, batch, 0.1)

    _, *launches = launched(backward, 3)
    for launch in launches:
        report = compiled(launch, max_spill_bytes=64)
        assert "wgmma.mma_async" in report.ptx and "cp.async.bulk.tensor" in report.ptx
        assert 2 * report.shared_bytes <= 227 * 1024, "two programs fit"
