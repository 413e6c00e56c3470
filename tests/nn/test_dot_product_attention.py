"""DotProductAttention and the trainer's inexact attention: batches and packed sequences against fp64 softmax."""

import inspect

import pytest
import torch

from octavo import nn
from octavo.errors import BackendError, ShapeError
from octavo.nn.dot_product_attention import DotProductAttention
from octavo.ops.attention import PackedLengths, attention_packed, library
from octavo.testing import assert_bitwise, assert_sqnr
from tests.assertions import assert_raises
from tests.ops.attention.softmax import softmax_fp64

DIM = 16
LENGTHS = {"equal": (24, 24, 24), "ragged": (30, 1, 0, 17), "empty-ends": (0, 5, 9, 0), "one-token": (1,), "one": (33,)}
LENGTH = pytest.mark.parametrize("lengths", LENGTHS.values(), ids=LENGTHS)
HEADS = pytest.mark.parametrize(("heads", "kv_heads"), [(4, 4), (4, 2), (6, 1)])
CAUSAL = pytest.mark.parametrize("causal", [True, False], ids=["causal", "full"])


def tokens(generator, device, heads, kv_heads, shape, dtype=torch.float32, dim=DIM):
    sizes = [(*shape, heads, dim), (*shape, kv_heads, dim), (*shape, kv_heads, dim)]
    return [torch.randn(s, generator=generator).to(device, dtype).requires_grad_() for s in sizes]


def cumulative(lengths, device="cpu"):
    return torch.tensor([0, *lengths]).cumsum(0).to(device)


def check(out, wanted, inputs, generator):
    """Output and gradients of fp32 inputs; a GPU's fp32 attention adds up TF32 products, three for one."""
    min_db = 80.0 if out.is_cuda else 90.0
    assert out.dtype == inputs[0].dtype
    assert_sqnr(out, wanted, min_db, "out")
    upstream = torch.randn(out.shape, generator=generator).to(out.device)
    got = torch.autograd.grad((out * upstream).sum(), inputs)
    want = torch.autograd.grad((wanted * upstream).sum(), inputs)
    for name, g, w, x in zip("qkv", got, want, inputs, strict=True):
        assert g.shape == x.shape and g.dtype == x.dtype
        if w.any():  # attention to one token alone has no gradient but v's
            assert_sqnr(g, w, min_db, f"gradient of {name}")
        else:
            assert g.abs().max() < 1e-5


@LENGTH
@HEADS
@CAUSAL
def test_packed_sequences(lengths, heads, kv_heads, causal, generator, device):
    inputs = tokens(generator, device, heads, kv_heads, (sum(lengths),))
    attention = DotProductAttention(heads, kv_heads, DIM, causal=causal, softmax_scale=0.3)
    wanted = softmax_fp64(*inputs, lengths, causal=causal, scale=0.3)
    out = attention(*inputs, cumulative(lengths, device))
    check(out, wanted, inputs, generator)
    measured = PackedLengths.from_lengths(list(lengths), device)
    assert_bitwise(attention(*inputs, measured), out)


@HEADS
@CAUSAL
def test_batches(heads, kv_heads, causal, generator, device):
    inputs = tokens(generator, device, heads, kv_heads, (3, 20))
    attention = DotProductAttention(heads, kv_heads, DIM, causal=causal)
    flat = softmax_fp64(*(x.flatten(0, 1) for x in inputs), (20,) * 3, causal=causal)
    check(attention(*inputs), flat.view(3, 20, heads, DIM), inputs, generator)


@CAUSAL
@pytest.mark.parametrize("scale", [0.0, -0.3])
def test_a_factor_that_is_not_positive(scale, causal, generator, device):
    """torch's causal attention makes NaN of it."""
    attention = DotProductAttention(4, 2, DIM, causal=causal, softmax_scale=scale)
    for lengths in (LENGTHS["ragged"], LENGTHS["equal"]):
        inputs = tokens(generator, device, 4, 2, (sum(lengths),))
        wanted = softmax_fp64(*inputs, lengths, causal=causal, scale=scale)
        check(attention(*inputs, cumulative(lengths, device)), wanted, inputs, generator)


def test_without_lengths_it_is_one_sequence(generator, device):
    inputs = tokens(generator, device, 4, 2, (21,))
    attention = DotProductAttention(4, 2, DIM)
    check(attention(*inputs), softmax_fp64(*inputs, (21,)), inputs, generator)


