"""SparseMoE: a router in high precision sends each token to a few experts; the sorted batch runs as grouped GEMMs."""

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.autograd.function import once_differentiable

from octavo.distributed.tensor_group import PartialRows, RowShare, whole
from octavo.distributed.token_shards import TokenShards
from octavo.errors import ConfigError
from octavo.nn.autocast_context import effective_recipe
from octavo.nn.functional.linear import quantize_input
from octavo.nn.functional.norm_linear import Norm, can_infer, norm_input, norm_operands
from octavo.nn.functional.norm_mlp import ActivationFunction
from octavo.nn.fusion import FusedLayer, fusable
from octavo.nn.grouped_linear import GroupedLinear
from octavo.nn.load_balance import RouterStatistics, losses_gradient
from octavo.nn.weights.delayed import DelayedState
from octavo.nn.weights.plan import LinearPlan
from octavo.numerics.quantized import QuantizedTensor
from octavo.numerics.recipe import Recipe
from octavo.ops.gemm.grouped_mm import Gather
from octavo.ops.gemm.hp_mm import hp_mm
from octavo.ops.moe import ExpertRows, Routing, combine_rows, dispatch_codes, dispatch_rows, moe_routing


class Router(nn.Module):
    """Logits of every expert, in fp32 from operands in the model's dtype. No recipe reaches it.

    Args:
        hidden_size: H.
        num_experts: E.

    Attributes:
        weight: Parameter [E, H].
        exact: a token's logits depend on that token alone, bit for bit.
    """

    def __init__(
        self,
        hidden_size: int,
        num_experts: int,
        *,
        dtype: torch.dtype = torch.bfloat16,
        device: torch.device | str | None = None,
    ) -> None:
        super().__init__()
        self.in_features, self.out_features = hidden_size, num_experts
        self.weight = nn.Parameter(torch.empty(num_experts, hidden_size, dtype=dtype, device=device))
        self.exact = False
        if not self.weight.is_meta:  # drawing one on "meta" would import the compiler, which takes seconds
            nn.init.normal_(self.weight, std=0.02)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x [T, H] -> [T, E] fp32."""
        return _RouterFunction.apply(x, self.weight, self.exact)


@fusable
class Experts(FusedLayer):
    """The experts' SwiGLU blocks: gate and up fused in one grouped linear, then down."""

    def __init__(
        self,
        hidden_size: int,
        intermediate_size: int,
        num_experts: int,
        num_experts_per_tok: int,
        *,
        dtype: torch.dtype = torch.bfloat16,
        device: torch.device | str | None = None,
    ) -> None:
        super().__init__()
        parts, used = (intermediate_size, intermediate_size), num_experts_per_tok
        self.gate_up_proj = GroupedLinear(
            hidden_size, sum(parts), num_experts, num_experts_per_tok=used, parts=parts, dtype=dtype, device=device
        )
        self.down_proj = GroupedLinear(
            intermediate_size, hidden_size, num_experts, num_experts_per_tok=used, dtype=dtype, device=device
        )

    def forward(self, rows: torch.Tensor, offsets: torch.Tensor) -> torch.Tensor:
        """rows [R, H] sorted by expert -> [R, H]."""
        hidden = ActivationFunction.apply(self.gate_up_proj(rows, offsets), None, "swiglu")  # [R, I]
        return self.down_proj(hidden, offsets)

    def fused_modules(self) -> list[nn.Module]:
        """See FusedLayer: the block itself is one, which the layer around it would call."""
        return [self, *self.children()]

    def can_infer(self, recipe: Recipe) -> bool:
        """Whether infer may stand for forward: no gradients, both GEMMs in FP8, and no hook watches what lies between.

        Args:
            recipe: in effect for gate_up_proj.
        """
        linears = (self.gate_up_proj, self.down_proj)
        if torch.is_grad_enabled() or recipe.is_emulated or not (recipe.is_fp8 and recipe.in_fp8("output")):
            return False
        if recipe.input is None or recipe.input.block_size[0] > 1 or not self.fuses(*self.fused_modules()):
            return False
        if recipe.high_precision_gemms and any(linear.weight is None for linear in linears):
            return False  # which the linears refuse
        return all(linear.observer is None and effective_recipe(linear.recipe) == recipe for linear in linears)

    def begin(self, recipe: Recipe) -> tuple[LinearPlan, LinearPlan]:
        """How both linears compute in what follows."""
        return self.gate_up_proj.begin(recipe), self.down_proj.begin(recipe)

    def infer(
        self, tokens: QuantizedTensor, routing: Routing, plans: tuple[LinearPlan, LinearPlan], dtype: torch.dtype
    ) -> torch.Tensor:
        """Each token's codes [T, H] -> [R, H] of dtype, with forward's bits; SwiGLU makes codes.

        Args:
            plans: of begin; the first has quantized the tokens.
        """
        scaling = plans[0].recipe.input
        assert scaling is not None, "can_infer wants an output GEMM in FP8"
        gather = None
        if routing.slots.numel() > routing.rows.numel():  # there are rows of no token, which only pad
            tokens = dispatch_codes(tokens, routing)
        else:
            gather = Gather(routing.slots, routing.rows.shape[1])
        known = plans[1].known(DelayedState.INPUT, observe=False)
        hidden = self.gate_up_proj.multiply_to_swiglu(
            tokens, routing.offsets, plans[0], dtype, gather, scaling=scaling, **known
        )  # [R, I]
        return self.down_proj.multiply_codes(hidden, routing.offsets, plans[1], dtype)

    def alignment(self, device: torch.device, *, training: bool) -> int:
        """What each expert's rows must be padded to a multiple of."""
        return max(linear.alignment(device, training=training) for linear in (self.gate_up_proj, self.down_proj))


