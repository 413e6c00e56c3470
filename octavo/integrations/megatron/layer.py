"""A GPT layer of Megatron's with octavo's modules, which it chooses by the config, as each layer's number asks."""

import dataclasses
from typing import Any

from megatron.core.fp8_utils import is_first_last_bf16_layer
from megatron.core.models.backends import LocalSpecProvider
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec, get_mlp_module_spec_for_backend
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear
from megatron.core.transformer.dot_product_attention import DotProductAttention
from megatron.core.transformer.identity_op import IdentityOp
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules, get_num_layers_to_build
from megatron.core.transformer.transformer_layer import TransformerLayer, get_transformer_layer_offset

from octavo.errors import ConfigError
from octavo.integrations.megatron.linear import InFp8
from octavo.integrations.megatron.norm import OctavoNorm
from octavo.integrations.megatron.provider import OctavoSpecProvider
from octavo.integrations.megatron.recipe import choose_recipe
from octavo.nn.delayed import join_model
from octavo.numerics.recipe import Recipe, get_recipe

_OTHERS = {  # how the full name of a module's class begins -> whose FP8 it is
    "transformer_engine.": "TransformerEngine",
    "torchao.float8.": "torchao's float8",
    "modelopt.": "ModelOpt",
}


class OctavoTransformerLayer(TransformerLayer):  # type: ignore[misc]
    """Megatron's TransformerLayer, with its arguments, whose linears have a recipe.

    Args:
        config: a TransformerConfig.
        submodules: None for those that the config asks for, dense or with experts; others must have octavo's linears.
        layer_number: in this pipeline stage.
        recipe: as octavo.convert takes it; None for that of the config's --fp8-* flags.
        fuse_norms: see OctavoSpecProvider.
        options: of TransformerLayer.
    Raises:
        ConfigError: see octavo.integrations.megatron.recipe_of; another FP8 backend's modules are among the layer's.
    """

    def __init__(
        self,
        config: Any,
        submodules: Any = None,
        layer_number: int = 1,
        *,
        recipe: Recipe | str | None = None,
        fuse_norms: bool = False,
        **options: Any,
    ) -> None:
        chosen = choose_recipe(config, recipe)
        if submodules is None:
            groups = options.get("pg_collection") or ProcessGroupCollection.use_mpu_process_groups()
            offset = get_transformer_layer_offset(config, options.get("vp_stage"), groups.pp.rank())
            submodules = _submodules(
                config, OctavoSpecProvider(fuse_norms=fuse_norms), _has_experts(config, layer_number + offset)
            )
        super().__init__(config, submodules, layer_number, **options)
        self._refuse_other_fp8()
        if is_first_last_bf16_layer(config, self.layer_number - 1):
            chosen = None
        linears = []
        for name, module in self.named_modules():
            if isinstance(module, InFp8) and module.fp8 is not None:
                module.fp8.set_recipe(chosen)
                module.awaits_layer = False
                module.fp8.full_name = f"layer {self.layer_number}, {name}"
                linears.append(module.fp8)
        if chosen is not None and chosen.has_state:
            join_model(linears)

    def _refuse_other_fp8(self) -> None:
        for name, module in self.named_modules():
            kinds = [f"{kind.__module__}." for kind in type(module).__mro__]
            other = next((whose for start, whose in _OTHERS.items() if any(k.startswith(start) for k in kinds)), None)
            if other and any(parameter.dim() > 1 for parameter in module.parameters(recurse=False)):
                raise ConfigError(
                    f"a layer has one FP8 backend, got octavo's and {other} ({name}, a {type(module).__name__}); leave "
                    "the submodules out, or take them all of one"
                )


def gpt_layer_spec(recipe: Recipe | str | None = None, *, fuse_norms: bool = False) -> ModuleSpec:
    """The spec of a GPT's layers, for GPTModel(transformer_layer_spec=...), dense or with experts as the config says.

    Args:
        recipe: as octavo.convert takes it, with the config's fp8 left unset; None for that of the --fp8-* flags.
        fuse_norms: a norm and the linear after it are one module, with TransformerEngine's keys: a little faster where
            one rank holds the linear. Else the keys are those of Megatron's local layers.
    Raises:
        RecipeError: an unknown recipe.
    """
    chosen = None if recipe is None else get_recipe(recipe)
    return ModuleSpec(module=OctavoTransformerLayer, params={"recipe": chosen, "fuse_norms": fuse_norms})


gpt_layer = gpt_layer_spec()  # pretrain_gpt.py --spec octavo.integrations.megatron gpt_layer


def gpt_block_spec(
    config: Any,
    recipe: Recipe | str | None = None,
    vp_stage: int | None = None,
    pp_rank: int | None = None,
    *,
    fuse_norms: bool = False,
) -> TransformerBlockSubmodules:
    """gpt_layer_spec for each layer of a pipeline stage, and octavo's norm after the last one.

    Args:
        config: a TransformerConfig.
        recipe: see gpt_layer_spec.
        vp_stage: of interleaved stages, as in Megatron's get_gpt_decoder_block_spec.
        pp_rank: so too.
        fuse_norms: see gpt_layer_spec.
    """
    layer = gpt_layer_spec(recipe, fuse_norms=fuse_norms)
    num_layers = get_num_layers_to_build(config, vp_stage=vp_stage, pp_rank=pp_rank)
    return TransformerBlockSubmodules(layer_specs=[layer] * num_layers, layer_norm=OctavoNorm)


def _submodules(config: Any, provider: OctavoSpecProvider, has_experts: bool) -> Any:
    """What Megatron's own local spec has for a layer, with octavo's modules."""
    names = ("qk_layernorm", "multi_latent_attention", "normalization", "qk_l2_norm")
    found = get_gpt_layer_local_spec(**{name: getattr(config, name) for name in names}).submodules
    num_experts = config.num_moe_experts if has_experts else None
    found.mlp = get_mlp_module_spec_for_backend(provider, num_experts, config.moe_grouped_gemm)
    local = LocalSpecProvider()
    own = {
        ColumnParallelLinear: provider.column_parallel_linear(),
        RowParallelLinear: provider.row_parallel_linear(),
        DotProductAttention: provider.core_attention(),
        local.layer_norm(config.normalization == "RMSNorm"): provider.layer_norm(),
    }
    for parts in (found, found.self_attention.submodules):
        for field in dataclasses.fields(parts):
            part = getattr(parts, field.name)
            if isinstance(part, type) and part in own:
                setattr(parts, field.name, own[part])
    if provider.fuse_layernorm_and_linear() and not config.multi_latent_attention:
        found.self_attention.submodules.linear_qkv = provider.column_parallel_layer_norm_linear()
        found.input_layernorm, found.sharded_state_dict_keys_map = IdentityOp, {}
    if provider.fuse_layernorm_and_linear() and not has_experts:
        found.pre_mlp_layernorm = IdentityOp
    return found


def _has_experts(config: Any, layer_number: int) -> bool:
    """Whether a layer, counted from 1 over all stages, has experts: Megatron's rule for --moe-layer-freq."""
    if config.num_moe_experts is None:
        return False
    every = config.moe_layer_freq
    return bool(every[layer_number - 1]) if isinstance(every, list) else (layer_number - 1) % every == 0
