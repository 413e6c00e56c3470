"""Models in real shapes with random weights, built on the device layer by layer, quantized as they are made."""

import dataclasses
from collections.abc import Callable

import torch
from torch import nn

from octavo.models import Decoder, ModelConfig
from octavo.models.checkpoint.names import ParameterNames, parameter_names
from octavo.models.initial import STD
from octavo.nn import Linear
from octavo.nn.live_weights import own_slices
from octavo.numerics import Numerics

_QWEN3 = {"family": "qwen3", "qk_norm": True, "rope_theta": 1e6, "vocab_size": 151_936, "head_dim": 128}

QWEN3_8B = ModelConfig(
    **_QWEN3,  # type: ignore[arg-type]
    hidden_size=4096,
    intermediate_size=12_288,
    num_layers=36,
    num_heads=32,
    num_kv_heads=8,
    max_position_embeddings=40_960,
)
QWEN3_30B_A3B = ModelConfig(
    **{**_QWEN3, "family": "qwen3_moe"},  # type: ignore[arg-type]
    hidden_size=2048,
    intermediate_size=6144,
    num_layers=48,
    num_heads=32,
    num_kv_heads=4,
    max_position_embeddings=40_960,
    num_experts=128,
    num_experts_per_tok=8,
    moe_intermediate_size=768,
    norm_topk_prob=True,
)
GPT_J_6B = ModelConfig(
    family="gptj",
    vocab_size=50_400,
    hidden_size=4096,
    intermediate_size=16_384,
    num_layers=28,
    num_heads=16,
    num_kv_heads=16,
    head_dim=256,
    rotary_dim=64,
    rms_norm_eps=1e-5,
    max_position_embeddings=2048,
)
LLAMA_3_70B = ModelConfig(
    family="llama",
    vocab_size=128_256,
    hidden_size=8192,
    intermediate_size=28_672,
    num_layers=80,
    num_heads=64,
    num_kv_heads=8,
    head_dim=128,
    rope_theta=5e5,
    rms_norm_eps=1e-5,
    max_position_embeddings=8192,
)
SHAPES = {"Qwen3-8B": QWEN3_8B, "Qwen3-30B-A3B": QWEN3_30B_A3B, "GPT-J-6B": GPT_J_6B}

_TOY_SIZES = {
    "vocab_size": 512,
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_layers": 2,
    "head_dim": 32,
    "max_position_embeddings": 512,
}


def make_toy(config: ModelConfig) -> ModelConfig:
    """The same family, with as many query heads a kv head, at sizes for a CPU."""
    num_kv_heads = 4 if config.is_parallel else 2
    sizes = _TOY_SIZES | {"num_heads": 4, "num_kv_heads": num_kv_heads}
    if config.num_experts:
        sizes |= {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 128}  # a block, as a graph wants
    if config.rotary_dim:
        sizes |= {"rotary_dim": 16}
    return dataclasses.replace(config, **sizes)  # type: ignore[arg-type]


@torch.no_grad()
def build_model(
    config: ModelConfig,
    numerics: Numerics,
    device: str,
    seed: int = 0,
    cut: Callable[[Decoder], object] | None = None,
) -> Decoder:
    """A model for inference with the weights that a seed draws on this device.

    Of a linear under an FP8 recipe only the codes stay, so that never more than one weight is held in both formats.

    Args:
        config: the shape.
        numerics: as in Decoder.set_numerics.
        cut: keeps this rank's slices of a model without values, in place; never more than one weight is then whole.
    Returns:
        The model in bf16; bf16 and FP8 models of one seed and device have the same weights before rounding.
    """
    model = Decoder(config, dtype=torch.bfloat16, device="meta")
    if cut is not None:
        model.set_numerics(numerics)
        cut(model)
    generator = torch.Generator(device).manual_seed(seed)
    for parameter in parameter_names(config):
        module_name, _, leaf = parameter.name.rpartition(".")
        module = model.get_submodule(module_name)
        value = own_slices(model, parameter.name, draw(parameter, config.num_layers, generator, device))
        setattr(module, leaf, nn.Parameter(value, requires_grad=False))
        if parameter.is_linear_weight and numerics.recipe.is_fp8:
            assert isinstance(module, Linear), parameter.name
            module.keep_codes_only(numerics.recipe)
    model.to(device)
    model.set_numerics(numerics)
    return model


def draw(parameter: ParameterNames, num_layers: int, generator: torch.Generator, device: str) -> torch.Tensor:
    """Values as octavo.models.initial has them, of other random numbers: those are drawn on the device, in bf16."""
    if parameter.name.endswith("norm.weight"):
        return torch.ones(parameter.shape, dtype=torch.bfloat16, device=device)
    if parameter.name.endswith(".bias"):
        return torch.zeros(parameter.shape, dtype=torch.bfloat16, device=device)
    is_residual = parameter.name.endswith((".o_proj.weight", ".down_proj.weight", ".fc_out.weight"))
    std = STD * (2 * num_layers) ** -0.5 if is_residual else STD
    value = torch.empty(parameter.shape, dtype=torch.bfloat16, device=device)
    return value.normal_(0.0, std, generator=generator)
