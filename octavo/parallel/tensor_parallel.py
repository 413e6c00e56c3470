"""parallelize: cut the linears of a Decoder among tensor-parallel ranks, in the bits of one GPU or not."""

import dataclasses
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from octavo.distributed.cut import Cut
from octavo.distributed.tensor_group import TensorGroup
from octavo.distributed.token_shards import TokenShards
from octavo.errors import ConfigError, ShapeError
from octavo.models.decoder import Decoder
from octavo.nn import (
    MLP,
    Attention,
    DecoderLayer,
    GeluMLP,
    LayerNorm,
    Linear,
    ParallelDecoderLayer,
    RMSNorm,
    SparseMoE,
    plan_fusion,
)
from octavo.nn.autocast_context import effective_recipe
from octavo.nn.cut_embedding import CutEmbedding
from octavo.nn.cut_linear import (
    ColumnLinear,
    CutLinear,
    RowLinear,
    TensorMode,
    check_group,
    check_mode,
    check_recipe,
)
from octavo.nn.weights.slices import Slices
from octavo.ops.adamw import BLOCK
from octavo.parallel.equal import check_equal
from octavo.parallel.gather import is_sharded
from octavo.parallel.replaced import note_replaced

if TYPE_CHECKING:
    from octavo.distributed.mesh import Mesh

Ranges = tuple[slice, ...]


@dataclasses.dataclass(frozen=True)
class CutReport:
    """What parallelize did.

    Attributes:
        mode: "gather" or "reduce"; None where nothing is cut, on one rank.
        num_cut: linears of which this rank holds a slice.
        num_local_params: parameters that this rank holds.
        num_params: those of the model.
        sequence_parallel: in training each rank has its own tokens between the linears.
    """

    mode: TensorMode | None
    num_cut: int
    num_local_params: int
    num_params: int
    sequence_parallel: bool = False

    def __str__(self) -> str:
        if self.mode is None:
            return "nothing cut: 1 tensor-parallel rank, which holds and computes the whole model"
        promise = "one GPU's bits forward" if self.mode == "gather" else "partial sums are added: not one GPU's bits"
        share = self.num_local_params / max(self.num_params, 1)
        tokens = "; in training each rank has its own tokens between them" if self.sequence_parallel else ""
        return f"{self.num_cut} linears cut, {share:.0%} of the parameters here; {self.mode}: {promise}{tokens}"


def parallelize(
    model: Decoder, mesh: "Mesh | TensorGroup", *, mode: TensorMode | None = None, sequence_parallel: bool = False
) -> CutReport:
    """Keep this rank's slices of a Decoder's linears and let it compute with the other ranks of its group.

    Attention is cut by KV head (KV heads that are fewer than ranks are repeated), gate and up by column, o_proj and
    down_proj by row or column as mode says, embedding and lm_head by vocabulary where the ranks divide it. Norms and
    experts stay whole on every rank. All ranks call the model with the same tokens; hidden
    states, logits and samples are the same on all of them.

    Args:
        model: a Decoder with the same values on all ranks, trainable or of FP8 codes alone; before shard, and before
            the optimizer is made. It is changed in place. Hooks on its modules must be on all ranks alike: they decide
            which messages are sent.
        mesh: of this job, with a dimension "tp"; or the ranks themselves.
        mode: "gather": each sum over in_features is made on one rank, so that hidden states, logprobs and samples have
            the bits of one GPU (bf16, rowwise, blockwise); its gradients have not, but are equal from run to run.
            "reduce": partial sums are added, fewer messages and other bits. None: gather where the model is exact.
        sequence_parallel: where gradients are enabled, embedding, residual stream and norms are of a rank's own tokens,
            and so is what they keep for the backward; linears gather their inputs, and scatter outputs over the tokens.
            Any number of tokens goes; the promises of mode stay, as does all that is computed without gradients.
    Returns:
        What was cut. On one rank nothing is.
    Raises:
        ConfigError: no Decoder; no mesh or group; ranks whose parameters differ; it is cut or sharded already; an
            unknown mode; reduce for an exact model; scales of the KV cache that depend on all heads.
        RecipeError: gather for a linear with delayed scaling.
        ShapeError: the ranks divide neither heads nor KV heads, or a linear's sizes, or would cut FP8 blocks.
    """
    group = _group_of(mesh)
    if not isinstance(model, Decoder):
        raise ConfigError(
            f"parallelize cuts octavo's Decoders, got {type(model).__name__}; build other models of "
            "octavo.nn.ColumnLinear and RowLinear, or cut them by torch's parallelize_module with the styles of "
            "octavo.parallel.styles"
        )
    mode = check_mode(mode or ("gather" if model.numerics.exact else "reduce"))
    if mode == "reduce" and model.numerics.exact:
        raise ConfigError("mode='reduce' is not exact, and the model's numerics are; use mode='gather'")
    if model.tensor_group is not None or is_sharded(model):
        raise ConfigError("the model is cut or sharded already; parallelize it once, and before shard")
    if model.numerics.has_known_kv_scales:
        raise ConfigError(
            f"kv_scales={model.numerics.kv_scales!r} are of all heads of a layer, of which a rank has some; use "
            "kv_scales='per_token_head'"
        )
    num_params = sum(p.numel() for p in model.parameters())
    if group is None or group.size == 1:
        return CutReport(None, 0, num_params, num_params)
    whole = dict(model.named_parameters())
    if group.group is not None:  # else they have not met
        check_equal(whole, group.group, model.device)
    blocks = [block for block in model.modules() if isinstance(block, Attention | MLP | GeluMLP)]
    plans = [plan for block in blocks for plan in _plans(block, group, mode)]  # all is checked before anything changes
    if model.lm_head is not None and _is_vocabulary_cut(model.lm_head.weight, model.lm_head.bias, group):
        rows = (own_range(model.lm_head.out_features, group, "lm_head"),)
        plans.append((model, "lm_head", model.lm_head, rows, slice(0, model.lm_head.in_features), ColumnLinear))
    made = [(*plan[:2], cut_linear(*plan[2:], group, mode)) for plan in plans]
    for block, name, linear in made:
        setattr(block, name, linear)
    if _is_vocabulary_cut(model.embed_tokens.weight, None, group):
        model.embed_tokens = _cut_embedding(model.embed_tokens, group)
    for block in blocks:
        if isinstance(block, Attention):
            _keep_heads(block, group)
    model.tensor_group = group
    if sequence_parallel:
        _cut_tokens(model, TokenShards(group))
    note_replaced(whole.values(), model.parameters())
    plan_fusion(model)
    num_local_params = sum(p.numel() for p in model.parameters())
    return CutReport(mode, len(made), num_local_params, num_params, sequence_parallel)


