"""What multiplies by its parameters and is no linear: found for convert's report, by shape and type name.

Fused experts (3-D parameters), convolutions, torch's attention, recurrent layers and whatever else has a matrix of its
own. No framework is imported: a module's own attributes and its config are read.
"""

from collections.abc import Iterator
from typing import Any, NamedTuple

from torch import nn
from torch.nn.modules.conv import _ConvNd
from torch.nn.utils.parametrize import ParametrizationList

from octavo.nn.linear import Linear
from octavo.nn.moe import Router
from octavo.nn.transposed_linear import is_conv1d

_HAVE_ROWS = (nn.Linear, Linear, Router)
_NO_PRODUCTS = (nn.Embedding, nn.EmbeddingBag, nn.LayerNorm, nn.RMSNorm, ParametrizationList)
_NO_MATRICES = ("embed", "position", "bias")  # in a parameter's name: looked up or added
_EXPERT_COUNTS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")
_EXPERTS_OF_A_TOKEN = ("num_experts_per_tok", "num_experts_per_token", "moe_top_k", "moe_topk", "top_k")
_INNER_CONFIGS = ("text_config", "ffn_config")


class Product(NamedTuple):
    """One weight that is multiplied by, outside of linears.

    Attributes:
        name: full, of the module where that has one weight, else of the parameter.
        owner: the module's.
        kind: "experts", "convolution" or "other".
        layer: the module's type.
        in_features: its product with out_features is the number of the weight's elements.
        out_features: see in_features.
        active_share: of the weight, that a token meets; 1 where nothing tells.
        note: how its FLOPs are counted, where that needs a word.
    """

    name: str
    owner: str
    kind: str
    layer: str
    in_features: int
    out_features: int
    active_share: float = 1.0
    note: str = ""


def find_products(model: nn.Module) -> list[Product]:
    """Every weight under a model that is multiplied by and belongs to no linear and no router of octavo's."""
    found: list[Product] = []
    for name, module in model.named_modules(remove_duplicate=False):
        if not isinstance(module, (*_HAVE_ROWS, *_NO_PRODUCTS)) and not is_conv1d(module):
            found += _products(model, name, module)
    return found


def _products(model: nn.Module, name: str, module: nn.Module) -> Iterator[Product]:
    layer = type(module).__name__
    if isinstance(module, _ConvNd):
        rows = module.out_channels
        note = "not counted: its FLOPs depend on the input's size"
        yield Product(name or "weight", name, "convolution", layer, module.weight.numel() // rows, rows, note=note)
        return
    for key, weight in module.named_parameters(recurse=False):
        place = f"{name}.{key}" if name else key
        shape = tuple(weight.shape)
        if not weight.is_floating_point() or not _is_matrix(layer, key, shape, module):
            continue
        if len(shape) == 2:
            own = name if key == "weight" and name else place
            yield Product(own, name, "other", layer, *shape[::-1])
        elif isinstance(module, nn.Bilinear):
            yield Product(name or key, name, "other", layer, shape[1] * shape[2], shape[0])
        else:
            num, rows, columns = shape
            sizes = (rows, columns) if getattr(module, "is_transposed", False) else (columns, rows)
            yield Product(place, name, "experts", layer, sizes[0], num * sizes[1], *_active(model, name, num))


def _is_matrix(layer: str, key: str, shape: tuple[int, ...], module: nn.Module) -> bool:
    """Whether a parameter is multiplied by: a stack of matrices, a `weight`, or one of a layer known to have more."""
    if min(shape, default=0) < 2 or any(word in key for word in _NO_MATRICES) or "Embedding" in layer:
        return False
    has_many = isinstance(module, nn.MultiheadAttention | nn.RNNBase | nn.RNNCellBase) or "Expert" in layer
    return len(shape) == 3 or (len(shape) == 2 and (key == "weight" or has_many))


def _active(model: nn.Module, name: str, num: int) -> tuple[float, str]:
    """(share of `num` stacked matrices that a token meets, who says so): asks the modules from this one up."""
    while True:
        module = model.get_submodule(name)
        for source, where in _tellers(module):
            if num not in [getattr(source, key, None) for key in _EXPERT_COUNTS]:
                continue
            for key in _EXPERTS_OF_A_TOKEN:
                used = getattr(source, key, None)
                if type(used) is int and 1 <= used <= num:
                    return used / num, f"a token meets {used} of {num} ({where}.{key})"
        if not name:
            return 1.0, f"all {num} are counted, as nothing tells how many of them a token meets"
        name = name.rpartition(".")[0]


def _tellers(module: nn.Module) -> Iterator[tuple[Any, str]]:
    """A module and its configs, with their names."""
    yield module, type(module).__name__
    config = getattr(module, "config", None)
    for source in (config, *(getattr(config, key, None) for key in _INNER_CONFIGS)):
        if source is not None:
            yield source, type(source).__name__
