"""What the loop's parts are run on: a policy with random weights, prompts of random tokens, a random reward."""

import dataclasses
import random
import zlib

import tokenizers
import torch
from tokenizers import models, pre_tokenizers

from bench.rl.workloads import LoopSizes, LoopVariant
from bench.serve.shapes import SHAPES, build_model, make_toy
from octavo.errors import ConfigError
from octavo.models import Decoder, ModelConfig
from octavo.models.tokenizer import Tokenizer
from octavo.numerics import Numerics
from octavo.rl.config import RLConfig
from octavo.rl.progress import RLProgress
from octavo.rl.ranks import Ranks
from octavo.rl.rollout_batch import Rollouts
from octavo.rl.rollout_worker import RolloutWorker

_LR = 1e-6  # as large models are reinforced with
_REWARD_RANGE = 2**32  # of a CRC


@dataclasses.dataclass
class RandomWords:
    """A task (octavo.rl.tasks.Task): prompts of random words, each one token, and a reward that is a hash.

    Args:
        vocab_size: words that there are.
        prompt_len: words of a prompt.
    """

    vocab_size: int
    prompt_len: int
    name: str = "random words"
    end: str = ""  # no text ends a completion, and the tokenizer has no end of sequence: all have the same length

    @property
    def alphabet(self) -> str:
        raise ConfigError("random words have a tokenizer of their own")

    def prompts(self, split: str, n: int, seed: int) -> list[str]:
        """`n` prompts of "train" or "heldout"."""
        rng = random.Random(f"{split} {seed}")
        return [" ".join(_word(i) for i in rng.choices(range(self.vocab_size), k=self.prompt_len)) for _ in range(n)]

    def score(self, prompt: str, completion: str) -> float:
        """A number from 0 to 1 that says nothing about the answer, and differs from one to the next."""
        return zlib.crc32(f"{prompt}\n{completion}".encode()) / _REWARD_RANGE

    def examples(self, split: str, n: int, seed: int) -> list[tuple[str, str]]:
        """None: there is no right answer."""
        raise ConfigError("random words have no right answers to warm up on")


def word_tokenizer(vocab_size: int) -> Tokenizer:
    """One token a word of RandomWords, and no end of sequence."""
    backend = tokenizers.Tokenizer(models.WordLevel({_word(i): i for i in range(vocab_size)}))
    backend.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return Tokenizer(backend)


def _word(token_id: int) -> str:
    return f"w{token_id}"


def model_config(sizes: LoopSizes) -> ModelConfig:
    """The shape at the depth of sizes, with a context for its sequences alone: the engine's cache is sized by it."""
    shape = make_toy(SHAPES[sizes.model]) if sizes.is_toy else SHAPES[sizes.model]
    return dataclasses.replace(shape, num_layers=sizes.num_layers, max_position_embeddings=sizes.max_len)


def loop_config(variant: LoopVariant, sizes: LoopSizes, recipe: str, device: str) -> RLConfig:
    """The loop's configuration; what is not said here is its default."""
    trainer = {
        "steps": 1,
        "minibatches": sizes.minibatches,
        "micro_batch_sequences": sizes.micro_batch,
        "optimizer": {"lr": _LR, "weight_decay": 0.0},
    }
    if variant.is_fp8:
        trainer["recipe"] = recipe
    return RLConfig(
        exact=variant.exact,
        precision=variant.precision,
        rollout={  # type: ignore[arg-type]
            "prompts_per_step": sizes.num_prompts,
            "samples_per_prompt": sizes.samples_per_prompt,
            "max_tokens": sizes.max_tokens,
            "max_num_seqs": sizes.num_sequences,
        },
        correction={"kind": "token_tis" if variant.is_fp8 and not variant.exact else "none"},  # type: ignore[arg-type]
        trainer=trainer,  # type: ignore[arg-type]
        run={"device": device},  # type: ignore[arg-type]
    )


def build_policy(config: ModelConfig, numerics: Numerics, device: str) -> Decoder:
    """A policy that can be trained, with the weights that serving benchmarks draw."""
    model = build_model(config, Numerics(), device)
    model.requires_grad_(True)
    model.set_numerics(numerics)
    return model


def build_worker(config: RLConfig, model: Decoder, sizes: LoopSizes, ranks: Ranks | None = None) -> RolloutWorker:
    """What samples from a policy, which may be sharded; no weights are published yet."""
    vocab_size = model.config.vocab_size
    task = RandomWords(vocab_size, sizes.prompt_len)
    return RolloutWorker(config, model, word_tokenizer(vocab_size), task, RLProgress(enabled=False), ranks)


def random_rollouts(sizes: LoopSizes, vocab_size: int, seed: int = 0) -> Rollouts:
    """Rollouts as the loop has them, of random tokens and of lengths drawn evenly; the sampler's logprobs are 0."""
    rng = random.Random(seed)
    lens = [rng.randint(sizes.min_tokens or sizes.max_tokens, sizes.max_tokens) for _ in range(sizes.num_sequences)]
    prompts = [rng.choices(range(vocab_size), k=sizes.prompt_len) for _ in range(sizes.num_prompts)]
    groups = [i // sizes.samples_per_prompt for i in range(sizes.num_sequences)]
    sequences = [prompts[g] + rng.choices(range(vocab_size), k=n) for g, n in zip(groups, lens, strict=True)]
    texts = [""] * sizes.num_sequences
    return Rollouts(
        prompts=texts,
        completions=texts,
        sequences=sequences,
        prompt_lens=[sizes.prompt_len] * sizes.num_sequences,
        response_lens=lens,
        rollout_logprobs=torch.zeros(sum(lens)),
        rewards=torch.tensor([rng.random() for _ in lens]),
        group_ids=torch.tensor(groups),
        weight_versions=torch.zeros(sum(lens), dtype=torch.int64),
        is_finished=torch.ones(sizes.num_sequences, dtype=torch.bool),
    )
