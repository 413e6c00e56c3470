"""`octavo bench capacity`: what one whole GPU holds of a Llama-3-8B-wide model with its head and cross-entropy.

Every variant has the same layers, parameters, loss and fused AdamW on bf16 parameters. For each, the most sequences
that train without running out of memory are searched, to an eighth; the others are timed at one more than plain torch
takes.
"""

import dataclasses
import functools
import statistics
import time
from collections.abc import Callable, Iterator

import torch
import torch.nn.functional as F
from torch import nn

from bench.measure import free_variant
from bench.options import BenchOptions
from bench.outcome import Outcome
from bench.record import Record
from bench.report import format_results
from bench.speed import peers
from bench.speed.stack import StackShape, torch_norm
from bench.speed.variants import StackVariant, attention_backend, build_layers, build_optimizer, runners
from octavo.nn import RMSNorm
from octavo.nn.cross_entropy import linear_cross_entropy

SHAPE = StackShape("Llama-3-8B", 4096, 14336, 32, 8, 128, layers=8, batch=1, seq_len=8192)
TOY = StackShape("a toy", 128, 256, 2, 1, 64, layers=1, batch=1, seq_len=64)
VOCABULARY, TOY_VOCABULARY = 128_256, 512
PLAIN_NAME = "plain torch bf16"
_WARMUP_STEPS, _TIMED_STEPS = 1, 2
_MAX_BATCH, _TOY_MAX_BATCH = 64, 2
# Losses at the first batch, which every variant can take: near ln(vocabulary), moved little by rounding.
MAX_LOSS_DIFFERENCE = 0.01


@dataclasses.dataclass(frozen=True)
class Trial:
    """One variant at one batch size that fitted."""

    step_ms: float
    peak_bytes: int
    loss: float


@dataclasses.dataclass
class Search:
    """What a variant did at each batch size tried; None is out of memory."""

    variant: StackVariant
    trials: dict[int, Trial | None] = dataclasses.field(default_factory=dict)

    @property
    def max_batch(self) -> int:
        """Most sequences that trained; 0 for none."""
        return max((batch for batch, trial in self.trials.items() if trial is not None), default=0)


def run(options: BenchOptions) -> Outcome:
    """Search every variant, print the table, make the record."""
    shape = TOY if options.quick else SHAPE
    shape = dataclasses.replace(shape, layers=options.layers or shape.layers, seq_len=options.seq_len or shape.seq_len)
    vocabulary, limit = (TOY_VOCABULARY, _TOY_MAX_BATCH) if options.quick else (VOCABULARY, _MAX_BATCH)
    print(peers.describe_peers(options.device))
    searches: list[Search] = []
    setting = None
    for variant in _make_variants(options):
        search = Search(variant)
        searches.append(search)
        _search(search, setting, limit, functools.partial(_try, variant, shape, vocabulary, options.device))
        setting = setting or min(search.max_batch + 1, limit)
        print(f"{variant.name}: up to {search.max_batch} x {shape.seq_len} tokens", flush=True)
    assert setting is not None, "plain torch is always searched first"
    what = (
        f"{shape.layers} layers of Llama-3-8B's width, embedding and lm_head of {vocabulary}, cross-entropy, AdamW on "
        f"bf16 parameters, sequences of {shape.seq_len} tokens on the whole card: most sequences tried a step without "
        f"running out of memory, and the step at {setting} sequences, one more than {PLAIN_NAME} can take."
    )
    record = Record("capacity", what, device=options.device)
    _add_rows(record, searches, shape, setting)
    print(format_results(record, "capacity"))
    complaints = _compare_losses(searches)
    if searches[0].max_batch >= limit and not options.quick:
        complaints.append(f"{PLAIN_NAME} fits {limit} sequences, so that nothing is shown; give it more layers")
    return Outcome(record, complaints)


def _make_variants(options: BenchOptions) -> list[StackVariant]:
    variants = [StackVariant("compiled torch bf16", "plain", compiled=True)]
    if peers.LIGER in peers.peer_versions(options.device):
        variants.append(StackVariant("Liger bf16", "liger"))
    variants += [StackVariant(f"octavo {recipe}", "octavo", recipe) for recipe in ("bf16", *options.recipes)]
    return [StackVariant(PLAIN_NAME, "plain"), *(variant for variant in variants if options.wants(variant.name))]


def _search(search: Search, setting: int | None, limit: int, attempt: Callable[[int], Trial | None]) -> None:
    """Double the batch until it no longer fits, then bisect to an eighth; 1 and `setting` are always tried."""

    def fits(batch: int) -> bool:
        if batch not in search.trials:
            search.trials[batch] = attempt(batch)
        return search.trials[batch] is not None

    if setting is not None and fits(1):
        fits(setting)
    low, high = search.max_batch, max(1, 2 * search.max_batch)
    refused = [batch for batch, trial in search.trials.items() if trial is None]
    high = min([high, *refused])
    while high <= limit and fits(high):
        low, high = high, 2 * high
    high = min(high, limit + 1)
    while high - low > max(1, low // 8):
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle) else (low, middle)


