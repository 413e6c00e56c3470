"""Ground truth of the AdamW step: each product, sum, root and quotient is rounded to fp32 by itself. Device-free."""

from collections.abc import Callable

import torch

from octavo.numerics.stochastic import round_to_bf16, spread_bits
from octavo.ops.adamw.state import (
    WEIGHT_FACTOR,
    decode_first,
    decode_second,
    encode_first,
    encode_second,
    from_blocks,
    join_master,
    split_master,
    to_blocks,
)


def adamw_step(
    param: torch.Tensor,
    exp_avg: torch.Tensor,
    exp_avg_sq: torch.Tensor,
    exp_avg_scale: torch.Tensor | None,
    exp_avg_sq_scale: torch.Tensor | None,
    master: torch.Tensor | None,
    grad: torch.Tensor,
    hyper: torch.Tensor,
    beta1: float,
    beta2: float,
    eps: float,
    offset: int = 0,
) -> None:
    """One step in place; arguments as ops.adamw.adamw_step_ takes them, all contiguous."""
    decay, step_size, inv_sqrt_correction, grad_scale, step = hyper.unbind()
    random = spread_bits(param.numel(), step.to(torch.int32), offset)  # [n]
    gradient = grad.float() * grad_scale
    first = _decoded(exp_avg, exp_avg_scale, decode_first) * beta1 + gradient * (1.0 - beta1)
    second = _decoded(exp_avg_sq, exp_avg_sq_scale, decode_second) * beta2 + gradient * gradient * (1.0 - beta2)
    root = second.double().sqrt().float()  # torch rounds fp32 roots wrongly in one of six on some CPUs
    update = first / (root * inv_sqrt_correction + eps)
    weight = _master_of(param, master) * decay - update * step_size
    _store_weight(param, master, weight, random.view(param.shape))
    _store_moment(exp_avg, exp_avg_scale, first, random, encode_first)
    # The high bits: the two moments' errors are their own. UE5M3 takes 20 of them by itself.
    high = random if exp_avg_sq_scale is not None else random >> 16
    _store_moment(exp_avg_sq, exp_avg_sq_scale, second, high, encode_second)


def _decoded(
    moment: torch.Tensor, scale: torch.Tensor | None, decode: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
) -> torch.Tensor:
    if scale is None:
        return moment.float()
    return from_blocks(decode(to_blocks(moment), scale), moment)


def _store_moment(
    moment: torch.Tensor,
    scale: torch.Tensor | None,
    value: torch.Tensor,
    random: torch.Tensor,
    encode: Callable[[torch.Tensor, torch.Tensor], tuple[torch.Tensor, torch.Tensor]],
) -> None:
    if scale is not None:
        codes, new_scale = encode(to_blocks(value), to_blocks(random))
        moment.copy_(from_blocks(codes, moment))
        scale.copy_(new_scale)
    elif moment.dtype == torch.bfloat16:
        moment.copy_(round_to_bf16(value, random.view(value.shape)))
    else:
        moment.copy_(value)


def _master_of(param: torch.Tensor, master: torch.Tensor | None) -> torch.Tensor:
    if master is None:
        return param.float()
    return join_master(param, master) if master.dtype == torch.int16 else master


def _store_weight(param: torch.Tensor, master: torch.Tensor | None, weight: torch.Tensor, random: torch.Tensor) -> None:
    if master is None and param.dtype == torch.bfloat16:
        # Bits of its own: the moments' errors must not go along with the weight's.
        param.copy_(round_to_bf16(weight, (random * WEIGHT_FACTOR) >> 16))
    elif master is None:
        param.copy_(weight)
    elif master.dtype == torch.int16:
        rounded, remainder = split_master(weight)
        param.copy_(rounded)
        master.copy_(remainder)
    else:
        param.copy_(weight)
        master.copy_(weight)
