"""Recipes: a recipe is a policy for the three GEMMs of a linear (output, grad_input, grad_weight).

Each operand has a scaling, or none for high precision. To change a recipe, or to add one, this file is the only one.
"""

import dataclasses
import difflib
from collections.abc import Callable
from typing import Any, Literal

import torch

from octavo.errors import RecipeError
from octavo.numerics.emulated_config import CONFIG_OF, EmulationConfig
from octavo.numerics.formats import Format
from octavo.numerics.scaling import GEMM_PAIRS, Scaling, name_gemm_pairs

GEMMS = ("output", "grad_input", "grad_weight")
EMULATED_RECIPES = tuple(CONFIG_OF)
UpdateEvery = Literal["forward", "step"]
AmaxCompute = Literal["max", "most_recent"] | Callable[[torch.Tensor], torch.Tensor]
ScaleCompute = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, "Recipe"], torch.Tensor]


@dataclasses.dataclass(frozen=True)
class DelayedConfig:
    """Parameters of delayed scaling; names and meaning as in TransformerEngine, but for update_every.

    Args:
        margin: quant_scale is fp8_max * 2**-margin / amax.
        amax_history_len: rows of the amax history, the staging row included.
        amax_compute_algo: "max" over the history, "most_recent", or a callable amax_history [len, n] -> amax [n].
        scaling_factor_compute_algo: None, or a callable (amax, old quant_scale, fp8_max, recipe) -> quant_scale.
        reduce_amax: where torch.distributed runs, scales are made from the largest amax of all ranks of the group
            (octavo.nn.set_amax_reduction_group), which must have the same linears. One collective an update carries
            them all; in compiled code under "forward" each linear has its own. DistributedDataParallel needs
            broadcast_buffers=False with it: otherwise rank 0's amaxes replace the others' first.
        update_every: "forward": a training forward makes new scales, as TransformerEngine does. "step": they stay
            for all micro-batches of a step and change when an optimizer of the model's has stepped, or by
            octavo.nn.update_scales: then ranks of one micro-batch each have the scales of one GPU with all of them.
    """

    margin: int = 0
    amax_history_len: int = 1024
    amax_compute_algo: AmaxCompute = "max"
    scaling_factor_compute_algo: ScaleCompute | None = None
    reduce_amax: bool = True
    update_every: UpdateEvery = "forward"

    def __post_init__(self) -> None:
        if self.update_every not in ("forward", "step"):
            raise RecipeError(f"update_every must be 'forward' or 'step', got {self.update_every!r}")
        if not isinstance(self.reduce_amax, bool):
            raise RecipeError(f"reduce_amax must be True or False, got {self.reduce_amax!r}")
        if not isinstance(self.margin, int):
            raise RecipeError(f"margin must be an integer, got {self.margin!r}")
        if self.scaling_factor_compute_algo is not None and not callable(self.scaling_factor_compute_algo):
            raise RecipeError(
                f"scaling_factor_compute_algo must be None or a callable, got {self.scaling_factor_compute_algo!r}"
            )
        if not isinstance(self.amax_history_len, int) or self.amax_history_len < 1:
            raise RecipeError(f"amax_history_len must be an integer >= 1, got {self.amax_history_len!r}")
        if self.amax_compute_algo not in ("max", "most_recent") and not callable(self.amax_compute_algo):
            raise RecipeError(
                f"amax_compute_algo must be 'max', 'most_recent' or a callable, got {self.amax_compute_algo!r}"
            )