def _group_of(mesh: "Mesh | TensorGroup") -> TensorGroup | None:
    """The ranks that cut; None of a mesh without them."""
    from octavo.distributed.mesh import Mesh  # whose library takes a while to import

    return mesh.tensor_group if isinstance(mesh, Mesh) else check_group(mesh)


def _cut_tokens(model: Decoder, shards: TokenShards) -> None:
    """Let everything between the cut linears compute a rank's own tokens; the head has all of them."""
    for module in model.modules():
        if isinstance(module, Decoder | DecoderLayer | ParallelDecoderLayer | SparseMoE | CutLinear):
            module.token_shards = None if module is model.lm_head else shards
        elif isinstance(module, RMSNorm | LayerNorm):
            module.tensor_group = shards.group


def _plans(
    block: Attention | MLP | GeluMLP, group: TensorGroup, mode: TensorMode
) -> list[tuple[nn.Module, str, Linear, Ranges, slice, type[CutLinear]]]:
    """(block, the linear's name in it, the linear, rows and columns that this rank keeps, what becomes of it)."""
    if isinstance(block, Attention):
        names, first = ("qkv_proj", "o_proj"), _head_rows(block, group)
    else:
        names = ("gate_up_proj", "down_proj") if isinstance(block, MLP) else ("fc_in", "fc_out")
        first = own_ranges(getattr(block, names[0]).parts, group, names[0])
    column, row = (getattr(block, name) for name in names)
    rows, columns = slice(0, row.out_features), own_range(row.in_features, group, names[1])
    if mode == "gather":
        rows, columns = own_range(row.out_features, group, names[1]), slice(0, row.in_features)
    plans: list[tuple[nn.Module, str, Linear, Ranges, slice, type[CutLinear]]] = [
        (block, names[0], column, first, slice(0, column.in_features), ColumnLinear),
        (block, names[1], row, (rows,), columns, RowLinear),
    ]
    for _, _, linear, ranges, of_columns, _ in plans:
        check_plan(linear, ranges, of_columns, mode)
    return plans


def _is_vocabulary_cut(weight: torch.Tensor | None, bias: torch.Tensor | None, group: TensorGroup) -> bool:
    """Of head or embedding [V, K]; not where the ranks do not divide V, or would cut an 8-bit moment's scale."""
    assert weight is not None, "neither is ever quantized"
    own, rest = divmod(weight.shape[0], group.size)
    return not rest and own * weight.shape[1] % BLOCK == 0 and (bias is None or own % BLOCK == 0)


def _cut_embedding(embedding: nn.Embedding, group: TensorGroup) -> CutEmbedding:
    """An embedding that holds this rank's rows of another one."""
    num_rows, width = embedding.weight.shape
    slices = Slices((num_rows,), (own_range(num_rows, group, "embed_tokens"),), slice(0, width))
    weight = _parameter(embedding.weight, slices.of_values(embedding.weight.detach()))
    return CutEmbedding(weight, slices, group).train(embedding.training)


def own_range(num: int, group: TensorGroup, what: str, start: int = 0) -> slice:
    """This rank's share of num rows or columns, which begin at start."""
    if num % group.size:
        raise ShapeError(f"{group.size} tensor-parallel ranks do not divide the {num} rows or columns of {what}")
    each = num // group.size
    return slice(start + group.rank * each, start + (group.rank + 1) * each)


