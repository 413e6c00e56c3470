"""OctavoSpecProvider: what Megatron's spec builders ask which module to use."""

from typing import Any

from megatron.core.models.backends import LocalSpecProvider
from megatron.core.transformer.mlp import MLPSubmodules
from megatron.core.transformer.moe.experts import SequentialMLP

from octavo.integrations.megatron.attention import OctavoDotProductAttention
from octavo.integrations.megatron.experts import OctavoGroupedMLP
from octavo.integrations.megatron.linear import OctavoColumnParallelLinear, OctavoRowParallelLinear
from octavo.integrations.megatron.norm import OctavoNorm
from octavo.integrations.megatron.norm_linear import OctavoLayerNormColumnParallelLinear


class OctavoSpecProvider(LocalSpecProvider):  # type: ignore[misc]
    """Octavo's linears, norms, attention and experts: a BackendSpecProvider.

    Args:
        fuse_norms: a norm and the linear after it are one module, with TransformerEngine's keys.
    """

    def __init__(self, *, fuse_norms: bool = False) -> None:
        self._fuse_norms = fuse_norms

    def column_parallel_linear(self) -> type:
        """The linear whose rows are cut among the ranks."""
        return OctavoColumnParallelLinear

    def row_parallel_linear(self) -> type:
        """The linear whose columns are."""
        return OctavoRowParallelLinear

    def fuse_layernorm_and_linear(self) -> bool:
        """Whether column_parallel_layer_norm_linear is asked for."""
        return self._fuse_norms

    def column_parallel_layer_norm_linear(self) -> type:
        """A norm and the linear after it."""
        return OctavoLayerNormColumnParallelLinear

    def layer_norm(self, rms_norm: bool = False, for_qk: bool = False) -> type:
        """The norm that the config names."""
        return OctavoNorm

    def core_attention(self) -> type:
        """Attention between the linears."""
        return OctavoDotProductAttention

    def grouped_mlp_modules(
        self, moe_use_grouped_gemm: bool, moe_use_legacy_grouped_gemm: bool = False
    ) -> tuple[type, Any]:
        """The experts: together, or one after the other."""
        linears = MLPSubmodules(linear_fc1=OctavoColumnParallelLinear, linear_fc2=OctavoRowParallelLinear)
        return OctavoGroupedMLP if moe_use_grouped_gemm else SequentialMLP, linears
