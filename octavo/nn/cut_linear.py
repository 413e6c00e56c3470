"""Column- and RowLinear: a Linear of which each rank of a tensor-parallel group holds a slice.

A ColumnLinear takes what all ranks have alike and makes a rank's own columns; a RowLinear takes such columns and makes
what all ranks have alike. parallel.parallelize puts them into a Decoder.
"""

from typing import Any, Literal

import torch
from torch import nn

from octavo.distributed.cut import Cut
from octavo.distributed.tensor_group import PartialRows, TensorGroup
from octavo.distributed.token_shards import TokenShards
from octavo.errors import ConfigError, RecipeError, ShapeError
from octavo.nn.autocast_context import effective_recipe
from octavo.nn.cut_embedding import CutEmbedding
from octavo.nn.functional.linear import quantize_input
from octavo.nn.fusion import fusable
from octavo.nn.linear import Linear
from octavo.nn.weights.cached import CachedWeight
from octavo.nn.weights.codes import CodesOnly
from octavo.nn.weights.cut import CutDim, CutWeight
from octavo.nn.weights.operands import Operands
from octavo.nn.weights.plan import LinearPlan
from octavo.numerics.quantized import QuantizedTensor
from octavo.numerics.recipe import GEMMS, Recipe

TensorMode = Literal["gather", "reduce"]
TENSOR_MODES = ("gather", "reduce")


class CutLinear(Linear):
    """What both have: the group, what is cut, and what that rules out.

    Attributes:
        tensor_group: the ranks.
        cut_dim: "in" or "out", the dim of the weight that is cut.
        mode: how sums over in_features are made, "gather" or "reduce".
        repeats_rows: ranks share some of the rows, which then cannot be trained.
        cut: where the weight lies in the whole one; None where parallelize has not made it.
        token_shards: with gradients a ColumnLinear takes, and a RowLinear makes, this rank's tokens alone [t, ...];
            None for all tokens on every rank, as without gradients.
    """

    is_cut = True
    tensor_group: TensorGroup
    cut_dim: CutDim
    mode: TensorMode
    repeats_rows = False
    cut: Cut | None = None
    token_shards: TokenShards | None = None

    def is_sliced(self, role: str) -> bool | None:
        """Whether each rank sees a slice of what an observer gets as `role`; None where it sees a part of a sum."""
        summed, alike = ("grad_input", "input") if self.cut_dim == "out" else ("output", "grad_output")
        return None if role == summed else role != alike

    def _set_up(self, group: TensorGroup, mode: TensorMode, cut_dim: CutDim) -> None:
        self.tensor_group, self.mode, self.cut_dim = group, mode, cut_dim
        weight, self.source = self.source, self._new_source(0)
        self.source.full_name = weight.full_name

    def _new_source(self, version: int, codes: Operands | None = None) -> CachedWeight | CodesOnly:
        if codes is not None or self.tensor_group is None:  # of a constructor that is not done
            return super()._new_source(version, codes)
        return CutWeight(self.parts, version, False, self.tensor_group, self.cut_dim)

    def check(self) -> None:
        """Refuse what a slice cannot compute, or not train where gradients are enabled: what a forward does first.

        Raises:
            RecipeError: its mode does not go with the recipe, or with exact numerics.
            ConfigError: it is trained, and ranks share rows of it.
        """
        check_recipe(effective_recipe(self.recipe), self.mode)
        if self.mode == "reduce" and self.exact:
            raise RecipeError(
                "mode='reduce' adds partial sums of several ranks, so it cannot be exact; use mode='gather' or "
                "numerics that are not exact"
            )
        if self.repeats_rows and torch.is_grad_enabled() and self.weight is not None and self.weight.requires_grad:
            raise ConfigError(
                "training with more tensor-parallel ranks than KV heads is not supported yet: ranks share rows of the "
                "K and V projections; use as many ranks as KV heads or fewer; more may only sample or score, without "
                "gradients"
            )

    def extra_repr(self) -> str:
        group = self.tensor_group
        return f"{super().extra_repr()}, rank {group.rank} of {group.size}, mode={self.mode}"