@pytest.mark.parametrize("causal", [True, False])
def test_no_tokens(causal, device):
    attention = DotProductAttention(4, 2, DIM, causal=causal)
    q, k = (torch.zeros(0, n, DIM, device=device, requires_grad=True) for n in (4, 2))
    assert attention(q, k, k, cumulative((0, 0), device)).shape == (0, 4, DIM)
    assert attention(q, k, k).shape == (0, 4, DIM)
    assert attention(q[None], k[None], k[None]).shape == (1, 0, 4, DIM)


def test_no_tokens_have_empty_gradients(device):
    """A rank without tokens gives each weight a gradient of zeros, as the other ranks wait for one."""
    layer = nn.TransformerLayer(32, 48, 2, dtype=torch.float32, device=device)
    for x, cu_seqlens in ((torch.zeros(0, 32), cumulative((0, 0), device)), (torch.zeros(0, 5, 32), None)):
        layer.zero_grad()
        layer(x.to(device), cu_seqlens=cu_seqlens).sum().backward()
        assert all(param.grad is not None and not param.grad.any() for param in layer.parameters())


def test_views_of_one_projection(generator, device):
    """What a fused qkv_proj gives: strided views, of which equal lengths copy nothing."""
    qkv = torch.randn(48, 8 * DIM, generator=generator).to(device)
    q, k, v = (x.unflatten(-1, (-1, DIM)) for x in qkv.split([4 * DIM, 2 * DIM, 2 * DIM], -1))
    attention = DotProductAttention(4, 2, DIM)
    for lengths in ((24, 24), (40, 8)):
        wanted = softmax_fp64(q, k, v, lengths)
        assert_sqnr(attention(q, k, v, cumulative(lengths, device)), wanted, 80.0)


def test_equal_lengths_pad_and_copy_nothing(generator, monkeypatch):
    monkeypatch.setattr(library, "attend_library", None)  # the padded path
    given = {}
    sdpa = torch.nn.functional.scaled_dot_product_attention
    monkeypatch.setattr(library.F, "scaled_dot_product_attention", lambda *x, **kw: given.update(x=x) or sdpa(*x, **kw))
    inputs = tokens(generator, "cpu", 4, 2, (48,))
    DotProductAttention(4, 2, DIM)(*inputs, cumulative((24, 24)))
    assert [x.data_ptr() for x in given["x"]] == [x.data_ptr() for x in inputs]
    assert given["x"][0].shape == (2, 4, 24, DIM)


def test_ragged_lengths_go_to_flash_attention(generator, monkeypatch):
    """The call's arguments, without a GPU; that the kernel takes them is tested on one."""
    calls = []

    def varlen_attn(q, k, v, cu_q, cu_k, max_q, max_k, *, scale, window_size, **flags):
        calls.append((cu_q.dtype, cu_k.tolist(), max_q, max_k, scale, window_size, flags))
        return q

    monkeypatch.setattr(library, "_varlen_attn", lambda: varlen_attn)
    monkeypatch.setattr(library, "_flash_takes", lambda q: True)
    monkeypatch.setattr(library, "_gqa_flags", lambda: {"enable_gqa": True})
    for kv_heads, causal in ((2, True), (4, False)):
        inputs = tokens(generator, "cpu", 4, kv_heads, (9,))
        DotProductAttention(4, kv_heads, DIM, causal=causal)(*inputs, cumulative((0, 7, 2)))
    assert calls == [
        (torch.int32, [0, 0, 7, 9], 7, 7, 0.25, (-1, 0), {"enable_gqa": True}),
        (torch.int32, [0, 0, 7, 9], 7, 7, 0.25, (-1, -1), {}),
    ]


@pytest.mark.parametrize("causal", [True, False])
def test_without_gradients_flash_attention_is_called_itself(causal, monkeypatch):
    """By the schema of this torch, on tensors without data; that the bits are varlen_attn's is tested on a GPU."""
    monkeypatch.setattr(library, "_varlen_attn", None)
    monkeypatch.setattr(library, "_flash_takes", lambda q: True)
    sizes = ((9, 4), (10, 2), (10, 2))
    q, k, v = (torch.empty(rows, heads, DIM, dtype=torch.bfloat16, device="meta") for rows, heads in sizes)
    lengths, keys = (PackedLengths.from_lengths(n, "meta") for n in ([7, 2], [8, 2]))
    with torch.no_grad():
        out = library.attend_packed(q, k, v, lengths, 0.1, causal, keys)
    assert out.shape == q.shape and out.dtype == q.dtype


@pytest.mark.slow  # loads torch.compile
def test_the_librarys_signature_is_what_we_call():
    names = set(inspect.signature(library._varlen_attn()).parameters)
    assert {"scale", "window_size"} <= names
    assert library._gqa_flags() == ({"enable_gqa": True} if "enable_gqa" in names else {})


