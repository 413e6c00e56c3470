"""Collectives between ranks, FP8 beside bf16: `torchrun --nproc-per-node 2 -m bench.speed.comm --out bench/records`.

NCCL on GPUs (set NCCL_NVLS_ENABLE=0 where multicast is to be off), gloo on a CPU; all_reduce_q goes through the ranks'
memory where it serves. A size is that of the whole bf16 tensor; "FP8 bytes" are as many bytes as it has elements,
without quantization. First each FP8 collective is held to what it promises, on every rank; then all calls of a size are
timed round-robin on each rank, behind a collective that lets all begin at once, and rank 0's are written.
"""

import os
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from bench.program import Program, backend_of, keeps
from bench.record import Record, time_calls
from octavo.distributed.collectives import all_gather_into, reduce_scatter_into
from octavo.distributed.packed import Packed, num_blocks
from octavo.distributed.transport import all_gather_q, reduce_scatter_q
from octavo.distributed.two_shot import all_reduce_q
from octavo.numerics import Scaling
from octavo.ops.packed import decode_pieces_, quantize_pieces_, requantize_pieces_
from octavo.ops.quantize import quantize
from octavo.testing.assertions import assert_bitwise, assert_sqnr
from octavo.testing.tolerances import E4M3_NORMAL_DB, TWO_SHOT_DB

SIZES = (1.0, 8.0, 64.0, 256.0, 1024.0)
REPEATS, WARMUP = 20, 3
BASE = "all_reduce bf16"  # what all-reduces are compared with
# FP8's name -> the call in bf16 that it stands for
PEERS = {
    "all_gather FP8 bytes": "all_gather bf16",
    "all_gather_q": "all_gather bf16",
    "all_to_all FP8 bytes": "all_to_all bf16",
    "reduce_scatter_q": "reduce_scatter bf16",
    "all_reduce_q": BASE,
    "all_reduce_q, error feedback": BASE,
    "all_reduce_q by collectives": BASE,
    "all_reduce_q by collectives, error feedback": BASE,
}
CHECKED_NUMEL = 1 << 20


