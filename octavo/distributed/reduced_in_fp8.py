"""Which gradients may be rounded to FP8 on their way between ranks: those of matrices that no lookup and no choice
depends on. Norms, biases, embeddings and routers stay in fp32."""

from collections.abc import Iterable

from torch import nn

from octavo.errors import ConfigError

_LOOKUPS = (nn.Embedding, nn.EmbeddingBag)


def reduced_in_fp8(model: nn.Module, ignore: Iterable[str] = ()) -> dict[nn.Parameter, str]:
    """The names of a model's trainable parameters of two dimensions or more; not those of embeddings and routers.

    A router is a module whose class says so ("Router" in its name), as `octavo.convert` takes it; routers that are
    plain linears must be named. A matrix that an embedding shares with a head is an embedding's.

    Args:
        model: not wrapped by DDP.
        ignore: further modules or parameters to leave out: a full name, a prefix that ends before a dot, or one part
            between dots, such as "gate".
    Raises:
        ConfigError: a name in `ignore` that means nothing in this model.
    """
    patterns = [pattern.split(".") for pattern in ignore]
    names = [name.split(".") for name, _ in model.named_parameters(remove_duplicate=False)]
    for pattern in patterns:
        if not any(_means(pattern, name) for name in names):
            raise ConfigError(
                f"ignore names parameters or modules of the model, and none is {'.'.join(pattern)!r}; "
                "see model.named_parameters()"
            )
    left_out: set[nn.Parameter] = set()
    chosen: dict[nn.Parameter, str] = {}
    for owner, module in model.named_modules():
        is_left_out = isinstance(module, _LOOKUPS) or "Router" in type(module).__name__
        for own_name, parameter in module.named_parameters(recurse=False):
            name = f"{owner}.{own_name}" if owner else own_name
            if is_left_out or any(_means(pattern, name.split(".")) for pattern in patterns):
                left_out.add(parameter)
            elif parameter.dim() >= 2 and parameter.requires_grad:
                chosen.setdefault(parameter, name)
    return {parameter: name for parameter, name in chosen.items() if parameter not in left_out}


def _means(pattern: list[str], name: list[str]) -> bool:
    return name[: len(pattern)] == pattern or (len(pattern) == 1 and pattern[0] in name)
