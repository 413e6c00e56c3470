"""The one-shot kernels compile for Hopper without spills; flags are set with release and read with acquire."""

import re

import pytest
import torch

from octavo.numerics import Scaling
from octavo.ops.norm.norm_quantize import exchange_norm_quantize
from octavo.ops.one_shot import Places
from octavo.ops.one_shot import triton as kernels
from tests.ops.compiled import assert_moves_16_bytes, compiled, launched

WORDS, PARTS = torch.zeros(4, 1024, dtype=torch.int32), torch.zeros(4, 1024, dtype=torch.bfloat16)
REST = torch.zeros(32, dtype=torch.int32)


def places(world: int) -> Places:
    addresses = torch.zeros(8, dtype=torch.int64)
    return Places(addresses, addresses, addresses, WORDS[0], 1, world)


@pytest.mark.parametrize("world", [2, 4])
@pytest.mark.parametrize("kind", ["gather", "gather with a rest", "add"])
def test_a_kernel_compiles(kind: str, world: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernels, "FEW", 0)

    def call() -> None:
        if kind == "add":
            kernels.add(PARTS, PARTS, places(world))
        else:
            rest = REST if kind == "gather with a rest" else None
            kernels.gather(WORDS, WORDS, rest, rest, places(world))

    (launch,) = launched(call)
    ptx = compiled(launch).ptx
    assert ptx.count("atom.global.sys.release.exch") == world - 1
    assert ptx.count("ld.global.sys.acquire") >= world - 1
    assert_moves_16_bytes(launch, ptx)
    assert not re.search(r"st\.global[\w.:]*b16", ptx), "a message leaves in stores of 16 bytes"


@pytest.mark.parametrize("world", [2, 4])
def test_packets_compile(world: int) -> None:
    (launch,) = launched(lambda: kernels.gather(WORDS, WORDS, REST, REST, places(world)))
    ptx = compiled(launch).ptx
    assert "atom" not in ptx and "st.global.wt" in ptx and "ld.volatile.global" in ptx


@pytest.mark.parametrize("is_sum", [True, False], ids=["sum", "columns"])
@pytest.mark.parametrize("tokens", [1, 64], ids=["by packets", "by flags"])
def test_the_norm_of_parts_compiles(tokens: int, is_sum: bool) -> None:
    part = torch.zeros(tokens, 4096 if is_sum else 2048, dtype=torch.bfloat16)
    weight, residual = torch.ones(4096, dtype=torch.bfloat16), torch.zeros(tokens, 4096, dtype=torch.bfloat16)
    rule = {"eps": 1e-6, "kind": "rms_norm", "residual": residual, "scaling": Scaling.of_kind("block_1x128")}
    (launch,) = launched(lambda: exchange_norm_quantize(part, places(2), is_sum, weight, **rule))  # type: ignore[arg-type]
    ptx = compiled(launch).ptx
    assert ("ld.volatile.global" in ptx) == (tokens == 1) and ("atom" in ptx) == (tokens > 1)
    assert ("griddepcontrol.wait" in ptx) == (tokens == 1)
    assert_moves_16_bytes(launch, ptx, r"wt\.v2\.b64" if tokens == 1 else r"v4\.b32")
    assert not re.search(r"(st|ld)\.global[\w.:]*b16", ptx), "rows come and go in 16 bytes at once"