@fusable
class ColumnLinear(CutLinear):
    """y = x @ weight.t() + bias, cut along out_features: each rank has the columns of y that its rows make.

    Without gradients, and of rank r of a group of G, y has the bits of these columns of the whole Linear's output; the
    gradient of x is the sum of the ranks' in its dtype.

    Args:
        in_features: K.
        out_features: N of all ranks together; each part of it a multiple of the group.
        bias: add a bias [N / G].
        group: the ranks.
        parts: as Linear's, of all ranks together.
        mode: that of the RowLinear that follows; "gather" promises one GPU's bits and refuses what could not have them.
        gather_output: every rank gets all columns, for a linear that no RowLinear follows; with one part alone.
    Raises:
        ShapeError: a part that the ranks do not divide.
        ConfigError: another mode, or a group that is no TensorGroup.
    """

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool = False,
        *,
        group: TensorGroup,
        parts: tuple[int, ...] | None = None,
        mode: TensorMode = "gather",
        gather_output: bool = False,
        device: torch.device | str | None = None,
        dtype: torch.dtype = torch.bfloat16,
    ) -> None:
        check_group(group)
        own = tuple(divided(part, group, "a part of out_features") for part in parts or (out_features,))
        if gather_output and len(own) > 1:
            raise ShapeError(f"gather_output would put the columns of parts {parts} into another order; use one part")
        super().__init__(in_features, sum(own), bias, parts=own, device=device, dtype=dtype)
        self.gather_output = gather_output
        self._set_up(group, check_mode(mode), "out")

    def forward(self, x: torch.Tensor, *, bias_to: list[torch.Tensor | None] | None = None) -> torch.Tensor:
        """x [..., K], the same on all ranks -> [..., N / G] of x's dtype; [..., N] with gather_output.

        With token_shards and gradients: x [t, K], this rank's tokens -> [T, N / G], all of them.
        """
        self.check()
        shards = self.token_shards if torch.is_grad_enabled() else None
        if shards is not None and not self.keeps_own(shards.num_tokens):
            x, shards = shards.gather(x), None
        elif shards is None and torch.is_grad_enabled():
            x = self.tensor_group.share(x)
        out = self._run(x, bias_to, shards)
        if not self.gather_output:
            return out
        return self.tensor_group.join_columns(out.reshape(-1, out.shape[-1])).view(*x.shape[:-1], -1)

    def infer_codes(
        self, rows: QuantizedTensor, plan: LinearPlan, dtype: torch.dtype, *, with_bias: bool = True
    ) -> torch.Tensor:
        self.check()
        return super().infer_codes(rows, plan, dtype, with_bias=with_bias)

    def may_take_codes(self, recipe: Recipe) -> bool:
        return not self.gather_output

    def keeps_own(self, num_tokens: int) -> bool:
        """Whether this rank's tokens are quantized here, and kept for the backward, instead of gathered before.

        So they are in high precision, and where all scales are of one token, of a block of tokens that no rank shares,
        or of all tokens. An observer wants to see all tokens.

        Args:
            num_tokens: of all ranks, T.
        Returns:
            False too without token_shards.
        """
        if self.token_shards is None:
            return False
        recipe = effective_recipe(self.recipe)
        if self.observer is not None or recipe.input is None:
            return self.observer is None
        if not all(recipe.in_fp8(gemm) for gemm in GEMMS) or recipe.input.is_per_tensor or self.saves_input:
            return False
        assert recipe.wgrad_input is not None, "its GEMM is in FP8"
        block, size = recipe.wgrad_input.block_size[1], self.tensor_group.size
        is_local = num_tokens % size == 0 and (block == -1 or num_tokens // size % block == 0)
        return is_local and not (self.source.is_sharded and torch.compiler.is_compiling())


@fusable
class RowLinear(CutLinear):
    """y = x @ weight.t() + bias of an x whose columns are cut among the ranks, as a ColumnLinear has made them.

    mode "gather": the ranks' columns of x are gathered, as FP8 codes where these have blocks of 128, each rank computes
    N / G columns of y, and these are gathered: every sum over K is made on one GPU, and y has its bits. mode "reduce":
    each rank multiplies its columns of x by its columns of the weight, and the partial sums, rounded to x's dtype, are
    added: fewer messages, other bits.

    Args:
        in_features: K of all ranks together, a multiple of the group.
        out_features: N; for "gather" a multiple of the group.
        bias: add a bias.
        group: the ranks.
        mode: "gather" or "reduce".
    Attributes:
        weight: "gather" [N / G, K], "reduce" [N, K / G].
        bias: "gather" [N / G], "reduce" [N].
    Raises:
        ShapeError: the ranks do not divide K or N.
        ConfigError: another mode, or a group that is no TensorGroup.
    """

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool = False,
        *,
        group: TensorGroup,
        mode: TensorMode = "gather",
        device: torch.device | str | None = None,
        dtype: torch.dtype = torch.bfloat16,
    ) -> None:
        num_columns = divided(in_features, check_group(group), "in_features")
        if check_mode(mode) == "gather":
            super().__init__(
                in_features, divided(out_features, group, "out_features"), bias, device=device, dtype=dtype
            )
        else:
            super().__init__(num_columns, out_features, bias, device=device, dtype=dtype)
        self.num_columns = num_columns
        self._set_up(group, mode, "out" if mode == "gather" else "in")

    def forward(self, x: torch.Tensor, *, bias_to: list[torch.Tensor | None] | None = None) -> torch.Tensor:
        """x [..., K / G], this rank's columns -> [..., N] of x's dtype, the same bits on all ranks.

        With token_shards and gradients: x [T, K / G] -> [t, N], of this rank's tokens.
        """
        assert bias_to is None, "an activation does not follow a RowLinear"
        if x.shape[-1] != self.num_columns:
            raise ShapeError(
                f"the last dim of x must be this rank's {self.num_columns} columns, got shape {tuple(x.shape)}"
            )
        self.check()
        flat, recipe = x.reshape(-1, self.num_columns), effective_recipe(self.recipe)
        group, shards = self.tensor_group, self.token_shards if torch.is_grad_enabled() else None
        if self.mode == "reduce":
            biases: list[torch.Tensor | None] = []
            out, bias = super().forward(flat, bias_to=biases), biases[0]
            out = group.add(out) if shards is None else shards.add(out)
            if bias is not None:
                out = out + (bias if shards is None else group.share(bias))
        elif self._sends_codes(recipe):
            plan = self.begin(recipe)
            out = self.infer_codes(quantize_input(flat, plan, columns=False, observe=False)[0], plan, x.dtype)
        else:
            out = super().forward(group.gather_columns(flat))
            out = group.join_columns(out) if shards is None else shards.exchange(out)
        return out.view(*x.shape[:-1], -1) if shards is None else out

    def infer_codes(
        self, rows: QuantizedTensor, plan: LinearPlan, dtype: torch.dtype, *, with_bias: bool = True
    ) -> torch.Tensor:
        """See Linear; rows are this rank's columns."""
        if self.mode == "gather":
            return self._infer_part(rows, plan, dtype, with_bias=with_bias).whole()
        out = self._infer_part(rows, plan, dtype, with_bias=False).whole()
        return out + self.bias if with_bias and self.bias is not None else out

    def infer_parts(self, rows: QuantizedTensor, plan: LinearPlan, dtype: torch.dtype) -> torch.Tensor | PartialRows:
        if self.mode == "reduce" and self.bias is not None:
            return self.infer_codes(rows, plan, dtype)
        return self._infer_part(rows, plan, dtype, with_bias=True)

    def _infer_part(
        self, rows: QuantizedTensor, plan: LinearPlan, dtype: torch.dtype, *, with_bias: bool
    ) -> PartialRows:
        self.check()
        if self.mode == "gather":
            rows = self.tensor_group.gather_codes(rows)
        own = super().infer_codes(rows, plan, dtype, with_bias=with_bias)
        return PartialRows(own, self.tensor_group, self.mode == "reduce")

    def may_take_codes(self, recipe: Recipe) -> bool:
        """A scale of a whole row is known to no rank before all have seen theirs."""
        return self.mode == "reduce" or (recipe.input is not None and recipe.input.kind == "block_1x128")

    def _sends_codes(self, recipe: Recipe) -> bool:
        is_plain = self.observer is None and not (recipe.fake_quant or recipe.emulated)
        is_own = not self.exact or recipe == self.recipe
        is_inference = not torch.is_grad_enabled() and recipe.in_fp8("output")
        return is_inference and is_plain and is_own and self.may_take_codes(recipe)


