"""The FBGEMM dialect of Llama 3.1 405B FP8: one fp32 scale a channel, inputs quantized per token at run time."""

import dataclasses
from typing import Any

import torch

from octavo.models.checkpoint.layout import F32, Layout, as_patterns
from octavo.numerics import Scaling

QUANT_METHOD = "fbgemm_fp8"
LAYOUT = Layout(
    "fbgemm", Scaling.per_row(torch.float8_e4m3fn), "dynamic", weight_scale=("weight_scale",), scale_dtypes=(F32,)
)


def parse(quantization: dict[str, Any]) -> Layout:
    """The layout that a quantization_config of FBGEMM declares.

    Raises:
        CheckpointError: a skip list that is none.
    """
    bound = quantization.get("activation_scale_ub")
    remark = (
        f"activation_scale_ub = {bound} is not applied: a token whose largest value exceeds it is scaled, not clipped"
    )
    return dataclasses.replace(
        LAYOUT,
        ignored=as_patterns(quantization.get("modules_to_not_convert"), "modules_to_not_convert"),
        remarks=() if bound is None else (remark,),
    )
