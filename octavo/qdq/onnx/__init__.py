"""ONNX files to and from Q/DQ graphs: QuantizeLinear and DequantizeLinear in FP8. Needs the extra `onnx`."""

from importlib.util import find_spec

from octavo.errors import BackendError, install_extra

if find_spec("onnx") is None:
    raise BackendError(f"octavo.qdq.onnx needs the package onnx; {install_extra('onnx')}")

from octavo.qdq.onnx.reading import from_onnx
from octavo.qdq.onnx.writing import to_onnx

__all__ = ["from_onnx", "to_onnx"]
