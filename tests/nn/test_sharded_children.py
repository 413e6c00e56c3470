"""fully_shard on parts of fused layers: outputs have the bits of the whole layer, gradients those of the same layer
where it runs module by module in the same places. One rank gathers and frees as several do."""

from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist

from octavo import nn
from octavo.models import Decoder, ModelConfig
from octavo.numerics import Numerics, get_recipe
from octavo.testing import assert_bitwise

MODULES = {
    "LayerNormLinear": lambda: nn.LayerNormLinear(128, 256),
    "LayerNormMLP-gelu": lambda: nn.LayerNormMLP(128, 256),
    "LayerNormMLP-swiglu": lambda: nn.LayerNormMLP(128, 256, bias=False, activation="swiglu"),
    "TransformerLayer-gelu": lambda: nn.TransformerLayer(
        128, 256, 2, bias=True, activation="gelu", normalization="LayerNorm"
    ),
    "TransformerLayer-swiglu": lambda: nn.TransformerLayer(128, 256, 2),
}
FAMILIES = {
    "qwen3": {"qk_norm": True},
    "qwen3_moe": {"qk_norm": True, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 128},
    "gptj": {"rotary_dim": 16},
}


@pytest.fixture(scope="module", autouse=True)
def _one_rank() -> Iterator[None]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def build(kind: str, recipe: str) -> torch.nn.Module:
    torch.manual_seed(0)
    if kind in FAMILIES:
        sizes = {"hidden_size": 128, "intermediate_size": 256, "num_layers": 2, "num_heads": 2, "head_dim": 64}
        model = Decoder(ModelConfig(kind, vocab_size=96, num_kv_heads=2, **sizes, **FAMILIES[kind]))
        model.set_numerics(Numerics(get_recipe(recipe)))
    else:
        model = MODULES[kind]()
        nn.convert(model, recipe, ignore=())
    for parameter in model.parameters():
        if parameter.dim() == 1:  # biases that are not zero
            torch.nn.init.normal_(parameter, 0.5, 0.2)
    return model


def parts(model: torch.nn.Module, level: str) -> list[torch.nn.Module]:
    """The children of each layer, or every linear and norm in it."""
    found = []
    for layer in getattr(model, "layers", [model]):
        inner = layer.children() if level == "children" else layer.modules()
        is_leaf = level == "leaves"
        found += [m for m in inner if any(True for _ in m.parameters(recurse=not is_leaf))]
    return found


def run(model: torch.nn.Module) -> torch.Tensor:
    if isinstance(model, Decoder):
        context = nn.PackedContext.from_lengths([24, 16], model.numerics, model.device, model.kv_table)
        return model(torch.arange(40), context)
    return model(torch.randn(2, 16, 128, generator=torch.Generator().manual_seed(3)).bfloat16())


def whole(tensor: torch.Tensor | None) -> torch.Tensor | None:
    return tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor


def step(model: torch.nn.Module) -> tuple[torch.Tensor, torch.Tensor, dict[str, torch.Tensor | None]]:
    """(output of a training forward, of one without gradients after it, gradients)."""
    out = run(model)
    out.float().square().mean().backward()
    grads = {name: whole(p.grad) for name, p in model.named_parameters()}
    with torch.no_grad():
        return out.detach(), run(model), grads


@pytest.mark.filterwarnings("ignore:FSDP2-wrapped module.*returned a view")  # in place, nothing is added to it
@pytest.mark.parametrize("recipe", ["bf16", "delayed"])
@pytest.mark.parametrize("level", ["leaves", "children"])
@pytest.mark.parametrize("kind", [*MODULES, *FAMILIES])
def test_layers_with_sharded_parts_have_the_bits_of_whole_ones(kind: str, level: str, recipe: str) -> None:
    from torch.distributed.fsdp import fully_shard

    fused, hooked, sharded = (build(kind, recipe) for _ in range(3))
    for part in parts(hooked, level):
        part.register_forward_hook(lambda *_: None)
    for part in parts(sharded, level):
        fully_shard(part)
    fully_shard(sharded)
    for model in (hooked, sharded):
        nn.plan_fusion(model)
    found, wanted, fastest = (step(model) for model in (sharded, hooked, fused))
    for mine, others, fusing in zip(found[:2], wanted[:2], fastest[:2], strict=True):
        assert_bitwise(mine, others)
        assert_bitwise(mine, fusing)
    assert found[2].keys() == wanted[2].keys()
    for name, gradient in found[2].items():
        if gradient is None:
            assert wanted[2][name] is None and name.startswith("lm_head"), name
        else:
            assert_bitwise(gradient, wanted[2][name])