def make_calls(numel: int, device: str) -> dict[str, Callable[[], object]]:
    """Every call by name, on a bf16 tensor of so many elements, a multiple of the ranks."""
    world = dist.get_world_size()
    x = torch.randn(numel, device=device).bfloat16()
    piece, many, residual = x[: numel // world].clone(), x.view(world, -1), torch.zeros_like(x)
    received, summed = torch.empty_like(x), x.clone()
    codes, piece_codes = (t.view(torch.uint8)[: len(t)] for t in (x, piece))
    received_codes = torch.empty_like(codes)
    sent = Packed.empty(world, num_blocks(numel // world), x.device)
    owned = sent.empty_like(1)
    sums, own = (sent.codes, sent.scales), (owned.codes, owned.scales)
    average = dist.ReduceOp.AVG  # a sum would grow from call to call
    return {
        BASE: lambda: dist.all_reduce(summed, average),
        "all_gather bf16": lambda: all_gather_into(received, piece),
        "all_to_all bf16": lambda: dist.all_to_all_single(received, x),
        "reduce_scatter bf16": lambda: reduce_scatter_into(piece, x, average),
        "all_gather FP8 bytes": lambda: all_gather_into(received_codes, piece_codes),
        "all_to_all FP8 bytes": lambda: dist.all_to_all_single(received_codes, codes),
        "all_gather_q": lambda: all_gather_q(piece),
        "reduce_scatter_q": lambda: reduce_scatter_q(many),
        "all_reduce_q": lambda: all_reduce_q(x),
        "all_reduce_q, error feedback": lambda: all_reduce_q(x, residual=residual),
        "all_reduce_q by collectives": lambda: all_reduce_q(x, transport="nccl"),
        "all_reduce_q by collectives, error feedback": lambda: all_reduce_q(x, residual=residual, transport="nccl"),
        # what all_reduce_q does on this rank alone
        "quantize": lambda: quantize_pieces_(many, *sums),
        "quantize, error feedback": lambda: quantize_pieces_(many, *sums, residual.view(world, -1)),
        "sum and quantize": lambda: requantize_pieces_(*sums, *own),
        "decode": lambda: decode_pieces_(*sums, received.view(world, -1)),
    }


def check(device: str) -> None:
    """FP8 collectives of random numbers, one of them infinite: their bits, their error, NaN where they promise it.

    Raises:
        AssertionError: on any rank that finds a promise broken.
    """
    world, rank = dist.get_world_size(), dist.get_rank()
    generator = torch.Generator().manual_seed(rank)
    x = torch.randn(CHECKED_NUMEL + 77, generator=generator).to(device, torch.bfloat16)
    exact = x.float()
    dist.all_reduce(exact)
    reduced = all_reduce_q(x.float())
    assert_sqnr(reduced, exact, TWO_SHOT_DB, "all_reduce_q")
    first = reduced.clone()
    dist.broadcast(first, 0)
    assert_bitwise(reduced, first, f"all_reduce_q of ranks 0 and {rank}")
    assert_bitwise(reduced, all_reduce_q(x.float(), transport="nccl"), "all_reduce_q by collectives")
    with torch.no_grad():
        mine = x[:CHECKED_NUMEL].view(-1, 128)
        wanted = quantize(mine, Scaling.block_1x128()).dequantize(torch.bfloat16)
    assert_bitwise(all_gather_q(mine)[rank], wanted, "all_gather_q")
    many = x[: CHECKED_NUMEL // 128 * 128 // world * world].view(world, -1)
    exact = many.float()
    dist.all_reduce(exact)
    assert_sqnr(reduce_scatter_q(many.float()), exact[rank], E4M3_NORMAL_DB, "reduce_scatter_q")
    x[200] = torch.inf if rank == world - 1 else x[200]
    is_nan = all_reduce_q(x).isnan()
    assert is_nan[128:256].all() and int(is_nan.sum()) == 128, "an infinity on one rank is NaN in its block alone"


def measure(record: Record, size: float, options: Any) -> None:
    """Time the calls of a size and add their rows."""
    per_block = 128 * dist.get_world_size()
    numel = int(size * 2**19) // per_block * per_block
    made = make_calls(numel, options.device)
    wanted = {name for kept in made if keeps(options, kept) for name in (kept, PEERS.get(kept, kept))}
    calls = {name: call for name, call in made.items() if name in wanted}
    token = torch.zeros(1, device=options.device)
    timings = time_calls(
        calls,
        repeats=options.repeats,
        warmup=WARMUP,
        device=options.device,
        align=lambda: dist.all_reduce(token),  # after calls of one rank alone the last would be waited for
    )
    for name, timing in timings.items():
        peer = PEERS.get(name)
        case, base = f"{name}, {size:g} MiB", None if peer is None else timings[peer].median_us
        record.add_times(case, "time", "us", timing, peer=peer, peer_value=base)
        if base is not None:
            record.add_ratio(case, "speedup", base / timing.median_us, peer)
        if dist.get_rank() == 0:
            compared = "" if base is None else f"   {base / timing.median_us:5.2f} x {peer}"
            print(f"{case:<42} {timing.median_us:10.1f} us{compared}", flush=True)


def _start(device: str) -> None:
    if device == "cpu":
        dist.init_process_group("gloo")
        return
    gpu = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
    torch.cuda.set_device(gpu)
    dist.init_process_group("nccl", device_id=gpu)


def main(arguments: list[str] | None = None) -> int:
    """Check, measure, print a table, write rank 0's record."""
    parser = Program("bench.speed.comm", __doc__)
    parser.add_filter("calls")
    parser.add_argument("--sizes", type=float, nargs="+", default=SIZES, help="MiB of the bf16 tensor")
    parser.add_argument("--repeats", type=int, default=REPEATS, help="timed calls of each")
    options = parser.parse(arguments)
    is_ours = not dist.is_initialized()
    if is_ours:
        _start(options.device)
    check(options.device)
    what = (
        f"Collectives of {dist.get_world_size()} ranks over {backend_of(options.device)}: sizes of the whole bf16 "
        f"tensor, {options.repeats} calls of each after {WARMUP}, round-robin; quantization is in the times of those "
        "that end in _q; correctness first."
    )
    record = Record("comm", what, device=options.device)
    for size in options.sizes:
        measure(record, size, options)
        if options.device == "cuda":
            torch.cuda.empty_cache()
    if dist.get_rank() == 0 and options.out is not None:
        print(f"record: {record.save(options.out, options.commit)}")
    if is_ours:
        dist.destroy_process_group()
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
