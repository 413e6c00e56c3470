"""Does a model train as well where its gradients travel in FP8? `torchrun --nproc-per-node 2 -m
bench.training.reduction_gap --out bench/records`.

A byte model of about 50M parameters in plain torch: fp32 parameters and gradients, bf16 autocast, no FP8 but on the
wire. For each seed every variant starts from the same weights and sees the same batches; what counts is the difference
of its final held-out loss to that of DDP's own fp32 all-reduce, in percent. `nudged`, the same all-reduce from weights
of which one starts one unit in the last place of bf16 away, says how much of that is rounding alone: it may well be as
much as the gap, so the record also has the gap to the mean of both fp32 runs, and the mean's standard error. A
finished run is a row of reduction_gap.jsonl in --out: the same command goes on from there.
"""

import dataclasses
import gc
import hashlib
import json
import math
import os
import statistics
import sys
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from bench.program import Program
from bench.record import Record, git_commit
from bench.report import format_record
from bench.speed.stack import PlainLayer, StackShape, torch_gated_unit, torch_norm
from bench.speed.variants import attention_backend
from bench.timing import synchronize
from bench.training.corpus import CorpusSettings, collect
from octavo.distributed.fp8_hook import FP8HookState, fp8_hook
from octavo.errors import DataError
from octavo.parallel.fp8_reduce_scatter import use_fp8_reduce_scatter
from octavo.train.config import ScheduleSection
from octavo.train.schedule import learning_rate

BASE, NUDGED, HOOK, CONTROL, STOCHASTIC = (
    "fp32 all-reduce",
    "fp32 all-reduce, nudged",
    "FP8 hook",
    "FP8 hook without error feedback",
    "FSDP2, stochastic FP8 reduce-scatter",
)
VARIANTS = (BASE, HOOK, CONTROL, NUDGED, STOCHASTIC)
MAX_MEAN_PERCENT = 0.25
ROWS = "reduction_gap.jsonl"
NUM_BYTES = 256
_STD = 0.02
_MAX_GRAD_NORM = 1.0
_MOST_COMPILED = 64  # code of one layer: under DDP and FSDP2, first and later layers, with and without gradients


@dataclasses.dataclass(frozen=True)
class GapSettings:
    """What every run has in common; set before any of them ran.

    Args:
        shape: of the layers and of a rank's batch.
        num_steps: of a run.
        peak_lr: after warmup_steps; a cosine takes it to a tenth.
        warmup_steps: long, for early steps amplify rounding.
        eval_batches: held-out batches of a rank.
        text: where bytes come from.
    """

    shape: StackShape
    num_steps: int = 1500
    peak_lr: float = 6e-4
    warmup_steps: int = 300
    weight_decay: float = 0.1
    eval_batches: int = 128
    text: CorpusSettings = dataclasses.field(default_factory=lambda: CorpusSettings(max_bytes=100_000_000))

    @property
    def schedule(self) -> ScheduleSection:
        """Warm-up and cosine."""
        return ScheduleSection(kind="cosine", warmup_steps=self.warmup_steps, min_ratio=0.1)


FULL = GapSettings(StackShape("a byte model", 768, 2816, 12, 4, 64, layers=6, batch=16, seq_len=512))
_TOY_SHAPE = StackShape("a toy byte model", 128, 256, 2, 1, 64, layers=2, batch=2, seq_len=32)
TOY = dataclasses.replace(FULL, shape=_TOY_SHAPE, num_steps=6, warmup_steps=2, eval_batches=2)


class ByteModel(nn.Module):
    """Embeddings of bytes and places, layers, and the head's loss."""

    def __init__(self, shape: StackShape) -> None:
        super().__init__()
        self.bytes = nn.Embedding(NUM_BYTES, shape.hidden_size)
        self.places = nn.Embedding(shape.seq_len, shape.hidden_size)
        self.layers = nn.ModuleList(PlainLayer(shape, torch_norm, torch_gated_unit) for _ in range(shape.layers))
        self.norm = nn.Parameter(torch.ones(shape.hidden_size))
        self.head = nn.Linear(shape.hidden_size, NUM_BYTES, bias=False)
        for name, parameter in self.named_parameters():
            if parameter.dim() == 2:
                is_residual = name.endswith((".o.weight", ".down.weight"))
                nn.init.normal_(parameter, std=_STD * ((2 * shape.layers) ** -0.5 if is_residual else 1.0))

    def forward(self, windows: torch.Tensor) -> torch.Tensor:
        """windows [B, S + 1] int64 bytes -> the mean loss of the S targets, nats a byte."""
        x = self.bytes(windows[:, :-1]) + self.places.weight  # [B, S, H] fp32
        for layer in self.layers:
            x = layer(x)
        logits = self.head(torch_norm(x, self.norm))
        return F.cross_entropy(logits.float().flatten(0, 1), windows[:, 1:].flatten())


