"""`octavo bench linear`: forward and backward of one linear, quantization included, beside bf16 and torchao.

A case is timed five ways. Three are eager: calls issued back to back in bursts of some 40 ms of each variant in turn,
CPU included, which is what small shapes are bound by. "step": six linears of the shape, their forwards one after the
other and one backward for all, as in a training step; time a linear. "eager": one at a time with torch's defaults,
so that each call hands over to autograd's own thread. "eager, one thread": the same with the backward on the calling
thread (torch.autograd.set_multithreading_enabled(False)). "queued": GPU time alone, the CPU ahead, as in a long
training step. "graph": replayed from a CUDA graph. Weights are quantized again in each call, as after an optimizer
step; "cached" keeps them, as within gradient accumulation. At one shape octavo's variants also run under
torch.compile(mode="reduce-overhead").
T tokens, K in, N out.
"""

import dataclasses
import traceback
from collections.abc import Callable

import torch
from torch import nn

from bench.measure import free_variant
from bench.options import BenchOptions
from bench.outcome import Outcome
from bench.record import Record, Timing, time_calls
from bench.report import EAGER, GRAPH, ONE_THREAD, QUEUED, STEP, format_results
from bench.speed.ceilings import Ceilings, measure_ceilings
from bench.speed.peers import TORCHAO, TORCHAO_RECIPES, convert_torchao, describe_peers, peer_versions
from bench.speed.speed_table import write_speed_table
from bench.timing import capture, time_back_to_back
from octavo.errors import BackendError
from octavo.nn import Linear
from octavo.numerics.analysis import sqnr
from octavo.numerics.recipe import get_recipe

BASE_NAME, EAGER_BASE_NAME = "bf16, compiled", "bf16"
MAIN_SHAPES = ((16384, 4096, 14336), (8192, 4096, 4096), (16384, 8192, 8192))
GRAPHED_SHAPE = (8192, 4096, 4096)  # the CPU needs about as long to issue an eager call as the GPU to run it
_SWEEP_TOKENS = (512, 1024, 2048, 4096, 8192, 16384)
_SWEEP_WEIGHTS = ((1024, 1024), (2048, 2048), (1024, 4096), (4096, 1024), (4096, 4096), (4096, 14336), (14336, 4096))
SWEEP_SHAPES = tuple((t, k, n) for k, n in _SWEEP_WEIGHTS for t in _SWEEP_TOKENS)
TOY_SHAPES = ((64, 128, 256),)
WAYS = (STEP, EAGER, ONE_THREAD, QUEUED, GRAPH)
STEP_LINEARS = 6
# Output and gradients on normal data against bf16: E5M2 gradients gave 24.5 dB, E4M3 28.5 (testing/tolerances.py).
MIN_FP8_DB = 22.0
_CALLS_BEFORE = 3  # delayed scaling's scales come from the steps before
_BURSTS = 3
_STEPS_A_BURST = 6
_HEAD_START_CYCLES = 4_000_000  # two milliseconds: an eager FP8 call is many launches
Call = Callable[[], object]
Shape = tuple[int, int, int]


@dataclasses.dataclass(frozen=True)
class LinearVariant:
    """One way to run the linear; compiled ones are for main shapes only.

    Attributes:
        cached: the weight's codes are kept from call to call.
        graphed: by torch.compile(mode="reduce-overhead"), which replays CUDA graphs.
    """

    name: str
    library: str
    recipe: str = "bf16"
    cached: bool = False
    graphed: bool = False


@dataclasses.dataclass
class CaseTimings:
    """All timings of one shape: way -> variant's name -> timing; a variant without a way is missing there."""

    shape: Shape
    ways: dict[str, dict[str, Timing]]

    def speedup(self, way: str, name: str) -> float | None:
        """Over the faster of bf16's variants, None where one of the two is missing."""
        timings = self.ways[way]
        bases = [timings[base].median_us for base in (BASE_NAME, EAGER_BASE_NAME) if base in timings]
        return min(bases) / timings[name].median_us if name in timings and bases else None


