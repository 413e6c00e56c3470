"""The audit of weights before an engine gets them: every tensor there, every scale beside its codes, all of them right.

The oracle is the trainer's bf16 weight itself: codes times scales must come back to it within E4M3's rounding, and what
is sent in high precision must equal it. A failure is named by the first cause that explains it.
"""

import math
from collections.abc import Callable, Collection

import torch

from octavo.models import Decoder
from octavo.models.checkpoint.fp8_block import BLOCK
from octavo.models.checkpoint.names import parameter_names
from octavo.numerics.scaling import floor_to_power_of_two
from octavo.weights.errors import WeightAuditError

SCALE_SUFFIX = "_scale_inv"
# E4M3 rounds a value by 1/16 of itself at most, its smallest codes by more; some 0.026 are usual for a whole weight.
MAX_RELATIVE_ERROR = 0.07
_MIN_BLOCKS = 4  # so many powers of two among scales are no accident
_CODES = torch.float8_e4m3fn

Load = Callable[[str], torch.Tensor]


def audit_weights(source: Decoder, names: Collection[str], load: Load, *, scale_format: str = "fp32") -> None:
    """Compare what is about to be sent with the policy that it should be.

    Args:
        source: the policy; its parameters hold the bf16 values.
        names: Hugging Face's names of what is sent.
        load: a tensor of this name, as the engine will read it.
        scale_format: "fp32" or "e8m0", that the codes were made with.
    Raises:
        WeightAuditError: naming the fault and the tensor.
    """
    for parameter in parameter_names(source.config):
        for name, value in parameter.split(source.get_parameter(parameter.name).detach()).items():
            if name not in names:
                raise WeightAuditError(
                    "un-updated tensor", name, "it is not among what is sent, so the engine would keep its old value"
                )
            sent = load(name)
            if sent.shape != value.shape:
                raise WeightAuditError(
                    "wrong tensor", name, f"its shape is {tuple(sent.shape)}, the policy's {tuple(value.shape)}"
                )
            if sent.dtype == _CODES and not parameter.is_linear_weight:
                fault = "quantized router" if name.endswith(".mlp.gate.weight") else "wrong tensor"
                raise WeightAuditError(fault, name, "it is sent as FP8 codes, and no recipe quantizes it")
            if sent.dtype == _CODES:
                _audit_codes(name, value, sent, names, load, scale_format)
            elif not torch.equal(sent, value.to(sent.dtype).to(sent.device)):
                raise WeightAuditError("un-updated tensor", name, "its values are not those of the trainer's weight")


def _audit_codes(
    name: str, value: torch.Tensor, codes: torch.Tensor, names: Collection[str], load: Load, scale_format: str
) -> None:
    scale_name = f"{name}{SCALE_SUFFIX}"
    if scale_name not in names:
        raise WeightAuditError(
            "missing scale", scale_name, f"{name} is sent as FP8 codes, and an engine would decode them by 1 or garbage"
        )
    scale = load(scale_name)
    _check_scale(scale_name, scale, tuple(codes.shape), scale_format)
    source, shipped = value.to(codes.device, torch.float32), scale.to(codes.device, torch.float32)
    error = _relative_error(source, codes, shipped)
    if error > MAX_RELATIVE_ERROR:
        fault, why = _explain(source, codes, shipped)
        raise WeightAuditError(
            fault, name, f"codes times scales are off the trainer's weight by {error:.3g} of it; {why}"
        )
    if scale_format == "fp32" and shipped.numel() >= _MIN_BLOCKS and _are_powers_of_two(shipped):
        raise WeightAuditError(
            "E8M0 against fp32 scales", scale_name, "every scale is a power of two, but the recipe's are fp32"
        )


def _check_scale(name: str, scale: torch.Tensor, shape: tuple[int, ...], scale_format: str) -> None:
    wanted = tuple(math.ceil(size / BLOCK) for size in shape)
    if tuple(scale.shape) != wanted:
        is_turned = tuple(scale.shape) == wanted[::-1]
        raise WeightAuditError(
            "transposed scales" if is_turned else "wrong tensor",
            name,
            f"its shape is {tuple(scale.shape)}; {BLOCK} x {BLOCK} blocks of {shape} have raw scales of {wanted}",
        )
    allowed = (torch.float32,) if scale_format == "fp32" else (torch.float32, torch.float8_e8m0fnu)
    if scale.dtype not in allowed:
        raise WeightAuditError(
            "E8M0 against fp32 scales" if scale.dtype == torch.float8_e8m0fnu else "wrong tensor",
            name,
            f"it is {scale.dtype}; the recipe's {scale_format} scales are sent as {allowed[-1]}",
        )
    as_numbers = scale.float()
    if not (torch.isfinite(as_numbers) & (as_numbers > 0)).all():
        raise WeightAuditError("wrong tensor", name, "a scale is zero, negative or not finite")


def _explain(source: torch.Tensor, codes: torch.Tensor, scale: torch.Tensor) -> tuple[str, str]:
    """The fault that codes and scales show, and what makes it likely."""

    def fits(other: torch.Tensor) -> bool:
        return _relative_error(source, codes, other) <= MAX_RELATIVE_ERROR

    if torch.equal(scale, torch.ones_like(scale)):
        return "scale 1 by omission", "every scale is 1"
    if scale.shape[0] == scale.shape[1] and fits(scale.T):
        return "transposed scales", "they fit once the scales are transposed"
    decoded = codes.float()
    above, below = _block_sums(source * decoded), _block_sums(decoded * decoded)
    # brings each block's codes nearest to the source, by least squares; 1 for blocks of zeros
    best = torch.where((below > 0) & (above > 0), above / below.clamp_min(1e-30), 1.0)
    if fits(best):
        if _are_powers_of_two(scale):
            return "E8M0 against fp32 scales", "the scales were cut down to powers of two after the codes were made"
        exponent = torch.log2(best)
        if ((exponent - exponent.round()).abs() < 0.03).all():
            return "E8M0 against fp32 scales", "the codes were made with powers of two, and other scales are sent"
        return "wrong tensor", "the codes are right and the scales are another tensor's or older"
    return "un-updated tensor", "the codes themselves are of other weights"


def _block_sums(x: torch.Tensor) -> torch.Tensor:
    rows, cols = (-size % BLOCK for size in x.shape)
    padded = torch.nn.functional.pad(x, (0, cols, 0, rows))
    return padded.unflatten(0, (-1, BLOCK)).unflatten(2, (-1, BLOCK)).sum(dim=(1, 3))


def _relative_error(source: torch.Tensor, codes: torch.Tensor, scale: torch.Tensor) -> float:
    """||codes * scale - source|| / ||source||."""
    rows, cols = codes.shape
    every = scale.repeat_interleave(BLOCK, 0)[:rows].repeat_interleave(BLOCK, 1)[:, :cols]
    size = float(source.norm())
    return float((codes.float() * every - source).norm()) / size if size else float(codes.float().abs().amax())


def _are_powers_of_two(scale: torch.Tensor) -> bool:
    return torch.equal(floor_to_power_of_two(scale), scale)
