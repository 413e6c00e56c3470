"""The model families: what tells them apart, and a small file each that translates Hugging Face's config.json."""

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple

from octavo.errors import CheckpointError
from octavo.models.families import gptj, llama, mistral, qwen2, qwen3, qwen3_moe
from octavo.models.families.value_types import check_values

if TYPE_CHECKING:
    from octavo.models.config import ModelConfig

__all__ = ["FAMILIES", "from_hf", "to_hf"]


class Family(NamedTuple):
    """One family.

    Attributes:
        from_hf: config.json to ModelConfig's arguments.
        to_hf: back.
        architecture: the class name that transformers gives it.
        fixed: arguments of ModelConfig that every new model of it has.
        has_experts: layers may be mixtures of experts.
        has_out_bias: attention_bias puts a bias on o_proj, too.
        is_parallel: GPT-J's layers, see ModelConfig.is_parallel.
    """

    from_hf: Callable[[dict[str, Any]], dict[str, Any]]
    to_hf: Callable[["ModelConfig"], dict[str, Any]]
    architecture: str
    fixed: dict[str, Any] = {}
    has_experts: bool = False
    has_out_bias: bool = True
    is_parallel: bool = False


# model_type of config.json -> family
FAMILIES = {
    "gptj": Family(gptj.from_hf, gptj.to_hf, "GPTJForCausalLM", is_parallel=True),
    "llama": Family(llama.from_hf, llama.to_hf, "LlamaForCausalLM"),
    "mistral": Family(mistral.from_hf, mistral.to_hf, "MistralForCausalLM"),
    "qwen2": Family(qwen2.from_hf, qwen2.to_hf, "Qwen2ForCausalLM", {"attention_bias": True}, has_out_bias=False),
    "qwen3": Family(qwen3.from_hf, qwen3.to_hf, "Qwen3ForCausalLM", {"qk_norm": True}),
    "qwen3_moe": Family(
        qwen3_moe.from_hf,
        qwen3_moe.to_hf,
        "Qwen3MoeForCausalLM",
        {"qk_norm": True, "norm_topk_prob": True},
        has_experts=True,
    ),
}


def from_hf(fields: dict[str, Any]) -> dict[str, Any]:
    """ModelConfig's arguments of a config.json; see ModelConfig.from_hf."""
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


def to_hf(config: "ModelConfig") -> dict[str, Any]:
    """The config.json of a ModelConfig; see ModelConfig.to_hf."""
    family = FAMILIES[config.family]
    return {"architectures": [family.architecture], **family.to_hf(config)}
