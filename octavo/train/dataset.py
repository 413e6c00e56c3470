"""What a run trains on, whichever its format: batches of a step, validation batches, the tokenizer that made them."""

import dataclasses
from collections.abc import Iterator
from typing import Protocol

from octavo.models.tokenizer import Tokenizer
from octavo.train.config import TrainConfig
from octavo.train.data import Batch, Sampler, validation_batches
from octavo.train.examples import TokenizedChat, load_chat
from octavo.train.packing import Fitted, PackSampler, fit, validation_packs
from octavo.train.tokens import TokenizedText, load_text


class Dataset(Protocol):
    """Tokens of both sides and how they become batches.

    Attributes:
        fingerprint: 16 hex digits of content, split and tokenizer.
    """

    @property
    def tokenizer(self) -> Tokenizer: ...

    @property
    def fingerprint(self) -> str: ...

    def batches(self, step: int) -> list[Batch]:
        """The micro-batches of one optimizer step (0-based): a pure function of the configuration and the step."""
        ...

    def validation_batches(self) -> Iterator[Batch]:
        """The same held-out batches each time."""
        ...

    def summary(self) -> list[str]:
        """What a person should know about it."""
        ...


def load_dataset(config: TrainConfig) -> Dataset:
    """The data that a configuration describes.

    Raises:
        DataError: it cannot be used. CheckpointError: a tokenizer that cannot be read.
    """
    if config.data.format == "chat":
        return ChatDataset.build(config, load_chat(config.data, config.model.path))
    return TextDataset.build(config, load_text(config.data, config.model.path))


@dataclasses.dataclass(frozen=True)
class TextDataset:
    """Language modelling: windows of a token stream."""

    config: TrainConfig
    text: TokenizedText
    sampler: Sampler

    @classmethod
    def build(cls, config: TrainConfig, text: TokenizedText) -> "TextDataset":
        data = config.data
        sampler = Sampler(
            tokens=text.train,
            seq_len=data.seq_len,
            batch_size=data.batch_size,
            num_micro_batches=data.num_micro_batches,
            seed=config.run.seed,
            eos_id=text.tokenizer.eos_id if data.mask_documents else None,
        )
        return cls(config, text, sampler)

    @property
    def tokenizer(self) -> Tokenizer:
        return self.text.tokenizer

    @property
    def fingerprint(self) -> str:
        return self.text.fingerprint

    def batches(self, step: int) -> list[Batch]:
        return self.sampler.batches(step)

    def validation_batches(self) -> Iterator[Batch]:
        data = self.config.data
        size = data.batch_size // data.num_micro_batches
        max_tokens = self.config.metrics.eval_tokens
        return validation_batches(self.text.validation, data.seq_len, size, self.sampler.eos_id, max_tokens)

    def summary(self) -> list[str]:
        return [
            f"{len(self.text.train):,} training and {len(self.text.validation):,} validation tokens from "
            f"{self.config.data.path}, vocabulary {self.tokenizer.vocab_size}; kept in {self.config.data.cache_dir}"
        ]


@dataclasses.dataclass(frozen=True)
class ChatDataset:
    """Supervised fine-tuning: packed conversations, whose answers are the targets."""

    config: TrainConfig
    chat: TokenizedChat
    sampler: PackSampler
    validation: Fitted

    @classmethod
    def build(cls, config: TrainConfig, chat: TokenizedChat) -> "ChatDataset":
        data = config.data
        train, validation = (fit(side, data.seq_len, data.long_examples) for side in (chat.train, chat.validation))
        sampler = PackSampler(train, data.seq_len, data.batch_size, data.num_micro_batches, config.run.seed)
        return cls(config, chat, sampler, validation)

    @property
    def tokenizer(self) -> Tokenizer:
        return self.chat.tokenizer

    @property
    def fingerprint(self) -> str:
        return self.chat.fingerprint

    def batches(self, step: int) -> list[Batch]:
        return self.sampler.batches(step)

    def validation_batches(self) -> Iterator[Batch]:
        data = self.config.data
        size = data.batch_size // data.num_micro_batches
        return validation_packs(self.validation, data.seq_len, size, self.config.metrics.eval_tokens)

    def summary(self) -> list[str]:
        train, data = self.sampler.fitted, self.config.data
        share = float(train.examples.answers.mean())
        lines = [
            f"{len(train.indices):,} training and {len(self.validation.indices):,} validation examples from "
            f"{data.path}, {share:.0%} of their tokens in answers, vocabulary {self.tokenizer.vocab_size}; "
            f"kept in {data.cache_dir}"
        ]
        counts = {
            "conversations without an answer left out": self.chat.num_empty,
            f"examples longer than data.seq_len={data.seq_len} left out": train.num_skipped
            + self.validation.num_skipped,
            f"examples cut to data.seq_len={data.seq_len}": train.num_cut + self.validation.num_cut,
            "examples left out because the cut took their answers": train.num_empty + self.validation.num_empty,
            "conversations cut into one example an answer (the template changes earlier turns)": self.chat.num_split,
        }
        return lines + [f"{count:,} {what}" for what, count in counts.items() if count]
