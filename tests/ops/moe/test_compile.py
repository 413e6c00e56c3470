"""The routing kernels compile for Hopper without spills, and move 16 bytes at a time."""

import pytest
import torch

from octavo.ops.moe import num_rows
from octavo.ops.moe import triton as kernels
from tests.ops.compiled import compile_all, compiled, launched


@pytest.mark.slow
@pytest.mark.parametrize(
    ("tokens", "experts", "top_k"),
    [(1, 1, 1), (1, 128, 8), (256, 128, 8), (512, 512, 16), (20, 128, 17), (8192, 128, 8), (8192, 512, 10)],
)
@pytest.mark.parametrize("alignment", [1, 16])
def test_routing_is_two_launches(tokens: int, experts: int, top_k: int, alignment: int) -> None:
    for report in compile_all(lambda: kernels.moe_routing(torch.zeros(tokens, experts), top_k, True, alignment), 2):
        assert "atom.global" not in report.ptx and "red.global" not in report.ptx


def test_steps_of_other_sizes_share_their_kernels() -> None:
    def route() -> None:
        for tokens in (513, 1040, 2401, 4096, 5000):
            kernels.moe_routing(torch.zeros(tokens, 128), 8, True, 16)
            slots = torch.zeros(num_rows(tokens * 8, 128, 16), dtype=torch.int64)
            kernels.dispatch_rows(torch.zeros(tokens, 2048, dtype=torch.bfloat16), slots, 8)

    found = sorted(launch.kernel.__name__ for launch in launched(route))
    assert found == ["choose_experts", "gather_rows", "place_rows"]


@pytest.mark.parametrize(
    ("tokens", "top_k", "name"), [(512, 16, "place_few_rows"), (513, 16, "place_rows"), (512, 17, "place_rows")]
)
def test_few_tokens_and_slots_have_a_kernel_of_their_own(tokens: int, top_k: int, name: str) -> None:
    found = launched(lambda: kernels.moe_routing(torch.zeros(tokens, 128), top_k, True, 1), 2)
    assert found[1].kernel.__name__ == name


def test_steps_of_few_tokens_share_their_kernels() -> None:
    assert launched(lambda: [kernels.moe_routing(torch.zeros(n, 128), 8, True, 1) for n in (1, 16, 255, 256, 512)], 2)


def test_few_tokens_wait_little() -> None:
    """A warp finds a maximum in one instruction and reads a token's experts at once; the second launch begins early."""
    choose, place = launched(lambda: kernels.moe_routing(torch.zeros(256, 128), 8, True, 1), 2)
    ptx = compiled(choose).ptx
    assert ptx.count("redux.sync.max") == ptx.count("redux.sync.min") == 8
    assert "div.rn.f64" not in ptx and "griddepcontrol.launch_dependents" in ptx
    ptx = compiled(place).ptx
    assert place.options["launch_pdl"] and ptx.index("griddepcontrol.wait") < ptx.index("ld.global.v4.b32")
    assert ptx.count("bar.sync") <= 8


def test_rows_are_copied_in_whole_words() -> None:
    slots, rows = torch.zeros(num_rows(512, 128, 16), dtype=torch.int64), torch.zeros(64, 2048, dtype=torch.bfloat16)
    codes, scale = rows.to(torch.float8_e4m3fn), torch.zeros(16, 64).t()
    reports = compile_all(lambda: kernels.dispatch_rows(rows, slots, 8), 1)
    for report in reports + compile_all(lambda: kernels.dispatch_codes(codes, scale, slots, 8), 1):
        assert "ld.global.v4.b32" in report.ptx and "st.global.v4.b32" in report.ptx


def test_one_token() -> None:
    """Sizes of 1 become constants."""
    slots, x = torch.zeros(16, dtype=torch.int64), torch.zeros(1, 64, dtype=torch.bfloat16)

    def route() -> None:
        rows = kernels.dispatch_rows(x, slots, 1)
        kernels.dispatch_codes(torch.zeros(1, 64, dtype=torch.float8_e4m3fn), torch.zeros(1, 1), slots, 1)
        kernels.combine_rows(rows, torch.zeros(1, 1, dtype=torch.int64), None)

    compile_all(route, 3)


def test_combine() -> None:
    x, rows, weights = torch.zeros(2432, 2048).bfloat16(), torch.zeros(64, 8, dtype=torch.int64), torch.zeros(64, 8)
    (report,) = compile_all(lambda: kernels.combine_rows(x, rows, weights), 1)
    assert report.ptx.count("ld.global.v4.b32") >= 8 and "fma.rn.f32" not in report.ptx