@dataclasses.dataclass(frozen=True)
class Recipe:
    """How a linear computes its three GEMMs.

    Attributes:
        name: the recipe's name; reports and checkpoints show it.
        input: scaling of this forward operand; None computes the linear in high precision.
        weight: scaling of this forward operand; None computes the linear in high precision.
        grad_output: scaling of the backward's operand; None runs both backward GEMMs in high precision.
        fp8_format: E4M3 (all operands) or HYBRID (grad_output in E5M2).
        delayed: parameters of delayed scaling; None for scales made from the tensor itself.
        input_for_grad_weight: scaling of the input's transposed codes for the grad_weight GEMM; None for input's own.
        fast_accum: GEMMs (of GEMMS) that may use the library's fast accumulation, which keeps fewer bits of a sum on
            Hopper; block recipes have none and exact mode uses none.
        saved_activations: how fused modules keep the inputs of norms and activations for their backward; None keeps
            them as they are.
        high_precision_gemms: GEMMs (of GEMMS) computed from high-precision operands, which are then saved as well.
        fake_quant: operands are quantized and decoded, and the GEMMs run in high precision: a format's error without
            its speed.
        emulated: "mxfp8" or "nvfp4": the operands' format where it is none of Scaling's; implies fake_quant.
        emulation: that format's switches (Mxfp8Config or Nvfp4Config); the format's defaults where it is left out.
        static_input: a linear's input has a known scale (Linear.input_scale, from a checkpoint or a calibration), one
            for the tensor; None is made from the input itself.

    Raises:
        RecipeError: fields that do not go together, such as scalings whose product no GEMM computes.
    """

    name: str
    input: Scaling | None = None
    weight: Scaling | None = None
    grad_output: Scaling | None = None
    fp8_format: Format = Format.HYBRID
    delayed: DelayedConfig | None = None
    input_for_grad_weight: Scaling | None = None
    fast_accum: tuple[str, ...] = ("output",)
    saved_activations: Scaling | None = None
    high_precision_gemms: tuple[str, ...] = ()
    fake_quant: bool = False
    emulated: str = ""
    emulation: EmulationConfig | None = None
    static_input: bool = False

    def __post_init__(self) -> None:
        if (self.input is None) != (self.weight is None):
            raise RecipeError(f"recipe {self.name!r}: input and weight are quantized together or not at all")
        if self.grad_output is not None and self.input is None:
            raise RecipeError(f"recipe {self.name!r}: grad_output needs a quantized forward")
        if self.fp8_format is Format.E5M2:
            raise RecipeError("fp8_format E5M2 has too few mantissa bits for the forward; use E4M3 or HYBRID")
        for field in ("fast_accum", "high_precision_gemms"):
            object.__setattr__(self, field, _as_gemms(field, getattr(self, field)))
        if not isinstance(self.fake_quant, bool):
            raise RecipeError(f"fake_quant must be True or False, got {self.fake_quant!r}")
        if self.emulated not in ("", *EMULATED_RECIPES):
            raise RecipeError(f"emulated must be one of {EMULATED_RECIPES} or empty, got {self.emulated!r}")
        if self.emulated and self.emulation is None:
            object.__setattr__(self, "emulation", CONFIG_OF[self.emulated]())
        if type(self.emulation) is not CONFIG_OF.get(self.emulated, type(None)):
            wanted = f"a {CONFIG_OF[self.emulated].__name__}" if self.emulated else "None where nothing is emulated"
            raise RecipeError(f"recipe {self.name!r}: emulation must be {wanted}, got {self.emulation!r}")
        if not isinstance(self.static_input, bool):
            raise RecipeError(f"static_input must be True or False, got {self.static_input!r}")
        is_static = self.input is not None and self.input.is_per_tensor and self.delayed is None
        if self.static_input and (not is_static or self.is_emulated):
            raise RecipeError(
                f"recipe {self.name!r}: static_input goes with one scale for the input, without delayed scaling and "
                "without emulation; use get_recipe('tensorwise', static_input=True)"
            )
        self._check_operands()

    def _check_operands(self) -> None:
        """Refuse scalings that delayed scaling has no scale for, or that no GEMM multiplies."""
        roles = {"input": self.input, "weight": self.weight, "grad_output": self.grad_output}
        for role, scaling in roles.items():
            if self.delayed is not None and scaling is not None and not scaling.is_per_tensor:
                raise RecipeError(
                    f"recipe {self.name!r}: delayed scaling knows one scale a tensor, and {role} has {scaling.kind}; "
                    "use per_tensor, or leave out delayed"
                )
        grad = ("grad_output", self.grad_output)
        operands = {
            "output": (("input", self.input), ("weight", self.weight)),
            "grad_input": (grad, ("weight", self.weight)),
            "grad_weight": (
                grad,
                ("input_for_grad_weight" if self.input_for_grad_weight else "input", self.wgrad_input),
            ),
        }
        for gemm, ((left, a), (right, b)) in operands.items():
            if a is not None and b is not None and self.in_fp8(gemm) and (a.kind, b.kind) not in GEMM_PAIRS:
                raise RecipeError(
                    f"recipe {self.name!r}: no GEMM takes the operands of {gemm}, {left} in {a.kind} x {right} in "
                    f"{b.kind}; use one of the pairs {name_gemm_pairs()}, name {gemm!r} in high_precision_gemms, or "
                    "set fake_quant=True"
                )

    @property
    def is_fp8(self) -> bool:
        """Whether the linears' operands are quantized."""
        return self.input is not None

    @property
    def is_emulated(self) -> bool:
        """Whether quantized operands are decoded again and the GEMMs run in high precision."""
        return self.fake_quant or bool(self.emulated)

    @property
    def wgrad_input(self) -> Scaling | None:
        """Scaling of the input's transposed codes: the grad_weight GEMM's second operand."""
        return self.input_for_grad_weight or self.input

    def in_fp8(self, gemm: str) -> bool:
        """Whether one of GEMMS multiplies FP8 codes."""
        has_operands = self.is_fp8 if gemm == "output" else self.has_fp8_backward
        return has_operands and not self.is_emulated and gemm not in self.high_precision_gemms

    @property
    def has_fp8_backward(self) -> bool:
        """Whether grad_input and grad_weight run in FP8."""
        return self.grad_output is not None

    @property
    def decodes_backward(self) -> bool:
        """Whether a GPU would decode both operands of backward GEMMs: no library multiplies E5M2 under block scales."""
        grad = self.grad_output
        is_taken = grad is None or grad.dtype != torch.float8_e5m2 or grad.block_size[1] == -1
        return not is_taken and (self.in_fp8("grad_input") or self.in_fp8("grad_weight"))

    @property
    def has_state(self) -> bool:
        """Whether the recipe needs an amax history (delayed scaling)."""
        return self.delayed is not None

    @property
    def updates_at_steps(self) -> bool:
        """Whether its scales change once an optimizer step (DelayedConfig.update_every)."""
        return self.delayed is not None and self.delayed.update_every == "step"

    @property
    def is_row_local(self) -> bool:
        """Whether a token's codes depend on that token alone, and are multiplied as they are: what exact mode needs."""
        if self.input is None or self.static_input:
            return True
        return self.delayed is None and self.input.block_size[0] == 1 and not self.is_emulated

    def as_dict(self) -> dict[str, Any]:
        """The recipe as plain JSON values: for fingerprints, checkpoints and reports."""

        def plain(value: Any) -> Any:
            if dataclasses.is_dataclass(value) and not isinstance(value, type):
                return {f.name: plain(getattr(value, f.name)) for f in dataclasses.fields(value)}
            if isinstance(value, Format):
                return value.name
            if isinstance(value, torch.dtype):
                return str(value).removeprefix("torch.")
            if callable(value):  # only a name can be saved: give two rules two names
                return f"{getattr(value, '__module__', '')}.{getattr(value, '__qualname__', repr(value))}"
            return list(value) if isinstance(value, tuple) else value

        fields: dict[str, Any] = plain(self)
        if self.emulation is None:
            del fields["emulation"]  # the fingerprints of older checkpoints stay true
        if self.delayed is not None and not self.updates_at_steps:
            del fields["delayed"]["update_every"]  # so too
        return fields


