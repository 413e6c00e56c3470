"""Whole Llama and GPT-J blocks, from torch and through an ONNX file: nothing is left but attention's own Q."""

from collections import Counter
from pathlib import Path

import pytest
import torch

from bench.speed.qdq_blocks import TOY_GPT_J_BLOCK, TOY_LLAMA_BLOCK, BlockShape, make_block
from octavo.numerics.analysis import sqnr
from octavo.qdq import fuse, insert
from octavo.qdq.fused import fp8_linear
from octavo.qdq.graph import DEQUANTIZE, QUANTIZE, QUANTIZE_DYNAMIC
from octavo.testing.tolerances import QDQ_BF16_BLOCK_DB, QDQ_FP32_BLOCK_DB
from tests.qdq.graphs import randn

SHAPES = [TOY_LLAMA_BLOCK, TOY_GPT_J_BLOCK]
ONE_IN_CI = [
    pytest.param(TOY_LLAMA_BLOCK, marks=pytest.mark.slow),
    pytest.param(TOY_GPT_J_BLOCK, marks=pytest.mark.largest),
]
WANTED = {
    TOY_LLAMA_BLOCK: {
        "norm_quantize": 1,
        "residual + norm_quantize": 1,
        "swiglu activation_quantize": 1,
        "scaled_mm": 4,  # q, k and v are one, gate and up are one
    },
    TOY_GPT_J_BLOCK: {"norm_quantize": 1, "gelu activation_quantize": 1, "scaled_mm": 4},
}


def prepare(shape: BlockShape, dtype: torch.dtype, device: torch.device):  # type: ignore[no-untyped-def]
    """(plain block's output in fp32, input, block with pairs)."""
    block = make_block(shape, 32, dtype=dtype, device=device.type)
    x = randn(2, 16, shape.hidden_size, dtype=dtype).to(device)
    with torch.no_grad():
        plain = make_block(shape, 32, dtype=torch.float32, device=device.type)
        plain.load_state_dict(block.state_dict())
        wanted = plain(x.float())
    insert(block, lambda model: model(x))
    return wanted, x, block


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=lambda shape: shape.name)
def test_a_block_from_torch(shape: BlockShape, dtype: torch.dtype, device: torch.device) -> None:
    plain, x, block = prepare(shape, dtype, device)
    module, report = fuse(torch.export.export(block, (x,)))
    assert Counter(site.op for site in report.fused) == WANTED[shape]
    assert [left.op for left in report.left_over] == ["Q"]
    assert "scaled_dot_product_attention writes no FP8" in report.left_over[0].reason
    left = {node.target for node in module.graph.nodes}
    assert not left & {QUANTIZE, QUANTIZE_DYNAMIC, DEQUANTIZE, torch.ops.aten.linear.default}
    with torch.no_grad():
        unfused, fused = block(x), module(x)
    stream = x.float()
    is_exact = dtype == torch.float32 and device.type == "cpu"
    least = QDQ_FP32_BLOCK_DB if is_exact else QDQ_BF16_BLOCK_DB
    assert sqnr(unfused.float() - stream, fused.float() - stream) >= least
    noise = [sqnr(plain - stream, out.float() - stream) for out in (unfused, fused)]
    assert noise[1] >= noise[0] - 0.5  # as far from the block without pairs as the unfused one


@pytest.mark.parametrize("shape", SHAPES, ids=lambda shape: shape.name)
def test_every_weight_is_stored_in_fp8_alone(shape: BlockShape) -> None:
    _, x, block = prepare(shape, torch.bfloat16, torch.device("cpu"))
    module, _ = fuse(torch.export.export(block, (x,)))
    stored = [*module.parameters(), *module.buffers()]
    codes = sum(value.numel() for value in stored if value.dtype == torch.float8_e4m3fn)
    assert codes == shape.linear_params
    assert all(value.dim() < 2 or value.dtype != torch.bfloat16 or value.shape[0] == 32 for value in stored)  # tables


@pytest.mark.parametrize("dtype", [torch.bfloat16, pytest.param(torch.float32, marks=pytest.mark.slow)], ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=lambda shape: shape.name)
def test_a_block_through_onnx_is_the_same_in_bits(shape: BlockShape, dtype: torch.dtype, tmp_path: Path) -> None:
    onnx = pytest.importorskip("octavo.qdq.onnx")
    _, x, block = prepare(shape, dtype, torch.device("cpu"))
    program = torch.export.export(block, (x,))
    onnx.to_onnx(program, tmp_path / "block.onnx")
    module, report = fuse(onnx.from_onnx(tmp_path / "block.onnx"))
    assert Counter(site.op for site in report.fused) == WANTED[shape]
    assert len(report.left_over) == 1
    with torch.no_grad():
        assert torch.equal(module(x), fuse(program)[0](x))


@pytest.mark.filterwarnings("ignore:.*LeafSpec.*:FutureWarning")
@pytest.mark.parametrize("shape", ONE_IN_CI, ids=lambda shape: shape.name)
def test_a_block_of_core_ops(shape: BlockShape) -> None:
    """As run_decompositions leaves it: mm between views, native_layer_norm, RMSNorm and SiLU spelled out."""
    _, x, block = prepare(shape, torch.float32, torch.device("cpu"))
    with torch.no_grad():
        module, report = fuse(torch.export.export(block, (x,)).run_decompositions())
        assert Counter(site.op for site in report.fused) == WANTED[shape]
        assert [left.reason for left in report.left_over] == ["aten.bmm writes no FP8"]
        assert sqnr(block(x) - x, module(x) - x) >= QDQ_FP32_BLOCK_DB


@pytest.mark.parametrize("shape", ONE_IN_CI, ids=lambda shape: shape.name)
def test_a_fused_block_compiles_whole(shape: BlockShape) -> None:
    _, x, block = prepare(shape, torch.bfloat16, torch.device("cpu"))
    module, _ = fuse(torch.export.export(block, (x,)))
    compiled = torch.compile(module, backend="aot_eager", fullgraph=True)
    with torch.no_grad():
        assert torch.equal(compiled(x), module(x))
    assert any(node.target is fp8_linear for node in module.graph.nodes)