def run(options: BenchOptions) -> Outcome:
    """Measure every shape, print a table each, make the record and, if asked for, the speed table."""
    print(describe_peers(options.device))
    ceilings = measure_ceilings(options.device, quick=options.quick)
    print(ceilings)
    what = (
        f"Forward and backward of one linear, quantization included: a {STEP_LINEARS}th of a step of {STEP_LINEARS} "
        "linears with one backward, eager (CPU included, torch's defaults), eager with the backward on the calling "
        "thread, queued (GPU time) and replayed from a CUDA graph; round-robin, L2 flushed for the last two. "
        f"{ceilings}"
    )
    record, complaints, cases = Record("linear", what, device=options.device), [], []
    main = TOY_SHAPES if options.quick else MAIN_SHAPES
    sweep = () if options.quick else SWEEP_SHAPES
    for shape in dict.fromkeys((*main, *sweep)):
        if not options.wants(case_name(shape)):
            continue
        timings, wrong = measure_shape(
            shape, make_variants(options, with_peers=shape in main, with_graphs=shape == GRAPHED_SHAPE), options
        )
        first_row = len(record.rows)
        add_case(record, timings, ceilings)
        print(format_results(record, "linear", first_row), flush=True)
        complaints += wrong
        cases.append(timings)
    if options.write_table is not None:
        print(f"speed table: {write_speed_table(options.write_table, cases, options)}")
    return Outcome(record, complaints)


def case_name(shape: Shape) -> str:
    """tokens x in x out."""
    return "x".join(map(str, shape))


def make_variants(options: BenchOptions, *, with_peers: bool, with_graphs: bool = False) -> list[LinearVariant]:
    """bf16, octavo's recipes with fresh and with cached weights, and for the main shapes the compiled peers."""
    variants = [LinearVariant(EAGER_BASE_NAME, "torch")]
    if with_peers and options.device == "cuda":
        variants.append(LinearVariant(BASE_NAME, "compiled"))
        if TORCHAO in peer_versions(options.device):
            variants += [LinearVariant(f"torchao {r}, compiled", TORCHAO, r) for r in TORCHAO_RECIPES]
    for recipe in options.recipes:
        variants.append(LinearVariant(f"octavo {recipe}", "octavo", recipe))
        if with_peers:
            variants.append(LinearVariant(f"octavo {recipe}, cached weight", "octavo", recipe, cached=True))
        if with_graphs and options.device == "cuda":
            variants.append(LinearVariant(f"octavo {recipe}, compiled, CUDA graphs", "octavo", recipe, graphed=True))
    return variants


def measure_shape(shape: Shape, variants: list[LinearVariant], options: BenchOptions) -> tuple[CaseTimings, list[str]]:
    """Check and time every variant on one shape.

    Returns:
        (timings, complaints about variants that failed or could not be captured).
    """
    tokens, cols, rows = shape
    generator = torch.Generator(options.device).manual_seed(0)
    x, weight, grad = (
        torch.randn(sizes, generator=generator, device=options.device).to(torch.bfloat16)
        for sizes in ((tokens, cols), (rows, cols), (tokens, rows))
    )
    weight *= cols**-0.5
    free_variant(options.device)
    complaints: list[str] = []
    eager: dict[str, Call] = {}
    steps: dict[str, Call] = {}
    graphs: dict[str, Call] = {}
    wanted = None
    for variant in variants:
        try:
            call, results = build_call(variant, x, weight, grad)
            for _ in range(_CALLS_BEFORE):
                call()
            found = [t.detach().clone() for t in results()]
            wanted = wanted or found  # the first variant is plain bf16
            check_close(variant, found, wanted)
            eager[variant.name] = call
            if not variant.graphed:
                steps[variant.name] = build_step(variant, x, weight, grad)
            if options.device == "cuda" and variant.library in ("torch", "octavo") and not variant.graphed:
                graphs[variant.name] = capture(call)
        except Exception as error:  # the other variants' figures are worth having; the exit code is 1
            complaints.append(f"{case_name(shape)} {variant.name}: {type(error).__name__}: {error}")
            traceback.print_exc()
    repeats, device = (3 if options.quick else 30), options.device
    queued = time_calls(eager, repeats=repeats, device=device, head_start_cycles=_HEAD_START_CYCLES)
    burst = 10 if options.quick else None
    by_default = time_back_to_back(eager, bursts=_BURSTS, device=device, burst=burst)
    with torch.autograd.set_multithreading_enabled(False):
        one_thread = time_back_to_back(eager, bursts=_BURSTS, device=device, burst=burst)
    whole = time_back_to_back(steps, bursts=_BURSTS, device=device, burst=2 if options.quick else _STEPS_A_BURST)
    ways = {
        STEP: {name: timing.divided(STEP_LINEARS) for name, timing in whole.items()},
        EAGER: by_default,
        ONE_THREAD: one_thread,
        QUEUED: queued,
        GRAPH: time_calls(graphs, repeats=repeats, device=device) if graphs else {},
    }
    return CaseTimings(shape, ways), complaints


