"""Experts whose widths are no multiple of a block, on the path of a GPU: nothing reads the offsets on the host."""

import pytest
import torch

pytest.importorskip("triton", reason="triton is only packaged for Linux")

from octavo import nn
from octavo.nn.functional import grouped
from octavo.numerics import get_recipe
from octavo.ops.gemm import grouped_mm as ops
from octavo.ops.gemm.grouped_mm import reference
from octavo.ops.gemm.grouped_mm import triton as kernels
from octavo.testing import assert_bitwise
from octavo.testing.compile import record_launches
from octavo.testing.interpreter import correct_interpreter, is_interpreting
from tests.assertions import assert_all_bitwise

HIDDEN, INNER, EXPERTS = 256, 192, 3
RECIPE = get_recipe("blockwise")
ENDS = torch.tensor([5, 5, 40], dtype=torch.int32)

if is_interpreting():
    correct_interpreter()


def experts(kind: str) -> nn.GroupedLinear:
    torch.manual_seed(0)
    if kind == "gate_up":
        layer = nn.GroupedLinear(HIDDEN, 2 * INNER, EXPERTS, parts=(INNER, INNER))
    else:
        layer = nn.GroupedLinear(INNER, HIDDEN if kind == "down" else INNER, EXPERTS)
    layer.set_recipe(RECIPE)
    return layer


def on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the layer's forward products go where those of CUDA tensors do."""

    def multiply(a, weights, offsets, *, gather=None, out_dtype, exact=False, fast_accum=False):  # type: ignore[no-untyped-def]
        left = (a.qdata, a.scale, list(a.scaling.block_size))
        right = ([q.qdata for q in weights], [q.scale for q in weights], list(weights[0].scaling.block_size))
        return ops._scaled_cuda(*left, *right, offsets, *(gather or (None, 1)), out_dtype, exact, fast_accum)

    monkeypatch.setattr(grouped, "scaled_grouped_mm", multiply)


def refuse(*_: object) -> None:
    raise AssertionError("it waits for the GPU")


@pytest.mark.parametrize("kind", ["gate_up", "down", "square"])
@pytest.mark.parametrize("held", ["weight", "codes"])
@pytest.mark.skipif(is_interpreting(), reason="the interpreter launches nothing")
def test_nothing_waits_and_no_weight_is_copied(kind: str, held: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """On b14d6df experts of 192 rows went group by group, whose ends were copied to the host."""
    layer = experts(kind)
    if held == "codes":
        layer.keep_codes_only()
    operands = [code for part in layer.source.shapes.by_expert(layer.forward_operands(RECIPE)) for code in part[1]]
    places = {q.qdata.data_ptr() for q in operands}
    on_a_gpu(monkeypatch)
    monkeypatch.setattr(reference, "groups", refuse)
    for name in ("tolist", "item", "cpu"):
        monkeypatch.setattr(torch.Tensor, name, refuse)
    read = []
    launched = kernels.scaled_grouped_mm
    monkeypatch.setattr(
        kernels, "scaled_grouped_mm", lambda a, whole, *rest: read.append(whole) or launched(a, whole, *rest)
    )
    with torch.no_grad(), record_launches() as found:
        layer(torch.ones(40, layer.in_features, dtype=torch.bfloat16), ENDS)
    assert {launch.kernel.__name__ for launch in found} == {"row_tiles"}
    assert len(read) == len(layer.expert_parts) and all(whole.qdata.data_ptr() in places for whole in read)


@pytest.mark.parametrize("kind", ["gate_up", "square"])
@pytest.mark.skipif(is_interpreting(), reason="the interpreter launches nothing")
def test_the_backward_does_not_wait_either(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    layer = experts(kind)
    on_a_gpu(monkeypatch)
    monkeypatch.setattr(reference, "groups", refuse)
    operands = layer.source.shapes.by_expert(layer.backward_operands(RECIPE))
    grad = grouped.quantize(torch.ones(40, layer.expert_parts[0], dtype=torch.bfloat16), RECIPE.grad_output)
    with record_launches() as found:
        for _, codes in operands:
            grouped.scaled_grouped_mm(grad, codes, ENDS, out_dtype=torch.float32)
    assert {launch.kernel.__name__ for launch in found} == {"row_tiles"}


@pytest.mark.skipif(not is_interpreting(), reason="tests/testing/test_interpreter.py starts it")
@pytest.mark.parametrize("exact", [False, True])
@pytest.mark.parametrize("kind", ["gate_up", "down", "square"])
def test_the_kernel_has_the_bits_of_the_reference(kind: str, exact: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    layer = experts(kind)
    layer.exact = exact
    x = torch.randn(40, layer.in_features, dtype=torch.bfloat16)
    with torch.no_grad():
        layer.exact = True  # in the reference's order
        expected = layer(x, ENDS)
        layer.exact = exact
        on_a_gpu(monkeypatch)
        monkeypatch.setattr(reference, "groups", refuse)
        assert_bitwise(layer(x, ENDS), expected)


def test_codes_keep_their_place_and_their_bits() -> None:
    layer = experts("gate_up")
    before = [q.qdata.clone().view(torch.uint8) for q in layer.quantized_weight(RECIPE)]
    layer.keep_codes_only()
    after = [q.qdata.view(torch.uint8) for q in layer.quantized_weight(RECIPE)]
    assert_all_bitwise(after, before)
    first = [q.qdata.data_ptr() for q in layer.quantized_weight(RECIPE)]
    assert first[2] - first[0] == first[4] - first[2] == INNER * HIDDEN
