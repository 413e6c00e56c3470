"""What a pretrained model can do: cloze on held-out code, and two small tasks after a short supervised fine-tuning.

Everything is greedy and teacher-forced: an answer counts where each of its tokens is the model's first choice given
the true ones before, which is exactly when greedy decoding would write it.
"""

import dataclasses
import hashlib
import keyword
import random
from collections.abc import Callable, Iterator

import numpy as np
import torch

from bench.training.corpus import Corpus
from bench.training.pretraining_sizes import Size
from octavo.models import Decoder
from octavo.models.tokenizer import Tokenizer
from octavo.nn import PackedContext
from octavo.nn.cross_entropy import linear_cross_entropy
from octavo.rl.tasks import Arithmetic
from octavo.run.optimizer import MasterAdamW
from octavo.run.sections import OptimizerSection
from octavo.train.config import ScheduleSection
from octavo.train.data import IGNORED
from octavo.train.schedule import learning_rate

MAX_FILES = 512
NUM_TRAIN = 5000  # examples of each task that the fine-tuning draws from
TUNING_BATCH, TUNING_LEARNING_RATE = 256, 3e-4
_LOGIT_ROWS = 8192  # whose logits exist at once
_SORTED_DIGITS = 5


@dataclasses.dataclass(frozen=True)
class Example:
    """Token ids of a question and its answer."""

    prompt: list[int]
    answer: list[int]


def measure_downstream(
    model: Decoder, corpus: Corpus, size: Size, optimizer: OptimizerSection, seed: int
) -> dict[str, float]:
    """All scores as shares from 0 to 1, in the model's own numerics; the model is fine-tuned in place.

    Args:
        optimizer: what the fine-tuning's optimizer keeps; its learning rate is TUNING_LEARNING_RATE.
    Returns:
        token, identifier and last_line (see measure_cloze), addition and sorting.
    """
    tokenizer = corpus.tokenizer
    scores = measure_cloze(model, corpus, tokenizer, size.seq_len)
    tasks = {name: make(tokenizer, size.task_examples, seed) for name, make in TASKS.items()}
    fine_tune(model, [examples for examples, _ in tasks.values()], optimizer, seed, size.tuning_steps)
    return scores | {name: measure_exact(model, held_out) for name, (_, held_out) in tasks.items()}


@torch.no_grad()
def measure_cloze(model: Decoder, corpus: Corpus, tokenizer: Tokenizer, seq_len: int) -> dict[str, float]:
    """Next-token accuracy at the end of held-out Python files, each by its last seq_len + 1 tokens.

    Returns:
        token: of all tokens; identifier: where the next token is a name or a part of one, and no keyword; last_line:
        share of files whose last line is right, every token of it.
    """
    files = [file for file in _python_files(corpus) if len(file) > seq_len][:MAX_FILES]
    names, breaks = vocabulary_masks(tokenizer)
    hits, targets, exact = [], [], []
    for start in range(0, len(files), 32):
        windows = np.stack([file[-seq_len - 1 :] for file in files[start : start + 32]]).astype(np.int64)
        context = PackedContext.from_lengths([seq_len] * len(windows), device=model.device)
        inputs = torch.from_numpy(windows[:, :-1]).reshape(-1).to(model.device)
        right = predict(model, inputs, context).reshape(len(windows), seq_len) == windows[:, 1:]
        hits.append(right.reshape(-1))
        targets.append(windows[:, 1:].reshape(-1))
        exact += [
            bool(row[last_line_start(window[1:], breaks) :].all()) for row, window in zip(right, windows, strict=True)
        ]
    hit, target = np.concatenate(hits), np.concatenate(targets)
    return {
        "token": float(hit.mean()),
        "identifier": float(hit[names[target]].mean()),
        "last_line": sum(exact) / len(exact),
        "num_files": len(files),
    }


def predict(model: Decoder, token_ids: torch.Tensor, context: PackedContext) -> np.ndarray:
    """The likeliest next token of every position: [T] int64."""
    hidden = model(token_ids, context)
    return torch.cat([model.logits(rows).argmax(dim=-1) for rows in hidden.split(_LOGIT_ROWS)]).cpu().numpy()


def vocabulary_masks(tokenizer: Tokenizer) -> tuple[np.ndarray, np.ndarray]:
    """For each token: is it a name or a part of one (and no keyword), does it hold the end of a line."""
    texts = [tokenizer.decode([i], skip_special_tokens=False) for i in range(tokenizer.vocab_size)]
    bare = [text.strip() for text in texts]
    names = [text.isidentifier() and not keyword.iskeyword(text) for text in bare]
    return np.array(names), np.array(["\n" in text for text in texts])


