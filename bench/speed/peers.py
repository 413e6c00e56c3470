"""Other libraries that stand beside octavo in a run, where they are installed: torchao's float8 and Liger's kernels."""

from importlib import import_module
from importlib.metadata import PackageNotFoundError, version

import torch
from torch import nn

from bench.speed.stack import EPS, Rotate

TORCHAO, LIGER = "torchao", "liger-kernel"
TORCHAO_RECIPES = ("tensorwise", "rowwise")
_MODULES = {TORCHAO: "torchao.float8", LIGER: "liger_kernel.ops"}


def peer_versions(device: str) -> dict[str, str]:
    """Installed peers that run on this device, name -> version; those that are missing are left out."""
    found = {}
    for name, module in _MODULES.items() if device == "cuda" else ():
        try:
            import_module(module)
            found[name] = version(name)
        except (ImportError, PackageNotFoundError):
            continue
    return found


def describe_peers(device: str) -> str:
    """One line: which peers take part."""
    found = peer_versions(device)
    absent = [name for name in _MODULES if name not in found]
    parts = [f"{name} {number}" for name, number in found.items()] + [f"no {name}" for name in absent]
    return f"peers in this run: {', '.join(parts)}"


def convert_torchao(module: nn.Module, recipe: str) -> nn.Module:
    """torchao's float8 training under one of its recipes, in place where module is no linear itself."""
    float8 = import_module("torchao.float8")
    config = float8.Float8LinearConfig.from_recipe_name(recipe)
    return float8.convert_to_float8_training(module, config=config)


def liger_norm(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """RMSNorm by Liger; not in place, because the residual stream needs the gradient too."""
    function = import_module("liger_kernel.ops").LigerRMSNormFunction
    return function.apply(x, weight, EPS, 0.0, "llama", False)


def liger_gated_unit(gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    """SwiGLU's elementwise part by Liger."""
    return import_module("liger_kernel.ops").LigerSiLUMulFunction.apply(gate, up)


def liger_rotate(cos: torch.Tensor, sin: torch.Tensor) -> Rotate:
    """RoPE by Liger, which writes over q and k; cos and sin [S, D]."""
    function = import_module("liger_kernel.ops").LigerRopeFunction
    return lambda q, k: function.apply(q, k, cos[None], sin[None])[:2]  # newer ones return the tables too


def liger_cross_entropy(hidden: torch.Tensor, weight: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """Mean cross-entropy straight from hidden states [T, H] by Liger's fused linear cross-entropy."""
    function = import_module("liger_kernel.ops").LigerFusedLinearCrossEntropyFunction
    out = function.apply(hidden, weight, targets)
    return out[0] if isinstance(out, tuple) else out