@dataclasses.dataclass(frozen=True)
class Text:
    """Bytes of both sides, cut into windows, and the hash of all files.

    Attributes:
        train: [windows, seq_len + 1] uint8, on the device.
        held_out: the same.
    """

    train: torch.Tensor
    held_out: torch.Tensor
    sha256: str


def load_text(settings: GapSettings, device: str) -> Text:
    """The files of the convergence runs' corpus, as bytes; a file's hash decides on which side it is."""
    files = collect(settings.text)
    share = settings.text.validation_fraction
    sides: tuple[list[bytes], list[bytes]] = ([], [])
    for digest, content, _ in files:
        sides[int(digest[-8:], 16) < share * 2**32].append(content)
    train, held_out = (_cut(b"\0".join(side), settings.shape.seq_len + 1).to(device) for side in sides)
    return Text(train, held_out, hashlib.sha256("".join(digest for digest, _, _ in files).encode()).hexdigest())


def _cut(content: bytes, length: int) -> torch.Tensor:
    num = len(content) // length
    return torch.from_numpy(np.frombuffer(content, np.uint8)[: num * length].reshape(num, length).copy())


def build(settings: GapSettings, variant: str, seed: int, device: str) -> nn.Module:
    """A variant's model on this rank, with the values that the seed has in every variant."""
    torch.manual_seed(seed)
    with torch.device(device):
        model = ByteModel(settings.shape)
    if variant == NUDGED:
        with torch.no_grad():
            model.get_parameter("layers.0.q.weight")[0, 0] *= 1 + 2**-7
    for layer in model.layers if device == "cuda" else []:
        layer.compile()
    if variant == STOCHASTIC:
        for layer in model.layers:
            fully_shard(layer)
        fully_shard(model)
        use_fp8_reduce_scatter(model, min_bytes=0, seed=seed)
        return model
    wrapped = DistributedDataParallel(model, gradient_as_bucket_view=True)
    if variant in (HOOK, CONTROL):
        state = FP8HookState(wrapped, min_bytes=0, error_feedback=variant == HOOK)
        wrapped.register_comm_hook(state, fp8_hook)
    return wrapped


def train(settings: GapSettings, variant: str, seed: int, text: Text, device: str) -> dict[str, Any]:
    """One run: its held-out loss, its last training loss, its seconds."""
    rank, world, shape = dist.get_rank(), dist.get_world_size(), settings.shape
    began = time.perf_counter()
    model = build(settings, variant, seed, device)
    matrices = [p for p in model.parameters() if p.dim() > 1]
    vectors = [p for p in model.parameters() if p.dim() <= 1]
    groups = [{"params": matrices, "weight_decay": settings.weight_decay}, {"params": vectors, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=settings.peak_lr, betas=(0.9, 0.95), fused=device == "cuda")
    num_windows = settings.num_steps * world * shape.batch
    if len(text.train) < num_windows or len(text.held_out) < settings.eval_batches * world * shape.batch:
        raise DataError(f"{len(text.train)} windows of text do not hold {num_windows}; take more of it, or fewer steps")
    order = np.random.default_rng(seed).permutation(len(text.train))[:num_windows]
    batches = text.train[torch.from_numpy(order).to(device)].view(settings.num_steps, world, shape.batch, -1)[:, rank]
    losses = []
    with attention_backend(device):
        for step in range(settings.num_steps):
            for group in optimizer.param_groups:
                group["lr"] = learning_rate(step, settings.num_steps, settings.peak_lr, settings.schedule)
            with torch.autocast(device, torch.bfloat16):
                loss = model(batches[step].long())
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), _MAX_GRAD_NORM)
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
            losses.append(loss.detach())
        synchronize(device)
        trained_s = time.perf_counter() - began
        held_out = _evaluate(settings, model, text, device)
    return {
        "variant": variant,
        "seed": seed,
        "held_out_loss": held_out,
        "last_train_loss": _mean_of_ranks(torch.stack(losses[-50:]).mean()),
        "step_ms": 1e3 * trained_s / settings.num_steps,
        "seconds": time.perf_counter() - began,
    }


