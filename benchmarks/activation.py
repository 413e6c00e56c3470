"""Fused activation and quantization: bit-equal to the separate ops first, then timed against a plain copy.

    python -m benchmarks.activation [--commit HASH] [--out FOLDER]

Needs a GPU; writes benchmarks/records/activation.json. The bytes of a case are the fewest that it can move: every input
read once, every result written once, even where fresh amaxes cost a second read.
"""

import argparse
import functools
from collections.abc import Callable, Iterable
from pathlib import Path

import torch

from octavo.numerics import QuantizedTensor, Scaling
from octavo.ops.activation import (
    activation,
    activation_backward,
    activation_backward_quantize,
    activation_quantize,
)
from octavo.ops.activation.reference import activation_backward_quantize as unfused_backward
from octavo.ops.activation.reference import activation_quantize as unfused_forward
from octavo.testing import Record, assert_bitwise, assert_sqnr, time_calls, tolerances

TIMED_SHAPE = (32768, 4096)  # tokens, width of the activation
CHECKED_SHAPES = [(2048, 4096), (63, 344), (200, 1408)]  # the first compiles what is timed
BLOCK, SQUARE, ROW, TENSOR = Scaling(), Scaling.block_128x128(), Scaling.per_row(), Scaling.per_tensor()
E5M2 = torch.float8_e5m2
DEVICE = "cuda"
# name -> kind, rows, columns, is the FP8 copy of the input stored; per_tensor has a known quant_scale
FORWARD: dict[str, tuple[str, Scaling, Scaling | None, bool]] = {
    "swiglu, rows 1x128": ("swiglu", BLOCK, None, False),
    "swiglu, rows 1x128, FP8 copy": ("swiglu", BLOCK, None, True),
    "swiglu, rows 1x128, columns 128x128": ("swiglu", BLOCK, SQUARE, False),
    "swiglu, rows 1x128, columns 128x128, FP8 copy": ("swiglu", BLOCK, SQUARE, True),
    "swiglu, rows and columns 1x128": ("swiglu", BLOCK, BLOCK, False),
    "swiglu, rows and columns 1x128, FP8 copy": ("swiglu", BLOCK, BLOCK, True),
    "swiglu, rows per row": ("swiglu", ROW, None, False),
    "swiglu, rows per row, FP8 copy": ("swiglu", ROW, None, True),
    "swiglu, rows and columns per row": ("swiglu", ROW, ROW, False),
    "swiglu, rows and columns per row, FP8 copy": ("swiglu", ROW, ROW, True),
    "swiglu, rows and columns known scale": ("swiglu", TENSOR, TENSOR, False),
    "swiglu, rows and columns known scale, FP8 copy": ("swiglu", TENSOR, TENSOR, True),
    "bias + gelu, rows 1x128, columns 128x128": ("gelu", BLOCK, SQUARE, False),
}
# name -> kind, gradient, the activation's columns, is the saved input in FP8
BACKWARD: dict[str, tuple[str, Scaling, Scaling | None, bool]] = {
    "swiglu backward, 1x128": ("swiglu", Scaling(E5M2), None, False),
    "swiglu backward, 1x128, from FP8": ("swiglu", Scaling(E5M2), None, True),
    "swiglu backward, 1x128, from FP8, forward columns 128x128": ("swiglu", Scaling(E5M2), SQUARE, True),
    "swiglu backward, per row": ("swiglu", Scaling.per_row(E5M2), None, False),
    "swiglu backward, per row, from FP8, forward columns per row": ("swiglu", Scaling.per_row(E5M2), ROW, True),
    "swiglu backward, known scale": ("swiglu", Scaling.per_tensor(E5M2), None, False),
    "bias + gelu backward, 1x128": ("gelu", Scaling(E5M2), None, False),
}
Call = Callable[[], object]


@functools.cache
def tensors(kind: str, tokens: int, width: int) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor]:
    """x, bias and grad, normal, on the GPU."""
    generator = torch.Generator(DEVICE).manual_seed(0)

    def draw(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator, device=DEVICE, dtype=torch.bfloat16)

    x = draw(tokens, 2 * width if kind == "swiglu" else width)
    return x, draw(width) if kind == "gelu" else None, draw(tokens, width)


def known_scale(scaling: Scaling) -> tuple[torch.Tensor | None, torch.Tensor | None]:
    """quant_scale and amax_out, for per_tensor only."""
    if not scaling.is_per_tensor:
        return None, None
    return torch.full((), 9.0, device=DEVICE), torch.zeros(1, device=DEVICE)


def forward_calls(name: str, tokens: int, width: int) -> tuple[Call, Call, int]:
    """(fused call, the separate ops, bytes read)."""
    kind, rows, columns, copies = FORWARD[name]
    x, bias, _ = tensors(kind, tokens, width)
    quant_scale, amax = known_scale(rows)
    store = BLOCK if copies else None
    fused = functools.partial(
        activation_quantize, x, kind=kind, bias=bias, scaling=rows, column_scaling=columns, quant_scale=quant_scale,
        amax_out=amax, store_scaling=store,
    )  # fmt: skip
    unfused = functools.partial(unfused_forward, x, kind, bias, rows, columns, quant_scale, amax, store)
    return fused, unfused, x.nbytes


