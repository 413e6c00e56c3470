"""`octavo bench qdq`: whole blocks with explicit Q/DQ pairs, as they stand and after octavo.qdq.fuse, beside bf16.

The unfused graph has its weights' Q folded already: FP8 weights, dequantized in each call. Compiled, its pairs are
plain torch, so that the compiler may fuse them with what stands around them.
"""

import dataclasses
import traceback
from collections.abc import Callable

import torch
from torch.export import ExportedProgram

from bench.options import BenchOptions
from bench.outcome import Outcome
from bench.record import Record, Timing, time_calls
from bench.report import format_results
from bench.speed.ceilings import Ceilings, measure_ceilings
from bench.speed.qdq_blocks import (
    GPT_J_6B_BLOCK,
    LLAMA_3_8B_BLOCK,
    TOY_GPT_J_BLOCK,
    TOY_LLAMA_BLOCK,
    BlockShape,
    make_block,
)
from octavo.errors import BackendError
from octavo.numerics.analysis import sqnr
from octavo.qdq import Report, fuse, insert
from octavo.qdq.graph import DEQUANTIZE, QUANTIZE, Rewriter
from octavo.qdq.moves import fold_constants

SIZES = ((64, 1), (1, 2048), (8, 2048))  # (sequences, tokens of each): a decoding step, a prompt, a batch of them
TOY_SIZES = ((2, 16),)
BASE_NAME, COMPILED_BASE_NAME, UNFUSED_NAME, FUSED_NAME = "bf16", "bf16, compiled", "Q/DQ", "Q/DQ fused"
FAST_NAME = f"{FUSED_NAME}, fast sums"
# Of a variant with pairs beside the unfused graph: bf16 is rounded at other places, so that codes near a boundary take
# their neighbour (32 to 35 dB at toy sizes on a CPU; a GPU's exp and rsqrt, and a compiler's, add their share).
MIN_SAME_DB = 26.0
MIN_FP8_DB = 17.0  # of the block's branches beside bf16's: four products in a row, as in `layer`
_HEAD_START_CYCLES = 4_000_000  # two milliseconds: an eager block is many launches
Call = Callable[[], torch.Tensor]


@dataclasses.dataclass(frozen=True)
class BlockCase:
    """One block at one size."""

    shape: BlockShape
    batch: int
    seq_len: int

    @property
    def name(self) -> str:
        """Of its rows."""
        return f"{self.shape.name} {self.batch}x{self.seq_len}"


def run(options: BenchOptions) -> Outcome:
    """Check every variant against the unfused graph, time them round-robin, make the record."""
    ceilings = measure_ceilings(options.device, quick=options.quick)
    print(ceilings)
    what = f"Forward of one block with explicit Q/DQ pairs; round-robin, L2 flushed, CPU ahead. {ceilings}"
    record, complaints = Record("qdq", what, device=options.device), list[str]()
    for case in make_cases(options):
        try:
            calls, report = prepare(case, options)
        except Exception as error:  # the other cases' figures are worth having; the exit code is 1
            complaints.append(f"{case.name}: {type(error).__name__}: {error}")
            traceback.print_exc()
            continue
        repeats = 3 if options.quick else 30
        timings = time_calls(calls, repeats=repeats, device=options.device, head_start_cycles=_HEAD_START_CYCLES)
        print(report)
        first_row = len(record.rows)
        add_case(record, case, timings, report, ceilings)
        print(format_results(record, "qdq", first_row), flush=True)
    return Outcome(record, complaints)


def make_cases(options: BenchOptions) -> list[BlockCase]:
    """Both blocks at every size, those that were asked for."""
    shapes = (TOY_LLAMA_BLOCK, TOY_GPT_J_BLOCK) if options.quick else (LLAMA_3_8B_BLOCK, GPT_J_6B_BLOCK)
    sizes = TOY_SIZES if options.quick else SIZES
    if options.batch is not None or options.seq_len is not None:
        sizes = ((options.batch or 1, options.seq_len or sizes[-1][1]),)
    cases = [BlockCase(shape, *size) for shape in shapes for size in sizes]
    return [case for case in cases if options.wants(case.name)]