def _try(variant: StackVariant, shape: StackShape, vocabulary: int, device: str, batch: int) -> Trial | None:
    try:
        return _train(variant, dataclasses.replace(shape, batch=batch), vocabulary, device)
    except torch.OutOfMemoryError:
        return None
    finally:
        free_variant(device)


def _train(variant: StackVariant, shape: StackShape, vocabulary: int, device: str) -> Trial:
    model = _Model(variant, shape, vocabulary, device)
    optimizer = build_optimizer(variant, list(model.parameters()), device)
    batches = _batches(shape, vocabulary, device)
    times_ms, first_loss = [], 0.0
    if device == "cuda":
        torch.cuda.reset_peak_memory_stats()
    with attention_backend(device):
        for index in range(_WARMUP_STEPS + _TIMED_STEPS):
            token_ids, targets = next(batches)
            start = time.perf_counter()
            loss = model(token_ids, targets)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
            value = float(loss.detach())  # waits for the GPU
            if device == "cuda":
                torch.cuda.synchronize()
            times_ms.append((time.perf_counter() - start) * 1e3)
            first_loss = value if index == 0 else first_loss
    peak = torch.cuda.max_memory_allocated() if device == "cuda" else 0
    return Trial(statistics.median(times_ms[_WARMUP_STEPS:]), peak, first_loss)


def _batches(shape: StackShape, vocabulary: int, device: str) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Random tokens and targets [B, S] without end; the first batch of a size is the same for every variant."""
    generator = torch.Generator(device).manual_seed(0)
    sizes = (shape.batch, shape.seq_len + 1)
    while True:
        tokens = torch.randint(vocabulary, sizes, generator=generator, device=device)
        yield tokens[:, :-1], tokens[:, 1:]


class _Model(nn.Module):
    """Embedding, the variant's layers, a norm and the variant's loss over the head."""

    def __init__(self, variant: StackVariant, shape: StackShape, vocabulary: int, device: str) -> None:
        super().__init__()
        self.variant = variant
        sizes, std = (vocabulary, shape.hidden_size), shape.hidden_size**-0.5
        generator = torch.Generator(device).manual_seed(1)
        embedding, head = (torch.randn(sizes, generator=generator, device=device).to(torch.bfloat16) for _ in range(2))
        self.embedding, self.head = nn.Parameter(embedding), nn.Parameter(head.mul_(std))
        self.layers = nn.ModuleList(build_layers(variant, shape, device))
        self.norm = RMSNorm(shape.hidden_size, 1e-5, device=device)
        self._calls = runners(variant, list(self.layers), device)

    def forward(self, token_ids: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        """Mean cross-entropy of targets [B, S] after token_ids [B, S]."""
        x = F.embedding(token_ids, self.embedding)  # [B, S, H]
        for call in self._calls:
            x = call(x)
        norm = torch_norm(x, self.norm.weight) if self.variant.family == "plain" else self.norm(x)
        hidden, flat = norm.flatten(0, 1), targets.flatten()  # [T, H], [T]
        if self.variant.family == "plain":
            return F.cross_entropy(F.linear(hidden, self.head).float(), flat)
        if self.variant.family == "liger":
            return peers.liger_cross_entropy(hidden, self.head, flat)
        return linear_cross_entropy(hidden, self.head, flat)


def _compare_losses(searches: list[Search]) -> list[str]:
    first = {s.variant.name: s.trials.get(1) for s in searches}
    base = first[PLAIN_NAME]
    if base is None:
        return [f"{PLAIN_NAME} does not train one sequence: choose fewer layers"]
    return [
        f"{name}: first loss {trial.loss:.5f}, {PLAIN_NAME} has {base.loss:.5f}"
        for name, trial in first.items()
        if trial is not None and not abs(trial.loss - base.loss) <= MAX_LOSS_DIFFERENCE * base.loss
    ]


def _add_rows(record: Record, searches: list[Search], shape: StackShape, setting: int) -> None:
    plain = searches[0].max_batch * shape.seq_len
    for search in searches:
        name, trial = search.variant.name, search.trials.get(setting)
        tokens = search.max_batch * shape.seq_len
        record.add(name, "most tokens a step", "tokens", tokens, peer=PLAIN_NAME, peer_value=plain)
        if trial is not None:
            where = f"at {setting} sequences, where {PLAIN_NAME} is out of memory"
            record.add(name, f"step time {where}", "ms", trial.step_ms)
            record.add(name, f"throughput {where}", "tokens/s", setting * shape.seq_len / trial.step_ms * 1e3)
            record.add(name, f"peak memory {where}", "GiB", trial.peak_bytes / 2**30)
