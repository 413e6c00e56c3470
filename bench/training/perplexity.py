"""Held-out perplexity in FP8, with an FP8 KV cache too, against bf16: small models with and without outliers in K.

`python -m bench.training.perplexity` trains a Llama without QK-norm and a Qwen3 with it, several seeds of each, gives a
copy of each Llama outliers in K that are beyond E4M3's range and change nothing in bf16, and measures all of them
through the serving engine's paged cache. With the outliers, a cache whose scale is missing (1) must be seen to fail.
"""

import argparse
import dataclasses
import itertools
import math
import statistics
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
import torch

from bench.program import Program
from bench.record import Record
from bench.report import format_record
from bench.training.corpus import CACHE, Corpus, CorpusSettings, open_corpus
from bench.training.key_outliers import add_key_outliers, key_spread
from bench.training.pretraining_sizes import Size
from octavo.errors import ConfigError
from octavo.models import Decoder, load_model, load_tokenizer
from octavo.models.calibration import calibrate
from octavo.models.perplexity import perplexity
from octavo.nn import PackedContext
from octavo.nn.cross_entropy import linear_cross_entropy
from octavo.numerics import Numerics, get_recipe
from octavo.numerics.formats import E4M3
from octavo.run.optimizer import MasterAdamW
from octavo.run.sections import OptimizerSection
from octavo.serve import LLM, SamplingParams
from octavo.train.config import ScheduleSection
from octavo.train.schedule import learning_rate

RECORDS = Path(__file__).parent.parent / "records"
MAX_GAP = 0.005  # of FP8 with an FP8 cache over bf16
TRAINING_SHARE = 0.55  # of the time that the corpus leaves; the rest is for kernels and measuring
OUTLIER_FACTOR = 4096.0  # lifts K's largest number, about 1 to 20, far beyond E4M3's 448
_MAX_GRAD_NORM = 1.0
_TICKS = 10_000  # the schedule's resolution: what is left of it goes by the clock
_WEIGHTS = "blockwise"
_OUTLIERS = ", outliers in K"  # behind the name of a model that has them


@dataclasses.dataclass(frozen=True)
class PerplexityVariant:
    """One way to run a model.

    Args:
        name: in the record.
        numerics: the model's.
        is_calibrated: K and V under one calibrated scale a layer each, through the scorer; the others go through the
            engine.
    """

    name: str
    numerics: Numerics
    is_calibrated: bool = False

    @property
    def has_no_scale(self) -> bool:
        """Whether its cache rounds K and V as they are: what a missing scale does."""
        return self.numerics.kv_scales == "_fixed"

    @property
    def is_held(self) -> bool:
        """To MAX_GAP."""
        return self.is_calibrated or (self.numerics.kv_cache_dtype == "fp8" and not self.has_no_scale)


def _variants(*, has_outliers: bool = False) -> list[PerplexityVariant]:
    """Those of every model, and the one that is to fail of a model with outliers."""
    fp8, rowwise = get_recipe(_WEIGHTS), get_recipe("rowwise")
    broken = (
        [PerplexityVariant("FP8 + FP8 KV with scale 1", Numerics(fp8, "fp8", kv_scales="_fixed"))]
        if has_outliers
        else []
    )
    return [
        PerplexityVariant("bf16", Numerics()),
        PerplexityVariant("bf16, exact", Numerics(exact=True)),
        PerplexityVariant("FP8", Numerics(fp8)),
        PerplexityVariant("FP8, exact", Numerics(fp8, exact=True)),
        PerplexityVariant("FP8 + FP8 KV", Numerics(fp8, "fp8")),
        PerplexityVariant("FP8 + FP8 KV, exact", Numerics(fp8, "fp8", exact=True)),
        PerplexityVariant("FP8 + FP8 KV with calibrated scales", Numerics(fp8), is_calibrated=True),
        PerplexityVariant("FP8 rowwise", Numerics(rowwise)),
        PerplexityVariant("FP8 rowwise + FP8 KV", Numerics(rowwise, "fp8")),
        *broken,
    ]


@dataclasses.dataclass(frozen=True)
class PerplexityPlan:
    """Sizes of a run: the model, sequences a training step, held-out and calibration sequences, the corpus."""

    size: Size
    batch: int
    num_held_out: int
    num_calibration: int
    corpus: CorpusSettings


