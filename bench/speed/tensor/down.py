"""`down`: an MLP's down projection in gather mode, its input's columns gathered as FP8 codes or in bf16."""

import functools
from collections.abc import Callable

import torch

from bench.record import Timing
from bench.speed.scale.session import Session
from bench.timing import time_back_to_back
from octavo.distributed.tensor_group import TensorGroup
from octavo.nn import Linear, RowLinear
from octavo.nn.weights.slices import Slices
from octavo.numerics import get_recipe
from octavo.testing.assertions import assert_bitwise

_TOKENS, _IN, _OUT = 8192, 14336, 4096  # Llama-3-8B's
_TOY = (64, 512, 256)
_BURSTS, _BURST = 15, 20  # the same on all ranks, which meet in each call
_CODES, _BF16 = "FP8 codes gathered", "bf16 gathered, then quantized"


def down(session: Session) -> None:
    """One linear, two ways to bring its input together."""
    session.attempt("down", functools.partial(_compare, session))


@torch.no_grad()
def _compare(session: Session) -> None:
    num_tokens, num_in, num_out = _TOY if session.is_toy else (_TOKENS, _IN, _OUT)
    whole, cut = _linears(session, num_in, num_out)
    generator = torch.Generator(session.device).manual_seed(1)
    x = torch.randn(num_tokens, num_in, generator=generator, device=session.device).to(torch.bfloat16)
    own = x.chunk(session.mesh.world_size, 1)[session.mesh.rank].contiguous()
    group = cut.tensor_group

    def gather_bf16() -> torch.Tensor:
        return group.gather(Linear.forward(cut, group.gather(own)))

    calls: dict[str, Callable[[], torch.Tensor]] = {_BF16: gather_bf16, _CODES: functools.partial(cut, own)}
    session.check(functools.partial(assert_bitwise, cut(own), whole(x), "exact output against one GPU's"))
    cut.exact = False
    if session.mesh.any(not torch.equal(calls[_CODES](), calls[_BF16]())):
        session.complain("down: outputs by codes and by bf16 differ where numerics are not exact")
    bursts = (2, 2) if session.is_toy else (_BURSTS, _BURST)
    session.mesh.barrier()
    timings = time_back_to_back(calls, bursts=bursts[0], burst=bursts[1], device=session.device.type)
    _add_rows(session, f"down projection, {num_tokens} x {num_in} to {num_out}, gather, blockwise", timings)


def _linears(session: Session, num_in: int, num_out: int) -> tuple[Linear, RowLinear]:
    """One GPU's linear and this rank's slice of it, both exact."""
    group, recipe = TensorGroup.of(), get_recipe("blockwise")
    generator = torch.Generator(session.device).manual_seed(0)
    weight = torch.randn(num_out, num_in, generator=generator, device=session.device) * num_in**-0.5
    rows = slice(group.rank * num_out // group.size, (group.rank + 1) * num_out // group.size)
    slices = Slices((num_out,), (rows,), slice(0, num_in))
    whole = Linear(num_in, num_out, device=session.device)
    cut = RowLinear(num_in, num_out, group=group, device=session.device)
    for linear, values in ((whole, weight), (cut, slices.of_values(weight))):
        linear.weight = torch.nn.Parameter(values.to(torch.bfloat16), requires_grad=False)
        linear.exact = True
        linear.set_recipe(recipe)
    return whole, cut


def _add_rows(session: Session, case: str, timings: dict[str, Timing]) -> None:
    peer = f"{case}: {_BF16}"
    slowest = {name: session.largest(timing.median_us) for name, timing in timings.items()}
    for name, timing in timings.items():
        beside = {} if name == _BF16 else {"peer": peer, "peer_value": slowest[_BF16]}
        session.record.add_times(f"{case}: {name}", "time", "us", timing, **beside)  # type: ignore[arg-type]
        session.say(
            f"{case}: {name}: {timing.median_us:.1f} us ({timing.p20_us:.1f} to {timing.p80_us:.1f}), "
            f"{slowest[name]:.1f} on the slowest rank"
        )
    ratio = slowest[_BF16] / slowest[_CODES]
    session.record.add_ratio(f"{case}: {_CODES}", "speed over a bf16 gather", ratio, peer)
    session.say(f"{case}: codes are {ratio:.3f} x a bf16 gather")
