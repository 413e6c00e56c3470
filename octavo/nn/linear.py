"""Linear: a high-precision parameter whose GEMMs run under a recipe; a WeightSource owns its 8-bit copies."""

import torch
from torch import nn

from octavo.distributed.tensor_group import PartialRows
from octavo.distributed.token_shards import TokenShards
from octavo.errors import DtypeError, RecipeError, ShapeError
from octavo.nn.autocast_context import effective_recipe
from octavo.nn.functional.emulated import EmulatedLinearFunction
from octavo.nn.functional.linear import (
    HighPrecisionLinearFunction,
    ScaledLinearFunction,
    output_gemm,
    scaled_linear,
    warn_of_fp16,
)
from octavo.nn.fusion import fusable
from octavo.nn.weight_holder import WeightHolder
from octavo.nn.weights.cached import CachedWeight
from octavo.nn.weights.capture import is_partitioned
from octavo.nn.weights.codes import CodesOnly
from octavo.nn.weights.gathered import GatheredWeight
from octavo.nn.weights.plan import LinearPlan, Observer
from octavo.nn.weights.slices import Slices
from octavo.numerics.quantized import QuantizedTensor
from octavo.numerics.recipe import Recipe
from octavo.numerics.scaling import INPUT_DTYPES


@fusable
class Linear(WeightHolder):
    """y = x @ weight.t() + bias under a recipe.

    The recipe is the module's own (`recipe`, set by convert or a model's numerics), else the autocast context's, else
    high precision. Any token count works; FP8 copies of the weight are derived state and never in a state dict.

    Args:
        in_features: K.
        out_features: N.
        bias: add a bias [N].
        parts: row counts of the projections fused in this weight (they sum to N); each keeps its own blocks.
        dtype: of the parameters, bf16 or fp32.

    Attributes:
        weight: Parameter [N, K], or None where the layer was loaded for inference from codes.
        source: owner of the weight's FP8 codes (octavo.nn.weights).
        input_scale: [1] fp32 decode scale of the input for recipes with static_input, None without; set_input_scale.
        exact: a row's output bits depend on that row alone.
        observer: None, or a function (role, tensor, codes or None) that sees every operand and result: roles "input",
            "weight", "output", "grad_output", "grad_input" and "grad_weight". Fused modules run unfused under one.
        saves_input: keep the input itself for grad_weight, and quantize it along the tokens in the backward: for one
            that another op saves anyway, such as attention's output. The bits are the same. A sharded weight's linear
            does so in compiled code, where torch.compile makes the input again or finds it saved.
        slices: which of a whole weight's rows and columns these are; None for all.
        follows_autocast: compute in torch.autocast's dtype, as the torch.nn.Linear did that convert replaced.
        weight_version: grows by one each time that the weight is committed (optimizer, load, refit).
    """

    is_cut = False  # see CutLinear
    slices: Slices | None = None

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool = False,
        *,
        parts: tuple[int, ...] | None = None,
        device: torch.device | str | None = None,
        dtype: torch.dtype = torch.bfloat16,
    ) -> None:
        super().__init__()
        self.in_features, self.out_features = in_features, out_features
        self.parts = parts or (out_features,)
        if sum(self.parts) != out_features:
            raise ShapeError(f"parts {self.parts} must sum to out_features={out_features}")
        self.source: CachedWeight | CodesOnly | GatheredWeight = self._new_source(0)
        self.weight: nn.Parameter | None = nn.Parameter(
            torch.empty(out_features, in_features, device=device, dtype=dtype)
        )
        self.bias = nn.Parameter(torch.zeros(out_features, device=device, dtype=dtype)) if bias else None
        self.recipe: Recipe | None = None
        self.exact = False
        self.observer: Observer | None = None
        self.saves_input = False
        self.follows_autocast = False
        self.input_scale: torch.Tensor | None = None
        self._input_quant_scale: torch.Tensor | None = None
        if not self.weight.is_meta:  # there it takes a ms and fills nothing
            nn.init.kaiming_uniform_(self.weight, a=5**0.5)

    def extra_repr(self) -> str:
        recipe = self.recipe.name if self.recipe else None
        return f"{self.in_features} -> {self.out_features}, recipe={recipe}, exact={self.exact}"

    def forward(self, input: torch.Tensor, *, bias_to: list[torch.Tensor | None] | None = None) -> torch.Tensor:
        """input [..., K] bf16, fp16 or fp32 -> [..., N] of its dtype; named as torch.nn.Linear names it.

        Args:
            bias_to: the bias is not added but appended here, for an activation that adds it: after this forward an
                engine that shards this module (FSDP2, ZeRO-3) has taken the parameter away.
        Raises:
            ShapeError: if the last dim is not in_features.
            DtypeError: for other dtypes.
        """
        return self._run(input, bias_to, None)

    def _run(
        self, x: torch.Tensor, bias_to: list[torch.Tensor | None] | None, token_shards: TokenShards | None
    ) -> torch.Tensor:
        """forward; with token_shards (see LinearPlan) x is [t, K], and the output [T, N]."""
        bias = self.bias
        if bias_to is not None:
            goes_away = bias is not None and (self.source.is_sharded or is_partitioned(bias))
            bias_to.append(bias.clone() if goes_away else bias)  # type: ignore[union-attr]
            bias = None
        if x.shape[-1] != self.in_features:
            raise ShapeError(f"the last dim of x must be in_features={self.in_features}, got shape {tuple(x.shape)}")
        if x.dtype not in INPUT_DTYPES:
            raise DtypeError(f"a Linear takes bfloat16, float16 or float32, got {x.dtype}")
        if self.follows_autocast and not x.is_meta and torch.is_autocast_enabled(x.device.type):
            x = x.to(torch.get_autocast_dtype(x.device.type))
        is_matrix = x.dim() == 2
        flat = x if is_matrix else x.reshape(-1, self.in_features)  # [T, K]
        recipe = effective_recipe(self.recipe)
        if recipe.input is not None:  # in FP8
            if self.exact:
                self._check_exact(recipe)
            out = self._forward_fp8(flat, bias, recipe, token_shards)
        else:
            if self.weight is None or not self.source.has_values:
                raise RecipeError(
                    "this layer holds FP8 codes only, so it cannot run in high precision; load it with a bf16 recipe, "
                    "or shard the model without all_gather_dtype='fp8'"
                )
            options = (self.exact, self.observer, token_shards)
            out = HighPrecisionLinearFunction.apply(flat, self.matrix, bias, *options)
        return out if is_matrix else out.view(*x.shape[:-1], self.out_features)

    def infer_codes(
        self, rows: QuantizedTensor, plan: LinearPlan, dtype: torch.dtype, *, with_bias: bool = True
    ) -> torch.Tensor:
        """The forward, without gradients, of an input [T, K] that is codes already -> [T, N] of dtype.

        Args:
            plan: of begin or plan_for.
            with_bias: False where an activation adds it.
        """
        bias = self.bias if with_bias else None
        return output_gemm(rows, self.matrix, bias, self.source, plan, dtype, training=False)

    def infer_parts(self, rows: QuantizedTensor, plan: LinearPlan, dtype: torch.dtype) -> torch.Tensor | PartialRows:
        """infer_codes, or this rank's part of it, which the next norm's kernel puts together with the others'."""
        return self.infer_codes(rows, plan, dtype)

    def may_take_codes(self, recipe: Recipe) -> bool:
        """Whether infer_codes has the bits of forward, where the recipe's scales alone would allow it."""
        return True

    def _check_exact(self, recipe: Recipe) -> None:
        if self.exact and recipe != self.recipe:
            raise RecipeError(
                f"this layer is exact under {self.recipe.name if self.recipe else 'bf16'}, and autocast asks for "
                f"{recipe.name!r}: trainer and sampler would differ; change the model's numerics instead (set_numerics)"
            )

    def _forward_fp8(
        self, flat: torch.Tensor, bias: torch.Tensor | None, recipe: Recipe, token_shards: TokenShards | None = None
    ) -> torch.Tensor:
        weight, is_training = self.matrix, torch.is_grad_enabled()
        is_emulated = recipe.fake_quant or recipe.emulated
        has_values = weight is not None and self.source.has_values
        if not has_values and (is_emulated or recipe.high_precision_gemms):
            raise RecipeError(
                f"this layer holds FP8 codes only, and recipe {recipe.name!r} with fake_quant, an emulated format or "
                "high_precision_gemms computes from the high-precision weight; load the checkpoint for training, or "
                "shard the model without all_gather_dtype='fp8'"
            )
        plan = self.begin(recipe)
        if is_emulated:
            return EmulatedLinearFunction.apply(flat, weight, bias, self.source, plan, is_training)
        if not is_training:
            return scaled_linear(flat, weight, bias, self.source, plan, training=False, needs_wgrad=False)[0]
        if flat.dtype == torch.float16 and not torch.compiler.is_compiling():
            warn_of_fp16()
        if token_shards is not None:
            plan = plan._replace(token_shards=token_shards)
        return ScaledLinearFunction.apply(flat, weight, bias, self.source, plan)
