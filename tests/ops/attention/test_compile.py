"""The paged attention kernels compile for Hopper, and decode without spills."""

import pytest
import torch

from octavo.numerics import Scaling
from octavo.ops.attention import MixedBatch, PackedLengths, allocate_kv_layer
from octavo.ops.attention import triton as kernels
from octavo.ops.attention.triton.backward import attend_backward
from octavo.testing import tolerances
from tests.ops.compiled import compiled, launched

# What a prefill has merged so far is loaded once a split beside that split's output: a few registers move then, outside
# the loop over keys, of which every 512 make a split.
MAX_PREFILL_SPILL_BYTES = 512
SHAPES = [
    (32, 8, 128, "fp8 attention"),
    (16, 16, 256, "fp8 attention"),
    (32, 8, 128, "fp8"),
    (32, 8, 128, "bf16"),
    (16, 16, 256, "fp8"),
    (16, 16, 256, "bf16"),
    (32, 8, 64, "fp8"),
]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("query_len", "exact", "shape"),
    [
        *((query_len, True, shape) for query_len in (1, 512) for shape in SHAPES),
        *((512, False, shape) for shape in SHAPES[:3]),
        *(pytest.param(512, False, shape, marks=pytest.mark.largest) for shape in SHAPES[3:]),
    ],
    ids=str,
)
def test_launches(query_len: int, exact: bool, shape: tuple[int, int, int, str]) -> None:
    heads, kv_heads, dim, kv = shape
    kinds = ("fp8", "fp8") if kv == "fp8 attention" else (kv, "bf16")
    layer = allocate_kv_layer(4, kv_heads, dim, kinds[0], attention_dtype=kinds[1])

    def attend() -> None:
        for tokens in (64, 512) if query_len == 1 else (512,):  # decoding with splits side by side, and by one program
            sequences, q = tokens // query_len, torch.empty(tokens, heads, dim, dtype=torch.bfloat16)
            tables, starts = (torch.zeros(*shape, dtype=torch.int32) for shape in ((sequences, 64), (sequences + 1,)))
            queries = kernels.Queries(tables, starts, starts[1:].contiguous(), query_len, 4096)
            kernels.attention_paged(q, layer, queries, dim**-0.5, exact=exact)

    for launch in launched(attend, 2 if query_len == 1 else 1):
        report = launch.compile()
        allowed = tolerances.MAX_SPILL_BYTES if query_len == 1 else MAX_PREFILL_SPILL_BYTES
        assert report.spill_bytes <= allowed, f"{launch} spills {report.spill_bytes} bytes"
        assert not report.notes, f"{launch}: {report.notes}"
        # one instruction for decode and prefill, whose bits are the same; the faster one where they need not be
        is_fast = not exact and dim <= 128
        assert ("mma.sync" in report.ptx) != is_fast, launch
        assert ("wgmma.mma_async" in report.ptx) == is_fast, launch


@pytest.mark.slow
@pytest.mark.parametrize(
    ("exact", "shape"),
    [(True, SHAPES[0]), (False, SHAPES[0]), (True, SHAPES[2]), (False, SHAPES[2]), (False, SHAPES[3])],
    ids=str,
)
def test_mixed(exact: bool, shape: tuple[int, int, int, str]) -> None:
    heads, kv_heads, dim, kv = shape
    kinds = ("fp8", "fp8") if kv == "fp8 attention" else (kv, "bf16")
    layer = allocate_kv_layer(4, kv_heads, dim, kinds[0], attention_dtype=kinds[1])

    def attend() -> None:
        # a vector's parts begin at any address, steps of all sizes share their kernels
        for tokens, sequences, num_splits, num_tiles, pages, first in (
            (64, 1, 1, 33, 16, 0),
            (512, 16, 256, 144, 128, 1),
        ):
            numbers = torch.zeros(4096, dtype=torch.int32)[first:]
            lists = (numbers[: 2 * n].view(n, 2) for n in (num_splits, num_tiles))
            tables = torch.zeros(sequences, pages, dtype=torch.int32)
            batch = MixedBatch(tables, numbers[: sequences + 1], numbers[:sequences], *lists)
            q = torch.empty(tokens, heads, dim, dtype=torch.bfloat16)
            kernels.attention_mixed(q, layer, batch, dim**-0.5, torch.empty_like(q), exact=exact)

    decode, tiles = launched(attend, 2)
    for launch, allowed in ((decode, tolerances.MAX_SPILL_BYTES), (tiles, MAX_PREFILL_SPILL_BYTES)):
        report = launch.compile()
        assert report.spill_bytes <= allowed, f"{launch} spills {report.spill_bytes} bytes"
        assert not report.notes, f"{launch}: {report.notes}"
        assert ("wgmma.mma_async" in report.ptx) == (launch is tiles and not exact), launch


@pytest.mark.parametrize("longest", [1024, 4096], ids=["one split", "splits"])
@pytest.mark.parametrize("dim", [128, pytest.param(256, marks=pytest.mark.slow)])
def test_decoding_to_codes(dim: int, longest: int) -> None:
    layer, starts = allocate_kv_layer(4, 8, dim, "fp8"), torch.arange(65, dtype=torch.int32)
    queries = kernels.Queries(torch.zeros(64, 64, dtype=torch.int32), starts, starts[:64], 1, longest)
    q, scaling = torch.empty(64, 32, dim, dtype=torch.bfloat16), Scaling.block_1x128()
    (launch,) = launched(lambda: kernels.attention_paged(q, layer, queries, 0.1, out_scaling=scaling), 1)
    assert "e4m3x2" in compiled(launch).ptx, launch


@pytest.mark.parametrize("query_len", [1, 96], ids=["decode", "prefill"])
def test_steps_of_other_sizes_share_their_kernels(query_len: int) -> None:
    layer = allocate_kv_layer(4, 2, 64, "fp8")

    def attend() -> None:
        for sequences, pages, longest, first in ((1, 32, 2048, 0), (16, 33, 2049, 1), (17, 256, 16384, 0)):
            tables, starts = torch.zeros(sequences + 1, pages, dtype=torch.int32), torch.zeros(sequences + 2).int()
            tables, starts = tables[first:][:sequences], starts[first:][: sequences + 1]
            queries = kernels.Queries(tables, starts, starts[:sequences], query_len, longest)
            kernels.attention_paged(torch.empty(sequences * query_len, 4, 64).bfloat16(), layer, queries, 0.125)

    launched(attend, 1)


@pytest.mark.slow
@pytest.mark.parametrize("kv", ["fp8", "bf16"])
@pytest.mark.parametrize(("heads", "kv_heads", "dim"), [(32, 8, 128), (16, 16, 256), (32, 8, 64)], ids=str)
def test_backward(heads: int, kv_heads: int, dim: int, kv: str) -> None:
    dtype = torch.float8_e4m3fn if kv == "fp8" else torch.bfloat16
    q, (k, v) = torch.empty(64, heads, dim, dtype=torch.bfloat16), (torch.empty(64, kv_heads, dim, dtype=dtype),) * 2
    scale = torch.empty(64, kv_heads) if kv == "fp8" else None
    lengths = PackedLengths.from_lengths([64])
    call = (q, q, (k, v, scale, scale), q, torch.empty(64, heads), lengths, 1.0)
    found = launched(lambda: attend_backward(*call), 3)
    assert [launch.kernel.__name__ for launch in found] == ["delta_rows", "query_gradients", "key_gradients"]
    for launch in found:
        compiled(launch)
