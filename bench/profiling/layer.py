"""One average layer of a decode step, kernel by kernel, beside the least time that its parts need."""

import collections
import dataclasses
import itertools
import statistics
from collections.abc import Callable, Sequence

from bench.profiling.kernels import Kernel
from bench.report import format_table
from bench.serve.floor import kv_token_bytes
from bench.speed.ceilings import Ceilings
from octavo.models import ModelConfig
from octavo.numerics import Numerics


@dataclasses.dataclass(frozen=True)
class Floor:
    """The least that a part needs: bytes that it moves, operations, and microseconds of each at the ceilings."""

    name: str
    num_bytes: float
    flops: float
    moving_us: float
    product_us: float


@dataclasses.dataclass(frozen=True)
class Layer:
    """The mean of those layers that have the commonest kernels.

    Attributes:
        kernels: (name, microseconds, microseconds without a kernel until the next), in order.
        num_alike: layers that have these kernels.
        num_layers: that were seen.
    """

    kernels: tuple[tuple[str, float, float], ...]
    num_alike: int
    num_layers: int

    def format(self, short: Callable[[str], str]) -> str:
        """For people; `short` is applied to kernels' names."""
        sums = ("sum", sum(us for _, us, _ in self.kernels), sum(gap for _, _, gap in self.kernels))
        rows = [[short(name), f"{us:.2f}", f"{gap:.2f}"] for name, us, gap in (*self.kernels, sums)]
        title = f"one layer ({self.num_alike} of {self.num_layers} alike)"
        return format_table((title, "us", "gap after it, us"), rows)


def format_floors(floors: Sequence[Floor]) -> str:
    """For people."""
    rows = [[floor.name, f"{floor.moving_us:.2f}", f"{floor.product_us:.2f}"] for floor in floors]
    rows.append(["sum of the larger", f"{sum(max(f.moving_us, f.product_us) for f in floors):.2f}", ""])
    return format_table(("least that a layer needs", "us by bytes", "us by operations"), rows)


def average_layer(kernels: Sequence[Kernel], anchor: str) -> Layer | None:
    """The average layer; None where `anchor` does not come twice.

    Args:
        kernels: of some steps, in the order of their starts.
        anchor: name of a kernel that each layer launches once; a layer is from one to the next.
    """
    places = [i for i, kernel in enumerate(kernels) if kernel.name == anchor]
    periods = [kernels[first : last + 1] for first, last in itertools.pairwise(places)]
    if not periods:
        return None
    names = collections.Counter(tuple(kernel.name for kernel in period) for period in periods)
    chosen, count = names.most_common(1)[0]
    alike = [period for period in periods if tuple(kernel.name for kernel in period) == chosen]
    rows = []
    for i, name in enumerate(chosen[:-1]):  # the last is the next layer's anchor
        us = statistics.fmean(period[i].us for period in alike)
        gap = statistics.fmean(max(0.0, period[i + 1].start_us - period[i].end_us) for period in alike)
        rows.append((name, us, gap))
    return Layer(tuple(rows), count, len(periods))


def layer_floors(
    config: ModelConfig, numerics: Numerics, num_seqs: int, length: float, ceilings: Ceilings
) -> list[Floor]:
    """Of a layer's parts in a decode step.

    A linear reads its weights and inputs (one byte each in FP8, else two) and writes bf16; attention reads the keys and
    values. Of the experts those that num_seqs tokens meet by chance are read.

    Args:
        length: tokens of a sequence, on average.
    """
    is_fp8, hidden, expert = numerics.recipe.is_fp8, config.hidden_size, config.moe_intermediate_size
    q, kv = config.q_dim, config.num_kv_heads * config.head_dim
    width = 1 if is_fp8 else 2

    def floor(name: str, num_bytes: float, flops: float, *, fp8: bool) -> Floor:
        moving_s, product_s = ceilings.moving_s(num_bytes), ceilings.product_s(flops, fp8=fp8)
        return Floor(name, num_bytes, flops, moving_s * 1e6, product_s * 1e6)

    def linear(name: str, out: int, in_: int, rows: int = num_seqs, copies: float = 1.0) -> Floor:
        num_bytes = copies * out * in_ * width + rows * (in_ * width + 2 * out)
        return floor(name, num_bytes, 2.0 * rows * out * in_, fp8=is_fp8)

    kv_bytes = num_seqs * length * kv_token_bytes(config, numerics.kv_cache_dtype) / config.num_layers
    floors = [linear("QKV projection", q + 2 * kv, hidden)]
    floors.append(floor("attention", kv_bytes, 4.0 * num_seqs * length * q, fp8=False))
    floors.append(linear("output projection", hidden, q))
    if not config.num_experts:
        f = config.intermediate_size
        return [*floors, linear("gate and up", 2 * f, hidden), linear("down", hidden, f)]
    routed = num_seqs * config.num_experts_per_tok
    met = config.num_experts * (1 - (1 - config.num_experts_per_tok / config.num_experts) ** num_seqs)
    router = config.num_experts * hidden
    floors.append(floor("router", 2.0 * router, 2.0 * num_seqs * router, fp8=False))
    floors.append(linear("experts' gate and up", 2 * expert, hidden, routed, met))
    return [*floors, linear("experts' down", hidden, expert, routed, met)]
