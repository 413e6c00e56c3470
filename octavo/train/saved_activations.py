"""What the modules of a decoder save for the backward: a formula, tensor by tensor, beside what nn/ really saves.

Legend: T tokens of a micro-batch, H hidden_size, Q and KV rows of q_proj and k_proj, F intermediate_size, V vocabulary;
E experts, S experts a token, R rows of the batch sorted by expert.
With sequence parallelism T is a rank's own tokens between cut linears.
A tensor that two modules save is counted once, where it is made.
"""

import dataclasses
import math

import torch

from octavo.distributed.token_shards import TokenShards
from octavo.models import Decoder
from octavo.nn import MLP, Attention, ColumnLinear, DecoderLayer, Linear, ParallelDecoderLayer, RMSNorm, SparseMoE
from octavo.nn.functional.norm_linear import can_fuse
from octavo.numerics import Recipe, Scaling, get_recipe
from octavo.ops.moe import num_rows


@dataclasses.dataclass(frozen=True)
class Saved:
    """One kind of tensor.

    Attributes:
        kind: what it is, for a person.
        dtype: short name.
        num_bytes: of all tensors of the kind, scales included.
    """

    kind: str
    dtype: str
    num_bytes: int


LINEAR, NORM, STATISTICS = "linear inputs", "norm inputs", "norm statistics"
ROUTING = "routing"
ACTIVATION, ATTENTION, HEAD, IDS = "activation inputs", "attention", "head gradients", "token ids and positions"
HEAD_INPUT = "head inputs"  # of a head that is cut among ranks
LAYER_INPUT = "layer inputs (recomputed)"


def saved_by_model(model: Decoder, num_tokens: int, num_recomputed: int = 0) -> list[Saved]:
    """Everything saved from the forward of one micro-batch to its backward.

    Args:
        model: with its recipes set; without values ("meta") is enough.
        num_recomputed: layers, from the first, that keep their input alone.
    """
    hp = _name(model.dtype)
    size, hidden = model.dtype.itemsize, model.config.hidden_size
    rows = [Saved(IDS, "int64", 2 * 8 * num_tokens)]
    for index, layer in enumerate(model.layers):
        assert isinstance(layer, DecoderLayer | ParallelDecoderLayer), index
        if index < num_recomputed:
            rows.append(Saved(LAYER_INPUT, hp, _num_own(model, num_tokens) * hidden * size))
        else:
            rows += saved_by_layer(layer, model, num_tokens)
    rows += _of_norm(_num_own(model, num_tokens), hidden, 1, model.dtype, shares_input=False)
    if model.head_group is None:
        # the loss makes the gradients of hidden states and of the head's weight in its forward
        rows.append(Saved(HEAD, "fp32", 4 * hidden * (num_tokens + model.config.vocab_size)))
    else:  # its input, targets and normalizers: the logits are made again
        rows += [Saved(HEAD_INPUT, hp, num_tokens * hidden * size), Saved(IDS, "int64", 8 * num_tokens)]
        rows.append(Saved(HEAD_INPUT, "fp32", 4 * num_tokens))
    return merge(rows)


def saved_by_layer(layer: DecoderLayer | ParallelDecoderLayer, model: Decoder, num_tokens: int) -> list[Saved]:
    """What one decoder layer saves."""
    attn, mlp, hidden, dtype = layer.self_attn, layer.mlp, model.config.hidden_size, model.dtype
    num_own = _num_own(layer, num_tokens)
    if isinstance(layer, ParallelDecoderLayer):
        rows = _of_norm(num_own, hidden, 2, dtype, shares_input=False)  # mean and rstd
        rows += [_of_linear(attn.qkv_proj, num_tokens, dtype), *_of_attention(attn, model, num_tokens)]
        inner = layer.mlp.fc_in.out_features
        # in high precision both linears keep the norm's output, which is one tensor unless each gathers it
        of_mlp = _of_mlp(None, layer.mlp.fc_in, layer.mlp.fc_out, inner, num_tokens, dtype)
        linears: tuple[Linear, ...] = (attn.qkv_proj, layer.mlp.fc_in)
        shares = all(_keeps_input(linear) and _num_kept(linear, num_tokens) == num_own for linear in linears)
        return [*rows, *(of_mlp[1:] if shares else of_mlp)]
    rows = [*_of_norm_linear(layer.input_layernorm, attn.qkv_proj, num_tokens, dtype)]
    rows += _of_attention(attn, model, num_tokens)
    if isinstance(mlp, SparseMoE):
        return [*rows, *_of_norm(num_own, hidden, 1, dtype, shares_input=False), *_of_experts(mlp, num_tokens)]
    assert isinstance(mlp, MLP), type(mlp)
    norm, width = layer.post_attention_layernorm, mlp.gate_up_proj.out_features
    return [*rows, *_of_mlp(norm, mlp.gate_up_proj, mlp.down_proj, width, num_tokens, dtype)]


