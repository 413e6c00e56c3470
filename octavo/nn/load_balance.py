"""How evenly a router uses its experts: the losses that even it out, and statistics of its choices.

SparseMoE adds the losses' gradients in its backward, and fills the statistics there.
Legend: T tokens, E experts, S slots (experts a token), R rows of the batch sorted by expert.
"""

import torch

_NUM_SUMS = 5  # tokens, entropy, load-balancing loss, squared log-sum-exp, rows placed


def load_balancing_loss(probs: torch.Tensor, experts: torch.Tensor) -> torch.Tensor:
    """E times the sum over experts of (share of the slots sent to it) * (mean probability); 1 where all are alike.

    Args:
        probs: [T, E] fp32.
        experts: [T, S] int64.
    Returns:
        fp32 scalar, differentiable in probs.
    Source:
        Fedus et al. 2021, "Switch Transformers", equation 4.
    """
    num_experts = probs.shape[1]
    return num_experts * (slot_shares(experts, num_experts) * probs.mean(dim=0)).sum()


def router_z_loss(logits: torch.Tensor) -> torch.Tensor:
    """Mean over tokens of the squared log-sum-exp of a token's logits [T, E]: fp32 scalar, differentiable.

    Source:
        Zoph et al. 2022, "ST-MoE", equation 5.
    """
    return torch.logsumexp(logits.float(), dim=1).square().mean()


def slot_counts(experts: torch.Tensor, num_experts: int) -> torch.Tensor:
    """Slots that go to each expert: [E] int64."""
    flat = experts.flatten()
    return torch.zeros(num_experts, dtype=torch.int64, device=flat.device).scatter_add_(0, flat, torch.ones_like(flat))


def slot_shares(experts: torch.Tensor, num_experts: int) -> torch.Tensor:
    """Share of all slots that goes to each expert: [E] fp32."""
    return slot_counts(experts, num_experts).float() / max(1, experts.numel())


def log_sum_exp(top: torch.Tensor, probs: torch.Tensor) -> torch.Tensor:
    """Of a token's logits, from the largest of them, top [T], and their softmax [T, E]: [T] fp32."""
    return top - probs.amax(dim=1).log()


def losses_gradient(
    probs: torch.Tensor, experts: torch.Tensor, top: torch.Tensor, aux_loss_coef: float, z_loss_coef: float
) -> tuple[torch.Tensor | None, torch.Tensor | None]:
    """Gradients of the two losses times their coefficients, None where a coefficient is 0.

    Args:
        probs: [T, E] fp32.
        experts: [T, S] int64.
        top: [T] fp32, each token's largest logit.
    Returns:
        (of the probabilities, [E]: the same for every token; of the logits, [T, E]).
    """
    num_tokens, num_experts = probs.shape
    of_probs = of_logits = None
    if aux_loss_coef:
        of_probs = aux_loss_coef * num_experts / max(1, num_tokens) * slot_shares(experts, num_experts)
    if z_loss_coef:
        of_logits = 2.0 * z_loss_coef / max(1, num_tokens) * log_sum_exp(top, probs)[:, None] * probs
    return of_probs, of_logits


class RouterStatistics:
    """Sums over what one router chose in training, on its device until they are read.

    Attributes:
        sums: [5 + E] fp64: tokens, entropy, load-balancing loss, squared log-sum-exp, rows placed, each expert's slots;
            None before the first batch.
    """

    def __init__(self) -> None:
        self.sums: torch.Tensor | None = None

    def add(self, probs: torch.Tensor, experts: torch.Tensor, slots: torch.Tensor, top: torch.Tensor) -> None:
        """Add a batch: probs [T, E], experts [T, S], slots [R] as in Routing, top [T] the largest logits."""
        num_tokens, num_experts = probs.shape
        if not num_tokens:
            return
        entropy = -torch.xlogy(probs, probs).sum()
        squares = log_sum_exp(top, probs).square().sum()
        placed = (slots < experts.numel()).sum()
        balance = num_tokens * load_balancing_loss(probs, experts)
        sums = (torch.full_like(entropy, num_tokens), entropy, balance, squares, placed)
        head = torch.stack([each.double() for each in sums])
        batch = torch.cat([head, slot_counts(experts, num_experts).double()])
        self.sums = batch if self.sums is None else self.sums + batch

    def take(self) -> torch.Tensor | None:
        """The sums, which then begin at zero."""
        sums, self.sums = self.sums, None
        return sums


def metrics_of(sums: torch.Tensor) -> dict[str, float]:
    """What the sums of all routers say.

    Args:
        sums: [layers, 5 + E] of RouterStatistics.
    Returns:
        Means over layers: "aux_loss" and "z_loss" before coefficients, "entropy" of a token's probabilities in nats,
        "load_max_over_mean" (the most used expert's slots over an expert's mean). Over all layers: "load_max_share"
        (the largest share of a layer's slots that one expert got; "load_mean_share" is what each would get),
        "idle_experts_share" (experts without a token), "dropped_share" (slots that no row was found for).
    """
    sums = sums.double().cpu()
    (tokens, entropy, balance, squares, placed), loads = sums[:, :_NUM_SUMS].unbind(1), sums[:, _NUM_SUMS:]
    slots = loads.sum(dim=1)  # [layers]
    shares = loads / slots[:, None]
    values = {
        "aux_loss": (balance / tokens).mean(),
        "z_loss": (squares / tokens).mean(),
        "entropy": (entropy / tokens).mean(),
        "load_max_over_mean": shares.amax(dim=1).mean() * loads.shape[1],
        "load_max_share": shares.amax(),
        "load_mean_share": shares.mean(),
        "idle_experts_share": (loads == 0).double().mean(),
        "dropped_share": 1.0 - placed.sum() / slots.sum(),
    }
    return {name: float(value) for name, value in values.items()}
