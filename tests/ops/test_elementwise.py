"""RoPE against complex numbers and transformers; rows of the exact RMSNorm; what elementwise ops refuse."""

import pytest
import torch

from octavo.errors import ConfigError, ShapeError
from octavo.ops.activation.swiglu import swiglu
from octavo.ops.attention.rope import apply_rope, rope_tables
from octavo.ops.norm.rms_norm import rms_norm
from octavo.testing import assert_bitwise, assert_sqnr
from tests.assertions import assert_raises


@pytest.mark.parametrize("width", [32, 128, 344])
def test_rows_of_the_exact_rms_norm_do_not_depend_on_the_batch(width, generator, device):
    x, w = (torch.randn(*shape, generator=generator).to(device, torch.bfloat16) for shape in ((97, width), (width,)))

    def run(t):
        return rms_norm(t, w, 1e-6, exact=True)

    whole = run(x)
    for rows in ([0], [96], [1, 50], list(range(96, -1, -5))):
        assert_bitwise(run(x[rows]), whole[rows])
    wide = torch.cat((x, x), dim=1)[:, :width]  # the same values in another memory layout
    assert_bitwise(run(wide), whole)


def test_rope_rotates_and_undoes(generator, device):
    cos, sin = (t.to(device) for t in rope_tables(64, 100, 10000.0))
    x = torch.randn(30, 4, 64, generator=generator).to(device)
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

    rope = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
    rope |= {"original_max_position_embeddings": 64, "rope_theta": 500000.0}
    sizes = {"hidden_size": 128, "num_attention_heads": 2, "max_position_embeddings": 512}
    config = transformers.LlamaConfig(**sizes, rope_parameters=rope)
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
    assert_bitwise(apply_rope(out.float(), positions, cos, sin, interleaved=interleaved, back=True), back)


def test_bad_input_is_refused():
    with pytest.raises(ShapeError, match="turn 16 elements, a head has 8"):
        apply_rope(torch.ones(1, 1, 8), torch.zeros(1, dtype=torch.int64), *rope_tables(16, 4, 1e4))
    assert_raises(ShapeError, "head_dim must be even", rope_tables, 63, 4, 1e4)
    assert_raises(ConfigError, "rope_type must be one of", rope_tables, 64, 4, 1e4, {"rope_type": "yarn"})
    assert_raises(ShapeError, "weight must have shape", rms_norm, torch.ones(2, 8), torch.ones(4), 1e-6)
    assert_raises(ShapeError, "even last dim", swiglu, torch.ones(2, 7))