def divided(num: int, group: TensorGroup, what: str) -> int:
    """num / group.size.

    Raises:
        ShapeError: it is no whole number.
    """
    if num % group.size:
        raise ShapeError(f"{what} must be a multiple of the {group.size} tensor-parallel ranks, got {num}")
    return num // group.size


def check_group(group: Any) -> TensorGroup:
    """Refuse what is no TensorGroup.

    Raises:
        ConfigError: naming what it is.
    """
    if not isinstance(group, TensorGroup):
        what = "None" if group is None else f"a {type(group).__name__}"
        raise ConfigError(
            f"the ranks of a cut must be a TensorGroup, got {what}; give mesh.tensor_group (None where "
            "tensor_parallel_degree is 1), or octavo.distributed.tensor_group.TensorGroup.of(group) of a process "
            "group, of() for all ranks"
        )
    return group


def check_recipe(recipe: Recipe, mode: TensorMode) -> None:
    """Refuse a recipe whose bits a cut linear could not have.

    Raises:
        RecipeError: delayed scaling in "gather".
    """
    if mode == "gather" and recipe.delayed is not None:
        raise RecipeError(
            "recipe 'delayed' has one scale for a whole weight, of which this rank sees a slice, so its bits would "
            "not be one GPU's; use 'blockwise' or 'rowwise', or mode='reduce', which promises no bits"
        )


