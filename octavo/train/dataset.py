"""What a run trains on, whichever its format: batches of a step, validation batches, the tokenizer that made them."""

import dataclasses
import functools
from collections.abc import Callable, Iterator

from octavo.models.tokenizer import Tokenizer
from octavo.train.config import TrainConfig
from octavo.train.data import Batch, Sampler, validation_batches
from octavo.train.examples import load_chat
from octavo.train.packing import PackSampler, fit, validation_packs
from octavo.train.tokens import load_text


@dataclasses.dataclass(frozen=True)
class Dataset:
    """Tokens of both sides and how they become batches.

    Attributes:
        fingerprint: 16 hex digits of content, split and tokenizer.
        batches: the micro-batches of one optimizer step (0-based): a pure function of the configuration and the step.
        validation_batches: the same held-out batches each time.
        summary: what a person should know about it.
    """

    tokenizer: Tokenizer
    fingerprint: str
    batches: Callable[[int], list[Batch]]
    validation_batches: Callable[[], Iterator[Batch]]
    summary: tuple[str, ...]


def load_dataset(config: TrainConfig) -> Dataset:
    """The data that a configuration describes.

    Raises:
        DataError: it cannot be used.
        CheckpointError: a tokenizer that cannot be read.
    """
    return _load_chat(config) if config.data.format == "chat" else _load_text(config)


def _load_text(config: TrainConfig) -> Dataset:
    """Language modelling: windows of a token stream."""
    data, text = config.data, load_text(config.data, config.model.path)
    eos_id = text.tokenizer.eos_id if data.mask_documents else None
    sampler = Sampler(text.train, data.seq_len, data.batch_size, data.num_micro_batches, config.run.seed, eos_id)
    held_out = functools.partial(
        validation_batches,
        text.validation,
        data.seq_len,
        data.batch_size // data.num_micro_batches,
        eos_id,
        config.metrics.eval_tokens,
    )
    summary = (
        f"{len(text.train):,} training and {len(text.validation):,} validation tokens from {data.path}, vocabulary "
        f"{text.tokenizer.vocab_size}; kept in {data.cache_dir}"
    )
    return Dataset(text.tokenizer, text.fingerprint, sampler.batches, held_out, (summary,))


def _load_chat(config: TrainConfig) -> Dataset:
    """Supervised fine-tuning: packed conversations, whose answers are the targets."""
    data, chat = config.data, load_chat(config.data, config.model.path)
    train, validation = (fit(side, data.seq_len, data.long_examples) for side in (chat.train, chat.validation))
    sampler = PackSampler(train, data.seq_len, data.batch_size, data.num_micro_batches, config.run.seed)
    micro_batch_size = data.batch_size // data.num_micro_batches
    held_out = functools.partial(
        validation_packs, validation, data.seq_len, micro_batch_size, config.metrics.eval_tokens
    )
    share = float(train.examples.answers.mean())
    summary = (
        f"{len(train.indices):,} training and {len(validation.indices):,} validation examples from {data.path}, "
        f"{share:.0%} of their tokens in answers, vocabulary {chat.tokenizer.vocab_size}; kept in {data.cache_dir}"
    )
    counts = {
        "conversations without an answer left out": chat.num_empty,
        f"examples longer than data.seq_len={data.seq_len} left out": train.num_skipped + validation.num_skipped,
        f"examples cut to data.seq_len={data.seq_len}": train.num_cut + validation.num_cut,
        "examples left out because the cut took their answers": train.num_empty + validation.num_empty,
        "conversations cut into one example an answer (the template changes earlier turns)": chat.num_split,
    }
    notes = (f"{count:,} {what}" for what, count in counts.items() if count)
    return Dataset(chat.tokenizer, chat.fingerprint, sampler.batches, held_out, (summary, *notes))