def _of_attention(attn: Attention, model: Decoder, num_tokens: int) -> list[Saved]:
    config, size, hp = model.config, model.dtype.itemsize, _name(model.dtype)
    q_dim, kv_dim = attn.num_heads * attn.head_dim, attn.num_kv_heads * attn.head_dim  # of a rank that cuts them
    # q and k after RoPE, v, the output, and the log-sum-exps; with QK-norm the whole of qkv, of which v is a view
    attention = num_tokens * (2 * q_dim + 2 * kv_dim + (q_dim + kv_dim if config.qk_norm else 0)) * size
    rows = [Saved(ATTENTION, hp, attention), Saved(ATTENTION, "fp32", 4 * num_tokens * attn.num_heads)]
    if config.qk_norm:
        for dim, heads in ((q_dim, attn.num_heads), (kv_dim, attn.num_kv_heads)):
            rows += _of_norm(num_tokens, dim, heads, model.dtype, shares_input=True)
    out_input = _of_linear(attn.o_proj, num_tokens, model.dtype)
    # else the attention's output, which is counted already
    is_own = not _keeps_input(attn.o_proj) or attn.o_proj.in_features > q_dim
    return [*rows, out_input] if is_own else rows


def _of_mlp(
    norm: RMSNorm | None, fc1: Linear, fc2: Linear, width: int, num_tokens: int, dtype: torch.dtype
) -> list[Saved]:
    """Of a norm (None: another block's) and a feed-forward block; what fc1 keeps of its input comes first without one.

    Args:
        width: of the activation's input.
    """
    recipe = fc1.recipe or get_recipe("bf16")
    if can_fuse(recipe, norm, fc1, fc2):
        of_input = [_codes(LINEAR, fc1.in_features, num_tokens, recipe.wgrad_input)]
        rows = of_input if norm is None else _of_fused_norm(fc1, recipe, num_tokens, dtype)
        rows.append(_stored(ACTIVATION, num_tokens, width, None if fc1.exact else recipe.saved_activations, dtype))
        if recipe.saved_activations is not None:  # else its codes are made again
            rows.append(_codes(LINEAR, fc2.in_features, num_tokens, recipe.wgrad_input))
        return rows
    rows = [_of_linear(linear, num_tokens, dtype) for linear in (fc1, fc2)]
    rows.append(Saved(ACTIVATION, _name(dtype), num_tokens * width * dtype.itemsize))
    num_own = _num_own(fc1, num_tokens)
    return rows if norm is None else [*_of_norm(num_own, fc1.in_features, 1, dtype, shares_input=False), *rows]


def _of_experts(moe: SparseMoE, num_tokens: int) -> list[Saved]:
    """The router's input and choices, and what each row of the sorted batch leaves behind."""
    dtype, hidden, slots = moe.gate.weight.dtype, moe.gate.in_features, num_tokens * moe.num_experts_per_tok
    experts, num_experts = moe.experts, moe.gate.out_features
    alignment = experts.alignment(moe.gate.weight.device, training=True)
    num = num_rows(slots, num_experts, alignment)
    # weights in fp32, experts and rows in int64 a slot; probabilities, largest logits; each row's slot; groups' ends
    routing = (4 + 8 + 8) * slots + 4 * num_tokens * (num_experts + 1) + 8 * num + 4 * num_experts
    return [
        _stored(LINEAR, num_tokens, hidden, None, dtype),
        Saved(ROUTING, "int64", routing),
        _of_linear(experts.gate_up_proj, num, dtype),
        _stored(ACTIVATION, num, 2 * experts.down_proj.in_features, None, dtype),
        _of_linear(experts.down_proj, num, dtype),
        _stored(LINEAR, num, hidden, None, dtype),  # the experts' outputs, for the gradient of their weights
    ]


