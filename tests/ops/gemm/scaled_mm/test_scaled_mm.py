"""The scaled GEMM: its order of operations, its row independence, and the library path against it."""

import itertools

import numpy as np
import pytest
import torch

from octavo.errors import DtypeError, ShapeError
from octavo.numerics import QuantizedTensor, Scaling
from octavo.ops.gemm.scaled_mm import library, scaled_mm
from octavo.ops.quantize import quantize
from octavo.testing import assert_bitwise, assert_sqnr
from tests.assertions import assert_raises

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
PAIRS = [
    ("per_tensor", "per_tensor"),
    ("per_row", "per_row"),
    ("block_1x128", "block_128x128"),
    ("block_128x128", "block_1x128"),
    ("block_1x128", "block_1x128"),
]
SHAPES = [(1, 16, 128), (63, 431, 300), (129, 128, 256), (8, 40, 17)]


def operands(pair, shape, generator, dtype_a=E4M3, device="cpu"):
    m, n, k = shape
    a = torch.randn(m, k, generator=generator).to(device)
    b = torch.randn(n, k, generator=generator).to(device) / k**0.5
    return quantize(a, Scaling.of_kind(pair[0], dtype_a)), quantize(b, Scaling.of_kind(pair[1]))


def by_the_contract(a: QuantizedTensor, b: QuantizedTensor) -> np.ndarray:
    """docs/numerics.md, GEMM, element by element in numpy."""
    codes_a, codes_b = a.qdata.float().numpy().astype(np.float64), b.qdata.float().numpy().astype(np.float64)
    if a.scaling.block_size[1] != 128:
        total = codes_a @ codes_b.T
        scale = a.expanded_scale()[:, :1].double().numpy() * b.expanded_scale()[:, :1].double().numpy().T
        return (total * scale).astype(np.float32)
    scale_a, scale_b = a.expanded_scale().numpy(), b.expanded_scale().numpy()
    acc = np.zeros((a.shape[0], b.shape[0]), np.float32)
    for start in range(0, a.shape[1], 128):
        p = (codes_a[:, start : start + 128] @ codes_b[:, start : start + 128].T).astype(np.float32)
        s1, s2 = scale_a[:, start][:, None], scale_b[:, start][None, :]
        if a.scaling.kind == "block_128x128":
            s1, s2 = s2, s1
        scaled = (p * s1).astype(np.float32).astype(np.float64)
        acc = (scaled * s2.astype(np.float64) + acc.astype(np.float64)).astype(np.float32)
    return acc


@pytest.mark.parametrize("pair", PAIRS, ids="-".join)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_reference_is_the_contract(pair, shape, generator):
    a, b = operands(pair, shape, generator)
    ours = scaled_mm(a, b, out_dtype=torch.float32, exact=True)
    assert_bitwise(ours, torch.from_numpy(by_the_contract(a, b)))


@pytest.mark.parametrize("pair", PAIRS[1:3] + PAIRS[4:], ids="-".join)
@pytest.mark.parametrize("k", [128, 344, 1000])
def test_exact_rows_do_not_depend_on_the_batch(pair, k, generator, device):
    a, b = operands(pair, (200, 96, k), generator, device=device)
    whole = scaled_mm(a, b, exact=True)
    for rows in ([0], [199], [5, 170], list(range(64)), list(range(3, 200, 7))):
        part = QuantizedTensor(
            a.qdata.view(torch.uint8)[rows].view(a.qdata.dtype), a.scale[rows].contiguous(), a.scaling
        )
        assert_bitwise(scaled_mm(part, b, exact=True), whole[rows])


@pytest.mark.parametrize("pair", PAIRS, ids="-".join)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_library_follows_the_reference(pair, shape, generator, device):
    for dtype_a, out_dtype in itertools.product((E4M3, E5M2), (torch.bfloat16, torch.float32)):
        a, b = operands(pair, shape, generator, dtype_a, device)
        bias = torch.randn(shape[1], generator=generator).to(device)
        exact = scaled_mm(a, b, bias=bias, out_dtype=out_dtype, exact=True)
        found = scaled_mm(a, b, bias=bias, out_dtype=out_dtype)
        assert found.dtype == out_dtype
        assert_sqnr(found, exact, 45.0, f"{dtype_a}, {out_dtype}")


@pytest.mark.parametrize("pair", PAIRS, ids="-".join)
@pytest.mark.parametrize("exact", [True, False], ids=["exact", "library"])
def test_zero_size(pair, exact, generator, device):
    for shape in ((0, 16, 128), (4, 0, 128), (4, 16, 0)):
        a, b = operands(pair, shape, generator, device=device)
        out = scaled_mm(a, b, exact=exact)
        assert out.shape == shape[:2]
        assert (out == 0).all()


def test_bad_input_is_refused(generator):
    a, b = operands(("per_row", "per_row"), (4, 8, 128), generator)
    short = quantize(torch.ones(8, 64), Scaling.per_row())
    assert_raises(ShapeError, "must agree in K", scaled_mm, a, short)
    with pytest.raises(ShapeError, match="per_row x block_128x128"):
        scaled_mm(a, quantize(torch.ones(8, 128), Scaling.block_128x128()))
    assert_raises(ShapeError, r"bias must have shape \(8,\)", scaled_mm, a, b, bias=torch.ones(4))
    assert_raises(DtypeError, "out_dtype", scaled_mm, a, b, out_dtype=torch.int8)