@fusable
class SparseMoE(nn.Module):
    """Each token's output is the sum of its experts' outputs times the router's probabilities.

    Args:
        hidden_size: H.
        intermediate_size: I, of one expert's gate and of its up.
        num_experts: E.
        num_experts_per_tok: S.
        norm_topk_prob: divide the chosen probabilities by their sum.
        aux_loss_coef: coefficient of the load-balancing loss, whose gradient then joins that of whatever loss is
            back-propagated (which sees no other value): scale both alike. 0 is off.

    Attributes:
        gate: Router.
        experts: Experts.
        z_loss_coef: of the router's z-loss, as aux_loss_coef; 0 at first.
        statistics: sums over what is trained on, filled in the backward; None for none.
        recorder: called with the experts [T, S] int64 of every batch; None for none.
        replay: given the router's own choice [T, S] int64, the choice to compute with, whose weights and gradients are
            this router's; it must stay until the backward where layers are recomputed. None for the router's own.
        token_shards: with gradients x and the result are this rank's tokens alone, of which every rank computes all;
            None for all tokens on every rank.
    """

    def __init__(
        self,
        hidden_size: int,
        intermediate_size: int,
        num_experts: int,
        num_experts_per_tok: int,
        *,
        norm_topk_prob: bool = True,
        aux_loss_coef: float = 0.0,
        dtype: torch.dtype = torch.bfloat16,
        device: torch.device | str | None = None,
    ) -> None:
        super().__init__()
        if not 1 <= num_experts_per_tok <= num_experts:
            raise ConfigError(f"num_experts_per_tok must be 1 to num_experts={num_experts}, got {num_experts_per_tok}")
        self.num_experts_per_tok, self.norm_topk_prob = num_experts_per_tok, norm_topk_prob
        self.aux_loss_coef, self.z_loss_coef = aux_loss_coef, 0.0
        self.statistics: RouterStatistics | None = None
        self.recorder: Callable[[torch.Tensor], None] | None = None
        self.replay: Callable[[torch.Tensor], torch.Tensor] | None = None
        self.token_shards: TokenShards | None = None
        self.gate = Router(hidden_size, num_experts, dtype=dtype, device=device)
        self.experts = Experts(
            hidden_size, intermediate_size, num_experts, num_experts_per_tok, dtype=dtype, device=device
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x [T, H] -> [T, H] of x's dtype."""
        if self.token_shards is None or not torch.is_grad_enabled():
            return self._mix(x)
        return self.token_shards.own(self._mix(self.token_shards.join(x)))

    def forward_norm(
        self, x: torch.Tensor | RowShare, residual: torch.Tensor | PartialRows | None, norm: Norm
    ) -> tuple[torch.Tensor | ExpertRows, torch.Tensor]:
        """forward(norm(x + residual)), and the sum; without gradients one kernel adds, norms and quantizes.

        The caller knows that neither norm nor this block has a hook or a forward of its own (FusedLayer.fuses).

        Args:
            x: [T, H], or this rank's share of its rows.
            residual: [T, H] of x's dtype, or this rank's part of it; None for nothing to add.
        Returns:
            (output [T, H] or the rows that make it, x + residual [T, H]: what the residual stream goes on with).
        """
        x, residual = whole(x), whole(residual)
        recipe = effective_recipe(self.experts.gate_up_proj.recipe)
        if not (can_infer(recipe, norm) and self.experts.can_infer(recipe)):
            stream = x if residual is None else x + residual
            return self(norm(stream)), stream
        plans = self.experts.begin(recipe)
        made, stream = norm_input(
            x, residual, *norm_operands(norm), plans[0], training=False, columns=False, keeps_norm=True
        )
        assert made.normed is not None, "it was asked for"
        routing = self._route(made.normed)
        return ExpertRows(self.experts.infer(made.rows, routing, plans, x.dtype), routing), stream

    def _mix(self, x: torch.Tensor) -> torch.Tensor:
        routing = self._route(x)
        recipe = effective_recipe(self.experts.gate_up_proj.recipe)
        if self.experts.can_infer(recipe):
            plans = self.experts.begin(recipe)
            tokens, _ = quantize_input(x, plans[0], columns=False, observe=False)
            return combine_rows(self.experts.infer(tokens, routing, plans, x.dtype), routing)
        rows = DispatchFunction.apply(x, routing)
        return CombineFunction.apply(self.experts(rows, routing.offsets), routing.weights, routing)

    def _route(self, x: torch.Tensor) -> Routing:
        alignment = self.experts.alignment(x.device, training=torch.is_grad_enabled())
        logits = self.gate(x)
        top_k, normalize, coefs = self.num_experts_per_tok, self.norm_topk_prob, (self.aux_loss_coef, self.z_loss_coef)
        given = None
        if self.replay is not None:
            given = self.replay(moe_routing(logits.detach(), top_k, normalize=normalize).experts)
        weights, *indices = _RouteFunction.apply(logits, given, top_k, normalize, alignment, coefs, self.statistics)
        routing = Routing(weights, *indices)
        if self.recorder is not None:
            self.recorder(routing.experts)
        return routing


class _RouterFunction(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor, exact: bool) -> torch.Tensor:
        ctx.save_for_backward(x, weight)
        return hp_mm(x, weight.to(x.dtype), out_dtype=torch.float32, exact=exact)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        needs_x, needs_weight = ctx.needs_input_grad[:2]
        grad_x = hp_mm(grad, weight.float().t(), out_dtype=x.dtype) if needs_x else None
        grad_weight = hp_mm(grad.t(), x.float().t(), out_dtype=weight.dtype) if needs_weight else None
        return grad_x, grad_weight, None


class _RouteFunction(torch.autograd.Function):
    """moe_routing with the gradient of its weights, to which those of the router's losses are added."""

    @staticmethod
    def forward(
        ctx: Any,
        logits: torch.Tensor,
        given: torch.Tensor | None,
        top_k: int,
        normalize: bool,
        alignment: int,
        coefs: tuple[float, float],
        statistics: RouterStatistics | None,
    ) -> tuple[torch.Tensor, ...]:
        """logits [T, E] -> the tensors of Routing."""
        routing = moe_routing(logits, top_k, normalize=normalize, alignment=alignment, experts=given)
        needs_top = ctx.needs_input_grad[0] and (coefs[1] != 0.0 or statistics is not None)
        top = logits.amax(dim=1) if needs_top else None
        ctx.save_for_backward(routing.weights, routing.experts, routing.probs, routing.slots, top)
        ctx.normalize, ctx.coefs, ctx.statistics = normalize, coefs, statistics
        ctx.mark_non_differentiable(*routing[1:])
        return tuple(routing)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: torch.Tensor, *_: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        """Gradient of the logits: through the division by the sum, then through the softmax."""
        weights, experts, probs, slots, top = ctx.saved_tensors
        if ctx.statistics is not None:
            ctx.statistics.add(probs, experts, slots, top)
        if ctx.normalize:
            total = probs.gather(1, experts).sum(dim=1, keepdim=True)
            grad = (grad - (grad * weights).sum(dim=1, keepdim=True)) / total
        grad_probs = torch.zeros_like(probs).scatter_(1, experts, grad)
        of_probs, of_logits = losses_gradient(probs, experts, top, *ctx.coefs)
        if of_probs is not None:
            grad_probs += of_probs
        grad_logits = probs * (grad_probs - (grad_probs * probs).sum(dim=1, keepdim=True))
        if of_logits is not None:
            grad_logits += of_logits
        return grad_logits, None, None, None, None, None, None


class DispatchFunction(torch.autograd.Function):
    """dispatch_rows: x [T, H] -> [R, H]."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, routing: Routing) -> torch.Tensor:
        ctx.save_for_backward(*routing)
        return dispatch_rows(x, routing)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        return combine_rows(grad, Routing(*ctx.saved_tensors), weighted=False), None


class CombineFunction(torch.autograd.Function):
    """combine_rows of out [R, H], with the gradient of weights [T, S] fp32, which routing has too -> [T, H]."""

    @staticmethod
    def forward(ctx: Any, out: torch.Tensor, weights: torch.Tensor, routing: Routing) -> torch.Tensor:
        ctx.save_for_backward(out, *routing)
        return combine_rows(out, routing)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        """Gradients of (out, weights)."""
        out, *indices = ctx.saved_tensors
        routing = Routing(*indices)
        spread = dispatch_rows(grad, routing).float()  # [R, H]
        # the weight of each row; padding rows take any, as they are zero
        per_row = routing.weights.flatten()[routing.slots.clamp_max(routing.weights.numel() - 1)]
        grad_weights = (spread * out.float()).sum(dim=1)[routing.rows]  # [T, S]
        return (spread * per_row[:, None]).to(out.dtype), grad_weights, None