def own_ranges(parts: tuple[int, ...], group: TensorGroup, what: str) -> Ranges:
    """This rank's share of each of the parts, which follow each other."""
    starts = [sum(parts[:i]) for i in range(len(parts))]
    return tuple(own_range(part, group, what, start) for part, start in zip(parts, starts, strict=True))


def _head_rows(attention: Attention, group: TensorGroup) -> Ranges:
    """This rank's rows of q, k and v in the fused projection."""
    heads, kv_heads, dim = attention.num_heads, attention.num_kv_heads, attention.head_dim
    if heads % group.size or (kv_heads % group.size and group.size % kv_heads):
        raise ShapeError(
            f"tensor-parallel ranks must divide the heads, and divide the KV heads or be a multiple of them; got "
            f"{group.size} ranks for {heads} heads and {kv_heads} KV heads: use {_fitting(heads, kv_heads)}"
        )
    each = max(kv_heads // group.size, 1)
    first = group.rank * kv_heads // group.size
    kv = slice(first * dim, (first + each) * dim)
    queries, keys = heads * dim, kv_heads * dim
    return (
        own_range(queries, group, "qkv_proj"),
        slice(queries + kv.start, queries + kv.stop),
        slice(queries + keys + kv.start, queries + keys + kv.stop),
    )


def _fitting(heads: int, kv_heads: int) -> str:
    """The numbers of ranks that the heads allow, in words."""
    sizes = [n for n in range(1, heads + 1) if not heads % n and not (kv_heads % n and n % kv_heads)]
    return " or ".join(map(str, sizes))


def check_plan(linear: Linear, rows: Ranges, columns: slice, mode: TensorMode) -> None:
    """Refuse a mode that does not go with the recipe, and to cut a block of the weight: no rank would know its scale.

    Raises:
        RecipeError: delayed scaling in "gather".
        ShapeError: naming where the cut would be.
    """
    check_recipe(effective_recipe(linear.recipe), mode)
    recipe = linear.recipe
    if recipe is None or recipe.weight is None:
        return
    starts = [sum(linear.parts[:i]) for i in range(len(linear.parts) + 1)]
    of_rows, of_columns = recipe.weight.block_size
    for size, ranges, borders in ((of_rows, rows, starts), (of_columns, (columns,), [0, linear.in_features])):
        for each in ranges if size > 1 else ():
            begin = max(border for border in borders if border <= each.start)
            if (each.start - begin) % size or ((each.stop - begin) % size and each.stop not in borders):
                raise ShapeError(
                    f"{recipe.name!r} has blocks of {size}, and {linear.source.full_name or 'a linear'} would be cut "
                    f"at {each.start - begin} to {each.stop - begin} of a part; use fewer tensor-parallel ranks, or "
                    "recipe='rowwise'"
                )


def cut_linear(
    linear: Linear, rows: Ranges, columns: slice, kind: type[CutLinear], group: TensorGroup, mode: TensorMode
) -> CutLinear:
    """A linear that holds these rows and columns of another one."""
    sizes = tuple(each.stop - each.start for each in rows)
    options: dict[str, Any] = {"group": group, "mode": mode, "device": "meta", "dtype": torch.bfloat16}
    has_bias = linear.bias is not None
    made: CutLinear
    if kind is ColumnLinear:
        parts = tuple(size * group.size for size in sizes)
        made = ColumnLinear(linear.in_features, sum(parts), has_bias, parts=parts, **options)
        made.repeats_rows = sum(parts) > linear.out_features
    else:
        made = RowLinear(linear.in_features, linear.out_features, has_bias, **options)
    slices = made.slices = Slices(linear.parts, rows, columns)
    made.train(linear.training)
    for name in ("recipe", "exact", "observer", "saves_input", "follows_autocast"):
        setattr(made, name, getattr(linear, name))
    made.full_name = linear.full_name
    is_wide = columns == slice(0, linear.in_features)
    made.cut = Cut((linear.out_features, linear.in_features), rows, None if is_wide else columns)
    if linear.input_scale is not None:
        made.set_input_scale(linear.input_scale)
    if linear.bias is not None:
        made.bias = _parameter(linear.bias, slices.of_values(linear.bias.detach()))
    if linear.weight is not None:
        made.weight = _parameter(linear.weight, slices.of_values(linear.weight.detach()))
    else:
        made.load_quantized(slices.of_codes(linear.source.held()))  # type: ignore[union-attr]
    if state := linear.held_state():
        made.load_state(state)  # amaxes of all ranks, a column a part
    return made


def _parameter(like: torch.Tensor, values: torch.Tensor) -> nn.Parameter:
    return nn.Parameter(values, requires_grad=like.requires_grad)


def _keep_heads(attention: Attention, group: TensorGroup) -> None:
    attention.num_heads //= group.size
    attention.num_kv_heads = max(attention.num_kv_heads // group.size, 1)
    for norm in (attention.q_norm, attention.k_norm):
        if norm is not None:
            norm.tensor_group = group
