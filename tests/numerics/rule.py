"""The quantization rule once more, independent of octavo: numpy and ml_dtypes, block maxima by reduceat, no padding."""

import ml_dtypes
import numpy as np
import torch

FP8 = {torch.float8_e4m3fn: ml_dtypes.float8_e4m3fn, torch.float8_e5m2: ml_dtypes.float8_e5m2}
LARGEST = {
    torch.float32: np.finfo(np.float32).max,
    torch.bfloat16: np.float32(ml_dtypes.finfo(ml_dtypes.bfloat16).max),
    torch.float16: np.float32(np.finfo(np.float16).max),
}


def quant_scale_of(
    amax: np.ndarray, fp8_max: float, largest: np.float32, is_e8m0: bool = False, floor: float = 0.0
) -> np.ndarray:
    """quant_scale of each block, in the order that the contract states; fp32 in and out."""
    amax = np.maximum(amax, np.float32(floor))  # the floor comes before the zero test
    with np.errstate(divide="ignore", over="ignore"):
        result = np.float32(fp8_max) / amax
    result = np.where(np.isinf(result), largest, result)
    result = np.where((amax == 0) | np.isinf(amax), np.float32(1), result)
    if is_e8m0:  # after the overflow replacement
        result = np.ldexp(np.float32(1), np.frexp(result)[1] - 1)
    assert result.dtype == np.float32
    return result


def quantize(
    x: torch.Tensor, dtype: torch.dtype, block_size: tuple[int, int], scale_format: str = "fp32", floor: float = 0.0
) -> tuple[np.ndarray, np.ndarray]:
    """(codes [M, K] uint8, decode scales [blocks, blocks] fp32)."""
    values = x.float().numpy()
    fp8_max = float(ml_dtypes.finfo(FP8[dtype]).max)
    rows, cols = values.shape
    bm, bk = (rows if block_size[0] == -1 else block_size[0]), (cols if block_size[1] == -1 else block_size[1])
    amax = np.fmax.reduceat(np.abs(values), np.arange(0, rows, bm), axis=0)  # fmax drops NaN
    amax = np.fmax.reduceat(amax, np.arange(0, cols, bk), axis=1)
    amax = np.where(np.isnan(amax), np.float32(0), amax)  # a block of NaN alone
    largest = LARGEST[torch.float32 if block_size == (-1, -1) else x.dtype]
    quant_scale = quant_scale_of(amax, fp8_max, largest, scale_format == "e8m0", floor)
    with np.errstate(over="ignore"):
        scaled = values * quant_scale[np.arange(rows) // bm][:, np.arange(cols) // bk]
    is_nan = np.isnan(scaled)
    saturated = np.clip(np.where(is_nan, 0, scaled), -fp8_max, fp8_max).astype(np.float32)
    codes = np.where(is_nan, np.uint8(0x7F), saturated.astype(FP8[dtype]).view(np.uint8))
    return codes, np.float32(1) / quant_scale
