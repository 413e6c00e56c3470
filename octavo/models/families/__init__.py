"""The model families: one small file each, translating Hugging Face's config.json to a ModelConfig and back."""

from collections.abc import Callable
from typing import Any, NamedTuple

from octavo.errors import CheckpointError
from octavo.models.config import ModelConfig
from octavo.models.families import gptj, llama, mistral, qwen2, qwen3, qwen3_moe
from octavo.models.families.value_types import check_values

__all__ = ["FAMILIES", "from_hf", "to_hf"]


class Family(NamedTuple):
    """The two translations of one family, and the class name that transformers gives it."""

    from_hf: Callable[[dict[str, Any]], ModelConfig]
    to_hf: Callable[[ModelConfig], dict[str, Any]]
    architecture: str


# model_type of config.json -> family
FAMILIES = {
    "gptj": Family(gptj.from_hf, gptj.to_hf, "GPTJForCausalLM"),
    "llama": Family(llama.from_hf, llama.to_hf, "LlamaForCausalLM"),
    "mistral": Family(mistral.from_hf, mistral.to_hf, "MistralForCausalLM"),
    "qwen2": Family(qwen2.from_hf, qwen2.to_hf, "Qwen2ForCausalLM"),
    "qwen3": Family(qwen3.from_hf, qwen3.to_hf, "Qwen3ForCausalLM"),
    "qwen3_moe": Family(qwen3_moe.from_hf, qwen3_moe.to_hf, "Qwen3MoeForCausalLM"),
}


def from_hf(fields: dict[str, Any]) -> ModelConfig:
    """Translate a config.json; see ModelConfig.from_hf."""
    model_type = fields.get("model_type")
    if not isinstance(model_type, str) or model_type not in FAMILIES:
        raise CheckpointError(
            f"config.json: model_type {model_type!r} is not an architecture that octavo runs; known: "
            f"{', '.join(FAMILIES)}"
        )
    check_values(fields)
    architectures = fields.get("architectures") or [FAMILIES[model_type].architecture]
    if architectures != [FAMILIES[model_type].architecture]:
        raise CheckpointError(
            f"config.json: architectures {architectures} is not supported; only {FAMILIES[model_type].architecture}, "
            "the language model, is"
        )
    return FAMILIES[model_type].from_hf(fields)


def to_hf(config: ModelConfig) -> dict[str, Any]:
    """The config.json of a ModelConfig; see ModelConfig.to_hf."""
    family = FAMILIES[config.family]
    return {"architectures": [family.architecture], **family.to_hf(config)}
