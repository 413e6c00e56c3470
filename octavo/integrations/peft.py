"""PEFT's LoRA and DoRA on octavo's linears: the base in FP8 and frozen, the adapters in high precision."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import nn

import octavo.nn
from octavo.errors import BackendError, ConfigError, RecipeError
from octavo.integrations.tested import installed_version, require
from octavo.nn.conversion import require_module
from octavo.nn.fusion import FusedLayer

try:
    import peft
    from peft.tuners import lora
except ImportError:
    require("peft", "peft")  # says which version is needed
    raise
require("peft", "peft")
if not hasattr(peft.LoraConfig, "_register_custom_module"):  # PEFT calls it experimental
    raise BackendError(
        f"octavo.integrations.peft: peft {installed_version('peft')} has no LoraConfig._register_custom_module, by "
        "which octavo's linears become targets; install a version that docs/ecosystem.md names"
    )


def register(config: Any, model: nn.Module) -> Any:
    """Let a LoraConfig take octavo's linears as it takes torch's, for who calls peft.get_peft_model: a trainer, say.

    Args:
        config: a peft.LoraConfig, changed in place. What it saves is a plain adapter_config.json.
        model: that it is for, after octavo.convert; target_modules="all-linear" becomes the names of its linears.
    Returns:
        The config.
    Raises:
        ConfigError: no linear of the model is octavo's, it is a model of octavo.models, or another of PEFT's methods.
    """
    require_module(model, "register")
    kinds = [type(module) for module in model.modules()]
    if fused := next((kind.__name__ for kind in kinds if issubclass(kind, FusedLayer)), ""):
        raise ConfigError(
            f"adapters go on models that call their linears one by one, got octavo's {fused}; load the checkpoint by "
            "transformers with quantization_config=octavo.integrations.huggingface.OctavoConfig(...)"
        )
    if not any(issubclass(kind, octavo.nn.Linear) for kind in kinds):
        raise ConfigError(
            "no linear of this model is octavo's; call octavo.convert(model, recipe) first, then add the adapters, "
            "which stay in high precision"
        )
    if type(config) is not peft.LoraConfig:
        raise ConfigError(f"octavo's linears take LoRA and DoRA, a peft.LoraConfig; got {type(config).__name__}")
    if config.fan_in_fan_out:
        raise ConfigError("octavo's linears store [N, K], got fan_in_fan_out=True; leave it out")
    if str(config.target_modules).lower() == "all-linear":  # as PEFT compares it
        config.target_modules = _all_linears(model)
    config._register_custom_module({octavo.nn.Linear: LoraLinear})
    return config


def get_peft_model(model: nn.Module, config: Any, **options: Any) -> Any:
    """peft.get_peft_model over a converted model: the base is frozen and stays in FP8, the adapters are trained.

    Args:
        model: after octavo.convert, before octavo.nn.keep_codes_only.
        config: as register takes it.
        options: of peft.get_peft_model.
    Returns:
        A peft.PeftModel.
    Raises:
        ConfigError: a target cannot have an adapter, or see register.
        RecipeError: a target holds FP8 codes only.
    """
    return peft.get_peft_model(model, register(config, model), **options)


def from_pretrained(model: nn.Module, folder: str | Path, **options: Any) -> Any:
    """peft.PeftModel.from_pretrained over a converted model.

    Args:
        model: as get_peft_model takes it.
        folder: of an adapter that save_pretrained wrote, over octavo's linears or torch's.
        options: of PeftModel.from_pretrained: is_trainable=True to train on.
    Returns:
        A peft.PeftModel.
    Raises:
        ConfigError: see get_peft_model.
        RecipeError: see get_peft_model.
    """
    config = register(peft.PeftConfig.from_pretrained(str(folder)), model)
    return peft.PeftModel.from_pretrained(model, str(folder), config=config, **options)


class LoraLinear(lora.Linear):  # type: ignore[misc]
    """PEFT's own layer over an octavo.nn.Linear: no FP8 code outlives a weight that PEFT writes through .data."""

    def update_layer(self, adapter_name: str, *args: Any, **kwargs: Any) -> None:
        """Add an adapter; PiSSA, OLoRA and their like change the base's weight here.

        Raises:
            ConfigError: the base is no plain octavo.nn.Linear, or the config names its parameter as a target.
            RecipeError: it holds FP8 codes only.
        """
        base = self.get_base_layer()
        if type(base) is not octavo.nn.Linear or kwargs.get("parameter_name"):
            what = kwargs.get("parameter_name") or type(base).__name__
            name = kwargs.get("target_name") or "a target"
            raise ConfigError(f"{name} is {what}, and adapters go on octavo.nn.Linear alone; do not target it")
        with self._writing("a new adapter"):
            super().update_layer(adapter_name, *args, **kwargs)

    def merge(self, safe_merge: bool = False, adapter_names: list[str] | None = None) -> None:
        """Add adapters to the base's weight, of which codes are then made again.

        Raises:
            RecipeError: the base holds FP8 codes only.
        """
        with self._writing("merge"):
            super().merge(safe_merge, adapter_names)

    def unmerge(self) -> None:
        """Take merged adapters out of the base's weight again, up to its rounding."""
        with self._writing("unmerge"):
            super().unmerge()

    def forward(self, x: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        """x [..., K] -> [..., N] of x's dtype: the base's product under its recipe, the adapters' in their own dtype.

        Raises:
            RecipeError: DoRA over a base that holds FP8 codes only.
        """
        if not self.disable_adapters and any(name in self.lora_magnitude_vector for name in self.active_adapters):
            self._require_weight("DoRA's norm")
        return super().forward(x, *args, **kwargs)  # type: ignore[no-any-return]

    @contextmanager
    def _writing(self, what: str) -> Iterator[None]:
        self._require_weight(what)
        try:
            yield
        finally:
            octavo.nn.mark_weights_updated(self.get_base_layer())

    def _require_weight(self, what: str) -> None:
        base = self.get_base_layer()
        if base.weight is None:
            raise RecipeError(
                f"{base.full_name or 'this linear'} holds FP8 codes only, and {what} needs its high-precision weight; "
                "call keep_codes_only after get_peft_model, train DoRA without it, and merge into a model that was not "
                "given to it"
            )


def _all_linears(model: nn.Module) -> set[str]:
    """What "all-linear" means: every linear but the head; PEFT itself would look for torch's alone."""
    if any(isinstance(module, lora.LoraLayer) for module in model.modules()):
        raise ConfigError("this model has adapters already; name the target_modules of another one, got 'all-linear'")
    find_head: Any = getattr(model, "get_output_embeddings", None)
    head = None if find_head is None else find_head()
    kinds = (octavo.nn.Linear, nn.Linear)
    return {name for name, module in model.named_modules() if isinstance(module, kinds) and module is not head}