def check_mode(mode: TensorMode) -> TensorMode:
    """Refuse what is no mode.

    Raises:
        ConfigError: it is another word.
    """
    if mode not in TENSOR_MODES:
        raise ConfigError(f"mode must be one of {TENSOR_MODES}, got {mode!r}")
    return mode


def parameter_cuts(model: nn.Module) -> dict[str, Cut]:
    """Where the parameters lie of which each tensor-parallel rank has a slice, by name.

    Raises:
        ConfigError: a linear that parallelize has not cut.
    """
    cuts = {}
    for name, module in model.named_modules():
        if not isinstance(module, CutLinear | CutEmbedding):
            continue
        if module.cut is None:
            raise ConfigError(
                f"{name} was made as a slice, so where it lies in a whole linear is not known; checkpoints are of "
                "models that octavo.parallel.parallelize has cut"
            )
        cuts[f"{name}.weight"] = module.cut
        if isinstance(module, CutLinear) and module.cut_dim == "out":
            cuts[f"{name}.bias"] = module.cut.vector
    return cuts


def sliced_parameters(model: nn.Module) -> tuple[TensorGroup | None, frozenset[str]]:
    """(the tensor-parallel ranks or None, names of the parameters of which each has a slice)."""
    group, names = None, set()
    for name, module in model.named_modules():
        if isinstance(module, CutLinear | CutEmbedding):
            group = module.tensor_group
            names.add(f"{name}.weight")
            if isinstance(module, CutLinear) and module.cut_dim == "out":
                names.add(f"{name}.bias")
    return group, frozenset(names)