@torch.no_grad()
def _evaluate(settings: GapSettings, model: nn.Module, text: Text, device: str) -> float:
    """The mean over the same held-out windows, each rank a part of them."""
    rank, world, size = dist.get_rank(), dist.get_world_size(), settings.shape.batch
    total = torch.zeros((), dtype=torch.float64, device=device)
    for index in range(settings.eval_batches):
        first = (index * world + rank) * size
        with torch.autocast(device, torch.bfloat16):
            total += model(text.held_out[first : first + size].long())
    return _mean_of_ranks(total / settings.eval_batches)


def _mean_of_ranks(value: torch.Tensor) -> float:
    total = value.double()
    dist.all_reduce(total)
    return float(total) / dist.get_world_size()


def gaps(runs: list[dict[str, Any]], variant: str, baselines: tuple[str, ...] = (BASE,)) -> list[float]:
    """Percent of the baselines' mean held-out loss of the same seed, a seed each that all of them have."""
    found = []
    for seed in _paired(runs, (variant, *baselines)):
        losses = {run["variant"]: run["held_out_loss"] for run in runs if run["seed"] == seed}
        base = statistics.fmean(losses[name] for name in baselines)
        found.append(100 * (losses[variant] - base) / base)
    return found


def _paired(runs: list[dict[str, Any]], variants: tuple[str, ...]) -> list[int]:
    """Seeds that all of these variants have finished."""
    return sorted(set.intersection(*({run["seed"] for run in runs if run["variant"] == name} for name in variants)))


def make_record(runs: list[dict[str, Any]], settings: GapSettings, text_sha256: str, device: str, world: int) -> Record:
    """The finished runs; beside each gap the largest that rounding alone makes."""
    shape, seeds = settings.shape, sorted({run["seed"] for run in runs})
    num_params = sum(p.numel() for p in ByteModel(shape).parameters())
    limit = f"The mean gap of {HOOK} was to be within {MAX_MEAN_PERCENT} %, set before. "
    complaints = find_complaints(runs)
    record = Record(
        "reduction_gap",
        f"Held-out loss after {settings.num_steps} steps of a byte model of {num_params / 1e6:.1f}M parameters on "
        f"{world} ranks, {shape.batch} x {shape.seq_len} bytes a rank and step: fp32 parameters and gradients, bf16 "
        f"autocast, AdamW (betas 0.9, 0.95, decay {settings.weight_decay}), peak learning rate {settings.peak_lr} "
        f"after {settings.warmup_steps} steps, cosine to a tenth, clipping at {_MAX_GRAD_NORM}. Seeds finished: "
        f"{', '.join(map(str, seeds))}. Gaps are paired with {BASE} of the same seed; p20 and p80 hold the smallest "
        f"and the largest of a seed. min_bytes of both FP8 reductions is 0, so that every matrix but the embeddings "
        f"travels in FP8. {settings.eval_batches * world * shape.batch * shape.seq_len / 1e6:.2f}M held-out bytes of "
        f"source files that training never sees; sha256 of the text {text_sha256[:16]}. {limit}"
        + (f"Outside of it: {'; '.join(complaints)}." if complaints else "It is."),
        device=device,
    )
    noise = max((abs(gap) for gap in gaps(runs, NUDGED)), default=None)
    for variant in VARIANTS:
        own = [run for run in runs if run["variant"] == variant]
        if not own:
            continue
        record.add_mean(variant, "held-out loss", "nats/byte", [run["held_out_loss"] for run in own])
        if variant != BASE and (found := gaps(runs, variant)):
            paired = _paired(runs, (variant, BASE))
            of_base = [run["held_out_loss"] for run in runs if run["variant"] == BASE and run["seed"] in paired]
            record.add_mean(variant, "held-out loss of the fp32 all-reduce, same seeds", "nats/byte", of_base)
            if len(found) > 1:
                error = statistics.stdev(found) / len(found) ** 0.5
                record.add(variant, "standard error of the mean gap", "%", error)
            if variant != NUDGED and (of_both := gaps(runs, variant, (BASE, NUDGED))):
                record.add_mean(variant, "gap to the mean of both fp32 runs of a seed", "%", of_both)
            peer = ("nudged, largest |gap|", noise) if noise is not None and variant != NUDGED else (None, None)
            record.add_mean(variant, "gap to the fp32 all-reduce, mean over seeds", "%", found, *peer)
            record.add(variant, "seeds", "runs", len(found))
    return record


