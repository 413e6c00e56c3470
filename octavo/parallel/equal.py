"""Whether ranks hold the same parameters, before they share or cut them."""

from collections.abc import Mapping
from typing import Any

import torch

from octavo.distributed.agreement import check_agreement


def check_equal(params: Mapping[str, torch.Tensor], group: Any, device: torch.device) -> None:
    """By a sum of each parameter's bits: replicas would train models of their own, shards a mixture of several.

    Args:
        params: by name, alike on all ranks; of those on the device "meta" nothing but the name is compared.
        group: the ranks, all of which come here.
        device: where the sums are put together.
    Raises:
        ConfigError: on all ranks, naming the first parameter that differs.
    """
    with torch.no_grad():
        sums = {
            name: sum_of_bits(param)
            for name, param in params.items()
            if param.element_size() in (2, 4) and not param.is_meta
        }
    values = torch.stack([each.to(device) for each in sums.values()]).tolist() if sums else []
    known = dict(zip(sums, values, strict=True))
    check_agreement({f"the sum of the bits of {name}": known.get(name) for name in params}, group)


def sum_of_bits(values: torch.Tensor) -> torch.Tensor:
    """The elements' bits as integers, added up: [] int64; of a tensor of 2 or 4 bytes an element."""
    return values.view(torch.int16 if values.element_size() == 2 else torch.int32).sum(dtype=torch.int64)
