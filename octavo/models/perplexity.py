"""perplexity: how well a model predicts a text, under its own numerics or with a KV cache of known FP8 scales."""

import math
from collections.abc import Sequence

import torch

from octavo.errors import DataError
from octavo.models.calibration import OnProgress, batches
from octavo.models.checkpoint.kv_scales import KVScales
from octavo.models.decoder import Decoder
from octavo.models.scoring import sequence_logprobs
from octavo.nn import PackedContext, token_logprobs

_MAX_LOG = 709.0  # exp of more overflows a double


@torch.no_grad()
def perplexity(
    model: Decoder,
    sequences: Sequence[Sequence[int]],
    *,
    kv_scales: tuple[KVScales, ...] = (),
    on_progress: OnProgress | None = None,
    stage: str = "perplexity",
) -> float:
    """exp of the mean negative log-probability of every token but each sequence's first.

    Args:
        sequences: token ids, none longer than the model's context.
        kv_scales: one a layer: K and V are rounded to E4M3 under these scales, as engines with static scales of the
            KV cache do. None: they are used as the model's numerics have them.
        stage: what on_progress is told.
    Raises:
        DataError: not one token to predict.
    """
    total, count = 0.0, 0
    for batch, num_done in batches(sequences):
        found = _static_kv_logprobs(model, batch, kv_scales) if kv_scales else sequence_logprobs(model, batch)
        total += sum(logprobs.double().sum().item() for logprobs in found)
        count += sum(logprobs.numel() for logprobs in found)
        if on_progress is not None:
            on_progress(stage, num_done, len(sequences))
    if not count:
        raise DataError("perplexity needs a sequence of at least two tokens, got none")
    mean = -total / count
    return math.exp(mean) if not mean > _MAX_LOG else math.inf


def _static_kv_logprobs(
    model: Decoder, sequences: Sequence[Sequence[int]], kv_scales: tuple[KVScales, ...]
) -> list[torch.Tensor]:
    """sequence_logprobs with keys and values under known scales."""
    lengths = [len(sequence) - 1 for sequence in sequences]
    inputs = [token for sequence in sequences for token in sequence[:-1]]
    targets = [token for sequence in sequences for token in sequence[1:]]
    hidden = model(torch.tensor(inputs, device=model.device), _StaticKVContext(lengths, model.device, kv_scales))
    logprobs, _ = token_logprobs(
        hidden,
        model.head_weight,
        torch.tensor(targets, device=model.device),
        with_entropy=False,
        head_bias=model.head_bias,
        tensor_group=model.head_group,
    )
    return list(logprobs.split(lengths))


class _StaticKVContext:
    """Whole sequences whose K and V go through E4M3 under one known scale a layer, or one a head."""

    def __init__(self, lengths: list[int], device: torch.device, kv_scales: tuple[KVScales, ...]) -> None:
        self._packed = PackedContext.from_lengths(lengths, device=device)
        self.positions = self._packed.positions
        self._kv_scales = kv_scales

    def attend(
        self, layer_index: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *, softmax_scale: float
    ) -> torch.Tensor:
        scales = self._kv_scales[layer_index]
        k, v = _round(k, scales.k_scale), _round(v, scales.v_scale)
        return self._packed.attend(layer_index, q, k, v, softmax_scale=softmax_scale)


def _round(x: torch.Tensor, scale: torch.Tensor | None) -> torch.Tensor:
    """[T, KH, D] as E4M3 under scale, [1] or [KH], gives it back."""
    if scale is None:
        return x
    fp8 = torch.finfo(torch.float8_e4m3fn)
    by_head = scale.to(x.device)[:, None]
    codes = (x.float() / by_head).clamp(fp8.min, fp8.max).to(torch.float8_e4m3fn)
    return (codes.float() * by_head).to(x.dtype)
