"""The kernels around the GEMMs that `octavo bench quant` times: what each does, its unfused parts, its fewest bytes.

T tokens, K elements of a row. Bytes are counted for one element of the [T, K] result, scales not counted: 16-bit
inputs read once, or twice where a scale needs the whole row or tensor first, codes written once.
"""

import dataclasses
import functools
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

import torch

from octavo.numerics.quantized import QuantizedTensor, quantize_reference
from octavo.numerics.scaling import Scaling
from octavo.ops.activation import activation, activation_backward, activation_backward_quantize, activation_quantize
from octavo.ops.norm import NormKind, norm_backward, norm_forward
from octavo.ops.norm.norm_quantize import norm_quantize
from octavo.ops.quantize import quantize, quantize_both, quantize_columns
from octavo.ops.quantize.many import MatrixBatch

EPS = 1e-5
NUM_MATRICES = 7
KINDS: tuple[NormKind, ...] = ("rms_norm", "layer_norm")
T = TypeVar("T")
STORED = Scaling.block_1x128()  # how fused modules keep the inputs of norms and activations
Inputs = tuple[torch.Tensor, ...]
Results = list[QuantizedTensor | torch.Tensor]
Call = Callable[[], Results]


@dataclasses.dataclass(frozen=True)
class QuantCase:
    """One kernel.

    Args:
        name: of the case.
        bytes_per_element: the fewest bytes that it can move.
        build: inputs -> the call that is timed; what it needs beside them (weights, known scales) is made before.
        parts: inputs -> the call's results from unfused parts or the reference, equal in every bit;
            tensors that are not quantized are compared by signal-to-noise ratio.
        widths: of the inputs, in units of K.
    """

    name: str
    bytes_per_element: float
    build: Callable[[Inputs], Call]
    parts: Callable[[Inputs], Results]
    widths: tuple[int, ...] = (1,)

    def make_inputs(self, tokens: int, width: int, device: str, seed: int = 0) -> Inputs:
        """Standard normal bf16 matrices [T, widths[i] * K]."""
        generator = torch.Generator(device).manual_seed(seed)
        return tuple(
            torch.randn(tokens, n * width, generator=generator, device=device).to(torch.bfloat16) for n in self.widths
        )


@dataclasses.dataclass(frozen=True)
class QuantTarget:
    """What a kernel quantizes to: scalings of rows and columns, a known scale, and how often it must read its input."""

    name: str
    rows: Scaling
    columns: Scaling | None
    known_scale: float | None = None
    reads: int = 1

    @property
    def code_bytes(self) -> int:
        """Bytes of codes an element."""
        return 1 if self.columns is None else 2

    def known(self, device: torch.device) -> dict[str, Any]:
        """Arguments of delayed scaling: the known scale, and where the amax goes."""
        if self.known_scale is None:
            return {}
        amax_out = torch.zeros(1, device=device)
        return {"quant_scale": torch.tensor(self.known_scale, device=device), "amax_out": amax_out}


_BLOCK, _SQUARE, _ROW, _TENSOR = (Scaling.of_kind(k) for k in ("block_1x128", "block_128x128", "per_row", "per_tensor"))
BOTH_WAYS = (
    QuantTarget("1x128 both ways", _BLOCK, _BLOCK),
    QuantTarget("1x128 rows, 128x128 columns", _BLOCK, _SQUARE),
    QuantTarget("per row and column", _ROW, _ROW, reads=2),
    QuantTarget("per tensor both ways", _TENSOR, _TENSOR, reads=2),
    QuantTarget("per tensor both ways, known scale", _TENSOR, _TENSOR, known_scale=16.0),
)
ONE_WAY = (
    QuantTarget("1x128 rows", _BLOCK, None),
    QuantTarget("128x128 rows", _SQUARE, None),
    QuantTarget("per row", _ROW, None),
    QuantTarget("per tensor", _TENSOR, None, reads=2),
    QuantTarget("per tensor, known scale", _TENSOR, None, known_scale=16.0),
)


def make_cases() -> list[QuantCase]:
    """Every case, quantizers first."""
    return [*_quantizers(), *_norms(), *_norm_backwards(), *_activations(), *_activation_backwards()]


def _quantizers() -> Iterator[QuantCase]:
    for target in (*ONE_WAY, *BOTH_WAYS, QuantTarget("128x128 both ways", _SQUARE, _SQUARE)):
        num_bytes = 2 * target.reads + target.code_bytes
        yield QuantCase(f"quantize, {target.name}", num_bytes, _bind(_quantize, target), _bind(_reference, target))
    for target in (ONE_WAY[1], ONE_WAY[4]):
        build, parts = _bind(_quantize_many, target), _bind(_many_reference, target)
        yield QuantCase(f"quantize {NUM_MATRICES} matrices, {target.name}", 3, build, parts)
    for scaling, reads in ((_BLOCK, 1), (_SQUARE, 1), (_ROW, 2)):
        target = QuantTarget(f"{scaling.kind} columns", scaling, None)
        parts = _bind(_columns_reference, target)
        yield QuantCase(f"quantize, {target.name}", 2 * reads + 1, _bind(_quantize_columns, target), parts)


