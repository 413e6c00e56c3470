"""The variants of a stack benchmark: plain torch, Liger, torchao and octavo, built from the same weights.

A variant is a name, how its layers are made, and its optimizer; `build_layers` and `build_optimizer` make both.
"""

import contextlib
import dataclasses
from collections.abc import Callable
from typing import Any, Literal

import torch
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from bench.options import BenchOptions
from bench.speed import peers
from bench.speed.stack import PlainLayer, Rotate, StackShape, draw_weights, torch_gated_unit, torch_norm
from octavo.nn import TransformerLayer, convert
from octavo.optim import AdamW

BASE_NAME = "bf16, compiled"
# TransformerLayer's linears -> the projections fused in each, in order of rows.
_FUSED = {
    "layernorm_qkv.linear": ("q", "k", "v"),
    "proj": ("o",),
    "layernorm_mlp.fc1": ("gate", "up"),
    "layernorm_mlp.fc2": ("down",),
}
_ADAMW: dict[str, Any] = {"lr": 1e-5, "betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 0.01}


@dataclasses.dataclass(frozen=True)
class StackVariant:
    """One way to run the stack.

    Args:
        name: of the case in tables and records.
        family: whose modules.
        recipe: "bf16" or an FP8 recipe.
        compiled: each layer under torch.compile.
        fp8_optimizer: octavo's AdamW with FP8 moments; else torch's fused AdamW on bf16 parameters.
    """

    name: str
    family: Literal["plain", "liger", "torchao", "octavo"]
    recipe: str = "bf16"
    compiled: bool = False
    fp8_optimizer: bool = False


BASE, PLAIN = StackVariant(BASE_NAME, "plain", compiled=True), StackVariant("bf16", "plain")


def make_variants(options: BenchOptions, *, fp8_optimizer: bool) -> list[StackVariant]:
    """The variants that this run measures: plain bf16, peers where installed, then octavo's.

    Args:
        fp8_optimizer: also plain bf16's and octavo's variants with the FP8 optimizer.
    """
    found = peers.peer_versions(options.device)
    others = [StackVariant("Liger bf16", "liger")] if peers.LIGER in found else []
    if peers.TORCHAO in found:
        others += [StackVariant(f"torchao {r}, compiled", "torchao", r, compiled=True) for r in peers.TORCHAO_RECIPES]
    ours = [StackVariant(f"octavo {recipe}", "octavo", recipe) for recipe in ("bf16", *options.recipes)]
    if options.compiled:
        ours += [dataclasses.replace(variant, name=f"{variant.name}, compiled", compiled=True) for variant in ours]
    with_fp8 = [
        dataclasses.replace(variant, name=f"{variant.name}, FP8 AdamW", fp8_optimizer=True)
        for variant in (BASE, PLAIN, *ours)
    ]
    return with_baselines([BASE, PLAIN, *others, *ours], options) + with_baselines(
        with_fp8 if fp8_optimizer else [], options
    )


def with_baselines(variants: list[StackVariant], options: BenchOptions, prefix: str = "") -> list[StackVariant]:
    """Those of one optimizer that were asked for, and every bf16 one, the fastest of which they are compared with.

    Args:
        prefix: of their cases' names.
    """
    wanted = [variant for variant in variants if options.wants(prefix + variant.name)]
    return [variant for variant in variants if variant in wanted or (wanted and variant.recipe == "bf16")]


def build_layers(
    variant: StackVariant, shape: StackShape, device: str, rotate: Rotate | None = None
) -> list[nn.Module]:
    """The variant's layers in bf16 on the device, not compiled; layer i has the same weights in every variant.

    Args:
        rotate: RoPE of plain layers.
    """
    return [
        _build_layer(variant, shape, draw_weights(shape, seed, device), device, rotate) for seed in range(shape.layers)
    ]


def runners(
    variant: StackVariant, layers: list[nn.Module], device: str
) -> list[Callable[[torch.Tensor], torch.Tensor]]:
    """What a step calls: the layers, compiled where the variant is. A CPU's toy sizes are never compiled."""
    if not variant.compiled or device == "cpu":
        return list(layers)
    return [torch.compile(layer) for layer in layers]


def build_optimizer(variant: StackVariant, parameters: list[nn.Parameter], device: str) -> torch.optim.Optimizer:
    """torch's fused AdamW, or octavo's with FP8 moments; the same rate and decay."""
    if variant.fp8_optimizer:
        return AdamW(parameters, **_ADAMW, state_dtype="fp8", master_weights=None)
    return torch.optim.AdamW(parameters, **_ADAMW, fused=device == "cuda")


def attention_backend(device: str) -> contextlib.AbstractContextManager[object]:
    """cuDNN's attention, else FlashAttention, for every variant alike."""
    if device == "cpu":
        return contextlib.nullcontext()
    return sdpa_kernel([SDPBackend.CUDNN_ATTENTION, SDPBackend.FLASH_ATTENTION])


def _build_layer(
    variant: StackVariant, shape: StackShape, weights: dict[str, torch.Tensor], device: str, rotate: Rotate | None
) -> nn.Module:
    if variant.family == "octavo":
        return _build_octavo(variant, shape, weights, device)
    norms = (peers.liger_norm, peers.liger_gated_unit) if variant.family == "liger" else (torch_norm, torch_gated_unit)
    with torch.device(device):
        layer = PlainLayer(shape, *norms, rotate).to(torch.bfloat16)
    with torch.no_grad():
        for name, weight in weights.items():
            layer.get_submodule(name).weight.copy_(weight)  # type: ignore[operator]
    return peers.convert_torchao(layer, variant.recipe) if variant.family == "torchao" else layer


def _build_octavo(variant: StackVariant, shape: StackShape, weights: dict[str, torch.Tensor], device: str) -> nn.Module:
    layer = TransformerLayer(
        shape.hidden_size,
        shape.ffn_hidden_size,
        shape.num_heads,
        shape.num_kv_heads,
        normalization="RMSNorm",
        activation="swiglu",
        bias=False,
        head_dim=shape.head_dim,
        eps=1e-5,
        dtype=torch.bfloat16,
        device=device,
    )
    with torch.no_grad():
        for name, parts in _FUSED.items():
            layer.get_submodule(name).weight.copy_(torch.cat([weights[part] for part in parts]))  # type: ignore[operator]
    if variant.recipe != "bf16":
        convert(layer, variant.recipe)
    return layer
