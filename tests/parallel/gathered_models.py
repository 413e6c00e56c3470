"""Models whose weights are gathered as FP8 codes, and steps that train them; no test file."""

import torch
from torch.utils.checkpoint import checkpoint

from octavo import nn
from octavo.distributed.mesh import Mesh
from octavo.models import Decoder, ModelConfig
from octavo.numerics import Numerics, Recipe, get_recipe

RECIPES = ("blockwise", "tensorwise", "delayed")
TOKENS = 24


class Block(torch.nn.Module):
    """A foreign layer: a norm and two linears, of whole blocks on so many ranks."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.norm = torch.nn.RMSNorm(size)
        self.up, self.down = torch.nn.Linear(size, 2 * size, bias=False), torch.nn.Linear(2 * size, size)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.nn.functional.silu(self.up(self.norm(x))))


class Stack(torch.nn.Module):
    """Two of them; activations are computed again in the backward where that is asked for."""

    def __init__(self, size: int, recompute: bool = False) -> None:
        super().__init__()
        self.layers, self.recompute = torch.nn.ModuleList([Block(size), Block(size)]), recompute

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = checkpoint(layer, x, use_reentrant=False) if self.recompute else layer(x)
        return x


def recipe_of(name: str) -> Recipe:
    return get_recipe("delayed", update_every="step") if name == "delayed by step" else get_recipe(name)


def make_stack(recipe: str, mesh: Mesh, recompute: bool = False) -> Stack:
    """Under one recipe, or "mixed": blockwise, but for the last layer's, delayed and tensorwise."""
    torch.manual_seed(0)
    model = Stack(256, recompute).bfloat16()
    nn.convert(model, recipe_of("blockwise" if recipe == "mixed" else recipe))
    if recipe == "mixed":
        model.layers[1].up.set_recipe(get_recipe("delayed"))  # type: ignore[union-attr, operator]
        model.layers[1].down.set_recipe(get_recipe("tensorwise"))  # type: ignore[union-attr, operator]
    return model


def make_decoder(recipe: str, mesh: Mesh, dtype: torch.dtype = torch.bfloat16, exact: bool = False) -> Decoder:
    size = 128 * mesh.world_size  # q: size rows, k and v: 128 * ranks / 2 each, so that a rank has whole blocks
    heads = {"num_heads": mesh.world_size, "num_kv_heads": mesh.world_size // 2, "head_dim": 128}
    config = ModelConfig(
        "llama", 96, size, size, num_layers=2, **heads, max_position_embeddings=64, tie_word_embeddings=False
    )
    model = Decoder(config, seed=0).to(dtype)
    model.set_numerics(Numerics(recipe_of(recipe), kv_cache_dtype="fp8" if exact else "bf16", exact=exact))
    return model


def whole(tensor: torch.Tensor | None) -> torch.Tensor:
    assert tensor is not None
    return (tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor).detach().clone()


def held_bytes(model: torch.nn.Module) -> int:
    return sum(m.source.held_bytes() for m in model.modules() if isinstance(m, nn.Linear))


def draw(step: int, rank: int) -> torch.Tensor:
    return torch.randn(TOKENS, 256, generator=torch.Generator().manual_seed(100 * step + rank)).bfloat16()


def loss_of(model: torch.nn.Module, x: torch.Tensor) -> torch.Tensor:
    return model(x).float().square().mean()


def train_stack(model: torch.nn.Module, mesh: Mesh, steps: int = 3, micro_batches: int = 1) -> list[torch.Tensor]:
    """Losses, gradients and weights of some steps, bf16 gradients."""
    optimizer, found = torch.optim.AdamW(model.parameters(), lr=1e-2), []
    for step in range(steps):
        for i in range(micro_batches):
            model.set_requires_gradient_sync(i == micro_batches - 1)  # type: ignore[operator]
            loss = loss_of(model, draw(step, mesh.rank + 8 * i))
            loss.backward()
            found.append(loss.detach())
        found += [whole(p.grad) for p in model.parameters()]
        optimizer.step()
        optimizer.zero_grad()
    scales = [buffer.clone() for name, buffer in model.named_buffers() if name.endswith("fp8_quant_scale")]
    return found + [whole(p) for p in model.parameters()] + scales
