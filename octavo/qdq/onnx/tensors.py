"""Tensors between torch and ONNX, bit for bit, in the types that both have."""

import numpy as np
import onnx
import torch
from onnx import TensorProto, numpy_helper

from octavo.errors import DtypeError

DTYPES = {
    TensorProto.FLOAT: torch.float32,
    TensorProto.FLOAT16: torch.float16,
    TensorProto.BFLOAT16: torch.bfloat16,
    TensorProto.DOUBLE: torch.float64,
    TensorProto.INT64: torch.int64,
    TensorProto.INT32: torch.int32,
    TensorProto.BOOL: torch.bool,
    TensorProto.FLOAT8E4M3FN: torch.float8_e4m3fn,
    TensorProto.FLOAT8E5M2: torch.float8_e5m2,
}
FP8_TYPES = (TensorProto.FLOAT8E4M3FN, TensorProto.FLOAT8E5M2)
_CODES = {dtype: code for code, dtype in DTYPES.items()}
_BITS = {torch.bfloat16: (np.uint16, torch.uint16), torch.float8_e4m3fn: (np.uint8, torch.uint8),
         torch.float8_e5m2: (np.uint8, torch.uint8)}  # fmt: skip


def torch_dtype(code: int, where: str) -> torch.dtype:
    """An ONNX element type as torch's.

    Raises:
        DtypeError: naming `where` it stands.
    """
    if code not in DTYPES:
        raise DtypeError(f"{where}: type {TensorProto.DataType.Name(code)} is not read; use FLOAT8E4M3FN, or a float")
    return DTYPES[code]


def onnx_dtype(dtype: torch.dtype) -> int:
    """torch's dtype as an ONNX element type."""
    if dtype not in _CODES:
        raise DtypeError(f"{dtype} has no place in an ONNX file; cast it in the model")
    return _CODES[dtype]


def read_array(tensor: onnx.TensorProto) -> np.ndarray:
    """An initializer's values; 8-bit and 16-bit floats in ml_dtypes' types."""
    torch_dtype(tensor.data_type, f"tensor {tensor.name!r}")
    array: np.ndarray = numpy_helper.to_array(tensor)
    return array


def to_torch(array: np.ndarray) -> torch.Tensor:
    """The same bits."""
    for dtype, (bits, torch_bits) in _BITS.items():
        if array.dtype.name == str(dtype).removeprefix("torch."):
            return torch.from_numpy(array.view(bits).copy()).view(torch_bits).view(dtype)
    return torch.from_numpy(array.copy())


def write_tensor(name: str, value: torch.Tensor) -> onnx.TensorProto:
    """An initializer of the same bits."""
    value = value.detach().cpu().contiguous()
    bits = _BITS.get(value.dtype)
    raw = (value if bits is None else value.view(bits[1])).numpy().tobytes()
    return onnx.helper.make_tensor(name, onnx_dtype(value.dtype), list(value.shape), raw, raw=True)
