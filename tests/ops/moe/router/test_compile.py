"""The router's kernels compile for Hopper to wgmma without spills, and begin before the kernel ahead has ended."""

import pytest
import torch

from octavo.ops.moe import triton as routing_kernels
from octavo.ops.moe.router import triton as kernels
from octavo.ops.moe.router.reference import NUM_PARTS
from tests.ops.compiled import assert_moves_16_bytes, compiled, launched


def make_parts(tokens: int, experts: int, K: int, reads_ahead: bool = True) -> torch.Tensor:
    x, weight = (torch.zeros(rows, K, dtype=torch.bfloat16) for rows in (tokens, experts))
    return kernels.router_parts(x, weight, reads_ahead)


@pytest.mark.parametrize(("experts", "K"), [(128, 2048), (60, 2048), (256, 4096), (128, 7168)])
def test_parts(experts: int, K: int) -> None:
    (launch,) = launched(lambda: make_parts(512, experts, K), 1)
    report = compiled(launch, 0)
    assert "wgmma.mma_async" in report.ptx and "atom.global" not in report.ptx
    assert 2 * report.shared_bytes <= 227 * 1024, "two programs fit"
    if experts == 128:
        assert_moves_16_bytes(launch, report.ptx)


def test_the_weight_is_read_before_the_wait() -> None:
    (launch,) = launched(lambda: make_parts(512, 128, 2048), 1)
    before, after = compiled(launch, 0).ptx.split("griddepcontrol.wait")
    assert launch.options["launch_pdl"]
    assert before.count("ld.global.v4.b32") == 16 and after.count("ld.global.v4.b32") == 4  # the tokens
    assert "griddepcontrol.launch_dependents" in after and "st.global" not in before
    (launch,) = launched(lambda: make_parts(512, 128, 2048, False), 1)
    assert "griddepcontrol.wait" not in compiled(launch, 0).ptx and not launch.options["launch_pdl"]


def test_the_routing_of_parts() -> None:
    """It begins early, and asks for all parts at once."""
    parts = torch.zeros(NUM_PARTS, 512, 128)
    choose, _ = launched(lambda: routing_kernels.moe_routing(parts, 8, True, 1), 2)
    ptx = compiled(choose, 0).ptx
    assert choose.options["launch_pdl"] and ptx.count("ld.global.v4.b32") == NUM_PARTS
    assert ptx.index("griddepcontrol.wait") < ptx.index("ld.global")


def test_steps_of_other_sizes_share_their_kernels() -> None:
    def route() -> None:
        for tokens in (1, 16, 31, 256, 512):
            routing_kernels.moe_routing(make_parts(tokens, 128, 2048), 8, True, 1)

    found = sorted(launch.kernel.__name__ for launch in launched(route))
    assert found == ["choose_experts", "place_few_rows", "router_tiles"]