def prepare(case: BlockCase, options: BenchOptions) -> tuple[dict[str, Call], Report]:
    """The variants of a case, checked.

    Returns:
        (name -> call, the report of the fusion).
    Raises:
        BackendError: where a variant is farther from the unfused graph, or that from bf16, than the bounds allow.
    """
    device = options.device
    torch.compiler.reset()  # else a second size of the same code would be compiled for any size
    block = make_block(case.shape, case.seq_len, dtype=torch.bfloat16, device=device)
    generator = torch.Generator(device).manual_seed(0)
    sizes = (case.batch, case.seq_len, case.shape.hidden_size)
    x = torch.randn(sizes, generator=generator, device=device).to(torch.bfloat16)
    modules: dict[str, torch.nn.Module] = {BASE_NAME: block}
    paired = make_block(case.shape, case.seq_len, dtype=torch.bfloat16, device=device)
    insert(paired, lambda model: model(x))
    with torch.no_grad():
        program = torch.export.export(paired, (x,))
    modules[UNFUSED_NAME] = fold_weights(program)
    modules[FUSED_NAME], report = fuse(program)
    modules[FAST_NAME], _ = fuse(program, fast_accum=True)
    if device == "cuda":
        plain = {**modules, UNFUSED_NAME: fold_weights(program, open_pairs=True)}
        for name, module in plain.items():
            if name == FAST_NAME:
                continue
            modules[f"{name}, compiled"] = torch.compile(module, dynamic=False)  # type: ignore[assignment]
    check_variants(modules, x)
    return {name: _call(module, x) for name, module in modules.items()}, report


def fold_weights(program: ExportedProgram, *, open_pairs: bool = False) -> torch.nn.Module:
    """The program with its weights stored in FP8 and nothing else rewritten.

    Args:
        open_pairs: write every pair in plain torch.
    """
    rewriter = Rewriter(program.module(check_guards=False))  # type: ignore[arg-type]
    fold_constants(rewriter)
    for node in rewriter.nodes(*_PLAIN) if open_pairs else ():
        node.target = _PLAIN[node.target]
    rewriter.graph.eliminate_dead_code()
    rewriter.module.recompile()
    return rewriter.module


def plain_quantize(x: torch.Tensor, scale: torch.Tensor, kind: str, dtype: torch.dtype) -> torch.Tensor:
    """A per-tensor Q without NaN's rule."""
    assert kind == "per_tensor", "the blocks' pairs have one scale"
    limit = torch.finfo(dtype).max
    return (x.float() * (1.0 / scale)).clamp(-limit, limit).to(dtype)


def plain_dequantize(codes: torch.Tensor, scale: torch.Tensor, kind: str, dtype: torch.dtype) -> torch.Tensor:
    """A per-tensor DQ."""
    assert kind == "per_tensor", "the blocks' pairs have one scale"
    return (codes.float() * scale).to(dtype)


_PLAIN: dict[object, Callable[..., torch.Tensor]] = {QUANTIZE: plain_quantize, DEQUANTIZE: plain_dequantize}


def check_variants(modules: dict[str, torch.nn.Module], x: torch.Tensor) -> None:
    """Every variant with pairs against the unfused graph, and that against bf16; of what it adds to its input."""
    with torch.no_grad():
        added = {name: module(x).float() - x.float() for name, module in modules.items()}
    bounds = {name: (UNFUSED_NAME, MIN_SAME_DB) for name in added if name.startswith(UNFUSED_NAME)}
    bounds[UNFUSED_NAME] = (BASE_NAME, MIN_FP8_DB)
    for name, (reference, least) in bounds.items():
        ratio = sqnr(added[reference], added[name])
        if not ratio >= least:
            raise BackendError(f"{name} has SQNR {ratio:.1f} dB against {reference}, at least {least} expected")


def _call(module: torch.nn.Module, x: torch.Tensor) -> Call:
    def call() -> torch.Tensor:
        with torch.no_grad():
            out: torch.Tensor = module(x)
        return out

    return call


def floor_s(case: BlockCase, variant_name: str, ceilings: Ceilings) -> float:
    """Seconds of the linears at the ceiling of the variant's products, or of reading their weights if longer."""
    in_fp8 = variant_name.startswith(FUSED_NAME)
    weight_bytes = case.shape.linear_params * (1 if in_fp8 or variant_name.startswith(UNFUSED_NAME) else 2)
    products = ceilings.product_s(case.shape.num_flops(case.batch, case.seq_len), fp8=in_fp8)
    return max(products, ceilings.moving_s(weight_bytes))


def add_case(record: Record, case: BlockCase, timings: dict[str, Timing], report: Report, ceilings: Ceilings) -> None:
    """Rows of every variant beside the unfused graph and bf16 of the same way, eager or compiled."""
    for name, timing in timings.items():
        title, end = f"{case.name} {name}", ", compiled" if name.endswith(", compiled") else ""
        unfused, base = (timings[peer + end].median_us for peer in (UNFUSED_NAME, BASE_NAME))
        record.add_times(title, "time", "us", timing, 1.0, BASE_NAME + end, base)
        if name.startswith(FUSED_NAME):
            record.add_ratio(title, "speedup over unfused", unfused / timing.median_us, UNFUSED_NAME + end)
            record.add_ratio(title, "speedup over bf16", base / timing.median_us, BASE_NAME + end)
        record.add_roofline(title, floor_s(case, name, ceilings) * 1e6 / timing.median_us)
    kernels = len(report.left_over)
    record.add(f"{case.name} {FUSED_NAME}", "pairs' kernels left", "kernels", kernels, peer="fused sites",
               peer_value=len(report.fused))  # fmt: skip