def _norms() -> Iterator[QuantCase]:
    for target in BOTH_WAYS:
        num_bytes = 2 * target.reads + target.code_bytes
        yield QuantCase(f"rms_norm, {target.name}", num_bytes, _bind(_norm, target), _bind(_norm_parts, target))
    block = BOTH_WAYS[0]
    yield QuantCase(
        f"layer_norm, {block.name}",
        2 + block.code_bytes,
        _bind(_norm, block, kind="layer_norm"),
        _bind(_norm_parts, block, kind="layer_norm"),
    )
    # x and residual read, their sum written in bf16 for the stream and in FP8 for the backward
    yield QuantCase(
        f"residual + rms_norm + kept input, {block.name}",
        4 + 2 + 1 + block.code_bytes,
        _bind(_norm, block, keep=True),
        _bind(_norm_parts, block, keep=True),
        widths=(1, 1),
    )


def _norm_backwards() -> Iterator[QuantCase]:
    for kind in KINDS:
        # the gradients of output and stream read, the kept codes read, the gradient of the input written
        build, parts = functools.partial(_norm_backward, kind=kind), functools.partial(_norm_backward_parts, kind=kind)
        yield QuantCase(f"{kind} backward", 2 + 2 + 1 + 2, build, parts, widths=(1, 1, 1))


def _activations() -> Iterator[QuantCase]:
    for target in BOTH_WAYS:
        num_bytes = 4 * target.reads + target.code_bytes
        run, parts = _bind(_activate, target, kind="swiglu"), _bind(_activate_parts, target, kind="swiglu")
        yield QuantCase(f"swiglu, {target.name}", num_bytes, run, parts, widths=(2,))
    block = BOTH_WAYS[0]
    gelu = {"kind": "gelu"}
    run, parts = _bind(_activate, block, **gelu), _bind(_activate_parts, block, **gelu)
    yield QuantCase(f"gelu, {block.name}", 2 + block.code_bytes, run, parts)
    kept = {"kind": "swiglu", "keep": True}
    run, parts = _bind(_activate, block, **kept), _bind(_activate_parts, block, **kept)
    yield QuantCase(f"swiglu + kept input, {block.name}", 4 + 2 + block.code_bytes, run, parts, widths=(2,))


def _activation_backwards() -> Iterator[QuantCase]:
    """From the gradient and the kept FP8 input: codes of the gradient both ways (two halves)."""
    for target in BOTH_WAYS:
        if target.rows != target.columns:  # a gradient has one scaling
            continue
        num_bytes = 4 * target.reads + 2 * target.code_bytes
        run, parts = _bind(_activate_backward, target), _bind(_activate_backward_parts, target)
        yield QuantCase(f"swiglu backward, {target.name}", num_bytes, run, parts, widths=(1, 2))


def _bind(function: Callable[..., T], target: QuantTarget, **fields: object) -> Callable[[Inputs], T]:
    return lambda inputs: function(inputs, target, **fields)


def _quantize(inputs: Inputs, target: QuantTarget) -> Call:
    x, known = inputs[0], target.known(inputs[0].device)
    if target.columns is None:
        return lambda: [quantize(x, target.rows, **known)]
    return lambda: list(quantize_both(x, target.rows, column_scaling=target.columns, **known))


def _quantize_columns(inputs: Inputs, target: QuantTarget) -> Call:
    return lambda: [quantize_columns(inputs[0], target.rows)]


def _quantize_many(inputs: Inputs, target: QuantTarget) -> Call:
    """As an FSDP unit's weights are: here as many pieces of x as there are weights in a layer."""
    batch = MatrixBatch(inputs[0].chunk(NUM_MATRICES), target.rows)
    known = target.known(inputs[0].device)
    if known:
        scales = known["quant_scale"].expand(len(batch.matrices)).contiguous()
        given: tuple[Any, ...] = scales, [torch.zeros_like(known["amax_out"]) for _ in batch.matrices]
    else:
        given = ()

    def call() -> Results:
        made = zip(batch.matrices, *batch.quantize(*given), strict=True)
        return [
            QuantizedTensor(
                codes.view(target.rows.dtype).view(x.shape), scale.view(target.rows.scale_shape(*x.shape)), target.rows
            )
            for x, codes, scale in made
        ]

    return call


def _many_reference(inputs: Inputs, target: QuantTarget) -> Results:
    return [made for x in inputs[0].chunk(NUM_MATRICES) for made in _reference((x,), target)]


