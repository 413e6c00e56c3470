"""The numerics contract in pure torch: formats, scalings, quantized tensors, recipes, delayed scaling, analysis."""

from octavo.numerics.analysis import TensorReport, analyze, analyze_model, format_table, sqnr
from octavo.numerics.contract import Numerics
from octavo.numerics.delayed import stage_amax, update_delayed
from octavo.numerics.formats import E4M3, E5M2, E8M0, FloatFormat, Format, all_values, format_of
from octavo.numerics.quantized import QuantizedTensor, expand_scale, quantize_reference
from octavo.numerics.recipe import RECIPE_NAMES, DelayedConfig, DelayedScaling, Recipe, get_recipe
from octavo.numerics.scaling import Scaling, block_amax, compute_quant_scale

__all__ = [
    "E4M3",
    "E5M2",
    "E8M0",
    "RECIPE_NAMES",
    "DelayedConfig",
    "DelayedScaling",
    "FloatFormat",
    "Format",
    "Numerics",
    "QuantizedTensor",
    "Recipe",
    "Scaling",
    "TensorReport",
    "all_values",
    "analyze",
    "analyze_model",
    "block_amax",
    "compute_quant_scale",
    "expand_scale",
    "format_of",
    "format_table",
    "get_recipe",
    "quantize_reference",
    "sqnr",
    "stage_amax",
    "update_delayed",
]
