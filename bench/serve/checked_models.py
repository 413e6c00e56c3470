"""The models whose exactness is measured: a few layers of the real shapes, and a small one that is trained here."""

import dataclasses
import json
import random
from collections.abc import Callable

import numpy as np

from bench.serve.shapes import SHAPES, build_model, make_toy
from octavo.models import Decoder, ModelConfig
from octavo.numerics import Numerics
from octavo.run.optimizer import MasterAdamW
from octavo.run.sections import OptimizerSection
from octavo.train.data import Sampler
from octavo.train.step import train_step
from octavo.train.tasks import make_tasks

TRAINED = "trained model"
NAMES = (TRAINED, *SHAPES)
NUM_LAYERS = 2  # of a real shape
# Text as bytes, so that no tokenizer is needed.
_TRAINED_CONFIG = ModelConfig(
    family="qwen3",
    vocab_size=256,
    hidden_size=512,
    intermediate_size=1536,
    num_layers=4,
    num_heads=8,
    num_kv_heads=2,
    head_dim=64,
    qk_norm=True,
    max_position_embeddings=4096,
)
_NUM_TASKS, _SEQ_LEN, _LR, _WARMUP_STEPS = 20_000, 128, 3e-3, 10
_STEPS, _BATCH_SIZE = 300, 32
_TOY_STEPS, _TOY_BATCH_SIZE = 20, 4


@dataclasses.dataclass(frozen=True)
class CheckedModel:
    """A model whose parameters have gradients, as a trainer holds it, and its kind of prompts.

    Attributes:
        draw: (number of tokens, randomness) -> a prompt.
        losses: at the start and the end of its training; None for random weights.
    """

    name: str
    model: Decoder
    draw: Callable[[int, random.Random], list[int]]
    losses: tuple[float, float] | None = None


def build_checked(name: str, device: str, *, num_layers: int | None = None, quick: bool) -> CheckedModel:
    """One of NAMES.

    Args:
        num_layers: of a real shape; None for NUM_LAYERS.
        quick: at toy sizes.
    Raises:
        AssertionError: the model that is trained does not learn.
    """
    if name == TRAINED:
        return _trained(device, quick=quick)
    config = make_toy(SHAPES[name]) if quick else SHAPES[name]
    config = dataclasses.replace(config, num_layers=num_layers or NUM_LAYERS)
    model = build_model(config, Numerics(), device).requires_grad_()
    ids = range(config.vocab_size)
    label = f"{'toy of ' if quick else ''}{name}, {config.num_layers} layers"
    return CheckedModel(label, model, lambda length, rng: rng.choices(ids, k=length))


def _trained(device: str, *, quick: bool) -> CheckedModel:
    """A model that answers small questions: its logprobs are peaked, its activations have what training gives them."""
    config = make_toy(_TRAINED_CONFIG) if quick else _TRAINED_CONFIG
    config = dataclasses.replace(config, vocab_size=_TRAINED_CONFIG.vocab_size)
    model = Decoder(config, device=device)
    text = "".join(map(_write, make_tasks(_NUM_TASKS // 10 if quick else _NUM_TASKS)))
    losses = _train(model, text, quick=quick)
    starts = [0, *(i + 1 for i, letter in enumerate(text[:-1]) if letter == "\n")]

    def draw(length: int, rng: random.Random) -> list[int]:
        start = rng.choice(starts)
        return list((text[start:] + text)[:length].encode())

    return CheckedModel(f"{'toy of a ' if quick else ''}{TRAINED}", model, draw, losses)


def _train(model: Decoder, text: str, *, quick: bool) -> tuple[float, float]:
    """Losses of the first and the last step."""
    steps, batch_size = (_TOY_STEPS, _TOY_BATCH_SIZE) if quick else (_STEPS, _BATCH_SIZE)
    tokens = np.frombuffer(text.encode(), dtype=np.uint8)
    sampler = Sampler(tokens, _SEQ_LEN, batch_size, num_micro_batches=1, seed=0, eos_id=None)
    optimizer = MasterAdamW(model, OptimizerSection(weight_decay=0.0))
    losses = []
    for step in range(steps):
        lr = _LR * min(1.0, (step + 1) / _WARMUP_STEPS)
        losses.append(train_step(model, optimizer, sampler.batches(step), lr=lr, max_grad_norm=1.0, step=step + 1).loss)
    assert losses[-1] < losses[0] / 2, f"{steps} steps took the loss from {losses[0]:.2f} to {losses[-1]:.2f} only"
    return losses[0], losses[-1]


def _write(line: str) -> str:
    """A conversation of make_tasks as lines: QUESTION=ANSWER."""
    ends = {"user": "=", "assistant": "\n"}
    return "".join(message["content"] + ends[message["role"]] for message in json.loads(line)["messages"])