def _columns_reference(inputs: Inputs, target: QuantTarget) -> Results:
    return [quantize_reference(inputs[0].cpu().t(), target.rows)]


def _reference(inputs: Inputs, target: QuantTarget, source: torch.Tensor | None = None) -> Results:
    """Rows and columns by the reference on the CPU: the ground truth of every code."""
    x = (inputs[0] if source is None else source).cpu()
    scale = None if target.known_scale is None else torch.tensor(target.known_scale)
    rows = quantize_reference(x, target.rows, scale)
    return [rows] if target.columns is None else [rows, quantize_reference(x.t(), target.columns, scale)]


def _norm(inputs: Inputs, target: QuantTarget, kind: NormKind = "rms_norm", keep: bool = False) -> Call:
    x, residual = inputs[0], inputs[1] if len(inputs) > 1 else None
    weight, known = torch.ones(x.shape[1], dtype=x.dtype, device=x.device), target.known(x.device)
    bias = torch.zeros_like(weight) if kind == "layer_norm" else None

    def call() -> Results:
        done = norm_quantize(
            x,
            weight,
            bias=bias,
            eps=EPS,
            kind=kind,
            residual=residual,
            scaling=target.rows,
            column_scaling=target.columns,
            store_scaling=STORED if keep else None,
            **known,
        )
        return [q for q in (done.rows, done.columns, done.stored) if q is not None]

    return call


def _norm_parts(inputs: Inputs, target: QuantTarget, kind: NormKind = "rms_norm", keep: bool = False) -> Results:
    x = inputs[0] if len(inputs) == 1 else inputs[0] + inputs[1]
    weight = torch.ones(x.shape[1], dtype=x.dtype, device=x.device)
    bias = torch.zeros_like(weight) if kind == "layer_norm" else None
    out: Results = _reference(inputs, target, norm_forward(x, weight, bias=bias, eps=EPS, kind=kind).y)
    return out + ([quantize_reference(x.cpu(), STORED)] if keep else [])


def _norm_backward(inputs: Inputs, kind: NormKind) -> Call:
    """Gradient of the norm from its kept FP8 input, added to the residual stream's gradient."""
    grad, x, stream = inputs
    weight = torch.ones(x.shape[1], dtype=x.dtype, device=x.device)
    kept, mean, rstd = quantize(x, STORED), *_statistics(x, kind)
    return lambda: list(norm_backward(grad, kept, weight, mean, rstd, kind=kind, grad_residual=stream)[:2])


def _norm_backward_parts(inputs: Inputs, kind: NormKind) -> Results:
    """The same by its formula in fp32."""
    grad, stream = inputs[0].float(), inputs[2].float()
    mean, rstd = _statistics(inputs[1], kind)
    normed = (quantize(inputs[1], STORED).dequantize() - (0.0 if mean is None else mean[:, None])) * rstd[:, None]
    centred = grad - (grad.mean(dim=1, keepdim=True) if kind == "layer_norm" else 0.0)
    grad_x = rstd[:, None] * (centred - normed * (grad * normed).mean(dim=1, keepdim=True))
    return [(grad_x + stream).to(torch.bfloat16), (grad * normed).sum(dim=0).to(torch.bfloat16)]


def _statistics(x: torch.Tensor, kind: NormKind) -> tuple[torch.Tensor | None, torch.Tensor]:
    weight = torch.ones(x.shape[1], dtype=x.dtype, device=x.device)
    done = norm_forward(x, weight, eps=EPS, kind=kind)
    return done.mean, done.rstd


def _activate(inputs: Inputs, target: QuantTarget, kind: str, keep: bool = False) -> Call:
    known = target.known(inputs[0].device)

    def call() -> Results:
        done = activation_quantize(
            inputs[0],
            kind=kind,
            scaling=target.rows,
            column_scaling=target.columns,
            store_scaling=STORED if keep else None,
            **known,
        )
        return [q for q in (done.rows, done.columns, done.stored) if q is not None]

    return call


def _activate_parts(inputs: Inputs, target: QuantTarget, kind: str, keep: bool = False) -> Results:
    out = _reference(inputs, target, activation(inputs[0], kind=kind))
    return out + ([quantize_reference(inputs[0].cpu(), STORED)] if keep else [])


def _activate_backward(inputs: Inputs, target: QuantTarget) -> Call:
    kept, known = quantize(inputs[1], STORED), target.known(inputs[0].device)

    def call() -> Results:
        done = activation_backward_quantize(inputs[0], kept, kind="swiglu", scaling=target.rows, **known)
        return [done.rows, done.columns]

    return call


def _activate_backward_parts(inputs: Inputs, target: QuantTarget) -> Results:
    gradient, _ = activation_backward(inputs[0], quantize(inputs[1], STORED), kind="swiglu")
    return _reference(inputs, target, gradient)