def last_line_start(tokens: np.ndarray, breaks: np.ndarray) -> int:
    """Where the last line that is not blank begins; line ends behind it belong to it."""
    is_break = breaks[tokens]
    end = len(tokens)
    while end and is_break[end - 1]:
        end -= 1
    before = np.flatnonzero(is_break[:end])
    return int(before[-1]) + 1 if len(before) else 0


def _python_files(corpus: Corpus) -> Iterator[np.ndarray]:
    for index in np.flatnonzero(corpus.is_python):
        yield corpus.validation[corpus.starts[index] : corpus.starts[index + 1] - 1]  # without the end-of-text token


def make_addition(tokenizer: Tokenizer, num_held_out: int, seed: int) -> tuple[list[Example], list[Example]]:
    """Two-digit sums, `3 7 + 5 8 =` -> ` 0 9 5`: (training, held out); both orders of a sum are on one side."""
    task = Arithmetic("add", num_digits=2, heldout_share=0.2)

    def examples(split: str, count: int) -> list[Example]:
        pairs = task.examples(split, count, seed)
        return [
            _example(tokenizer, " ".join(prompt), " ".join(answer.removesuffix(task.end).zfill(3)))
            for prompt, answer in pairs
        ]

    return examples("train", NUM_TRAIN), examples("heldout", num_held_out)


def make_sorting(tokenizer: Tokenizer, num_held_out: int, seed: int) -> tuple[list[Example], list[Example]]:
    """Five digits in order, `sort 5 2 9 1 7 =` -> ` 1 2 5 7 9`: no held-out set of digits is trained on."""
    generator = random.Random(f"sorting {seed}")
    sides: tuple[list[Example], list[Example]] = ([], [])
    while len(sides[0]) < NUM_TRAIN or len(sides[1]) < num_held_out:
        digits = [str(generator.randrange(10)) for _ in range(_SORTED_DIGITS)]
        answer = " ".join(sorted(digits))
        held_out = hashlib.sha256(answer.encode()).digest()[0] < 51
        sides[held_out].append(_example(tokenizer, f"sort {' '.join(digits)} =", answer))
    return sides[0][:NUM_TRAIN], sides[1][:num_held_out]


TASKS: dict[str, Callable[[Tokenizer, int, int], tuple[list[Example], list[Example]]]] = {
    "addition": make_addition,
    "sorting": make_sorting,
}


def _example(tokenizer: Tokenizer, prompt: str, answer: str) -> Example:
    return Example(tokenizer.encode(prompt), tokenizer.encode(f" {answer}"))


def fine_tune(model: Decoder, tasks: list[list[Example]], section: OptimizerSection, seed: int, num_steps: int) -> None:
    """Train on the answers alone, an equal share of every task in each batch, linearly decaying from the peak."""
    section = section.model_copy(update={"lr": TUNING_LEARNING_RATE})
    optimizer, generator = MasterAdamW(model, section), random.Random(seed)
    schedule = ScheduleSection(kind="linear", warmup_steps=num_steps // 10, min_ratio=0.0)
    for step in range(num_steps):
        batch = [example for task in tasks for example in generator.choices(task, k=TUNING_BATCH // len(tasks))]
        inputs, targets, context = _pack(batch, model.device)
        linear_cross_entropy(model(inputs, context), model.head_weight, targets, ignore_index=IGNORED).backward()
        optimizer.accumulate_gradients()
        optimizer.clip_gradients(1.0)
        optimizer.step(lr=learning_rate(step, num_steps, TUNING_LEARNING_RATE, schedule))


@torch.no_grad()
def measure_exact(model: Decoder, examples: list[Example]) -> float:
    """Share of examples whose whole answer greedy decoding would write."""
    num_right = 0
    for start in range(0, len(examples), TUNING_BATCH):
        batch = examples[start : start + TUNING_BATCH]
        inputs, targets, context = _pack(batch, model.device)
        expected = targets.cpu().numpy()
        wrong = (predict(model, inputs, context) != expected) & (expected != IGNORED)
        ends = np.cumsum([len(example.prompt) + len(example.answer) - 1 for example in batch])
        num_right += sum(not part.any() for part in np.split(wrong, ends[:-1]))
    return num_right / len(examples)


def _pack(batch: list[Example], device: torch.device) -> tuple[torch.Tensor, torch.Tensor, PackedContext]:
    """Inputs [T], targets [T] with IGNORED where a token is none of an answer, and the context of the examples."""
    inputs, targets = [], []
    for example in batch:
        inputs += [*example.prompt, *example.answer[:-1]]
        targets += [*[IGNORED] * (len(example.prompt) - 1), *example.answer]
    lengths = [len(example.prompt) + len(example.answer) - 1 for example in batch]
    context = PackedContext.from_lengths(lengths, device=device)
    both = torch.tensor([inputs, targets], dtype=torch.int64).to(device, non_blocking=True)
    return both[0], both[1], context
