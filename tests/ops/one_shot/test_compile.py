"""The one-shot kernels compile for Hopper without spills; flags are set with release and read with acquire."""

import pytest
import torch

from octavo.numerics import Scaling
from octavo.ops.norm.norm_quantize import triton as norms
from octavo.ops.one_shot import triton as kernels
from tests.ops.compiled import compiled, launched

WORDS, PARTS = torch.zeros(4, 1024, dtype=torch.int32), torch.zeros(4, 1024, dtype=torch.bfloat16)
SHARED = torch.zeros(8, dtype=torch.int64), torch.zeros(8, dtype=torch.int64), WORDS[0]


@pytest.mark.parametrize("world", [2, 4])
@pytest.mark.parametrize("kind", ["gather", "gather with a rest", "add"])
def test_a_kernel_compiles(kind: str, world: int) -> None:
    def call() -> None:
        if kind == "add":
            kernels.launch(kernels.add_parts, 4096, world, PARTS, PARTS, PARTS, *SHARED, 1, 4096)
        else:
            rest = WORDS[0] if kind == "gather with a rest" else None
            kernels.launch(
                kernels.gather_columns, 4096, world, WORDS, WORDS, rest, WORDS, rest, *SHARED, 1, 4096, 1024, 32
            )

    (launch,) = launched(call)
    ptx = compiled(launch).ptx
    assert ptx.count("atom.global.sys.release.exch") == world
    assert ptx.count("ld.global.sys.acquire") >= world


@pytest.mark.parametrize("world", [2, 4])
def test_packets_compile(world: int) -> None:
    def call() -> None:
        arguments = WORDS, WORDS[0], WORDS, WORDS[0], SHARED[0], SHARED[2], 1, 4096, 1024, 32
        kernels.launch(kernels.gather_packets, 4096, world, WORDS, *arguments)

    (launch,) = launched(call)
    ptx = compiled(launch).ptx
    assert "atom" not in ptx and "st.global.wt" in ptx and "ld.volatile.global" in ptx


@pytest.mark.parametrize("is_sum", [True, False], ids=["sum", "columns"])
@pytest.mark.parametrize("tokens", [1, 64], ids=["by packets", "by flags"])
def test_the_norm_of_parts_compiles(tokens: int, is_sum: bool) -> None:
    part = torch.zeros(tokens, 4096 if is_sum else 2048, dtype=torch.bfloat16)
    weight, residual = torch.ones(4096, dtype=torch.bfloat16), torch.zeros(tokens, 4096, dtype=torch.bfloat16)
    exchange = norms.RankExchange((*SHARED, SHARED[0]), 1, 2, is_sum)
    scaling = Scaling.of_kind("block_1x128")

    def call() -> None:
        norms.exchange_norm_quantize(part, exchange, weight, None, residual, 1e-6, "rms_norm", False, scaling)

    (launch,) = launched(call)
    ptx = compiled(launch).ptx
    assert ("ld.volatile.global" in ptx) == (tokens == 1) and ("atom" in ptx) == (tokens > 1)
    assert ("griddepcontrol.wait" in ptx) == (tokens == 1)
