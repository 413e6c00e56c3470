"""Linear: a high-precision parameter whose GEMMs run under a recipe, with 8-bit copies made once a weight version."""

from collections.abc import Callable

import torch
from torch import nn

from octavo.errors import CheckpointError, DtypeError, RecipeError, ShapeError
from octavo.nn.autocast_context import effective_recipe
from octavo.nn.delayed import DelayedLinear
from octavo.nn.emulated_linear import EmulatedLinearFunction
from octavo.nn.linear_function import (
    HighPrecisionLinearFunction,
    ScaledLinearFunction,
    scaled_linear,
    warn_of_fp16,
)
from octavo.nn.quantized_weight import (
    DELAYED_BUFFERS,
    DelayedState,
    Operands,
    WeightCache,
    is_captured,
    join_ranges,
    merge_parts,
    moved_device,
    name_tensors,
    one_operand,
    out_of,
    quantize_ahead,
    quantize_backward,
    quantize_forward,
    ranges_of,
    transpose_codes,
    weight_state,
)
from octavo.numerics.quantized import QuantizedTensor
from octavo.numerics.recipe import Recipe
from octavo.numerics.scaling import INPUT_DTYPES, reciprocal
from octavo.ops.quantize import quantize

Observer = Callable[[str, torch.Tensor, QuantizedTensor | None], None]