def build_call(
    variant: LinearVariant, x: torch.Tensor, weight: torch.Tensor, grad: torch.Tensor
) -> tuple[Call, Callable[[], list[torch.Tensor]]]:
    """One forward and backward of the variant.

    Returns:
        (call, a function that gives output, input gradient and weight gradient of the last call).
    """
    leaf = x.clone().requires_grad_()
    module = _build_module(variant, weight)
    run = torch.compile(module, dynamic=False, mode="reduce-overhead") if variant.graphed else module
    held: list[torch.Tensor] = []
    parameter = next(module.parameters())
    fresh = module if isinstance(module, Linear) and not variant.cached else None

    def call() -> None:
        leaf.grad = parameter.grad = None
        if fresh is not None:
            fresh.weight_version += 1  # a linear's own share of mark_weights_updated, which a step calls once
        held.clear()  # before a graph writes its output again
        out = run(leaf)
        out.backward(grad)
        held.append(out.detach())

    def results() -> list[torch.Tensor]:
        assert leaf.grad is not None and parameter.grad is not None, "call fills both gradients"
        return [*held, leaf.grad, parameter.grad]

    return call, results


def build_step(variant: LinearVariant, x: torch.Tensor, weight: torch.Tensor, grad: torch.Tensor) -> Call:
    """STEP_LINEARS linears of the variant, forward one after the other, then one backward through all."""
    modules = [_build_module(variant, weight) for _ in range(STEP_LINEARS)]
    leaves = [x.clone().requires_grad_() for _ in modules]
    parameters = [parameter for module in modules for parameter in module.parameters()]
    fresh = [module for module in modules if isinstance(module, Linear) and not variant.cached]

    def call() -> None:
        for tensor in (*leaves, *parameters):
            tensor.grad = None
        for module in fresh:
            module.weight_version += 1
        outs = [module(leaf) for module, leaf in zip(modules, leaves, strict=True)]
        torch.autograd.backward(outs, [grad] * len(outs))

    return call


def check_close(variant: LinearVariant, found: list[torch.Tensor], wanted: list[torch.Tensor]) -> None:
    """Output and both gradients are near bf16's, or BackendError."""
    least = 40.0 if variant.recipe == "bf16" else MIN_FP8_DB
    for name, ours, theirs in zip(("output", "input gradient", "weight gradient"), found, wanted, strict=True):
        ratio = sqnr(theirs.float(), ours.float())
        if not ratio >= least:
            raise BackendError(f"{name} has SQNR {ratio:.1f} dB against bf16's, at least {least} expected")


def _build_module(variant: LinearVariant, weight: torch.Tensor) -> nn.Module:
    rows, cols = weight.shape
    factory = Linear if variant.library == "octavo" else nn.Linear
    module: nn.Module = factory(cols, rows, bias=False, device=weight.device, dtype=torch.bfloat16)
    with torch.no_grad():
        next(module.parameters()).copy_(weight)
    if isinstance(module, Linear):
        module.recipe = get_recipe(variant.recipe)
    if variant.library == TORCHAO:
        module = convert_torchao(module, variant.recipe)
    return torch.compile(module, dynamic=False) if variant.library in (TORCHAO, "compiled") else module  # type: ignore[return-value]


def floor_s(shape: Shape, variant_name: str, ceilings: Ceilings) -> float:
    """Seconds of the three GEMMs at the ceiling of the variant's format."""
    tokens, cols, rows = shape
    return ceilings.product_s(6.0 * tokens * cols * rows, fp8="bf16" not in variant_name)


def add_case(record: Record, case: CaseTimings, ceilings: Ceilings) -> None:
    """Rows of every variant and way, beside the faster of bf16's variants."""
    for way, timings in case.ways.items():
        bases = [name for name in (BASE_NAME, EAGER_BASE_NAME) if name in timings]
        base = min(bases, key=lambda name: timings[name].median_us) if bases else None
        for name, timing in timings.items():
            beside = None if base is None else timings[base].median_us
            title = f"{case_name(case.shape)} {name}"
            record.add_times(title, f"time, {way}", "us", timing, 1.0, base, beside)
            if beside is not None and name not in bases:
                record.add_ratio(title, f"speedup, {way}", beside / timing.median_us, base)
    for name, timing in case.ways[QUEUED].items():
        share = floor_s(case.shape, name, ceilings) * 1e6 / timing.median_us
        record.add_roofline(f"{case_name(case.shape)} {name}", share, "GEMM ceiling of the same run")
