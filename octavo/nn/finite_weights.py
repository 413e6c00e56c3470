"""Refuses inf and NaN in a live model's weights, where FP8 codes would hide an infinity for ever."""

import torch
from torch import nn

from octavo.distributed.shards import local
from octavo.errors import NonFiniteError
from octavo.nn.weights.gathered import GatheredWeight

_NUM_NAMED = 3


@torch.no_grad()
def check_finite_weights(module: nn.Module) -> None:
    """Refuse inf and NaN in any parameter: one pass over the weights, and one read of the device for all of them.

    Args:
        module: its parameters of 16 bits and more are looked at, of sharded ones this rank's rows; FP8 codes are
            checked where they are loaded.
    Raises:
        NonFiniteError: naming the parameters, with how many of their elements are NaN and inf.
    """
    named = {n: local(p.detach()) for n, p in module.named_parameters() if p.is_floating_point() and not p.is_meta}
    for name, child in module.named_modules():
        source = vars(child).get("source")
        if isinstance(source, GatheredWeight):
            named[f"{name}.weight" if name else "weight"] = source.shard
    named = {name: p for name, p in named.items() if p.element_size() > 1 and p.numel()}
    if not named:
        return
    # A sum of magnitudes is finite unless an element is not, or it overflows: then that parameter is looked at again.
    norms = torch._foreach_norm(list(named.values()), 1, torch.float32)
    device = norms[0].device
    is_fine = torch.stack([norm.to(device) for norm in norms]).isfinite().tolist()
    unclear = [name for name, is_well in zip(named, is_fine, strict=True) if not is_well]
    bad = [name for name in unclear if not named[name].isfinite().all()]
    if bad:
        more = f" and {len(bad) - _NUM_NAMED} more parameters" if len(bad) > _NUM_NAMED else ""
        raise NonFiniteError(
            f"weights must be finite before they are served or quantized, for FP8 codes hide an infinity; got "
            f"{', '.join(f'parameter {name}, {describe(named[name])}' for name in bad[:_NUM_NAMED])}{more}; go back to "
            "the last good checkpoint, and look for the step that broke them"
        )


def describe(tensor: torch.Tensor) -> str:
    """A tensor's shape and dtype, and how many of its elements are NaN and inf."""
    flat = tensor.detach().float()
    counts = f"{int(flat.isnan().sum())} NaN and {int(flat.isinf().sum())} inf of {flat.numel()}"
    return f"shape {tuple(tensor.shape)} {str(tensor.dtype).removeprefix('torch.')}: {counts}"