def cuda_call(a, b, monkeypatch, *, direct, **options):
    """What the GPU's path hands to torch._scaled_mm_v2, which is not called."""
    calls = []

    def record(*args):
        calls.append([[part.value if hasattr(part, "value") else part for part in _listed(arg)] for arg in args])
        return torch.zeros(args[0].shape[0], args[1].shape[1], dtype=args[9])

    with monkeypatch.context() as patch:
        patch.setattr(torch, "_scaled_mm_v2", record)
        patch.setattr(library, "_HAS_SCALED_MM", direct)
        out = library.scaled_mm_cuda(a, b, options.pop("bias", None), options.pop("out_dtype"), **options)
    return out, calls


def _listed(arg):
    return list(arg) if isinstance(arg, list | tuple) else [arg]


@pytest.mark.parametrize("pair", PAIRS, ids="-".join)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("fast_accum", [True, False], ids=["fast", "slow"])
def test_direct_call_is_what_the_public_function_calls(pair, shape, fast_accum, generator, monkeypatch):
    a, b = operands(pair, shape, generator)
    bias = torch.randn(shape[1], generator=generator).bfloat16()
    monkeypatch.setattr(torch.Tensor, "new_empty", torch.Tensor.new_zeros)  # rows that are added may hold anything
    options = {"bias": bias, "out_dtype": torch.bfloat16, "fast_accum": fast_accum}
    out, (direct,) = cuda_call(a, b, monkeypatch, direct=True, **options)
    _, (public,) = cuda_call(a, b, monkeypatch, direct=False, **options)
    assert out.shape == (shape[0], shape[1])
    for ours, theirs in zip(direct, public, strict=True):
        assert len(ours) == len(theirs)
        for x, y in zip(ours, theirs, strict=True):
            if isinstance(x, torch.Tensor):
                assert x.stride() == y.stride()
                assert_bitwise(x, y)
            else:
                assert x == y


def test_operands_that_fit_are_passed_on_as_they_are(generator, monkeypatch):
    a, b = operands(("block_1x128", "block_128x128"), (128, 256, 512), generator)
    _, (call,) = cuda_call(a, b, monkeypatch, direct=True, out_dtype=torch.bfloat16)
    passed = {part.data_ptr() for arg in call for part in arg if isinstance(part, torch.Tensor)}
    assert passed == {tensor.data_ptr() for q in (a, b) for tensor in (q.qdata, q.scale)}


@pytest.mark.parametrize("kind", ["per_row", "block_1x128"])
@pytest.mark.parametrize("shape", [(5, 16, 384), (67, 130, 100), (129, 128, 256), (1, 256, 128)], ids=str)
def test_added_rows_leave_the_others_as_they_are(kind, shape, generator, monkeypatch):
    """What is passed on begins with the operand itself, in the scale's strides, and the result is cut."""
    a, b = operands((kind, "block_128x128" if kind == "block_1x128" else kind), shape, generator)
    bias = torch.randn(shape[1], generator=generator)
    for dtype in (torch.bfloat16, torch.float32):
        out, (call,) = cuda_call(a, b, monkeypatch, direct=True, out_dtype=dtype, bias=bias)
        assert_bitwise(out, bias.to(dtype).expand(shape[:2]))
        assert out.is_contiguous()
    (codes,), (scale,) = call[0], call[2]
    rows = {5: 32, 67: 68, 129: 132, 1: 32}[shape[0]] if kind == "block_1x128" else -(-shape[0] // 16) * 16
    assert codes.shape[0] == scale.shape[0] == rows
    assert scale.stride() == ((1, rows) if kind == "block_1x128" else (1, 1))
    assert_bitwise(codes[: shape[0], : shape[2]], a.qdata)
    assert (codes[: shape[0], shape[2] :].view(torch.uint8) == 0).all()
    assert_bitwise(scale[: shape[0]], a.scale)


def test_rows_are_not_copied_where_memory_goes_on(generator, monkeypatch):
    a, b = operands(("block_1x128", "block_128x128"), (129, 128, 256), generator)
    for first, rows, is_copied in ((0, 58, False), (64, 58, False), (66, 62, True), (0, 129, True)):
        part = QuantizedTensor(a.qdata[first : first + rows], a.scale[first : first + rows], a.scaling)
        _, (call,) = cuda_call(part, b, monkeypatch, direct=True, out_dtype=torch.bfloat16)
        (codes,), (scale,) = call[0], call[2]
        assert (codes.data_ptr() != part.qdata.data_ptr()) == is_copied
        assert codes.shape[0] == scale.shape[0] == scale.stride(1) == -(-rows // 4) * 4
        assert_bitwise(codes[:rows], part.qdata)
        assert_bitwise(scale[:rows], part.scale)


def test_an_unknown_signature_is_not_called():
    assert library.is_expected("_scaled_mm_v2", library._SCALED_MM)
    assert not library.is_expected("_scaled_mm_v2", library._SCALED_MM.replace("Tensor? bias", "Tensor bias"))
    assert not library.is_expected("_scaled_mm_v99", library._SCALED_MM)


@pytest.mark.parametrize(
    ("shape", "kind", "said"),
    [((8, 64), "per_row", "must agree in K"), ((8, 128), "block_128x128", "per_row x block_128x128")],
    ids=["K", "pair"],
)
def test_gpu_path_checks_its_operands(shape, kind, said, monkeypatch):
    a, b = quantize(torch.ones(4, 128), Scaling.per_row()), quantize(torch.ones(shape), Scaling.of_kind(kind))
    assert_raises(ShapeError, said, cuda_call, a, b, monkeypatch, direct=True, out_dtype=torch.bfloat16)