def _size(name: str, *sizes: int, seq_len: int, vocab_size: int) -> Size:
    settings = {"seq_len": seq_len, "learning_rate": 1.5e-3, "steps": 0, "warmup_steps": 0, "vocab_size": vocab_size}
    return Size(name, *sizes, **settings)  # type: ignore[arg-type]


def _corpus(vocab_size: int, megabytes: int) -> CorpusSettings:
    num_bytes = megabytes * 1_000_000
    return CorpusSettings((), vocab_size, num_bytes, enough_bytes=0, bpe_bytes=num_bytes // 10)


PLANS = {
    "gpu": PerplexityPlan(
        _size("gpu", 8, 512, 1408, 8, 4, seq_len=512, vocab_size=8192), 64, 128, 32, _corpus(8192, 60)
    ),
    "cpu": PerplexityPlan(_size("cpu", 3, 128, 384, 4, 2, seq_len=128, vocab_size=1024), 8, 128, 16, _corpus(1024, 8)),
    "toy": PerplexityPlan(_size("toy", 2, 128, 256, 4, 2, seq_len=64, vocab_size=512), 4, 6, 2, _corpus(512, 2)),
}


def train(
    plan: PerplexityPlan, corpus: Corpus, device: str, *, qk_norm: bool, seconds: float, seed: int = 0
) -> Decoder:
    """A bf16 model trained for so many seconds, the learning rate falling to a tenth by the clock."""
    config = plan.size.model_config(corpus.meta["vocab_size"])
    if qk_norm:
        config = dataclasses.replace(config, family="qwen3", qk_norm=True)
    model = Decoder(config, device=device, seed=seed)
    peak, schedule = plan.size.learning_rate, ScheduleSection(warmup_steps=_TICKS // 20)
    optimizer, generator = MasterAdamW(model, OptimizerSection(lr=peak)), np.random.default_rng(seed)
    context = PackedContext.from_lengths([plan.size.seq_len] * plan.batch, device=model.device)
    began, loss = time.monotonic(), None
    for step in itertools.count():
        done = (time.monotonic() - began) / seconds
        if done >= 1 and step:
            break
        windows = _windows(corpus.train, generator.integers(len(corpus.train), size=plan.batch), plan.size.seq_len)
        tokens = torch.from_numpy(windows).to(device)
        hidden = model(tokens[:, :-1].reshape(-1), context)
        loss = linear_cross_entropy(hidden, model.head_weight, tokens[:, 1:].reshape(-1))
        loss.backward()
        optimizer.accumulate_gradients()
        optimizer.clip_gradients(_MAX_GRAD_NORM)
        optimizer.step(lr=learning_rate(min(_TICKS - 1, int(done * _TICKS)), _TICKS, peak, schedule))
        if device == "cuda" and step % 16 == 0:
            torch.cuda.synchronize()  # the clock is the host's
    assert loss is not None, "one step at least"
    print(f"{'with' if qk_norm else 'without'} QK-norm: {step} steps, loss {loss.item():.3f}", flush=True)
    return model


def _windows(tokens: np.ndarray, starts: np.ndarray, seq_len: int) -> np.ndarray:
    """[starts, seq_len + 1] int64; a window past the end begins earlier."""
    starts = np.minimum(starts, len(tokens) - seq_len - 1)
    return np.stack([tokens[start : start + seq_len + 1] for start in starts]).astype(np.int64)


def measure(
    model: Decoder, variant: PerplexityVariant, held_out: Sequence[list[int]], calibration: Sequence[list[int]]
) -> float:
    """exp of the mean negative log-probability of every held-out token but each sequence's first."""
    model.set_numerics(variant.numerics)
    if variant.is_calibrated:
        return perplexity(model, held_out, kv_scales=calibrate(model, calibration).kv_scales())
    pages = sum(-(-(len(sequence) + 1) // 64) for sequence in held_out)  # room for all: none is computed twice
    longest = max(map(len, held_out))
    # A step takes a sequence and a part of the next, whose rest then reads these keys from the cache.
    budget = max(16, longest * 3 // 2)
    limits = {"max_num_batched_tokens": budget, "num_kv_pages": pages, "max_num_seqs": 16, "enforce_eager": True}
    llm = LLM(model, warm_up=False, **limits)  # type: ignore[arg-type]
    params = SamplingParams(max_tokens=1, prompt_logprobs=0, ignore_eos=True)
    total, count = 0.0, 0
    for output in llm.generate([list(sequence) for sequence in held_out], params):
        assert output.prompt_logprobs is not None, "asked for"
        for token, found in zip(output.prompt_token_ids[1:], output.prompt_logprobs[1:], strict=True):
            assert found is not None, "of every token but the first"
            total, count = total + found[token].logprob, count + 1
    return math.exp(-total / count)


@dataclasses.dataclass
class Found:
    """One model's figures, a number a seed.

    Args:
        spreads: largest channel of K over the median.
        reaches: the largest K over E4M3's largest number, in the layer that has the least of it.
        values: variant -> perplexities.
    """

    spreads: list[float] = dataclasses.field(default_factory=list)
    reaches: list[float] = dataclasses.field(default_factory=list)
    values: dict[str, list[float]] = dataclasses.field(default_factory=dict)

    @property
    def gaps(self) -> dict[str, list[float]]:
        """PerplexityVariant -> perplexity over bf16's, less 1."""
        reference = self.values["bf16"]
        return {
            variant: [value / base - 1 for value, base in zip(values, reference, strict=True)]
            for variant, values in self.values.items()
        }


def measure_all(
    found: Found,
    name: str,
    model: Decoder,
    held_out: Sequence[list[int]],
    calibration: Sequence[list[int]],
    *,
    has_outliers: bool = False,
) -> None:
    """Every variant of a model; its figures are put behind those of earlier seeds."""
    found.spreads.append(key_spread(model))
    found.reaches.append(min(amax.max().item() for amax in calibrate(model, calibration).keys.values()) / E4M3.max)
    for variant in _variants(has_outliers=has_outliers):
        value = measure(model, variant, held_out, calibration)
        found.values.setdefault(variant.name, []).append(value)
        print(f"{name}: {variant.name}: {value:.4f} ({value / found.values['bf16'][-1] - 1:+.3%})", flush=True)
    model.set_numerics(Numerics())


def find_complaints(found: dict[str, Found]) -> list[str]:
    """Each variant and seed that is further from bf16 than it may be, or nearer than a missing scale must be."""
    complaints = []
    for name, figures in found.items():
        has_outliers = name.endswith(_OUTLIERS)
        for reach in figures.reaches:
            if has_outliers and not reach > 1:
                complaints.append(f"{name}: K reaches {reach:.2f} times E4M3's range, more than 1 is asked for")
        for variant in _variants(has_outliers=has_outliers):
            for gap in figures.gaps[variant.name]:
                said = f"{name}: {variant.name} is {gap:+.3%} from bf16"
                if variant.is_held and not abs(gap) <= MAX_GAP:
                    complaints.append(f"{said}, at most {MAX_GAP:.1%} are allowed")
                if variant.has_no_scale and not gap > MAX_GAP:
                    complaints.append(f"{said}, more than {MAX_GAP:.1%} would show that its scale is missing")
    return complaints


def make_record(found: dict[str, Found], what: str, device: str) -> Record:
    """Means over the seeds, with the smallest and the largest as p20 and p80."""
    record = Record("perplexity", what, device=device)
    for name, figures in found.items():
        for metric, numbers in (
            ("largest channel of K over the median", figures.spreads),
            ("largest K over E4M3's largest number", figures.reaches),
        ):
            record.add_mean(name, metric, "x", numbers)
        reference = statistics.fmean(figures.values["bf16"])
        for variant, values in figures.values.items():
            case, gaps = f"{name}: {variant}", [100 * gap for gap in figures.gaps[variant]]
            record.add_mean(case, "perplexity", "", values, "bf16", reference)
            record.add_mean(case, "over bf16", "%", gaps)
    return record


def _models(
    options: argparse.Namespace, plan: PerplexityPlan, corpus: Corpus, seconds_left: float
) -> Iterator[tuple[str, Decoder]]:
    if options.checkpoint is not None:
        yield options.checkpoint.name, load_model(options.checkpoint, device=options.device)
        return
    seconds = max(1.0, seconds_left * TRAINING_SHARE / 2 / options.seeds)
    for seed in range(options.seeds):
        for name, qk_norm in (("Llama without QK-norm", False), ("Qwen3 with QK-norm", True)):
            yield name, train(plan, corpus, options.device, qk_norm=qk_norm, seconds=seconds, seed=seed)


def _sequences(
    options: argparse.Namespace, plan: PerplexityPlan, corpus: Corpus
) -> tuple[list[list[int]], list[list[int]]]:
    """(held-out, calibration) sequences, evenly over validation and over training text; room is left for one token."""
    sides = []
    for tokens, number in ((corpus.validation, plan.num_held_out), (corpus.train, plan.num_calibration)):
        starts = np.linspace(0, max(0, len(tokens) - plan.size.seq_len), number).astype(np.int64)
        sides.append(_windows(tokens, starts, plan.size.seq_len - 2).tolist())  # of seq_len - 1 tokens
    if options.checkpoint is not None:  # the same text, in its own tokens
        theirs = load_tokenizer(options.checkpoint)
        sides = [[theirs.encode(corpus.tokenizer.decode(s))[: plan.size.seq_len - 1] for s in side] for side in sides]
    return sides[0], sides[1]


def main(arguments: list[str] | None = None) -> int:
    """Train, measure, write the record; 1 where a variant is further from bf16 than it may be, see above."""
    parser = Program("bench.training.perplexity", __doc__, out=RECORDS)
    parser.add_argument("--minutes", type=float, default=9.0, help="of all; training takes a little over half of them")
    parser.add_argument("--seeds", type=int, default=3, help="models of each kind, trained from other weights and text")
    parser.add_argument("--plan", choices=tuple(PLANS), help="sizes; by the device if left out")
    parser.add_argument("--checkpoint", type=Path, help="a bf16 checkpoint with its tokenizer, instead of training")
    parser.add_argument("--outliers", type=float, default=OUTLIER_FACTOR, help="factor of K's channels, a power of two")
    parser.add_argument("--cache", type=Path, default=CACHE, help="folder of the corpus")
    options = parser.parse(arguments)
    if not (options.minutes > 0 and options.seeds > 0):
        raise ConfigError(f"--minutes and --seeds must be > 0, got {options.minutes:g} and {options.seeds}")
    if options.checkpoint is not None:
        options.seeds = 1
    began = time.monotonic()
    plan = PLANS[options.plan or ("gpu" if options.device == "cuda" else "cpu")]
    corpus = open_corpus(plan.corpus, options.cache)
    held_out, calibration = _sequences(options, plan, corpus)
    found: dict[str, Found] = {}
    seconds_left = 60 * options.minutes - (time.monotonic() - began)
    for name, model in _models(options, plan, corpus, seconds_left):
        measure_all(found.setdefault(name, Found()), name, model, held_out, calibration)
        if not model.config.qk_norm and not model.config.is_parallel:
            add_key_outliers(model, options.outliers)
            name += _OUTLIERS
            measure_all(found.setdefault(name, Found()), name, model, held_out, calibration, has_outliers=True)
    record = make_record(found, _describe(plan, corpus, held_out, options), options.device)
    too_far = find_complaints(found)
    print(f"\n{format_record(record)}\nwrote {record.save(options.out, options.commit)}")
    for complaint in too_far:
        print(f"COMPLAINT: {complaint}", file=sys.stderr)
    return 1 if too_far else 0


def _describe(plan: PerplexityPlan, corpus: Corpus, held_out: Sequence[list[int]], options: argparse.Namespace) -> str:
    num_tokens = sum(len(sequence) - 1 for sequence in held_out)
    return (
        f"Perplexity of {num_tokens:,} held-out tokens in sequences below {plan.size.seq_len}, prefilled in chunks "
        f"through the engine's paged cache (calibrated scales: through the scorer), weights and activations in "
        f"{_WEIGHTS} but where rowwise is said. Outliers: {options.outliers:g}-fold pairs of K's channels, Q's divided "
        f"by as much; scale 1 is the fault that must show there. Means of {options.seeds} seeds, the smallest and "
        f"the largest as p20 and p80; gaps are of one seed's perplexities. Largest K: of the layer that has the least. "
        f"Text: {corpus.describe()}."
    )


if __name__ == "__main__":
    sys.exit(main())
