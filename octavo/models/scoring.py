"""sequence_logprobs: the trainer's side of the one policy, differentiable, in exact mode the sampler's very bits."""

import itertools
from collections.abc import Sequence

import torch

from octavo.errors import DataError, ShapeError
from octavo.models.decoder import Decoder
from octavo.nn import PackedContext, token_logprobs
from octavo.nn.conversion import require_module
from octavo.ops._runtime.to_device import send
from octavo.ops.gemm.scaled_mm import unpadded_rows

_SUMMED = 128  # weights' gradients sum over tokens, in blocks of so many


def sequence_logprobs(
    model: Decoder,
    sequences: Sequence[Sequence[int]],
    temperature: float = 1.0,
    *,
    prompt_lens: Sequence[int] | None = None,
) -> list[torch.Tensor]:
    """Log-probability of every token of each sequence given those before it.

    Args:
        model: its numerics decide the bits.
        sequences: token ids, prompt and response together; packed into one batch without padding.
        temperature: > 0; logits are divided by it before the log-softmax, which is untruncated.
        prompt_lens: tokens at each sequence's beginning that are not scored, which spares their logits.
    Returns:
        One [len - 1] fp32 tensor a sequence: entry i is that of token i + 1; with prompt_lens [len - prompt_len], entry
        i that of token prompt_len + i. Differentiable in the parameters; those of a model that holds codes alone take
        no gradient: load it with trainable=True.
    Raises:
        ShapeError: an empty sequence, or one longer than the model's context; prompt_lens that are not one for each
            sequence, from 1 to its length.
        DataError: no list of sequences, a token outside the vocabulary, or a temperature that is not > 0.
        ConfigError: what is no model.
    Exactness: under exact numerics equal in bits to what the sampler reports, whatever else is in the batch.
    """
    logprobs, counts = joined_logprobs(model, sequences, temperature, prompt_lens=prompt_lens)
    return list(logprobs.split(counts))


def joined_logprobs(
    model: Decoder,
    sequences: Sequence[Sequence[int]],
    temperature: float,
    *,
    prompt_lens: Sequence[int] | None,
) -> tuple[torch.Tensor, list[int]]:
    """sequence_logprobs as one tensor, sequence after sequence, and how many of it are of each."""
    require_module(model, "sequence_logprobs")
    if not temperature > 0.0:
        raise DataError(f"temperature must be > 0 to score tokens, got {temperature}")
    _check_sequences(model, sequences)
    if prompt_lens is not None:
        _check_prompt_lens(sequences, prompt_lens)
    lengths = [len(sequence) - 1 for sequence in sequences]
    scored = lengths if prompt_lens is None else [len(ids) - n for ids, n in zip(sequences, prompt_lens, strict=True)]
    if not sum(lengths):
        return torch.zeros(0, device=model.device), scored
    whole, added = _padded(model, lengths)
    inputs = [id_ for ids, n in zip(sequences, whole, strict=True) for id_ in (*ids[:-1], *[0] * (n - len(ids) + 1))]
    targets = [id_ for ids, count in zip(sequences, scored, strict=True) for id_ in ids[len(ids) - count :]]
    # all of it is on its way before the pass is launched: nothing makes the GPU wait in the middle
    token_ids, wanted = (send(ids, torch.int64, model.device) for ids in (inputs + [0] * sum(added), targets))
    kept = None
    if not scored == lengths == whole:
        ends = [end - n + length for end, n, length in zip(itertools.accumulate(whole), whole, lengths, strict=True)]
        rows = [row for end, count in zip(ends, scored, strict=True) for row in range(end - count, end)]
        kept = send(rows, torch.int64, model.device)
    packed = [*(n for n in whole if n), *added]
    context = PackedContext.from_lengths(packed, model.numerics, model.device, model.kv_table)
    hidden = model(token_ids, context)  # [T, hidden_size]
    hidden = hidden[: len(wanted)] if kept is None else hidden.index_select(0, kept)
    logprobs, _ = token_logprobs(
        hidden,
        model.head_weight,
        wanted,
        temperature=temperature,
        exact=model.numerics.exact,
        with_entropy=False,
        head_bias=model.head_bias,
        tensor_group=model.head_group,
    )
    return logprobs, scored


def _padded(model: Decoder, lengths: list[int]) -> tuple[list[int], list[int]]:
    """Where padding tokens go: (lengths of the sequences with those at their ends, of padding sequences after them).

    Sequences that all become equally long are attended to as a batch, faster than ragged ones. In exact mode,
    whose attention gains nothing, gradients keep their bits.
    """
    longest = model.config.max_position_embeddings
    wanted = _num_wanted(model, sum(lengths))
    each, rest = divmod(wanted, len(lengths))
    if not (model.numerics.exact or rest) and max(lengths) <= each <= longest:
        return [each] * len(lengths), []
    num_whole, rest = divmod(wanted - sum(lengths), longest)
    return lengths, [longest] * num_whole + [rest] * (rest > 0)


def _num_wanted(model: Decoder, num_tokens: int) -> int:
    """Tokens with padding, which spares FP8 products on a GPU the copies with which they fill up odd sizes.

    There is none where a token would be seen by others: in a scale that all share, or by the experts' statistics.
    """
    recipe = model.numerics.recipe
    is_local = recipe.input is not None and not recipe.input.is_per_tensor
    if model.device.type != "cuda" or not is_local or model.config.num_experts or model.kv_table is not None:
        return num_tokens
    return unpadded_rows(-(-num_tokens // _SUMMED) * _SUMMED, model.numerics.exact)


def _check_prompt_lens(sequences: Sequence[Sequence[int]], prompt_lens: Sequence[int]) -> None:
    if len(prompt_lens) != len(sequences):
        raise ShapeError(
            f"prompt_lens has {len(prompt_lens)} entries for {len(sequences)} sequences; give one for each"
        )
    for i, (sequence, prompt_len) in enumerate(zip(sequences, prompt_lens, strict=True)):
        if not 1 <= prompt_len <= len(sequence):
            raise ShapeError(
                f"prompt_lens[{i}] is {prompt_len}, but sequence {i} has {len(sequence)} tokens, of which the first "
                "is never scored; it must be from 1 to that"
            )


def _check_sequences(model: Decoder, sequences: Sequence[Sequence[int]]) -> None:
    config = model.config
    for i, sequence in enumerate(sequences):
        if isinstance(sequence, (str, int, float)) or getattr(sequence, "ndim", 1) != 1:
            raise DataError(
                f"sequence {i} must be a list of token ids, got {str(sequence)[:80]!r} ({type(sequence).__name__}); a "
                "single sequence is given as [[1, 2, 3]], and text is tokenized first"
            )
        if not 1 <= len(sequence) <= config.max_position_embeddings:
            raise ShapeError(
                f"sequence {i} has {len(sequence)} tokens; it needs at least one and at most "
                f"max_position_embeddings={config.max_position_embeddings}"
            )
        if not 0 <= min(sequence) <= max(sequence) < config.vocab_size:
            raise DataError(
                f"sequence {i} holds the token ids {min(sequence)} to {max(sequence)}; the vocabulary has "
                f"{config.vocab_size}"
            )
