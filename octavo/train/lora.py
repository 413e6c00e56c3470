"""`[lora]` of a training run: adapters on the Decoder's linears, what a checkpoint holds of them, and the merged model.

The base is frozen, and its FP8 codes are made once. Checkpoints hold adapters alone, in PEFT's files.
"""

import dataclasses
import hashlib
import json
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from octavo.errors import CheckpointError, ConfigError, RecipeError, did_you_mean
from octavo.models import Decoder, Tokenizer, load_model
from octavo.models.checkpoint.dialects import newest_model
from octavo.models.checkpoint.names import parameter_names
from octavo.models.checkpoint.safetensors_io import check_finite
from octavo.models.checkpoint.storage import writing
from octavo.models.export import ModelExport, high_precision_linears
from octavo.nn import Linear, fp8_state_dict, keep_codes_only, load_fp8_state_dict
from octavo.nn.adapted_linear import AdaptedLinear
from octavo.run.checkpoint_store import changes
from octavo.train.config import LoraSection, TrainConfig

_PREFIX = "base_model.model."  # PEFT's, before Hugging Face's name of a module


def add_adapters(model: Decoder, section: LoraSection, seed: int) -> None:
    """Freeze a model and give its linears the adapters that a [lora] section describes; before set_numerics.

    Args:
        model: loaded for training, whole on one device.
        seed: of the adapters' A.
    Raises:
        ConfigError: a name that matches no linear, or experts.
    """
    weights = [parameter for parameter in parameter_names(model.config) if parameter.is_linear_weight]
    parts = {_module(parameter.name): [_module(name) for name, _ in parameter.parts] for parameter in weights}
    chosen = _choose([name for names in parts.values() for name in names], section)
    targets = {name: names for name, names in parts.items() if not chosen.isdisjoint(names)}
    for linear in map(model.get_submodule, targets):
        if type(linear) is not Linear:
            raise ConfigError(
                f"lora.target_modules = {section.target_modules!r} takes in experts, which have no adapters here; name "
                "the linears of attention, such as ['q_proj', 'k_proj', 'v_proj', 'o_proj']"
            )
    model.requires_grad_(False)
    generator = torch.Generator().manual_seed(seed)
    for name, names in targets.items():
        linear = model.get_submodule(name)
        linear.__class__ = AdaptedLinear
        assert isinstance(linear, AdaptedLinear), "it has just become one"
        pair_names = tuple(part if part in chosen else None for part in names)
        linear.add(section.rank, section.alpha / section.rank, pair_names, generator)


def _module(name: str) -> str:
    return name.removesuffix(".weight")


def _choose(modules: list[str], section: LoraSection) -> set[str]:
    """The modules that the section names, as PEFT matches them."""
    targets = section.target_modules
    if targets == ("all-linear",):
        return set(modules)
    found = {target: {name for name in modules if f".{name}".endswith(f".{target}")} for target in targets}
    ends = sorted({name.rpartition(".")[2] for name in modules})
    for target, names in found.items():
        if not names:
            hint = did_you_mean(target, ends) or f"; they end with {', '.join(ends)}"
            raise ConfigError(f"lora.target_modules: {target!r} matches no linear of the model's layers{hint}")
    if not found:
        raise ConfigError("lora.target_modules names no linear; name some, or leave it out for all")
    return set.union(*found.values())


def _linears(model: Decoder) -> Iterator[Linear]:
    return (module for module in model.modules() if isinstance(module, Linear))


def adapted_linears(model: Decoder) -> Iterator[tuple[str, AdaptedLinear]]:
    """The linears of a model that have adapters, by name."""
    return ((name, module) for name, module in model.named_modules() if isinstance(module, AdaptedLinear))


@dataclasses.dataclass(frozen=True)
class Adapters:
    """The adapters of a run.

    Attributes:
        section: the run's [lora].
        base: the folder of the base's checkpoint, as model.path names it; of a run's folder the newest model in it.
        base_sha256: of the names and values of all frozen parameters.
    """

    section: LoraSection
    base: Path
    base_sha256: str

    @classmethod
    def of_run(cls, model: Decoder, config: TrainConfig) -> "Adapters | None":
        """Those that build_model has added; None for a run without [lora].

        Raises:
            RecipeError: keep_codes_only under a recipe without codes, or with such as no backward can transpose.
        """
        if config.lora is None:
            return None
        adapters = cls(config.lora, newest_model(Path(config.model.path)), _digest(model))
        if config.lora.keep_codes_only:
            recipes = [linear.recipe for linear in _linears(model) if linear.recipe is not None]
            are_square = all(recipe.weight is None or recipe.weight.is_square for recipe in recipes)
            if not are_square or not keep_codes_only(model):
                raise RecipeError(
                    "lora.keep_codes_only needs codes of square blocks or of one scale a tensor, got precision.recipe "
                    f"= {config.precision.recipe!r}; leave it out, or use 'blockwise', 'tensorwise' or 'delayed'"
                )
        return adapters

    def describe(self) -> dict[str, Any]:
        """What trainer.json says of them."""
        return {**self.section.model_dump(mode="json"), "base": str(self.base), "base_sha256": self.base_sha256}

    def summary(self, model: Decoder) -> str:
        """What is trained, for a person."""
        linears = [linear for _, linear in adapted_linears(model)]
        num = sum(linear.lora_a.numel() + linear.lora_b.numel() for linear in linears)
        num_pairs = sum(len(linear.pair_rows) for linear in linears)
        rank = self.section.rank
        return f"{num:,} more are trained, in {num_pairs} adapters of rank {rank}; {self.base} stays as it is"

    def merged(self, model: Decoder) -> Decoder:
        """A plain Decoder on the CPU with the adapters in its weights, in the model's numerics.

        Values that no adapter changes are shared where the model is on the CPU.

        Raises:
            CheckpointError: keep_codes_only, and the base cannot be read again.
        """
        linears = dict(adapted_linears(model))
        base = model
        if any(linear.weight is None for linear in _linears(model)):
            base = load_model(self.base, dtype=model.dtype, trainable=True)
        values = {}
        for parameter in parameter_names(model.config):
            value, linear = base.get_parameter(parameter.name).detach(), linears.get(_module(parameter.name))
            adapts = linear is not None and parameter.is_linear_weight
            values[parameter.name] = (linear.merged(value) if adapts else value).cpu()  # type: ignore[union-attr]
        made = Decoder(model.config, dtype=model.dtype, device="meta")
        made.load_state_dict(values, assign=True)
        made.requires_grad_(False)
        made.set_numerics(model.numerics, ignore=high_precision_linears(model))
        load_fp8_state_dict(made, fp8_state_dict(model), strict=False)
        for name in linears:  # whose weights' scales under delayed scaling are the base's
            own = made.get_submodule(name)
            assert isinstance(own, Linear), name
            own.source.is_scaled = False
            if own.recipe is not None and own.recipe.has_state:
                own.forward_operands(own.recipe)
        made.kv_scales, made.weight_version = model.kv_scales, model.weight_version
        return made


