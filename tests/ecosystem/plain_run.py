"""What the ranks of a row's tests compare with: the same steps of a small model in plain torch."""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import nn

import octavo
from octavo.errors import OctavoError
from octavo.nn import LayerNormLinear, LayerNormMLP, set_fusion
from octavo.numerics import Recipe, get_recipe

STEPS, BATCH, DIM, VOCAB = 20, 8, 128, 64


class Case(NamedTuple):
    """One run of STEPS steps under ZeRO's stage, 0 for DDP; resumed: by a new engine or booster, after half of them."""

    stage: int
    recipe: str
    dtype: str
    accumulation: int
    resumed: bool = False
    own_layers: bool = False


def recipe_of(name: str) -> Recipe:
    """delayed-step makes scales once a step; delayed-recent makes them of what the last step staged alone."""
    delayed = {"delayed-step": {"update_every": "step"}, "delayed-recent": {"amax_compute_algo": "most_recent"}}
    return get_recipe("delayed", **delayed[name]) if name in delayed else get_recipe(name)


class Tied(nn.Module):
    """A token model whose output layer has the embedding's weight; the layers between are torch's, or octavo's."""

    def __init__(self, own_layers: bool) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCAB, DIM)
        if own_layers:
            self.layers = nn.Sequential(LayerNormLinear(DIM, DIM, dtype=torch.float32), LayerNormMLP(DIM, 2 * DIM))
            self.layers.float()
        else:
            self.layers = nn.Sequential(nn.LayerNorm(DIM), nn.Linear(DIM, 2 * DIM), nn.GELU(), nn.Linear(2 * DIM, DIM))
        self.out = nn.Linear(DIM, VOCAB, bias=False)
        self.out.weight = self.embed.weight

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        hidden = self.embed(ids)
        return self.out(hidden + self.layers(hidden))


def make(case: Case, seed: int = 0) -> nn.Module:
    torch.manual_seed(seed)
    return Tied(case.own_layers)


def build(case: Case, seed: int = 0) -> nn.Module:
    """A converted model."""
    model = make(case, seed)
    octavo.convert(model, recipe_of(case.recipe), ignore=())
    return model


def batches(case: Case, rank: int) -> list[torch.Tensor]:
    source = torch.Generator().manual_seed(1 + rank)
    return [torch.randint(VOCAB, (BATCH, 2), generator=source) for _ in range(STEPS * case.accumulation)]


def loss_of(model: Callable[[torch.Tensor], torch.Tensor], ids: torch.Tensor) -> torch.Tensor:
    return nn.functional.cross_entropy(model(ids[:, 0]).float(), ids[:, 1])


def plain(case: Case, rank: int, world_size: int) -> tuple[list[float], dict[str, torch.Tensor]]:
    """Losses and last weights in plain torch, with sums over ranks and micro-batches in ZeRO's order."""
    model = build(case)
    if case.stage == 3:
        set_fusion(model, False)  # as with the hooks that ZeRO-3 has between the layers
    if case.dtype == "bf16":
        model.bfloat16()
    parameters = list(model.parameters())
    masters = [nn.Parameter(p.detach().float()) for p in parameters] if case.dtype == "bf16" else parameters
    optimizer, losses = torch.optim.AdamW(masters, lr=1e-3), []
    sums: list[torch.Tensor] = []
    for i, ids in enumerate(batches(case, rank)):
        loss = loss_of(model, ids)
        (loss / case.accumulation).backward()
        losses.append(loss.item())
        is_last = (i + 1) % case.accumulation == 0
        if case.stage < 2 and not is_last:
            continue  # ZeRO-2 and 3 reduce each micro-batch
        grads = [average(parameter.grad, world_size) for parameter in parameters]
        model.zero_grad()
        sums = [total + grad for total, grad in zip(sums, grads, strict=True)] if sums else grads
        if is_last:
            for master, total in zip(masters, sums, strict=True):
                master.grad = total.to(master.dtype)
            sums = []
            optimizer.step()
            optimizer.zero_grad()
            if case.dtype == "bf16":
                torch._foreach_copy_([p.detach() for p in parameters], [m.detach() for m in masters])
                octavo.nn.mark_weights_updated(model)
                octavo.nn.update_scales(model)
    return losses, model.state_dict()


def average(grad: torch.Tensor | None, world_size: int) -> torch.Tensor:
    assert grad is not None
    if world_size > 1:
        dist.all_reduce(grad)
        grad /= world_size
    return grad


def said_to(act: Callable[[], Any]) -> str:
    """What octavo says to a mistake: the error's class and text, or "nothing"."""
    try:
        act()
    except OctavoError as error:
        return f"{type(error).__name__}: {error}"
    return "nothing"