def merge(rows: list[Saved]) -> list[Saved]:
    """Rows of one kind and dtype summed up, in order of appearance."""
    totals: dict[tuple[str, str], int] = {}
    for row in rows:
        totals[row.kind, row.dtype] = totals.get((row.kind, row.dtype), 0) + row.num_bytes
    return [Saved(kind, dtype, num_bytes) for (kind, dtype), num_bytes in totals.items() if num_bytes]


def scale_bytes(rows: int, cols: int, scaling: Scaling) -> int:
    """Bytes of the fp32 scales of an operand [rows, cols]."""
    (height, width) = scaling.block_size
    return 4 * (1 if height == -1 else math.ceil(rows / height)) * (1 if width == -1 else math.ceil(cols / width))


def _of_norm_linear(norm: RMSNorm, linear: Linear, num_tokens: int, dtype: torch.dtype) -> list[Saved]:
    recipe = linear.recipe or get_recipe("bf16")
    if can_fuse(recipe, norm, linear):
        return _of_fused_norm(linear, recipe, num_tokens, dtype)
    norm_rows = _of_norm(_num_own(linear, num_tokens), linear.in_features, 1, dtype, shares_input=False)
    return [*norm_rows, _of_linear(linear, num_tokens, dtype)]


def _of_fused_norm(linear: Linear, recipe: Recipe, num_tokens: int, dtype: torch.dtype) -> list[Saved]:
    """Codes of the norm's output along the tokens, its input, and a statistic a token."""
    return [
        _codes(LINEAR, linear.in_features, num_tokens, recipe.wgrad_input),
        _stored(NORM, num_tokens, linear.in_features, None if linear.exact else recipe.saved_activations, dtype),
        Saved(STATISTICS, "fp32", 4 * num_tokens),
    ]


def _of_norm(num_tokens: int, width: int, num_rows: int, dtype: torch.dtype, *, shares_input: bool) -> list[Saved]:
    """RMSNorm of num_rows rows a token: its input and a statistic a row.

    Args:
        width: elements a token.
        shares_input: the input is a view of a tensor that is counted in another place.
    """
    kept = 0 if shares_input else num_tokens * width * dtype.itemsize
    return [Saved(NORM, _name(dtype), kept), Saved(STATISTICS, "fp32", 4 * num_tokens * num_rows)]


def _of_linear(linear: Linear, num_tokens: int, dtype: torch.dtype) -> Saved:
    """What a linear of its own saves for grad_weight."""
    recipe, num_tokens = linear.recipe or get_recipe("bf16"), _num_kept(linear, num_tokens)
    if _keeps_input(linear):
        return _stored(LINEAR, num_tokens, linear.in_features, None, dtype)
    if recipe.in_fp8("grad_weight"):
        return _codes(LINEAR, linear.in_features, num_tokens, recipe.wgrad_input)
    return _codes(LINEAR, num_tokens, linear.in_features, recipe.input)


def _num_own(module: torch.nn.Module, num_tokens: int) -> int:
    """Of so many tokens, those of a rank between cut linears."""
    shards: TokenShards | None = getattr(module, "token_shards", None)
    return num_tokens if shards is None else shards.num_own(num_tokens)


def _num_kept(linear: Linear, num_tokens: int) -> int:
    """Of so many tokens, those whose input a linear saves on a rank."""
    keeps_own = isinstance(linear, ColumnLinear) and linear.keeps_own(num_tokens)
    return _num_own(linear, num_tokens) if keeps_own else num_tokens


def _keeps_input(linear: Linear) -> bool:
    """Whether a linear's input is saved as it is."""
    recipe = linear.recipe
    return recipe is None or not recipe.is_fp8 or recipe.is_emulated or "grad_weight" in recipe.high_precision_gemms


def _codes(kind: str, rows: int, cols: int, scaling: Scaling | None) -> Saved:
    assert scaling is not None, "an FP8 recipe has scalings"
    return Saved(kind, "fp8", rows * cols + scale_bytes(rows, cols, scaling))


def _stored(kind: str, rows: int, cols: int, scaling: Scaling | None, dtype: torch.dtype) -> Saved:
    """A tensor kept in FP8 by a scaling, or as it is."""
    if scaling is None:
        return Saved(kind, _name(dtype), rows * cols * dtype.itemsize)
    return _codes(kind, rows, cols, scaling)


def _name(dtype: torch.dtype) -> str:
    return {torch.bfloat16: "bf16", torch.float32: "fp32"}[dtype]
