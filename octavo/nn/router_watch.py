"""All routers of a model at once: their losses' coefficients, and what they chose. Training loops call it."""

import torch
from torch import nn

from octavo.errors import ConfigError
from octavo.nn.load_balance import RouterStatistics, metrics_of
from octavo.nn.moe import SparseMoE


def sparse_blocks(model: nn.Module) -> list[SparseMoE]:
    """The blocks with experts, in the order of the layers."""
    return [module for module in model.modules() if isinstance(module, SparseMoE)]


class RouterWatch:
    """Measures the routers of a model in training, and scales their losses.

    Args:
        model: dense ones are allowed, and have no metrics.
        aux_loss_coef: of the load-balancing loss; None for what the blocks have.
        z_loss_coef: of the router's z-loss.
        measures: False leaves the statistics off.
    Raises:
        ConfigError: a coefficient for a model without experts.
    """

    def __init__(
        self, model: nn.Module, *, aux_loss_coef: float | None = None, z_loss_coef: float = 0.0, measures: bool = True
    ) -> None:
        self.blocks = sparse_blocks(model)
        if not self.blocks and (aux_loss_coef or z_loss_coef):
            raise ConfigError(
                f"router_aux_loss_coef={aux_loss_coef or 0.0} and router_z_loss_coef={z_loss_coef} are losses of "
                "routers, and this model has no experts; leave both out"
            )
        given = aux_loss_coef
        self._aux_coefs = [block.aux_loss_coef if given is None else given for block in self.blocks]
        self._z_coef = z_loss_coef
        for block in self.blocks if measures else ():
            block.statistics = RouterStatistics()

    def scale(self, share: float) -> None:
        """Let the losses of the next forward passes count by this much: a micro-batch's share of its optimizer step."""
        for block, coef in zip(self.blocks, self._aux_coefs, strict=True):
            block.aux_loss_coef, block.z_loss_coef = coef * share, self._z_coef * share

    def metrics(self) -> dict[str, float]:
        """See octavo.nn.load_balance.metrics_of, over what was back-propagated since the last call; else empty."""
        sums = self.take()
        return {} if sums is None else metrics_of(sums)

    def take(self) -> torch.Tensor | None:
        """The sums that metrics would be of, [layers, 5 + E], which then begin at zero; None without any."""
        taken = [block.statistics.take() for block in self.blocks if block.statistics is not None]
        found = [sums for sums in taken if sums is not None]
        return torch.stack([sums.to(found[0].device) for sums in found]) if found else None
