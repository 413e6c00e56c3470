"""A router's product and the routing by it for few tokens, as in decoding: libraries take a kernel more and idle."""

import torch

from octavo import env
from octavo.errors import ShapeError
from octavo.ops._runtime.registry import register
from octavo.ops.gemm.hp_mm import hp_mm
from octavo.ops.moe import Routing, moe_routing
from octavo.ops.moe.reference import add_parts
from octavo.ops.moe.router.reference import NUM_PARTS, router_parts_reference

__all__ = ["route_tokens", "router_logits", "takes_tokens"]


def _parts_cuda(x, weight, reads_ahead):  # type: ignore[no-untyped-def]
    from octavo.ops.moe.router import triton

    return triton.router_parts(x, weight, reads_ahead)


_parts = register(
    "router_parts(Tensor x, Tensor weight, bool reads_ahead) -> Tensor",
    reference=router_parts_reference,
    fake=lambda x, weight, _: x.new_empty((NUM_PARTS, x.shape[0], weight.shape[0]), dtype=torch.float32),
    cuda=_parts_cuda,
)


def takes_tokens(x: torch.Tensor, weight: torch.Tensor) -> bool:
    """Whether the kernels take these, without gradients: few tokens of 16 bits on Hopper, outside of torch.compile."""
    if not x.is_cuda or env.force_reference() or torch.compiler.is_compiling():
        return False
    from octavo.ops.moe.router import triton

    return triton.can_run(x, weight)


def router_logits(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """A router's logits x @ weight.t() without gradients and not exact.

    Args:
        x: [T, K] bf16, fp16 or fp32.
        weight: [E, K]; another dtype is rounded to x's.
    Returns:
        [T, E] fp32.
    Raises:
        ShapeError: if K differs.
    Exactness: as hp_mm(exact=False). For few 16-bit tokens on Hopper, outside of torch.compile, a token's bits depend
        on that token alone.
    """
    _check(x, weight)
    if takes_tokens(x, weight):
        return add_parts(_parts(x, weight, False))
    return hp_mm(x, weight.to(x.dtype), out_dtype=torch.float32)


def route_tokens(
    x: torch.Tensor,
    weight: torch.Tensor,
    top_k: int,
    *,
    normalize: bool,
    alignment: int = 1,
    reads_ahead: bool = False,
) -> Routing:
    """moe_routing of router_logits, which adds their parts up itself, for what takes_tokens accepts.

    Args:
        x: [T, K] bf16 or fp16.
        weight: [E, K] of x's dtype.
        top_k: as in moe_routing.
        normalize: as there.
        alignment: as there.
        reads_ahead: the kernel before this call has not written the weight, which may be read before that one ends.
    Returns:
        Routing.
    Raises:
        ShapeError: if K differs.
        ConfigError: as moe_routing.
    Exactness: bitwise moe_routing(router_logits(x, weight), ...).
    """
    _check(x, weight)
    return moe_routing(_parts(x, weight, reads_ahead), top_k, normalize=normalize, alignment=alignment)


def _check(x: torch.Tensor, weight: torch.Tensor) -> None:
    if x.dim() != 2 or weight.dim() != 2 or x.shape[1] != weight.shape[1]:
        raise ShapeError(f"x [T, K] and weight [E, K] must agree in K, got {tuple(x.shape)} and {tuple(weight.shape)}")