# name -> block shapes of (input, weight, grad_output), and the default format. Per-tensor recipes default to hybrid as
# TransformerEngine's do; finer scales leave E4M3 enough range for gradients, and its third mantissa bit gives 4 dB.
_KINDS: dict[str, tuple[str, str, str, Format]] = {
    "delayed": ("per_tensor", "per_tensor", "per_tensor", Format.HYBRID),
    "tensorwise": ("per_tensor", "per_tensor", "per_tensor", Format.HYBRID),
    "rowwise": ("per_row", "per_row", "per_row", Format.E4M3),
    "blockwise": ("block_1x128", "block_128x128", "block_1x128", Format.E4M3),
}
RECIPE_NAMES = ("bf16", *_KINDS, *EMULATED_RECIPES)
_NAMES_OF_FP8 = ("fp8", "float8", "e4m3", "hybrid", "fp8_e4m3")  # of the format, not of a recipe
_SWITCHES = ("fast_accum", "high_precision_gemms", "fake_quant", "saved_activations")
_COMMON = ("fp8_format", "backward", "scale_format", "amax_floor", *_SWITCHES)
_EMULATION = {name: tuple(f.name for f in dataclasses.fields(config)) for name, config in CONFIG_OF.items()}
_FIELDS_OF = {
    "bf16": (),
    "delayed": (*_COMMON, *(f.name for f in dataclasses.fields(DelayedConfig))),
    "tensorwise": (*_COMMON, "static_input"),
    "blockwise": (*_COMMON, "input_for_grad_weight"),
    "mxfp8": ("fp8_format", "backward", *_EMULATION["mxfp8"]),
    "nvfp4": ("backward", *_EMULATION["nvfp4"]),
}
_DELAYED = tuple(f.name for f in dataclasses.fields(DelayedConfig))
# what a framework that names an FP8 format and a recipe beside it can name
FORMAT_RECIPES = tuple(name for name in RECIPE_NAMES if "fp8_format" in _FIELDS_OF.get(name, _COMMON))