def test_lengths_are_measured_once(monkeypatch, generator):
    context = nn.PackedContext(torch.tensor([0, 3, 9]))
    assert context.positions.tolist() == [0, 1, 2, 0, 1, 2, 3, 4, 5]
    monkeypatch.setattr(PackedLengths, "from_cu_seqlens", None)
    q, k, v = tokens(generator, "cpu", 4, 2, (9,))
    for layer in range(2):
        context.attend(layer, q, k, v, softmax_scale=0.2)
    known = nn.PackedContext.from_lengths([3, 6])
    assert_bitwise(known.positions, context.positions)
    assert (known.lengths.num_tokens, known.lengths.max_len, known.lengths.is_equal) == (9, 6, False)
    assert [PackedLengths.from_lengths(n).is_equal for n in ([4, 4], [4, 0])] == [True, False]


def test_bad_input_is_refused(generator):
    assert_raises(ShapeError, "must be a multiple of num_kv_heads", DotProductAttention, 4, 3, DIM)
    attention = DotProductAttention(4, 2, DIM)
    q, k, v = tokens(generator, "cpu", 4, 2, (9,))
    for text, inputs in (
        (r"k must end in \[2, 16\]", (q, q, v)),
        ("attention takes q", (q, k[:3], v[:3])),
        ("goes with packed q", (q[None], k[None], v[None], cumulative((9,)))),
        ("must end with the number of tokens 9, got 8", (q, k, v, cumulative((8,)))),
        ("rise from 0", (q, k, v, torch.tensor([0, 10, 9]))),
    ):
        assert_raises(ShapeError, text, attention, *inputs)
    assert_raises(ShapeError, "negative", PackedLengths.from_lengths, [3, -1])
    with pytest.raises(BackendError, match="exact attention is causal"):
        attention_packed(q, k, v, cumulative((9,)), softmax_scale=1.0, exact=True, causal=False)


@pytest.mark.gpu
@CAUSAL
@pytest.mark.parametrize("dim", [64, 128])
@pytest.mark.parametrize("lengths", [(512, 512), (700, 1, 0, 333, 64), (1024,)], ids=["equal", "ragged", "one"])
@pytest.mark.parametrize(("heads", "kv_heads"), [(8, 8), (8, 2)])
def test_bf16_on_a_gpu(lengths, heads, kv_heads, dim, causal, generator):
    """cuDNN's and FlashAttention's kernels round P and their results to bf16: 45 dB, gradients 40."""
    inputs = tokens(generator, "cuda", heads, kv_heads, (sum(lengths),), torch.bfloat16, dim)
    attention = DotProductAttention(heads, kv_heads, dim, causal=causal)
    out = attention(*inputs, cumulative(lengths, "cuda"))
    wanted = softmax_fp64(*inputs, lengths, causal=causal)
    assert_sqnr(out, wanted, 45.0, "out")
    upstream = torch.randn(out.shape, generator=generator).cuda().bfloat16()
    got = torch.autograd.grad((out * upstream).sum(), inputs)
    want = torch.autograd.grad((wanted * upstream).sum(), inputs)
    for name, g, w in zip("qkv", got, want, strict=True):
        assert_sqnr(g, w, 40.0, f"gradient of {name}")


@pytest.mark.gpu
@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize(("kv_heads", "dim"), [(8, 128), (2, 64), (8, 256)])
def test_without_gradients_the_bits_are_the_same(kv_heads, dim, causal, generator):
    lengths, keys = (PackedLengths.from_lengths(n, "cuda") for n in ([300, 1, 77], [300, 90, 100]))
    q, k, v = (
        torch.randn(rows, heads, dim, generator=generator).cuda().bfloat16()
        for rows, heads in ((378, 8), (490, kv_heads), (490, kv_heads))
    )
    with_gradients = library.attend_packed(q, k, v, lengths, dim**-0.5, causal, keys)
    with torch.no_grad():
        assert_bitwise(library.attend_packed(q, k, v, lengths, dim**-0.5, causal, keys), with_gradients)


@pytest.mark.gpu
def test_a_gpu_is_never_waited_for(generator):
    """Between the context and the last layer nothing reads back from the device."""
    torch.cuda.set_sync_debug_mode("error")
    try:
        for lengths in ([700, 324], [512, 512]):
            context = nn.PackedContext.from_lengths(lengths, device="cuda")
            q, k = (torch.zeros(1024, n, 64, device="cuda", dtype=torch.bfloat16) for n in (8, 2))
            out = context.attend(0, q, k, k, softmax_scale=0.1)  # a wait would raise
            assert out.shape == q.shape
    finally:
        torch.cuda.set_sync_debug_mode("default")
