"""Strong outliers in K that leave the model's function alone: pairs of K's channels up, the same of Q's down."""

import torch

from octavo.errors import ConfigError
from octavo.models import Decoder
from octavo.nn import Linear

CHANNELS = 2  # pairs of each kv head that are scaled


@torch.no_grad()
def add_key_outliers(model: Decoder, factor: float) -> None:
    """Multiply some pairs of K's channels by a power of two, and divide the same of Q's by it, in every layer.

    RoPE turns the two channels of a pair into each other, so both get the factor. Every product q . k stays what it
    was, and with a power of two each bf16 value between them only changes its exponent: in high precision the model's
    bits stay. Queries that share a kv head share its pairs.

    Raises:
        ConfigError: a factor that is no power of two above 1, or a model with QK-norm (which undoes it) or with pairs
            of neighbours (GPT-J).
    """
    config = model.config
    if config.qk_norm or config.is_parallel:
        raise ConfigError("outliers in K want a model without QK-norm whose RoPE pairs are half a head apart")
    if not factor > 1 or torch.tensor(factor).frexp().mantissa.item() != 0.5:
        raise ConfigError(f"the factor must be a power of two above 1, for other ones round; got {factor:g}")
    half = (config.rotary_dim or config.head_dim) // 2
    num_q, width = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
    for layer in range(config.num_layers):
        scales = torch.ones(config.num_kv_heads, config.head_dim, device=model.device)  # of K
        for head in range(config.num_kv_heads):
            for i in range(CHANNELS):
                channel = (half // 2 + i * half // CHANNELS + head) % half
                scales[head, [channel, channel + half]] = factor
        of_queries = scales.repeat_interleave(config.num_heads // config.num_kv_heads, dim=0).reciprocal()
        for tensor in _projections(model, layer):
            shape = (-1, *[1] * (tensor.dim() - 1))
            tensor[:num_q] *= of_queries.view(shape).to(tensor.dtype)
            tensor[num_q : num_q + width] *= scales.view(shape).to(tensor.dtype)
    model.mark_weights_updated()


@torch.no_grad()
def key_spread(model: Decoder) -> float:
    """The largest channel of K over the median one, by the norms of the projection's rows; of the layer with most."""
    config = model.config
    num_q, width = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
    spreads = []
    for layer in range(config.num_layers):
        rows = _projections(model, layer)[0][num_q : num_q + width].float().norm(dim=1)
        spreads.append((rows.max() / rows.median()).item())
    return max(spreads)


def _projections(model: Decoder, layer: int) -> list[torch.Tensor]:
    """Weight and, where there is one, bias of q, k and v."""
    linear = model.get_submodule(f"layers.{layer}.self_attn.qkv_proj")
    assert isinstance(linear, Linear) and linear.weight is not None, "a model in high precision"
    return [linear.weight] if linear.bias is None else [linear.weight, linear.bias]