def get_recipe(name: "str | Recipe", **overrides: Any) -> Recipe:
    """Make a recipe by name.

    Args:
        name: one of RECIPE_NAMES; EMULATED_RECIPES among them are emulated on Hopper and CPUs, and "tensorwise" is
            what others call current scaling. A Recipe passes through.
        overrides: fp8_format (Format, "e4m3" or "hybrid"; default hybrid for delayed and tensorwise, e4m3 for the
            others), backward ("fp8" or "bf16": decoded operands), scale_format ("fp32" or "e8m0"), amax_floor (input
            and weight only, never grad_output), fast_accum and high_precision_gemms (of GEMMS), fake_quant,
            saved_activations ("fp8" or "bf16"); for "delayed" also DelayedConfig's fields; for "blockwise" also
            input_for_grad_weight ("block_128x128", the default, or "block_1x128"), for "tensorwise" static_input, for
            "mxfp8" and "nvfp4" fields of Mxfp8Config (scale_rounding) and Nvfp4Config (stochastic_rounding,
            random_hadamard, square_weight_blocks).
    Returns:
        A frozen Recipe.
    Raises:
        RecipeError: for an unknown name or field (the nearest known one is named) or a value outside these.
    """
    if isinstance(name, Recipe):
        if overrides:
            raise RecipeError(f"a Recipe takes no overrides, got {sorted(overrides)}; use dataclasses.replace")
        return name
    if name not in RECIPE_NAMES:
        raise RecipeError(f"unknown recipe {name!r}; known: {', '.join(RECIPE_NAMES)}{_hint(str(name))}")
    known = _FIELDS_OF.get(name, _COMMON)
    for field in overrides:
        if field not in known:
            allowed = ", ".join(known) or "none"
            raise RecipeError(f"recipe {name!r} has no field {field!r}; fields: {allowed}{_nearest(field, known)}")
    if name == "bf16":
        return Recipe("bf16")
    delayed = DelayedConfig(**{k: v for k, v in overrides.items() if k in _DELAYED}) if name == "delayed" else None
    rest = {k: v for k, v in overrides.items() if k not in _DELAYED}
    if name in EMULATED_RECIPES:
        switches = {k: rest.pop(k) for k in _EMULATION[name] if k in rest}
        return dataclasses.replace(_build("blockwise", None, **rest), **_emulation(name, switches))
    return _build(name, delayed, **rest)


