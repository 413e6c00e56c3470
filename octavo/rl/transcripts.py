"""Sample transcripts of a run: text token by token with both sides' logprobs, for the report to colour."""

import dataclasses
import itertools
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from octavo.models.stream_decoder import StreamDecoder
from octavo.models.tokenizer import Tokenizer
from octavo.rl.history import append_lines, read_lines
from octavo.rl.rollout_batch import Rollouts

TRANSCRIPTS_FILE = "transcripts.jsonl"
MAX_TOKENS = 1024  # of one transcript; the rest of a longer response is left out, and counted


@dataclasses.dataclass(frozen=True)
class Token:
    """One token after the prompt.

    Attributes:
        text: what it adds to the text; empty for a part of a character.
        trainer: log pi of it on the trainer's side; None for what an environment wrote.
        rollout: the same on the rollout's side.
    """

    text: str
    trainer: float | None = None
    rollout: float | None = None


@dataclasses.dataclass(frozen=True)
class Transcript:
    """One response.

    Attributes:
        why: it was chosen.
        num_left_out: tokens beyond the first MAX_TOKENS.
    """

    step: int
    why: str
    prompt: str
    reward: float
    is_finished: bool
    tokens: tuple[Token, ...]
    num_left_out: int = 0

    @property
    def max_abs_delta(self) -> float:
        """The largest |delta logprob| of the tokens shown."""
        deltas = (abs(t.trainer - t.rollout) for t in self.tokens if t.trainer is not None and t.rollout is not None)
        return max(deltas, default=0.0)

    def as_dict(self) -> dict[str, Any]:
        """Plain JSON values; tokens as short lists."""
        return {**dataclasses.asdict(self), "tokens": [list(dataclasses.astuple(token)) for token in self.tokens]}

    @classmethod
    def from_dict(cls, fields: dict[str, Any]) -> "Transcript":
        """as_dict's inverse."""
        return cls(**{**fields, "tokens": tuple(Token(*values) for values in fields["tokens"])})


def choose_transcripts(
    step: int, rollouts: Rollouts, trainer_logprobs: torch.Tensor, tokenizer: Tokenizer
) -> list[Transcript]:
    """The responses of a step that are worth a look: best and worst reward, and the largest mismatch if there is one.

    Args:
        trainer_logprobs: [tokens] fp32 on the CPU, packed as rollouts.rollout_logprobs.
    """
    if not len(rollouts) or not rollouts.num_tokens:
        return []
    deltas = (trainer_logprobs - rollouts.rollout_logprobs).abs().nan_to_num(nan=torch.inf)
    worst = [float(part.max()) if part.numel() else 0.0 for part in deltas.split(rollouts.response_lens)]
    wanted = {
        int(rollouts.rewards.argmax()): "best reward",
        int(rollouts.rewards.argmin()): "worst reward",
    }
    if any(worst):
        wanted[max(range(len(worst)), key=worst.__getitem__)] = "largest mismatch"
    return [_transcript(step, why, index, rollouts, trainer_logprobs, tokenizer) for index, why in wanted.items()]


def append_transcripts(path: Path, transcripts: list[Transcript]) -> None:
    """Add them to a file, a line each."""
    append_lines(path, (transcript.as_dict() for transcript in transcripts))


def read_transcripts(path: Path) -> list[Transcript]:
    """The transcripts of a file without lines that were cut short; none where there is no file."""
    return [Transcript.from_dict(row) for row in read_lines(path)]


def _transcript(
    step: int, why: str, index: int, rollouts: Rollouts, trainer_logprobs: torch.Tensor, tokenizer: Tokenizer
) -> Transcript:
    start = sum(rollouts.response_lens[:index])
    rows = slice(start, start + rollouts.response_lens[index])
    pairs = zip(trainer_logprobs[rows].tolist(), rollouts.rollout_logprobs[rows].tolist(), strict=True)
    ids = rollouts.sequences[index][rollouts.prompt_lens[index] :]
    is_sampled = rollouts.is_sampled[index] if rollouts.is_sampled else [True] * len(ids)
    tokens = tuple(itertools.islice(_tokens(ids, is_sampled, pairs, tokenizer), MAX_TOKENS))
    return Transcript(
        step=step,
        why=why,
        prompt=rollouts.prompts[index],
        reward=float(rollouts.rewards[index]),
        is_finished=bool(rollouts.is_finished[index]),
        tokens=tokens,
        num_left_out=len(ids) - len(tokens),
    )


def _tokens(
    ids: list[int], is_sampled: list[bool], pairs: Iterator[tuple[float, float]], tokenizer: Tokenizer
) -> Iterator[Token]:
    decoder = StreamDecoder(tokenizer, skip_special_tokens=False)
    for token_id, sampled in zip(ids, is_sampled, strict=True):
        text = decoder.push(token_id)
        yield Token(text, *next(pairs)) if sampled else Token(text)
