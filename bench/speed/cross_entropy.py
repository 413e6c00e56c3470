"""The lm_head's loss, forward and backward, at Llama-3's vocabulary: time and peak memory beside Liger and plain torch.

    python -m bench.speed.cross_entropy [--tokens N] [--commit HASH] [--out FOLDER]

Needs a GPU; checks every case's gradients against fp32 first; writes bench/records/cross_entropy.json.
"""

import argparse
import functools
from collections.abc import Callable
from importlib import import_module
from pathlib import Path

import torch
import torch.nn.functional as F

from bench.record import Record, time_calls
from octavo.nn import linear_cross_entropy, token_logprobs
from octavo.numerics.analysis import sqnr

HIDDEN, VOCABULARY = 4096, 128_256
CHECKED = (1024, 1024, 32_003)  # tokens, hidden, vocabulary: small enough for fp32 logits of all
MIN_DB = 35.0  # the peers keep logits in bf16,
MAX_LOSS_ERROR = 0.05  # and plain torch the loss, too
PLAIN = "torch F.cross_entropy"
LIGER = "liger_kernel.transformers.fused_linear_cross_entropy"
Inputs = tuple[torch.Tensor, torch.Tensor, torch.Tensor]
Loss = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]


def make_inputs(tokens: int, hidden: int, vocabulary: int) -> Inputs:
    """Hidden states, head and targets with logits of the size that a trained model has."""
    x = torch.randn(tokens, hidden, device="cuda", dtype=torch.bfloat16).requires_grad_()
    weight = (torch.randn(vocabulary, hidden, device="cuda") * 3 * hidden**-0.5).bfloat16().requires_grad_()
    return x, weight, torch.randint(0, vocabulary, (tokens,), device="cuda")


def plain(x: torch.Tensor, weight: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """bf16 logits of all tokens at once."""
    return F.cross_entropy(x @ weight.t(), targets)


def from_logprobs(x: torch.Tensor, weight: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """The road of reinforcement learning, which makes the logits twice."""
    return -token_logprobs(x, weight, targets, with_entropy=False)[0].mean()


def make_losses() -> dict[str, Loss]:
    """Every case that can run here; Liger's sums grad_weight in bf16 unless told otherwise."""
    losses: dict[str, Loss] = {
        "octavo linear_cross_entropy": linear_cross_entropy,
        "octavo token_logprobs": from_logprobs,
        PLAIN: plain,
    }
    try:
        liger = import_module(LIGER).LigerFusedLinearCrossEntropyLoss
    except ImportError:
        print("liger-kernel is not installed: no peer but plain torch")
        return losses
    for name, dtype in (("liger", None), ("liger, fp32 grad_weight", torch.float32)):
        module = liger(accum_dtype=dtype)
        losses[name] = lambda x, weight, targets, module=module: module(weight, x, targets)
    return losses


def run(loss: Loss, inputs: Inputs) -> torch.Tensor:
    """Forward and backward with fresh gradients; returns the loss."""
    inputs[0].grad = inputs[1].grad = None
    value = loss(*inputs)
    value.backward()
    return value.detach()


def check(losses: dict[str, Loss]) -> None:
    """Each case's gradients against those of fp32 logits."""
    inputs = make_inputs(*CHECKED)
    exact = [x.detach().float().requires_grad_() for x in inputs[:2]]
    wanted = plain(exact[0], exact[1], inputs[2])
    wanted.backward()
    for name, loss in losses.items():
        value = run(loss, inputs)
        found = [
            float(sqnr(e.grad.cpu(), x.grad.cpu()))
            for x, e in zip(inputs[:2], exact, strict=True)
            if x.grad is not None and e.grad is not None
        ]
        error = abs(float(value - wanted.detach()))
        print(f"{name:28s} loss off by {error:.1e}, gradients {min(found):.1f} dB from fp32")
        if len(found) != 2 or min(found) < MIN_DB or error > MAX_LOSS_ERROR:
            raise SystemExit(f"{name} is wrong: gradients {found} dB, at least {MIN_DB} expected; loss off by {error}")


def peak_bytes(call: Callable[[], object], inputs: Inputs) -> int:
    """Most memory that a call holds beyond its inputs."""
    inputs[0].grad = inputs[1].grad = None
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    call()
    return torch.cuda.max_memory_allocated() - before


def measure(losses: dict[str, Loss], tokens: int, record: Record) -> None:
    """Time and memory of every case, interleaved, as rows of the record."""
    inputs = make_inputs(tokens, HIDDEN, VOCABULARY)
    calls = {name: functools.partial(run, loss, inputs) for name, loss in losses.items()}
    timings = time_calls(calls, repeats=10, warmup=2)
    peaks = {name: peak_bytes(call, inputs) / 2**30 for name, call in calls.items()}
    flops = 6 * tokens * HIDDEN * VOCABULARY
    plain_ms, plain_peak = timings[PLAIN].median_us / 1e3, peaks[PLAIN]
    for name, timing in timings.items():
        ms, peak = timing.median_us / 1e3, peaks[name]
        rate = flops / timing.median_us / 1e6
        print(f"{name:28s} {ms:8.2f} ms  {rate:5.0f} TFLOP/s of three GEMMs  {peak:6.2f} GiB")
        case = f"{name}, {tokens} x {HIDDEN} to {VOCABULARY} bf16, forward and backward"
        p20, p80 = timing.p20_us / 1e3, timing.p80_us / 1e3
        record.add(case, "time", "ms", ms, p20, p80, peer=PLAIN, peer_value=plain_ms)
        record.add(case, "peak memory", "GiB", peak, peer=PLAIN, peer_value=plain_peak)


def main() -> None:
    """Check, measure, write the record."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=8192)
    parser.add_argument("--commit", help="of the tree that is measured, where git is not at hand")
    parser.add_argument("--out", type=Path, default=Path(__file__).parent.parent / "records")
    arguments = parser.parse_args()
    if not torch.cuda.is_available():
        raise SystemExit("bench.speed.cross_entropy needs a GPU: no CUDA device is visible")
    torch.manual_seed(0)
    losses = make_losses()
    check(losses)
    what = (
        "Cross-entropy from hidden states, forward and backward; medians, L2 flushed, interleaved; memory beyond the "
        "inputs, gradients included"
    )
    record = Record("cross_entropy", what)
    measure(losses, arguments.tokens, record)
    print(f"wrote {record.save(arguments.out, arguments.commit)}")


if __name__ == "__main__":
    main()