def _emulation(name: str, switches: dict[str, Any]) -> dict[str, Any]:
    """What an emulated recipe changes in the blockwise one: no operand, kept or multiplied, has Scaling's blocks."""
    own = {"name": name, "emulated": name, "emulation": CONFIG_OF[name](**switches)}
    return own | {"saved_activations": None, "input_for_grad_weight": None}


def _build(
    name: str,
    delayed: DelayedConfig | None,
    fp8_format: Format | str | None = None,
    backward: str = "fp8",
    scale_format: str = "fp32",
    amax_floor: float = 0.0,
    saved_activations: str = "fp8",
    input_for_grad_weight: str = "block_128x128",
    **switches: Any,
) -> Recipe:
    if backward not in ("fp8", "bf16"):
        raise RecipeError(f"backward must be 'fp8' or 'bf16', got {backward!r}")
    if saved_activations not in ("fp8", "bf16"):
        raise RecipeError(f"saved_activations must be 'fp8' or 'bf16', got {saved_activations!r}")
    if input_for_grad_weight not in ("block_128x128", "block_1x128"):
        raise RecipeError(f"input_for_grad_weight must be block_128x128 or block_1x128, got {input_for_grad_weight!r}")
    input_kind, weight_kind, grad_kind, default_format = _KINDS[name]
    fmt = default_format if fp8_format is None else _as_format(fp8_format)
    forward = {"dtype": fmt.forward_dtype, "scale_format": scale_format, "amax_floor": amax_floor}
    grad = Scaling.of_kind(grad_kind, fmt.backward_dtype, scale_format=scale_format) if backward == "fp8" else None
    return Recipe(
        name=name,
        input=Scaling.of_kind(input_kind, **forward),  # type: ignore[arg-type]
        weight=Scaling.of_kind(weight_kind, **forward),  # type: ignore[arg-type]
        grad_output=grad,
        fp8_format=fmt,
        delayed=delayed,
        input_for_grad_weight=Scaling.of_kind(input_for_grad_weight, **forward) if name == "blockwise" else None,  # type: ignore[arg-type]
        saved_activations=Scaling.block_1x128() if saved_activations == "fp8" else None,
        **switches,
    )


def _as_gemms(field: str, value: Any) -> tuple[str, ...]:
    names = (value,) if isinstance(value, str) else tuple(value)
    unknown = [name for name in names if name not in GEMMS]
    if unknown:
        raise RecipeError(f"{field} names GEMMs of {', '.join(GEMMS)}, got {unknown}")
    return names


def _as_format(value: Format | str) -> Format:
    if isinstance(value, Format):
        return value
    if isinstance(value, str) and value.upper() in Format.__members__:
        return Format[value.upper()]
    raise RecipeError(f"fp8_format must be a Format, 'e4m3' or 'hybrid', got {value!r}")


def _hint(name: str) -> str:
    """The recipe that the caller may mean by a name that is none."""
    if name.casefold() in _NAMES_OF_FP8:
        return "; for FP8 take 'blockwise', or a faster one (docs/numerics.md)"
    return _nearest(name, RECIPE_NAMES)


def _nearest(name: str, known: tuple[str, ...]) -> str:
    close = difflib.get_close_matches(name, known, n=1)
    return f"; did you mean {close[0]!r}?" if close else ""


def DelayedScaling(
    margin: int = 0,
    fp8_format: Format = Format.HYBRID,
    amax_history_len: int = 1024,
    amax_compute_algo: AmaxCompute = "max",
    scaling_factor_compute_algo: ScaleCompute | None = None,
    reduce_amax: bool = True,
    update_every: UpdateEvery = "forward",
) -> Recipe:
    """The delayed-scaling recipe under TransformerEngine's name and defaults; see DelayedConfig and get_recipe."""
    return get_recipe(
        "delayed",
        margin=margin,
        fp8_format=fp8_format,
        amax_history_len=amax_history_len,
        amax_compute_algo=amax_compute_algo,
        scaling_factor_compute_algo=scaling_factor_compute_algo,
        reduce_amax=reduce_amax,
        update_every=update_every,
    )
