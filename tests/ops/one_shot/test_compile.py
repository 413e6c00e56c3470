"""The one-shot kernels compile for Hopper without spills; flags are set with release and read with acquire."""

import pytest
import torch

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