def check_adapters(theirs: Mapping[str, Any], ours: Mapping[str, Any]) -> None:
    """Compare what two describe: that of a checkpoint, and that of the run; empty without [lora].

    Raises:
        CheckpointError: other adapters, or another base.
    """
    free = ("base", "keep_codes_only")  # the same base may lie at another place
    found = [f"lora.{text}" for key, text in changes(theirs, ours).items() if key not in free]
    if found or (theirs and not ours):
        listed = "; ".join(found) or "there is no [lora] here"
        raise CheckpointError(
            f"the checkpoint has other adapters, or another base: {listed}; choose another run.dir, or start over with "
            "--no-resume"
        )


def _digest(model: Decoder) -> str:
    frozen = {name: parameter for name, parameter in model.named_parameters() if not parameter.requires_grad}
    with ThreadPoolExecutor() as pool:
        digests = dict(zip(frozen, pool.map(_digest_of, frozen.values()), strict=True))
    return hashlib.sha256(json.dumps(digests, sort_keys=True).encode()).hexdigest()


def _digest_of(parameter: torch.Tensor) -> str:
    return hashlib.sha256(parameter.detach().cpu().contiguous().view(torch.uint8).numpy()).hexdigest()  # type: ignore[arg-type]


class AdapterExport(ModelExport):
    """What a checkpoint of a run with adapters holds in a ModelExport's place: these alone, in PEFT's files.

    Args:
        model: with adapters.
        tokenizer: written beside them.
        adapters: the run's.
    """

    folder = "adapter"

    def __init__(self, model: Decoder, tokenizer: Tokenizer, adapters: Adapters) -> None:
        self._linears, self._tokenizer, self._adapters = dict(adapted_linears(model)), tokenizer, adapters
        weights = [parameter for parameter in parameter_names(model.config) if parameter.is_linear_weight]
        self._modules = [_module(name) for parameter in weights for name, _ in parameter.parts]
        self.tensors = {
            f"{name}.{key}": getattr(linear, key).detach()
            for name, linear in self._linears.items()
            for key in ("lora_a", "lora_b")
        }

    @property
    def num_bytes(self) -> int:
        return sum(tensor.nbytes for tensor in self.tensors.values())

    def write(self, path: str | Path, tensors: Mapping[str, torch.Tensor] | None = None, group: Any = None) -> None:
        """Write adapter_config.json, adapter_model.safetensors and the tokenizer; as ModelExport's, by one process.

        Raises:
            CheckpointError: an adapter is not finite.
        """
        assert group is None, "adapters are trained by one process"
        directory, values = Path(path), self.tensors if tensors is None else tensors
        for name, value in values.items():
            check_finite(name, value, "the model")
        with writing(directory):
            directory.mkdir()
            (directory / "adapter_config.json").write_text(json.dumps(self._peft_config(), indent=2) + "\n", "utf-8")
            save_file(dict(self._peft_tensors(values)), directory / "adapter_model.safetensors", {"format": "pt"})
            self._tokenizer.save(directory)  # type: ignore[union-attr]

    def _peft_tensors(self, values: Mapping[str, torch.Tensor]) -> Iterator[tuple[str, torch.Tensor]]:
        for name, linear in self._linears.items():
            a, b = (values[f"{name}.{key}"].cpu() for key in ("lora_a", "lora_b"))
            names = filter(None, linear.pair_names)
            for module, *pair in zip(names, a.split(b.shape[1]), b.split(linear.pair_rows), strict=True):
                for key, tensor in zip("AB", pair, strict=True):
                    yield f"{_PREFIX}{module}.lora_{key}.weight", tensor.clone()

    def _peft_config(self) -> dict[str, Any]:
        """PEFT's LoraConfig; targets by the ends of their names where these mean the same modules."""
        chosen = {name for linear in self._linears.values() for name in linear.pair_names if name}
        ends = {name.rpartition(".")[2] for name in chosen}
        is_alike = chosen == {name for name in self._modules if name.rpartition(".")[2] in ends}
        section = self._adapters.section
        return {
            "peft_type": "LORA",
            "task_type": "CAUSAL_LM",
            "base_model_name_or_path": str(self._adapters.base),
            "r": section.rank,
            "lora_alpha": int(section.alpha) if section.alpha.is_integer() else section.alpha,
            "lora_dropout": 0.0,
            "target_modules": sorted(ends if is_alike else chosen),
            "bias": "none",
            "fan_in_fan_out": False,
            "inference_mode": True,
        }
