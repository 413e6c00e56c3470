"""Triton kernels of fake quantization: the formats, and the random Hadamard transform that comes before NVFP4."""

from octavo.ops.quantize.fake_quantize.triton.formats import mxfp8, nvfp4
from octavo.ops.quantize.fake_quantize.triton.hadamard import random_hadamard

__all__ = ["mxfp8", "nvfp4", "random_hadamard"]