class Linear(DelayedLinear):
    """y = x @ weight.t() + bias under a recipe.

    The recipe is the module's own (`recipe`, set by convert or a model's numerics), else the autocast context's, else
    high precision. Any token count works; FP8 copies of the weight are derived state and never in a state dict.

    Args:
        in_features, out_features: K and N.
        bias: add a bias [N].
        parts: row counts of the projections fused in this weight (they sum to N); each keeps its own blocks.
        dtype: of the parameters, bf16 or fp32.

    Attributes:
        weight: Parameter [N, K], or None where the layer was loaded for inference from codes.
        input_scale: [1] fp32 decode scale of the input for recipes with static_input, None without; set_input_scale.
        exact: a row's output bits depend on that row alone.
        observer: None, or a function (role, tensor, codes or None) that sees every operand and result: roles "input",
            "weight", "output", "grad_output", "grad_input" and "grad_weight". Fused modules run unfused under one.
        saves_input: keep the input itself for grad_weight, and quantize it along the tokens in the backward: for one
            that somebody else saves anyway, such as attention's output. The bits are the same.
        follows_autocast: compute in torch.autocast's dtype, as the torch.nn.Linear did that convert replaced.
        weight_version: grows by one each time that the weight is committed (optimizer, load, refit).
    """

    # GEMMs take the weight as one operand where its scaling allows
    has_whole_operand = True
    full_name = ""  # in the model that was converted, for messages

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool = False,
        *,
        parts: tuple[int, ...] | None = None,
        device: torch.device | str | None = None,
        dtype: torch.dtype = torch.bfloat16,
    ) -> None:
        super().__init__()
        self.in_features, self.out_features = in_features, out_features
        self.parts = parts or (out_features,)
        if sum(self.parts) != out_features:
            raise ShapeError(f"parts {self.parts} must sum to out_features={out_features}")
        self.weight: nn.Parameter | None = nn.Parameter(
            torch.empty(out_features, in_features, device=device, dtype=dtype)
        )
        self.bias = nn.Parameter(torch.zeros(out_features, device=device, dtype=dtype)) if bias else None
        self.recipe: Recipe | None = None
        self.exact = False
        self.observer: Observer | None = None
        self.saves_input = False
        self.follows_autocast = False
        self.weight_version = 0
        self._loaded: Operands | None = None
        self._loaded_whole: QuantizedTensor | None = None
        self.input_scale: torch.Tensor | None = None
        self._input_quant_scale: torch.Tensor | None = None
        nn.init.kaiming_uniform_(self.weight, a=5**0.5)

    def extra_repr(self) -> str:
        recipe = self.recipe.name if self.recipe else None
        return f"{self.in_features} -> {self.out_features}, recipe={recipe}, exact={self.exact}"

    def set_recipe(self, recipe: Recipe | None) -> None:
        """Give this linear a recipe of its own, with the buffers that it needs where the weight has values."""
        self.recipe = recipe
        if recipe is not None and recipe.has_state and self.weight is not None and not self.weight.is_meta:
            self.delayed_state(recipe)

    def forward(self, x: torch.Tensor, *, add_bias: bool = True) -> torch.Tensor:
        """x [..., K] bf16, fp16 or fp32 -> [..., N] of x's dtype.

        Args:
            add_bias: False leaves the bias to an activation that adds it.
        Raises:
            ShapeError: if the last dim is not in_features. DtypeError: for other dtypes.
        """
        bias = self.bias if add_bias else None
        if x.shape[-1] != self.in_features:
            raise ShapeError(f"the last dim of x must be in_features={self.in_features}, got shape {tuple(x.shape)}")
        if x.dtype not in INPUT_DTYPES:
            raise DtypeError(f"a Linear takes bfloat16, float16 or float32, got {x.dtype}")
        if self.follows_autocast and torch.is_autocast_enabled(x.device.type):
            x = x.to(torch.get_autocast_dtype(x.device.type))
        is_matrix = x.dim() == 2
        flat = x if is_matrix else x.reshape(-1, self.in_features)  # [T, K]
        recipe = effective_recipe(self.recipe)
        if recipe.input is not None:  # in FP8
            if self.exact:
                self._check_exact(recipe)
            out = self._forward_fp8(flat, bias, recipe)
        else:
            if self.weight is None:
                raise RecipeError(
                    "this layer holds FP8 codes only, so it cannot run in high precision; load it with a bf16 recipe"
                )
            out = HighPrecisionLinearFunction.apply(flat, self.weight, bias, self)
        return out if is_matrix else out.view(*x.shape[:-1], self.out_features)

    def _check_exact(self, recipe: Recipe) -> None:
        if self.exact and recipe != self.recipe:
            raise RecipeError(
                f"this layer is exact under {self.recipe.name if self.recipe else 'bf16'}, and autocast asks for "
                f"{recipe.name!r}: trainer and sampler would differ; change the model's numerics instead (set_numerics)"
            )

    def _forward_fp8(self, flat: torch.Tensor, bias: torch.Tensor | None, recipe: Recipe) -> torch.Tensor:
        weight, is_training = self.weight, torch.is_grad_enabled()
        is_emulated = recipe.fake_quant or recipe.emulated
        if weight is None and (is_emulated or recipe.high_precision_gemms):
            raise RecipeError(
                f"this layer holds FP8 codes only, and recipe {recipe.name!r} with fake_quant, an emulated format or "
                "high_precision_gemms computes from the high-precision weight; load the checkpoint for training"
            )
        if recipe.delayed is not None:
            self.begin_forward(recipe)
        if is_emulated:
            return EmulatedLinearFunction.apply(flat, weight, bias, self, recipe, is_training)
        if not is_training:
            return scaled_linear(flat, weight, bias, self, recipe, training=False, needs_wgrad=False)[0]
        if flat.dtype == torch.float16 and not torch.compiler.is_compiling():
            warn_of_fp16()
        ahead = self if weight is not None and self._may_go_ahead(flat, weight, recipe) else None
        return ScaledLinearFunction.apply(flat, weight, bias, self, recipe, ahead)

    def _may_go_ahead(self, flat: torch.Tensor, weight: torch.Tensor, recipe: Recipe) -> bool:
        """Whether a training forward makes the weight's codes for the backward as well, from one read of it.

        They then live from here on. What the layer saves for its weight gradient, a byte an element of the input, makes
        room for that gradient in the backward: where it is no larger, memory is fullest when the backward ends, and the
        codes are there by then anyway.
        """
        is_trained = weight.requires_grad and flat.requires_grad and not self.saves_input
        is_fp8 = recipe.grad_output is not None and not recipe.high_precision_gemms
        return is_trained and is_fp8 and flat.numel() <= weight.nbytes

    # 8-bit copies

    def forward_operands(self, recipe: Recipe, *, observe: bool = False) -> Operands:
        """Codes of the weight for the output GEMM: (row range, [rows, K]) pairs, made once a weight version.

        Args:
            observe: a forward with gradients; in training mode delayed scaling stages the weight's amax with the codes.
        """
        assert recipe.weight is not None, f"recipe {recipe.name!r} quantizes no weight"
        if self._loaded is not None:
            return self._check_loaded(recipe)
        weight = self.weight
        assert weight is not None, "a layer without codes has its weight"
        observe = observe and self.training and recipe.delayed is not None
        if is_captured(weight):
            return self._quantize_weight(recipe, observe)
        cache = self._start_cache(recipe, observe, weight)
        if cache.forward is not None:
            cache.watch.look(weight, self.full_name)
            return cache.forward
        return cache.put(self._quantize_weight(recipe, observe, cache.place_for(weight, self.parts, recipe.weight)))

    def whole_operand(self, recipe: Recipe, *, observe: bool = False) -> QuantizedTensor | None:
        """forward_operands as one [N, K] operand, or None where the scaling needs a GEMM a range."""
        operands = self.forward_operands(recipe, observe=observe)
        if self._loaded_whole is not None:
            return self._loaded_whole
        if self._loaded is not None or len(operands) == 1 or is_captured():
            return one_operand(operands)
        if self._cache.whole is None:
            self._cache.forward, self._cache.whole = join_ranges(operands)
        return self._cache.whole

    def operand_ahead(self, recipe: Recipe) -> QuantizedTensor | None:
        """whole_operand of a training forward that makes backward_operands as well, where it makes any."""
        weight = self.weight
        if weight is None or is_captured(weight):
            return self.whole_operand(recipe, observe=True)
        cache = self._start_cache(recipe, recipe.delayed is not None and self.training, weight)
        if cache.forward is None and cache.goes_ahead:
            self._quantize_ahead(recipe, weight, cache)
        elif cache.forward is not None and len(cache.forward) == 1:
            cache.watch.look(weight, self.full_name)
        held = cache.forward
        return held[0][1] if held is not None and len(held) == 1 else self.whole_operand(recipe, observe=True)

    def _quantize_ahead(self, recipe: Recipe, weight: torch.Tensor, cache: WeightCache) -> None:
        """Fill the cache for both GEMMs from one read of the weight, where it is one range."""
        assert recipe.weight is not None, f"recipe {recipe.name!r} quantizes no weight"
        has_scale = recipe.delayed is not None
        known = self.delayed_state(recipe).known(DelayedState.WEIGHT, observe=self.training) if has_scale else {}
        place = cache.place_for(weight, self.parts, recipe.weight)
        made = quantize_ahead(weight, self.parts, recipe.weight, known, place)
        if made is not None:
            cache.put(made[0])
            cache.backward, cache.is_ahead = made[1], True

    def backward_operands(self, recipe: Recipe) -> Operands:
        """Codes of the weight for the grad_input GEMM: (row range, [K, rows]) pairs, made at the first backward."""
        assert recipe.weight is not None, f"recipe {recipe.name!r} quantizes no weight"
        if self._loaded is not None and recipe.weight.block_size[0] == recipe.weight.block_size[1]:
            return transpose_codes(self.forward_operands(recipe))
        weight = self.weight
        if weight is None or is_captured(weight):
            return self._quantize_backward(recipe)
        cache = self._start_cache(recipe, False, weight)
        if cache.backward is None:
            cache.backward = self._quantize_backward(recipe)
        else:
            cache.has_waited = True
        cache.is_ahead = False
        return cache.backward

    def _start_cache(self, recipe: Recipe, observe: bool, weight: torch.Tensor | None = None) -> WeightCache:
        """The cache, without copies of an older weight: of another version by the counter, or changed uncounted."""
        if weight is None:
            weight = self.weight
            assert weight is not None, "a layer without codes has its weight"
        return self._cache.start(weight, (self.weight_version, weight_state(weight), recipe), observe)

    def held_codes(self) -> tuple[Operands, Recipe] | None:
        """The codes that the next forward under their recipe takes as they are, and that recipe; None without any."""
        weight = self.weight
        return None if weight is None else self._cache.held_for(weight, self.weight_version, weight_state(weight))

    def pin_codes(self, recipe: Recipe) -> None:
        """Make the codes that a forward reads; those of later weights go to their place. See live_weights.pin_codes."""
        self._cache.is_pinned = self.weight is not None
        self.forward_operands(recipe)
        if self.has_whole_operand:
            self.whole_operand(recipe)

    def derived_tensors(self) -> dict[str, torch.Tensor]:
        """What an inference forward reads beside parameters and buffers: codes held or pinned, known scales."""
        known = {"input_scale": self.input_scale, "input_quant_scale": self._input_quant_scale}
        found = {name: tensor for name, tensor in known.items() if tensor is not None}
        if self._loaded is not None:
            return found | name_tensors(self._loaded, self._loaded_whole)
        return found | name_tensors(self._cache.forward or [], self._cache.whole) if self._cache.is_pinned else found

    def adopt_codes(self) -> None:
        """Take the pinned codes for those of the weight as it is: who wrote the one in place wrote the other."""
        if self.weight is not None and self.recipe is not None and self._cache.is_pinned:
            self._cache.adopt(self.weight, (self.weight_version, weight_state(self.weight), self.recipe))
            self._has_weight_scales = self._has_weight_scales or self.recipe.has_state

    def quantized_weight(self, recipe: Recipe | None = None) -> list[QuantizedTensor]:
        """The weight's codes and scales as one QuantizedTensor a row range; shared, not copied."""
        recipe = recipe or effective_recipe(self.recipe)
        return [q for _, q in self.forward_operands(recipe)] if recipe.is_fp8 else []

    def renew_codes(self) -> list[QuantizedTensor]:
        """quantized_weight of new values that are also trained on: see live_weights.renew_codes."""
        recipe, weight, cache = effective_recipe(self.recipe), self.weight, self._cache
        # Delayed scaling's training forward makes codes of its own, which it observes; experts transpose theirs.
        is_plain = recipe.is_fp8 and recipe.delayed is None and self.has_whole_operand
        if is_plain and weight is not None and cache.has_waited and not is_captured(weight):
            self._start_cache(recipe, False, weight)
            if cache.forward is None:
                self._quantize_ahead(recipe, weight, cache)
        return self.quantized_weight(recipe)

    def load_quantized(self, parts: list[QuantizedTensor]) -> None:
        """Take a checkpoint's codes as they are; the layer becomes inference-only and holds no other weight.

        Args:
            parts: one QuantizedTensor [part rows, K] for each of self.parts, all with one scaling.
        Raises:
            CheckpointError: if shapes or scalings do not fit.
        """
        shapes = [tuple(p.shape) for p in parts]
        expected = [(rows, self.in_features) for rows in self.parts]
        if shapes != expected or any(p.scaling != parts[0].scaling for p in parts):
            raise CheckpointError(f"codes of shapes {shapes} do not fit parts {expected} with one scaling")
        self._hold(merge_parts(parts, self.parts))
        self.weight_version += 1

    def keep_codes_only(self, recipe: Recipe | None = None) -> None:
        """Give up the high-precision weight for its codes, for good: half its memory or less, and no training of it.

        The forward's bits stay, and square blocks (blockwise, one scale a tensor) still send gradients to the input.

        Args:
            recipe: None for the layer's own.
        Raises:
            RecipeError: no FP8 recipe, or one whose operands are no codes.
        """
        recipe = recipe or effective_recipe(self.recipe)
        if not recipe.is_fp8 or recipe.is_emulated:
            raise RecipeError(f"recipe {recipe.name!r} has no codes to keep; use one of delayed to blockwise")
        self._hold(self.forward_operands(recipe))
        self.weight_version += 1

    def _hold(self, operands: Operands) -> None:
        """Let these codes be all that there is of the weight."""
        joined = join_ranges(operands) if self.has_whole_operand else (operands, None)
        (self._loaded, self._loaded_whole), self._cache, self.weight = joined, WeightCache(), None

    def set_input_scale(self, scale: torch.Tensor) -> None:
        """Give the input a known scale (one positive fp32 number, decodes) for recipes with static_input."""
        home = self.weight if self._loaded is None else self._loaded[0][1].scale
        device = None if home is None or home.is_meta else home.device
        known = scale.detach().reshape(-1).to(device, torch.float32, copy=True)
        quant_scale = reciprocal(known)
        if known.numel() != 1 or not (torch.isfinite(quant_scale) & (quant_scale > 0)).all():
            raise CheckpointError(f"an input scale must be one positive finite number, got {scale}")
        self.input_scale, self._input_quant_scale = known, quant_scale

    def input_quant_scale(self, recipe: Recipe) -> torch.Tensor:
        """The reciprocal of input_scale, [1] fp32: what a recipe with static_input encodes with."""
        if self._input_quant_scale is None:
            raise RecipeError(f"recipe {recipe.name!r} has static inputs, this layer no input_scale; set_input_scale")
        return self._input_quant_scale

    def _check_loaded(self, recipe: Recipe) -> Operands:
        assert self._loaded is not None, "only called on layers that hold codes"
        held = self._loaded[0][1].scaling
        if recipe.weight is None or (held.dtype, held.block_size) != (recipe.weight.dtype, recipe.weight.block_size):
            raise RecipeError(
                f"this layer holds {held.kind} codes, recipe {recipe.name!r} wants "
                f"{recipe.weight.kind if recipe.weight else 'none'}; load the checkpoint with a recipe that fits it"
            )
        return self._loaded

    def _apply(self, fn, recurse: bool = True):  # type: ignore[no-untyped-def]
        """Move codes with the module; a dtype change leaves them alone."""
        state = {name: self._buffers[name] for name in DELAYED_BUFFERS if name in self._buffers}
        super()._apply(fn, recurse)
        self._cache, self._delayed = WeightCache(), None
        for name, buffer in state.items():  # delayed scaling's state stays fp32
            moved = self._buffers[name]
            self._buffers[name] = buffer.to(moved.device) if moved is not None and buffer is not None else moved
        held = self._loaded
        if held is not None and (device := moved_device(fn, held[0][1].scale)) != held[0][1].device:
            self._hold([(rows, q.to(device)) for rows, q in held])
        if self.input_scale is not None:
            self.input_scale = self.input_scale.to(moved_device(fn, self.input_scale))
            self._input_quant_scale = reciprocal(self.input_scale)
        return self

    # What codes are made from

    def _quantize_weight(self, recipe: Recipe, observe: bool, place: Operands | None = None) -> Operands:
        weight = self.weight
        assert weight is not None and recipe.weight is not None, "a recipe in FP8 quantizes a parameter"
        if not recipe.has_state:
            return quantize_forward(weight, self.parts, recipe.weight, place)
        state = self.delayed_state(recipe)
        ranges = ranges_of(weight, self.parts, recipe.weight)
        if not (self._has_weight_scales or weight.requires_grad):
            self._scale_weights(state, recipe, [source for _, source in ranges])
        known = [state.known(DelayedState.WEIGHT + i, observe=observe) for i in range(len(ranges))]
        return [
            (rows, quantize(source, recipe.weight, out=out_of(place, i), **known[i]))
            for i, (rows, source) in enumerate(ranges)
        ]

    def _quantize_backward(self, recipe: Recipe) -> Operands:
        assert recipe.weight is not None, f"recipe {recipe.name!r} quantizes no weight"
        known = self.delayed_state(recipe).weight_scales if recipe.has_state else None
        return quantize_backward(self.weight, self.parts, recipe.weight, quant_scale=known)

    def _load_from_state_dict(self, state_dict, prefix, *args):  # type: ignore[no-untyped-def]
        """Also take delayed scaling's state from inside the model's state dict, where older checkpoints have it."""
        held = {name: state_dict[prefix + name] for name in DELAYED_BUFFERS if prefix + name in state_dict}
        if len(held) == len(DELAYED_BUFFERS):
            state_dict = {key: tensor for key, tensor in state_dict.items() if key.removeprefix(prefix) not in held}
            try:
                self.check_state(held, prefix.removesuffix("."))
                self.load_state(held)
            except CheckpointError as error:
                args[-1].append(str(error))  # as torch's own do; the last of args is the list of errors
        super()._load_from_state_dict(state_dict, prefix, *args)
        self.weight_version += 1
