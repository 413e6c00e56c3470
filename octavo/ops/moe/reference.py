"""Ground truth of expert routing: row-local probabilities, stable order, sizes known from shapes. Device-free torch.

Legend: T tokens, E experts, S slots (experts a token), R rows of the sorted batch, H width.
"""

import torch

from octavo.numerics.fixed_point import exact_sum

_SUM_BITS = 40  # exponentials are at most 1; 2**13 experts stay exact in fp64


def num_rows(num_slots: int, num_experts: int, alignment: int) -> int:
    """R: enough for any routing of num_slots = T * S slots, each group rounded up to a multiple of alignment."""
    most = num_slots + min(num_slots, num_experts) * (alignment - 1)
    return -(-most // alignment) * alignment


def softmax_rows(logits: torch.Tensor) -> torch.Tensor:
    """Softmax of each row in fp32, a row's bits its own affair: [T, E] fp32.

    Exponentials are made in fp64 and rounded: no device's own fp32 function shows in them.
    """
    wide = logits.float().contiguous()
    exponentials = torch.exp((wide - wide.amax(dim=-1, keepdim=True)).double()).float()
    return exponentials / exact_sum(exponentials, _SUM_BITS).float()


def moe_routing_reference(
    logits: torch.Tensor, top_k: int, normalize: bool, alignment: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """See octavo.ops.moe.moe_routing; the tensors of Routing in order."""
    probs = softmax_rows(logits)
    best, chosen = probs.sort(dim=-1, descending=True, stable=True)  # equal ones keep their order: the lowest first
    weights, experts = best[:, :top_k].contiguous(), chosen[:, :top_k].contiguous()  # [T, S]
    if normalize:
        weights = weights / sum_slots(weights)
    return weights, experts, probs, *place_rows(experts, logits.shape[1], alignment)


def given_routing_reference(
    logits: torch.Tensor, experts: torch.Tensor, normalize: bool, alignment: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """moe_routing_reference where the caller chose the experts [T, S]: their weights are of these logits."""
    probs = softmax_rows(logits)
    weights = probs.gather(1, experts)
    if normalize:
        weights = weights / sum_slots(weights)
    return weights, experts.clone(), probs, *place_rows(experts, logits.shape[1], alignment)


def place_rows(
    experts: torch.Tensor, num_experts: int, alignment: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Rows sorted by expert, then by token: Routing's rows [T, S], slots [R] and offsets [E] of experts [T, S]."""
    flat = experts.flatten()
    order = flat.argsort(stable=True)  # slots by expert, then by token
    ones = torch.ones_like(flat)
    counts = torch.zeros(num_experts, dtype=torch.int64, device=flat.device).scatter_add_(0, flat, ones)
    padded = (counts + (alignment - 1)) // alignment * alignment
    ends = padded.cumsum(0)
    shift = (ends - padded) - (counts.cumsum(0) - counts)  # how far padding moves each group
    rows = torch.empty_like(flat)
    rows[order] = torch.arange(flat.numel(), device=flat.device) + shift[flat[order]]
    size = num_rows(flat.numel(), num_experts, alignment)
    slots = torch.full((size,), flat.numel(), dtype=torch.int64, device=flat.device)
    slots[rows] = torch.arange(flat.numel(), device=flat.device)
    return rows.view(experts.shape), slots, ends.int()


def sum_slots(values: torch.Tensor) -> torch.Tensor:
    """Sum of [T, S] over the slots, one after the other: [T, 1]."""
    total = values[:, :1]
    for slot in range(1, values.shape[1]):
        total = total + values[:, slot : slot + 1]
    return total


def dispatch_reference(x: torch.Tensor, slots: torch.Tensor, num_slots: int) -> torch.Tensor:
    """Each row its token's values, zeros in rows without a token.

    Args:
        x: [T, H].
        slots: [R].
        num_slots: S.
    Returns:
        [R, H] of x's dtype.
    """
    if not x.shape[0]:
        return x.new_zeros(slots.shape[0], x.shape[1])
    is_padding = slots >= x.shape[0] * num_slots
    rows = x[(slots // num_slots).clamp_max(x.shape[0] - 1)]
    return rows.masked_fill_(is_padding[:, None], 0)


def dispatch_codes_reference(
    codes: torch.Tensor, scale: torch.Tensor, slots: torch.Tensor, num_slots: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Codes and scales of each row its token's; rows without a token have zeros and the scale 1, as zeros quantize.

    Args:
        codes: [T, H].
        scale: [T, G] fp32.
        slots: [R].
        num_slots: S.
    Returns:
        codes [R, H], scale [R, G] in scale_layout.
    """
    rows = dispatch_reference(codes.view(torch.uint8), slots, num_slots).view(codes.dtype)
    own = dispatch_reference(scale, slots, num_slots)
    own = own.masked_fill((slots >= codes.shape[0] * num_slots)[:, None], 1.0)
    return rows, own.new_empty_strided(*scale_layout(*own.shape)).copy_(own)


def scale_layout(num_rows: int, num_groups: int) -> tuple[tuple[int, int], tuple[int, int]]:
    """Sizes and strides of scales [R, G], as octavo.ops.quantize lays them out."""
    return (num_rows, num_groups), (1, num_rows if num_groups > 1 else 1)


def combine_reference(out: torch.Tensor, rows: torch.Tensor, weights: torch.Tensor | None) -> torch.Tensor:
    """Each token's rows times their weights, added in slot order in fp32.

    Args:
        out: [R, H].
        rows: [T, S].
        weights: [T, S] fp32, or None for ones.
    Returns:
        [T, H] of out's dtype, rounded once.
    """
    total = torch.zeros(rows.shape[0], out.shape[1], dtype=torch.float32, device=out.device)
    for slot in range(rows.shape[1]):
        part = out[rows[:, slot]].float()
        total = total + (part if weights is None else part * weights[:, slot, None])
    return total.to(out.dtype)