def backward_calls(name: str, tokens: int, width: int) -> tuple[Call, Call, int]:
    """(fused call, the separate ops, bytes read)."""
    kind, scaling, columns, is_coded = BACKWARD[name]
    x, bias, grad = tensors(kind, tokens, width)
    stored = activation_quantize(x, kind=kind, scaling=BLOCK, store_scaling=BLOCK).stored if is_coded else x
    assert stored is not None
    quant_scale, amax = known_scale(scaling)
    forward_columns = None if columns is None else (columns, None)
    fused = functools.partial(
        activation_backward_quantize, grad, stored, kind=kind, bias=bias, scaling=scaling, quant_scale=quant_scale,
        amax_out=amax, forward_columns=forward_columns,
    )  # fmt: skip
    unfused = functools.partial(unfused_backward, grad, stored, kind, bias, scaling, quant_scale, amax, forward_columns)
    return fused, unfused, grad.nbytes + (stored.num_bytes if isinstance(stored, QuantizedTensor) else x.nbytes)


def all_calls(tokens: int, width: int) -> dict[str, tuple[Call, Call, int]]:
    """Every case at one shape."""
    return {name: forward_calls(name, tokens, width) for name in FORWARD} | {
        name: backward_calls(name, tokens, width) for name in BACKWARD
    }


def check_all() -> int:
    """Fused against the separate ops, bit for bit, and these against the CPU; returns how many tensors were equal."""
    compared = 0
    for shape in CHECKED_SHAPES:
        for name, (fused, unfused, _) in all_calls(*shape).items():
            pairs = zip(_tensors_of(fused()), _tensors_of(unfused()), strict=True)
            for place, (found, expected) in enumerate(pairs):
                assert_bitwise(found, expected, f"result {place} of {name} at {shape}")
                compared += 1
    for kind in ("swiglu", "gelu"):
        x, bias, grad = tensors(kind, 200, 1408)
        cpu = [None if t is None else t.cpu() for t in (x, bias, grad)]
        pairs = [
            (activation(x, kind=kind, bias=bias), activation(cpu[0], kind=kind, bias=cpu[1])),
            (
                activation_backward(grad, x, kind=kind, bias=bias)[0],
                activation_backward(cpu[2], cpu[0], kind=kind, bias=cpu[1])[0],
            ),
        ]
        for found, expected in pairs:
            assert_sqnr(found, expected, tolerances.BF16_OUTPUT_ACROSS_DEVICES_DB, kind)
    return compared


def _tensors_of(result: Iterable[object]) -> list[torch.Tensor]:
    """Codes, scales and plain tensors of a result, flattened."""
    flat: list[torch.Tensor] = []
    for part in result:
        if isinstance(part, QuantizedTensor):
            flat += [part.qdata, part.scale]
        elif isinstance(part, torch.Tensor):
            flat.append(part)
    return flat


def time_all(record: Record) -> None:
    """Time every case and its separate ops beside a copy, and add the rows."""
    copied = tensors("swiglu", *TIMED_SHAPE)[0]
    copy = torch.empty_like(copied)
    cases = all_calls(*TIMED_SHAPE)
    calls: dict[str, Call] = {"copy": lambda: copy.copy_(copied)}
    calls |= {name: fused for name, (fused, _, _) in cases.items()}
    calls |= {f"unfused {name}": unfused for name, (_, unfused, _) in cases.items()}
    timings = time_calls(calls, repeats=15, warmup=2, device=DEVICE)
    copy_rate, *_ = timings["copy"].rate(2 * copied.nbytes / 1e9)
    print(f"{'copy':58s} {timings['copy'].median_us:8.1f} us {copy_rate:6.0f} GB/s")
    for name, (fused, _, num_read) in cases.items():
        num_bytes = num_read + sum(t.nbytes for t in _tensors_of(fused()))
        value, p20, p80 = timings[name].rate(num_bytes / 1e9)
        peer, *_ = timings[f"unfused {name}"].rate(num_bytes / 1e9)
        print(
            f"{name:58s} {timings[name].median_us:8.1f} us {value:6.0f} GB/s {value / copy_rate:5.2f} of copy "
            f"({num_bytes / 2**20:.0f} MiB, {num_bytes / TIMED_SHAPE[0] / TIMED_SHAPE[1]:.2f} B an output), "
            f"{value / peer:5.2f} x unfused"
        )
        case = f"{name}, {TIMED_SHAPE[0]}x{TIMED_SHAPE[1]} outputs, {num_bytes} bytes"
        record.add(case, "bandwidth", "GB/s", value, p20, p80, peer="torch copy_", peer_value=copy_rate)
        record.add(case, "bandwidth", "GB/s", value, p20, p80, peer="the same ops unfused", peer_value=peer)


def main() -> None:
    """Check, time, write the record."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--commit", help="of the tree that is measured, where git is not at hand")
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "records")
    arguments = parser.parse_args()
    if not torch.cuda.is_available():
        raise SystemExit("benchmarks.activation needs a GPU: no CUDA device is visible")
    print(f"{check_all()} tensors equal those of the separate ops bit for bit")
    what = "Fused activations against a copy: fewest bytes over time; medians, L2 flushed, interleaved"
    record = Record("activation", what)
    time_all(record)
    print(f"wrote {record.save(arguments.out, arguments.commit)}")


if __name__ == "__main__":
    main()
