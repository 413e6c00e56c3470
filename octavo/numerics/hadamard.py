"""The random Hadamard transform of tokens: outliers are spread over their block, and no product of operands sees it.

Rows are taken in blocks of 16, the last one filled up with zeros, and multiplied by diag(SIGNS) @ H / 4, H being
Sylvester's. Each sum is made in four steps of adding and subtracting neighbours, so its bits are the same everywhere.
"""

import math

import torch
import torch.nn.functional as F

from octavo.errors import DtypeError, ShapeError
from octavo.numerics.scaling import INPUT_DTYPES

HADAMARD_BLOCK = 16
HADAMARD_STEPS = 4
# TransformerEngine's, drawn once: a fixed vector keeps runs repeatable.
SIGNS = (1, 1, 1, -1, 1, -1, -1, -1, -1, -1, -1, 1, -1, 1, -1, -1)
NEGATIVE = sum(1 << i for i, sign in enumerate(SIGNS) if sign < 0)  # a bit for each negative one


def check_tokens(x: torch.Tensor) -> None:
    """Refuse what has no rows of tokens to transform.

    Raises:
        DtypeError: x has another dtype.
        ShapeError: x is no matrix.
    """
    if x.dtype not in INPUT_DTYPES:
        raise DtypeError(f"x must be float32, bfloat16 or float16, got {x.dtype}; cast it before transforming")
    if x.dim() != 2:
        raise ShapeError(f"x must be a matrix [T, K], got shape {tuple(x.shape)}; flatten leading dims first")


def result_like(x: torch.Tensor) -> torch.Tensor:
    """An uninitialized result for x [T, K]: T filled up to blocks; fp16, whose range sums may leave, becomes fp32."""
    dtype = torch.bfloat16 if x.dtype == torch.bfloat16 else torch.float32
    rows = math.ceil(x.shape[0] / HADAMARD_BLOCK) * HADAMARD_BLOCK
    return torch.empty(rows, x.shape[1], dtype=dtype, device=x.device)


def random_hadamard(x: torch.Tensor) -> torch.Tensor:
    """x with its rows transformed: random_hadamard(x).t() @ random_hadamard(y) is x.t() @ y.

    Args:
        x: [T, K] fp32, bf16 or fp16; T is the dim that a product sums over.
    Returns:
        [T rounded up to 16, K], bf16 for bf16 and else fp32: the filled-up rows count, for they hold a share of all
        others.
    Raises:
        DtypeError: x has another dtype.
        ShapeError: x is no matrix.
    Source:
        NVIDIA, "Pretraining LLMs with NVFP4" (arXiv 2509.25149), signs and order of TransformerEngine.
    Exactness: bitwise on every device.
    """
    check_tokens(x)
    result = result_like(x)
    padded = F.pad(x.float(), (0, 0, 0, result.shape[0] - x.shape[0]))
    blocks = padded.view(padded.shape[0] // HADAMARD_BLOCK, HADAMARD_BLOCK, x.shape[1])
    signs = torch.tensor(SIGNS, dtype=torch.float32, device=x.device)
    blocks = blocks * (signs * HADAMARD_BLOCK**-0.5)[:, None]
    for _ in range(HADAMARD_STEPS):  # the neighbours' bit of a row's number moves to the front each time
        even, odd = blocks[:, 0::2], blocks[:, 1::2]
        blocks = torch.cat([even + odd, even - odd], dim=1)
    values = result.copy_(blocks.reshape(result.shape))
    return values.masked_fill_(torch.isnan(values), math.nan)  # casts of NaN differ from device to device
