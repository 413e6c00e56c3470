"""Modules and autograd Functions: linears under a recipe, norms, attention, the decoder layer; autocast and convert."""

from octavo.nn.attention import Attention
from octavo.nn.attention_context import AttentionContext, PackedContext
from octavo.nn.autocast_scope import autocast
from octavo.nn.check_weights import check_weights
from octavo.nn.checkpoint import checkpoint, recompute_all
from octavo.nn.conversion import ConversionReport, ConversionRow, convert, set_exact
from octavo.nn.cross_entropy import linear_cross_entropy
from octavo.nn.cut_linear import ColumnLinear, RowLinear
from octavo.nn.decoder_layer import DecoderLayer, ParallelDecoderLayer
from octavo.nn.dot_product_attention import DotProductAttention
from octavo.nn.fp8_state import (
    fp8_state_dict,
    load_fp8_state_dict,
    reset_amax_history,
    set_amax_reduction_group,
)
from octavo.nn.fusion import plan_fusion, set_fusion
from octavo.nn.grouped_linear import GroupedLinear
from octavo.nn.layer_norm import LayerNorm
from octavo.nn.layer_norm_linear import LayerNormLinear
from octavo.nn.layer_norm_mlp import LayerNormMLP
from octavo.nn.linear import Linear
from octavo.nn.live_weights import freeze_to_fp8, keep_codes_only, live_tensors, mark_weights_updated, pin_codes
from octavo.nn.logprob import token_logprobs
from octavo.nn.mlp import MLP, GeluMLP
from octavo.nn.moe import Router, SparseMoE
from octavo.nn.rms_norm import RMSNorm
from octavo.nn.rope import RotaryEmbedding
from octavo.nn.scale_updates import update_scales
from octavo.nn.statistics import TensorStatistics
from octavo.nn.transformer_layer import TransformerLayer
from octavo.nn.weights.capture import captured_with_codes
from octavo.nn.weights.delayed import DELAYED_BUFFERS, HISTORY_BUFFER

__all__ = [
    "DELAYED_BUFFERS",
    "HISTORY_BUFFER",
    "MLP",
    "Attention",
    "AttentionContext",
    "ColumnLinear",
    "ConversionReport",
    "ConversionRow",
    "DecoderLayer",
    "DotProductAttention",
    "GeluMLP",
    "GroupedLinear",
    "LayerNorm",
    "LayerNormLinear",
    "LayerNormMLP",
    "Linear",
    "PackedContext",
    "ParallelDecoderLayer",
    "RMSNorm",
    "RotaryEmbedding",
    "Router",
    "RowLinear",
    "SparseMoE",
    "TensorStatistics",
    "TransformerLayer",
    "autocast",
    "captured_with_codes",
    "check_weights",
    "checkpoint",
    "convert",
    "fp8_state_dict",
    "freeze_to_fp8",
    "keep_codes_only",
    "linear_cross_entropy",
    "live_tensors",
    "load_fp8_state_dict",
    "mark_weights_updated",
    "pin_codes",
    "plan_fusion",
    "recompute_all",
    "reset_amax_history",
    "set_amax_reduction_group",
    "set_exact",
    "set_fusion",
    "token_logprobs",
    "update_scales",
]
