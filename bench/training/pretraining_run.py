"""One pretraining run on one device: fixed windows, a loop that never waits for the GPU but to note its losses.

Everything measured goes to a file of JSON lines as it happens; a run that reaches its deadline leaves a checkpoint, and
the same command goes on from there.
"""

import dataclasses
import datetime
import json
import math
import time
from importlib import metadata
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch

from bench.training.corpus import Corpus, load_corpus
from bench.training.downstream import measure_downstream
from bench.training.pretraining_sizes import SIZES, Size
from bench.training.pretraining_variants import parse_variant
from octavo.models import Decoder
from octavo.nn import PackedContext, fp8_state_dict, load_fp8_state_dict
from octavo.nn.cross_entropy import linear_cross_entropy
from octavo.run.optimizer import MasterAdamW
from octavo.train.build import set_precision
from octavo.train.config import PrecisionSection
from octavo.train.schedule import learning_rate

MAX_GRAD_NORM = 1.0
NOTE_EVERY = 20  # steps between waits for the GPU
LEAST_SECONDS = 25  # a run is not begun with less time than this
State = Literal["done", "paused", "waiting"]


@dataclasses.dataclass(frozen=True)
class PretrainingJob:
    """One run.

    Args:
        variant: which one.
        seed: which one.
        size: which one.
        steps: its length.
        tokens_per_step: its length.
        corpus: folder of the tokens.
        work: folder of results and checkpoints.
        deadline: time.time() at which it stops, with a checkpoint.
        keep_middle: leave a checkpoint at the middle for variants that switch there.
        downstream: measure cloze and tasks at the end.
        num_evals: validations in the course of the run.
        side_by_side: for the record: runs that share the device.
        commit: for the record: of which tree.
    """

    variant: str
    seed: int
    size: str
    steps: int
    tokens_per_step: int
    corpus: Path
    work: Path
    device: str
    deadline: float
    keep_middle: bool = False
    downstream: bool = False
    num_evals: int = 10
    side_by_side: int = 1
    commit: str = "unknown"

    @property
    def name(self) -> str:
        """Of its files."""
        return f"{self.size}-{self.variant}-s{self.seed}"

    @property
    def results(self) -> Path:
        """Its JSON lines."""
        return self.work / f"{self.name}.jsonl"

    @property
    def checkpoint(self) -> Path:
        """Where a paused run goes on."""
        return self.work / f"{self.name}.pt"

    @property
    def middle(self) -> Path:
        """The run at half its steps."""
        return self.work / f"{self.name}.middle.pt"

    @property
    def parent(self) -> "PretrainingJob | None":
        """The job of the variant whose first half this one shares."""
        parent = parse_variant(self.variant).parent
        return None if parent is None else dataclasses.replace(self, variant=parent)

    def has(self, kind: str) -> bool:
        """Whether its results hold a row of this kind."""
        return any(row["kind"] == kind for row in read_rows(self.results))


def read_rows(path: Path) -> list[dict[str, Any]]:
    """JSON lines; a last line that was cut off is left out."""
    rows = []
    for line in path.read_text().splitlines() if path.is_file() else []:
        try:
            rows.append(json.loads(line))
        except json.JSONDecodeError:
            break
    return rows


def execute(job: PretrainingJob) -> State:
    """Run a job, or as much of it as there is time for."""
    if job.has("finished"):
        return "done"
    parent = job.parent
    if job.deadline - time.time() < LEAST_SECONDS or (parent is not None and not parent.middle.is_file()):
        return "waiting"
    return _Run(job).execute()


