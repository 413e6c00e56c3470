"""Models with explicit quantize/dequantize pairs, rewritten to fused FP8 ops: write pairs, export, fuse.

`octavo.qdq.onnx` reads and writes the same graphs as ONNX QuantizeLinear and DequantizeLinear.
"""

from octavo.qdq.insertion import QDQLinear, insert
from octavo.qdq.operators import dequantize, quantize, quantize_dynamic
from octavo.qdq.report import FusedSite, LeftOver, Report
from octavo.qdq.rewriting import fuse

__all__ = [
    "FusedSite",
    "LeftOver",
    "QDQLinear",
    "Report",
    "dequantize",
    "fuse",
    "insert",
    "quantize",
    "quantize_dynamic",
]
