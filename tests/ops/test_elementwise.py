"""RMSNorm, SwiGLU and RoPE: against plain fp64 formulas, row-local in bits, and fused equal to unfused."""

import pytest
import torch

from octavo.errors import ConfigError, ShapeError
from octavo.numerics import Scaling
from octavo.ops.activation.swiglu import swiglu, swiglu_backward
from octavo.ops.attention.rope import apply_rope, rope_tables
from octavo.ops.norm.rms_norm import rms_norm
from octavo.testing import assert_bitwise, assert_sqnr

WIDTHS = [32, 128, 344]
SCALINGS = [Scaling.per_row(), Scaling.block_1x128()]


def sample(shape, generator, device, dtype=torch.bfloat16, scale=1.0):
    return (torch.randn(shape, generator=generator) * scale).to(device, dtype)


@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("exact", [True, False], ids=["exact", "library"])
def test_rms_norm_formula(width, exact, generator, device):
    x, w = (
        sample((50, width), generator, device, torch.float32, 3.0),
        sample((width,), generator, device, torch.float32),
    )
    wide = x.double()
    expected = wide / (wide.square().mean(-1, keepdim=True) + 1e-6).sqrt() * w.double()
    assert_sqnr(rms_norm(x, w, 1e-6, exact=exact), expected, 110.0)


@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("op", ["rms_norm", "swiglu"])
def test_rows_do_not_depend_on_the_batch(width, op, generator, device):
    x = sample((97, width), generator, device)
    w = sample((width,), generator, device)
    run = (lambda t: rms_norm(t, w, 1e-6, exact=True)) if op == "rms_norm" else swiglu
    whole = run(x)
    for rows in ([0], [96], [1, 50], list(range(96, -1, -5))):
        assert_bitwise(run(x[rows]), whole[rows])
    wide = torch.cat((x, x), dim=1)[:, :width]  # the same values in another memory layout
    assert_bitwise(run(wide), whole)


def test_swiglu_formula_and_gradient(generator, device):
    x = sample((20, 64), generator, device, torch.float32, 4.0)
    wide = x.double().requires_grad_()
    expected = torch.nn.functional.silu(wide[:, :32]) * wide[:, 32:]
    assert_sqnr(swiglu(x), expected.detach(), 110.0)
    grad = sample((20, 32), generator, device, torch.float32)
    expected.backward(grad.double())
    assert_sqnr(swiglu_backward(grad, x), wide.grad, 110.0)


def test_swiglu_survives_extreme_gates(device):
    x = torch.tensor([[-1e4, 1e4, -100.0, 2.0, 3.0, 4.0]], device=device)
    out, grad = swiglu(x), swiglu_backward(torch.ones(1, 3, device=device), x)
    assert out.isfinite().all()
    assert grad.isfinite().all()
    assert out[0, 0] == 0


def test_rope_rotates_and_undoes(generator, device):
    cos, sin = (t.to(device) for t in rope_tables(64, 100, 10000.0))
    x = sample((30, 4, 64), generator, device, torch.float32)
    positions = torch.randint(0, 100, (30,), generator=generator).to(device)
    turned = apply_rope(x, positions, cos, sin)
    pairs = torch.complex(x[..., :32].double(), x[..., 32:].double())
    angles = positions.double()[:, None] * 10000.0 ** (-torch.arange(32, device=device).double() / 32)
    expected = pairs * torch.polar(torch.ones_like(angles), angles)[:, None]
    assert_sqnr(turned, torch.cat((expected.real, expected.imag), -1), 100.0)
    assert_sqnr(apply_rope(turned, positions, cos, -sin), x, 110.0)


def test_rope_tables_equal_transformers():
    transformers = pytest.importorskip("transformers")
    from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

    rope = {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 64,
        "rope_theta": 500000.0,
    }
    config = transformers.LlamaConfig(
        hidden_size=128, num_attention_heads=2, max_position_embeddings=512, rope_parameters=rope
    )
    cos, sin = LlamaRotaryEmbedding(config)(torch.zeros(1), torch.arange(512)[None])
    ours = rope_tables(64, 512, 500000.0, rope)
    torch.testing.assert_close(ours[0], cos[0, :, :32], rtol=0, atol=2e-6)
    torch.testing.assert_close(ours[1], sin[0, :, :32], rtol=0, atol=2e-6)


@pytest.mark.parametrize("interleaved", [False, True], ids=["halves", "neighbours"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=["bf16", "fp32"])
def test_rope_turns_a_part_of_each_head(interleaved, dtype, generator, device):
    x = torch.randn(9, 3, 64, generator=generator).to(device, dtype)
    positions = torch.arange(9, device=device) * 7
    cos, sin = (table.to(device) for table in rope_tables(16, 64, 1e4))
    out = apply_rope(x, positions, cos, sin, interleaved=interleaved)
    assert_bitwise(out[..., 16:], x[..., 16:])
    for i in range(8):
        first, second = (2 * i, 2 * i + 1) if interleaved else (i, i + 8)
        turn = torch.complex(cos[positions, i], sin[positions, i])[:, None]
        expected = torch.complex(x[..., first].float(), x[..., second].float()) * turn
        for index, part in ((first, expected.real), (second, expected.imag)):
            torch.testing.assert_close(
                out[..., index], part.to(dtype), rtol=2**-7 if dtype == torch.bfloat16 else 1e-5, atol=1e-6
            )
    back = apply_rope(out.float(), positions, cos, -sin, interleaved=interleaved)
    torch.testing.assert_close(back, x.float(), rtol=0, atol=2e-2 if dtype == torch.bfloat16 else 1e-5)


def test_bad_input_is_refused():
    with pytest.raises(ShapeError, match="turn 16 elements, a head has 8"):
        apply_rope(torch.ones(1, 1, 8), torch.zeros(1, dtype=torch.int64), *rope_tables(16, 4, 1e4))
    with pytest.raises(ShapeError, match="head_dim must be even"):
        rope_tables(63, 4, 1e4)
    with pytest.raises(ConfigError, match="rope_type must be one of"):
        rope_tables(64, 4, 1e4, {"rope_type": "yarn"})
    with pytest.raises(ShapeError, match="weight must have shape"):
        rms_norm(torch.ones(2, 8), torch.ones(4), 1e-6)
    with pytest.raises(ShapeError, match="even last dim"):
        swiglu(torch.ones(2, 7))