class _Run:
    """The state of one run."""

    def __init__(self, job: PretrainingJob) -> None:
        self.job, self.variant, self.size = job, parse_variant(job.variant), SIZES[job.size]
        self.device = torch.device(job.device)
        self.corpus = load_corpus(job.corpus)
        self.num_sequences = job.tokens_per_step // self.size.seq_len
        self.model = Decoder(self.size.model_config(self.corpus.meta["vocab_size"]), device=self.device, seed=job.seed)
        if self.variant.nudged:
            nudge(self.model)
        self.precision: PrecisionSection | None = None  # the model's, none before a run begins
        self.optimizer = MasterAdamW(self.model, self.variant.optimizer_section(self.size.learning_rate))
        self.losses = torch.zeros(job.steps, 2, device=self.device)  # loss and gradient norm
        self.context = self._context(self.num_sequences)
        self.windows = train_windows(self.corpus, self.size, job).to(self.device)  # [steps * sequences, seq_len + 1]
        self.validation = validation_windows(self.corpus, self.size).to(self.device)
        self.step = 0

    def execute(self) -> State:
        """Train, validate, note."""
        self._begin()
        if not self.job.has("end"):
            if not self._train():
                return "paused"
            self._end()
        if self.job.downstream:
            if time.time() > self.job.deadline:
                return "paused"
            self._set_precision(self.variant.final_precision)
            section = self.variant.optimizer_section(self.size.learning_rate)
            scores = measure_downstream(self.model, self.corpus, self.size, section, self.job.seed)
            self._note("downstream", **scores)
        self._note("finished")
        self.job.checkpoint.unlink(missing_ok=True)
        return "done"

    def _begin(self) -> None:
        """Where a checkpoint is, from there; else from the parent's middle; else from the seed's weights."""
        job, parent = self.job, self.job.parent
        if job.checkpoint.is_file():
            self._load(job.checkpoint)
            rows = read_rows(job.results)
        elif parent is not None:
            self._load(parent.middle)
            rows = [self._start_row(), *read_rows(parent.results)[1:]]
        else:
            rows = [self._start_row()]
        kept = [row | {"run": job.name} for row in rows if row["kind"] == "start" or self._is_before(row)]
        job.results.write_text("".join(json.dumps(row) + "\n" for row in kept))
        self._set_precision(self.variant.precision if self.step < self._middle else self.variant.final_precision)

    def _is_before(self, row: dict[str, Any]) -> bool:
        return row["kind"] in ("steps", "eval", "end") and row["step"] < self.step

    def _start_row(self) -> dict[str, Any]:
        job, size, config = self.job, self.size, self.model.config
        self._set_precision(self.variant.precision)
        report = self.model.conversion_report
        num_tokens = job.steps * self.num_sequences * size.seq_len
        return {
            "kind": "start",
            "run": job.name,
            "variant": job.variant,
            "seed": job.seed,
            "size": job.size,
            "num_params": config.num_params,
            "shape": [config.num_layers, config.hidden_size, config.intermediate_size],
            "steps": job.steps,
            "tokens_per_step": self.num_sequences * size.seq_len,
            "seq_len": size.seq_len,
            "learning_rate": size.learning_rate,
            "fp8_flop_share": report.fp8_flop_share if report else 0.0,
            "epochs": num_tokens / self.corpus.meta["num_tokens"]["train"],
            "corpus": self.corpus.describe(),
            "side_by_side": job.side_by_side,
            **describe_machine(self.device),
            "commit": job.commit,
        }

    @property
    def _middle(self) -> int:
        return self.job.steps // 2

    def _train(self) -> bool:
        """Steps to the end; False where the deadline came first."""
        job, schedule = self.job, self.size.schedule(self.job.steps)
        eval_every = max(1, job.steps // job.num_evals)
        noted, began = self.step, time.monotonic()
        while self.step < job.steps:
            if self.step == self._middle:
                if job.keep_middle:
                    self._save(job.middle)
                self._set_precision(self.variant.final_precision)
            self._train_step(learning_rate(self.step, job.steps, self.size.learning_rate, schedule))
            self.step += 1
            is_eval = self.step % eval_every == 0 and self.step < job.steps
            if self.step % NOTE_EVERY == 0 or is_eval or self.step in (job.steps, self._middle):
                self._note_steps(noted, began)
                if is_eval:
                    self._note("eval", step=self.step - 1, loss=self._validate(self.size.eval_sequences)[0])
                noted, began = self.step, time.monotonic()
                if time.time() > job.deadline and self.step < job.steps:
                    self._save(job.checkpoint)
                    return False
        return True

    def _train_step(self, lr: float) -> None:
        rows = slice(self.step * self.num_sequences, (self.step + 1) * self.num_sequences)
        loss = self._loss(self.windows[rows], self.context)
        loss.backward()
        self.optimizer.accumulate_gradients()
        norm = self.optimizer.clip_gradients(MAX_GRAD_NORM)
        self.optimizer.step(lr=lr)
        self.losses[self.step, 0], self.losses[self.step, 1] = loss.detach(), norm

    def _loss(self, windows: torch.Tensor, context: PackedContext) -> torch.Tensor:
        """Mean loss of windows [sequences, seq_len + 1]: every token but the first is a target."""
        tokens = windows.long()
        hidden = self.model(tokens[:, :-1].reshape(-1), context)  # [tokens, hidden_size]
        return linear_cross_entropy(hidden, self.model.head_weight, tokens[:, 1:].reshape(-1))

    @torch.no_grad()
    def _validate(self, num_sequences: int) -> tuple[float, list[float]]:
        """Mean loss over the first validation windows, and that of each batch of them."""
        windows = self.validation[:num_sequences]
        batches = windows.split(min(self.num_sequences, 32))
        losses = [self._loss(batch, self._context(len(batch))) for batch in batches]
        means = torch.stack(losses).tolist()
        sizes = [len(batch) for batch in batches]
        return sum(m * n for m, n in zip(means, sizes, strict=True)) / len(windows), means

    def _context(self, num_sequences: int) -> PackedContext:
        return PackedContext.from_lengths([self.size.seq_len] * num_sequences, device=self.device)

    def _set_precision(self, precision: PrecisionSection) -> None:
        if precision != self.precision:
            set_precision(self.model, precision)
            self.precision = precision

    def _end(self) -> None:
        """Validate the final weights in the variant's own numerics, and once more in bf16."""
        loss, batches = self._validate(self.size.final_sequences)
        rows = [row for row in read_rows(self.job.results) if row["kind"] == "steps"]
        timed = rows[1:] or rows  # the first steps compile
        rate = sum(len(row["loss"]) for row in timed) / sum(row["seconds"] for row in timed)
        is_cuda = self.device.type == "cuda"
        state = [t for name, t in self.optimizer.state_dict().items() if not name.startswith("param.")]
        self._set_precision(PrecisionSection(recipe="bf16"))
        self._note(
            "end",
            step=self.step - 1,
            loss=loss,
            batch_losses=[round(x, 5) for x in batches],
            bf16_loss=self._validate(self.size.final_sequences)[0],
            num_tokens=min(len(self.validation), self.size.final_sequences) * self.size.seq_len,
            tokens_per_s=rate * self.num_sequences * self.size.seq_len,
            peak_bytes=torch.cuda.max_memory_allocated(self.device) if is_cuda else 0,
            optimizer_bytes=sum(t.numel() * t.element_size() for t in state),
        )
        if self.job.downstream:  # it may need another command
            self._save(self.job.checkpoint)

    def _note_steps(self, first: int, began: float) -> None:
        values = self.losses[first : self.step].tolist()  # waits for the device
        seconds = time.monotonic() - began
        losses, norms = ([round(row[i], 5) for row in values] for i in (0, 1))
        self._note("steps", step=first, loss=losses, grad_norm=norms, seconds=round(seconds, 4))
        if not all(map(math.isfinite, losses + norms)):
            raise FloatingPointError(
                f"{self.job.name}: a loss or gradient is not finite in steps {first} to {self.step}"
            )

    def _note(self, kind: str, **values: Any) -> None:
        with self.job.results.open("a") as file:
            file.write(json.dumps({"kind": kind, "run": self.job.name, **values}) + "\n")

    def _save(self, path: Path) -> None:
        state = {"step": self.step, "model": self.model.state_dict(), "optimizer": self.optimizer.state_dict()}
        state["fp8"] = fp8_state_dict(self.model)
        torch.save(state, path.with_suffix(".partial"))
        path.with_suffix(".partial").replace(path)

    def _load(self, path: Path) -> None:
        state = torch.load(path, map_location=self.device, weights_only=True)
        self.step = state["step"]
        self.model.load_state_dict(state["model"])
        load_fp8_state_dict(self.model, state["fp8"])
        self.optimizer.load_state_dict(state["optimizer"])


def describe_machine(device: torch.device) -> dict[str, str | None]:
    """What a record says of where it was measured."""
    return {
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else "CPU",
        "torch": torch.__version__,
        "triton": metadata.version("triton") if find_spec("triton") else None,
        "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
    }


@torch.no_grad()
def nudge(model: Decoder) -> None:
    """Move one weight by one unit in its last place."""
    weight = model.get_parameter("layers.0.mlp.down_proj.weight")
    assert weight.dtype == torch.bfloat16, "the runs have bf16 parameters"
    weight.view(torch.int16)[0, 0] += 1


def train_windows(corpus: Corpus, size: Size, job: PretrainingJob) -> torch.Tensor:
    """What a run sees, in its order: [steps * sequences, seq_len + 1] int32, stretches of the training tokens.

    The seed shuffles the stretches; none comes twice before all have come.
    """
    needed = job.steps * (job.tokens_per_step // size.seq_len)
    available = (len(corpus.train) - 1) // size.seq_len
    generator = np.random.default_rng(job.seed)
    order = np.concatenate([generator.permutation(available) for _ in range(-(-needed // available))])[:needed]
    return _gather(corpus.train, order, size.seq_len)


def validation_windows(corpus: Corpus, size: Size) -> torch.Tensor:
    """The first validation tokens: [sequences, seq_len + 1] int32, the same in every run."""
    available = (len(corpus.validation) - 1) // size.seq_len
    return _gather(corpus.validation, np.arange(min(available, size.final_sequences)), size.seq_len)


def _gather(tokens: np.ndarray, order: np.ndarray, seq_len: int) -> torch.Tensor:
    windows = np.empty((len(order), seq_len + 1), dtype=np.int32)
    for row, index in enumerate(order):
        windows[row] = tokens[index * seq_len : index * seq_len + seq_len + 1]
    return torch.from_numpy(windows)
