"""nn.RMSNorm and nn.LayerNorm: values and gradients against torch's own modules in fp64; any leading dims; exact."""

import pytest
import torch

from octavo.nn.layer_norm import LayerNorm
from octavo.nn.rms_norm import RMSNorm
from octavo.testing import assert_bitwise, assert_sqnr, tolerances

# fp32 sums of 344 terms lose 3 to 4 of 24 bits; a bf16 output is rounded to 8.
FLOORS = {torch.float32: 110.0, torch.bfloat16: tolerances.BF16_OUTPUT_ACROSS_DEVICES_DB}
MODULES = pytest.mark.parametrize(
    ("make", "torch_make"),
    [
        (RMSNorm, torch.nn.RMSNorm),
        (LayerNorm, torch.nn.LayerNorm),
        (lambda *sizes, **options: LayerNorm(*sizes, bias=False, **options), torch.nn.LayerNorm),
    ],
    ids=["rms_norm", "layer_norm", "layer_norm_without_bias"],
)


@MODULES
@pytest.mark.parametrize("dtype", list(FLOORS), ids=["fp32", "bf16"])
@pytest.mark.parametrize("zero_centered_gamma", [False, True], ids=["gamma", "zero_centered"])
@pytest.mark.parametrize("shape", [(6, 344), (2, 3, 128), (128,)], ids=str)
def test_values_and_gradients(shape, zero_centered_gamma, dtype, make, torch_make, generator, device):
    norm = make(shape[-1], 1e-5, dtype=dtype, zero_centered_gamma=zero_centered_gamma, device=device)
    wanted = torch_make(shape[-1], 1e-5, dtype=torch.float64, device=device)
    x = torch.randn(shape, generator=generator).to(device, dtype).requires_grad_()
    assert_sqnr(norm(x), wanted(x.detach().double()), FLOORS[dtype])  # both start by multiplying with 1
    with torch.no_grad():
        for ours, theirs in zip(norm.parameters(), wanted.parameters(), strict=False):
            ours.copy_(torch.randn(shape[-1], generator=generator))
            theirs.copy_(ours)
        if zero_centered_gamma:
            wanted.weight.add_(1)
    wide = x.detach().double().requires_grad_()
    grad = torch.randn(shape, generator=generator).to(device, dtype)
    norm(x).backward(grad)
    wanted(wide).backward(grad.double())
    assert_sqnr(x.grad, wide.grad, FLOORS[dtype])
    for ours, theirs in zip(norm.parameters(), wanted.parameters(), strict=False):
        assert_sqnr(ours.grad, theirs.grad, FLOORS[dtype])


@pytest.mark.parametrize("zero_centered_gamma", [False, True], ids=["gamma", "zero_centered"])
@pytest.mark.parametrize("kind", [RMSNorm, LayerNorm])
def test_exact_rows_and_their_gradients(kind, zero_centered_gamma, generator, device):
    norm = kind(344, 1e-5, dtype=torch.float32, zero_centered_gamma=zero_centered_gamma, device=device)
    with torch.no_grad():
        for parameter in norm.parameters():
            parameter.copy_(torch.randn(344, generator=generator))
    x, grad = (3 + torch.randn(7, 344, generator=generator).to(device) for _ in range(2))
    results = []
    for norm.exact in (False, True):
        leaf = x.clone().requires_grad_()
        norm.zero_grad()
        y = norm(leaf)
        y.backward(grad)
        results.append((y, leaf.grad, *(parameter.grad for parameter in norm.parameters())))
    for plain, exact in zip(*results, strict=True):
        assert_sqnr(exact, plain, FLOORS[torch.float32])
    assert_bitwise(norm(x)[3:5], norm(x[3:5]))


@MODULES
def test_the_compiler_does_not_break_the_graph(make, torch_make, generator, device):
    norm = make(256, device=device)
    x = torch.randn(5, 256, generator=generator).to(device, torch.bfloat16).requires_grad_()
    compiled = torch.compile(norm, fullgraph=True, backend="aot_eager")
    y = compiled(x)
    assert_bitwise(y, norm(x))
    (grad,) = torch.autograd.grad(y.sum(), x)
    assert grad.isfinite().all()