def find_complaints(runs: list[dict[str, Any]]) -> list[str]:
    """What is off: a loss that is not finite, or FP8 with error feedback outside the floor."""
    complaints = [
        f"{run['variant']}, seed {run['seed']}: loss {run['held_out_loss']}"
        for run in runs
        if not math.isfinite(run["held_out_loss"])
    ]
    found = gaps(runs, HOOK)
    if found and not abs(statistics.fmean(found)) <= MAX_MEAN_PERCENT:
        complaints.append(f"{HOOK}: mean gap {statistics.fmean(found):+.3f} %, at most {MAX_MEAN_PERCENT} was wanted")
    return complaints


def main(arguments: list[str] | None = None) -> int:
    """Run what is not done yet, write the record after each run; 0 where nothing is off."""
    parser = Program("bench.training.reduction_gap", __doc__)
    parser.add_argument("--seeds", type=int, default=3, help="seeds of each variant")
    parser.add_argument("--variants", nargs="+", choices=VARIANTS, default=VARIANTS[:4], help="the first is always run")
    parser.add_argument("--toy", action="store_true", help="sizes for a CPU, which claim nothing")
    parser.add_argument("--time-limit", type=float, default=math.inf, help="seconds; a run that would pass it is left")
    options = parser.parse(arguments)
    if options.device == "cpu" and not options.toy:
        parser.error("a CPU runs toy sizes only, which claim nothing: add --toy")
    warnings.filterwarnings("ignore")
    began, is_ours = time.perf_counter(), not dist.is_initialized()
    if options.device == "cuda":
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    if is_ours:
        dist.init_process_group("nccl" if options.device == "cuda" else "gloo")
    torch._dynamo.config.recompile_limit = _MOST_COMPILED
    torch._dynamo.config.fail_on_recompile_limit_hit = True
    torch._dynamo.config.optimize_ddp = False  # a layer is small enough: no cut at DDP's buckets
    settings = TOY if options.toy else FULL
    text = load_text(settings, options.device)
    key = {
        "settings": repr(settings),
        "text": text.sha256,
        "device": options.device if options.device == "cpu" else torch.cuda.get_device_name(),
        "torch": torch.__version__,
        "ranks": dist.get_world_size(),
        "commit": options.commit or git_commit(),
    }
    runs = _from_first_rank(lambda: _finished(options.out, key))
    for seed in range(options.seeds):
        for variant in [BASE, *(v for v in options.variants if v != BASE)]:
            if any((run["variant"], run["seed"]) == (variant, seed) for run in runs):
                continue
            took = max((run["seconds"] for run in runs[1:]), default=0.0)  # the first one's holds compilation
            if _from_first_rank(lambda took=took: time.perf_counter() - began + took > options.time_limit):  # type: ignore[misc]
                continue
            run = train(settings, variant, seed, text, options.device)
            gc.collect()
            runs.append(run)
            if dist.get_rank() == 0:
                print(f"{time.perf_counter() - began:6.1f} s: {json.dumps(run)}", flush=True)
                _save(
                    options, run | key, make_record(runs, settings, text.sha256, options.device, dist.get_world_size())
                )
    complaints = find_complaints(runs)
    if dist.get_rank() == 0:
        record = make_record(runs, settings, text.sha256, options.device, dist.get_world_size())
        print(format_record(record), *(f"COMPLAINT: {complaint}" for complaint in complaints), sep="\n")
    if is_ours:
        dist.destroy_process_group()
    return 1 if complaints else 0


def _finished(folder: Path | None, key: dict[str, Any]) -> list[dict[str, Any]]:
    """Runs of the same settings that an earlier call has finished."""
    file = None if folder is None else folder / ROWS
    rows = [json.loads(line) for line in file.read_text().splitlines()] if file is not None and file.is_file() else []
    return [row for row in rows if all(row.get(name) == value for name, value in key.items())]


def _save(options: Any, row: dict[str, Any], record: Record) -> None:
    if options.out is None:
        return
    record.save(options.out, options.commit)
    with (options.out / ROWS).open("a") as file:
        file.write(json.dumps(row) + "\n")


def _from_first_rank(find: Callable[[], Any]) -> Any:
    """What the first rank finds, on all of them."""
    found = [find() if dist.get_rank() == 0 else None]
    dist.broadcast_object_list(found)
    return found[0]


if __name__ == "__main__":
    sys.exit(main())
