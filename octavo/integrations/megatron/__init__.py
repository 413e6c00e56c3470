"""octavo's FP8 in Megatron-Core's GPT: a spec for its layers; parameters, parallelism and checkpoints stay Megatron's.

Users give gpt_layer_spec() to GPTModel, or `--spec octavo.integrations.megatron gpt_layer` to pretrain_gpt.py.
"""

from octavo.errors import BackendError
from octavo.integrations.tested import installed_version, require

try:
    from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear
except ImportError:
    require("megatron", "megatron-core")  # says which version is needed
    raise
require("megatron", "megatron-core")
if not all(hasattr(kind, "_forward_impl") for kind in (ColumnParallelLinear, RowParallelLinear)):
    raise BackendError(
        f"octavo.integrations.megatron: megatron-core {installed_version('megatron-core')} has no "
        "ColumnParallelLinear._forward_impl, by which octavo multiplies; install a version that docs/ecosystem.md names"
    )

from octavo.integrations.megatron.attention import OctavoDotProductAttention  # noqa: E402
from octavo.integrations.megatron.experts import OctavoGroupedMLP  # noqa: E402
from octavo.integrations.megatron.layer import OctavoTransformerLayer, gpt_block_spec, gpt_layer, gpt_layer_spec  # noqa: E402
from octavo.integrations.megatron.linear import OctavoColumnParallelLinear, OctavoRowParallelLinear  # noqa: E402
from octavo.integrations.megatron.norm import OctavoNorm  # noqa: E402
from octavo.integrations.megatron.norm_linear import OctavoLayerNormColumnParallelLinear  # noqa: E402
from octavo.integrations.megatron.provider import OctavoSpecProvider  # noqa: E402
from octavo.integrations.megatron.recipe import recipe_of  # noqa: E402

__all__ = [
    "OctavoColumnParallelLinear",
    "OctavoDotProductAttention",
    "OctavoGroupedMLP",
    "OctavoLayerNormColumnParallelLinear",
    "OctavoNorm",
    "OctavoRowParallelLinear",
    "OctavoSpecProvider",
    "OctavoTransformerLayer",
    "gpt_block_spec",
    "gpt_layer",
    "gpt_layer_spec",
    "recipe_of",
]
