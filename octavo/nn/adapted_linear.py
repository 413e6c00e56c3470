"""AdaptedLinear: a Linear whose weight is frozen, with trained low-rank matrices beside it (LoRA)."""

import torch
from torch import nn

from octavo.errors import RecipeError
from octavo.nn.linear import Linear


class AdaptedLinear(Linear):
    """A Linear with a frozen weight, and low-rank pairs of its parts: y + scale * (x @ A.t()) @ B.t() for each.

    The adapters compute in high precision, in the weight's dtype. A fused step would pass them by, so none stands for a
    linear of this type.

    Attributes:
        lora_a: [pairs * rank, K], one pair's A after the other.
        lora_b: [rows of the parts with a pair, rank].
        pair_names: for each of `parts` Hugging Face's name of the module, or None where it has no pair.
        scale: alpha / rank.
    """

    pair_names: tuple[str | None, ...]
    scale: float

    def add(self, rank: int, scale: float, pair_names: tuple[str | None, ...], generator: torch.Generator) -> None:
        """Begin with a B of zeros and an A as PEFT draws it.

        Args:
            generator: on the CPU, so that A has the same values on every device.
        """
        assert self.weight is not None, "the base was loaded for training"
        self.pair_names, self.scale = pair_names, scale
        drawn = torch.empty(rank * sum(map(bool, pair_names)), self.in_features)
        nn.init.kaiming_uniform_(drawn, a=5**0.5, generator=generator)
        self.lora_a = nn.Parameter(drawn.to(self.weight))
        self.lora_b = nn.Parameter(self.weight.new_zeros(sum(self.pair_rows), rank))

    @property
    def rank(self) -> int:
        return self.lora_b.shape[1]

    @property
    def pair_rows(self) -> list[int]:
        """Rows of each part with a pair."""
        return [rows for rows, name in zip(self.parts, self.pair_names, strict=True) if name]

    def forward(self, x: torch.Tensor, *, bias_to: list[torch.Tensor | None] | None = None) -> torch.Tensor:
        """x [..., K] -> [..., N] of x's dtype: the base's product under its recipe, and the adapters'.

        Raises:
            RecipeError: exact numerics.
        """
        if self.exact:
            raise RecipeError("adapters do not compute exactly; use the merged model of the run, which can")
        out = super().forward(x, bias_to=bias_to)
        flat = x.reshape(-1, self.in_features)
        low = (flat @ self.lora_a.t()).split(self.rank, dim=-1)  # a pair's [T, rank] each
        pairs = iter(zip(low, self.lora_b.split(self.pair_rows), strict=True))
        parts = out.view(-1, self.out_features).split(self.parts, dim=-1)
        made = []
        for part, name in zip(parts, self.pair_names, strict=True):
            if name:
                down, b = next(pairs)
                part = torch.addmm(part, down, b.t(), alpha=self.scale)
            made.append(part)
        return (torch.cat(made, dim=-1) if len(made) > 1 else made[0]).view(out.shape)

    @torch.no_grad()
    def merged(self, weight: torch.Tensor) -> torch.Tensor:
        """weight + scale * B @ A of each pair, summed in fp32 and rounded once.

        Args:
            weight: the base's, [N, K].
        Returns:
            [N, K] of its dtype.
        """
        pairs = iter(zip(self.lora_a.split(self.rank), self.lora_b.split(self.pair_rows), strict=True))
        made = []
        for part, name in zip(weight.split(self.parts), self.pair_names, strict=True):
            if name:
                a, b = (factor.float().to(weight.device) for factor in next(pairs))
                part = torch.addmm(part.float(), b, a, alpha=self.scale).to(weight.dtype)
            made.append(part)
        return torch.cat(made)
