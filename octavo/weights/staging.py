"""WeightStaging: the next weights of a model, checked, in the very form that its forward reads, beside the live ones.

Tensors come one by one under the checkpoint's names, from files or from a network; serve's weight update commits them.
"""

import dataclasses
import fnmatch
from collections.abc import Iterable, Sequence
from pathlib import Path

import torch

from octavo.errors import CheckpointError
from octavo.models.checkpoint import bf16, kv_scales, scaled_weight
from octavo.models.checkpoint.kv_scales import KVScales
from octavo.models.checkpoint.layout import BF16, E8M0, F16, F32, Layout
from octavo.models.checkpoint.names import ParameterNames, is_ignored, parameter_names
from octavo.models.checkpoint.safetensors_io import Place, SafetensorsReader, TensorEntry, check_finite
from octavo.models.decoder import Decoder
from octavo.nn import DELAYED_BUFFERS, Linear
from octavo.nn.live_weights import keeps_codes, live_tensors, make_tensors, own_slices, pin_codes
from octavo.nn.weights.delayed import SCALE_BUFFER
from octavo.numerics import QuantizedTensor
from octavo.numerics.scaling import reciprocal

_PATH = Path("weight update")  # how errors name what came
_HEAD, _EMBEDDING = "lm_head.weight", "embed_tokens.weight"
_WEIGHT_SCALES, _INPUT_SCALES = ("weight_scale_inv", "weight_scale"), ("input_scale", "activation_scale")
_NUM_NAMED = 4  # names in an error's text


@dataclasses.dataclass(frozen=True)
class Staged:
    """Weights that are ready to be written over a model's.

    Attributes:
        tensors: by the names of nn.live_tensors, with the sizes and dtypes of the live ones; they share no storage with
            what they were made of.
        kv_scales: the model's next kv_scales.
    """

    tensors: dict[str, torch.Tensor]
    kv_scales: tuple[KVScales, ...]


class _ArrivedTensors(SafetensorsReader):
    """The tensors that have come and are still needed, read like those of a checkpoint's files."""

    def __init__(self) -> None:
        self.path = _PATH
        self.entries: dict[str, TensorEntry] = {}
        self._held: dict[str, torch.Tensor] = {}

    def put(self, name: str, tensor: torch.Tensor) -> None:
        """Hold a tensor."""
        self._held[name] = tensor
        self.entries[name] = TensorEntry(name, tensor.dtype, tuple(tensor.shape), _PATH)

    def load(self, name: str, device: torch.device | str = "cpu", place: Place | None = None) -> torch.Tensor:
        """The tensor itself, where it is; add has checked it."""
        assert place is None, "tensors arrive whole"
        return self._held[name]

    def drop(self, names: Iterable[str]) -> None:
        """Let tensors go."""
        for name in names:
            self.entries.pop(name, None)
            self._held.pop(name, None)


def held_layout(model: Decoder) -> Layout:
    """How codes and scales for a model are named and shaped where no checkpoint says it: as its recipe holds them."""
    recipe = model.numerics.recipe
    if recipe.weight is None or recipe.has_state or recipe.is_emulated:
        return Layout("high-precision")
    return Layout(
        "FP8",
        dataclasses.replace(recipe.weight, amax_floor=0.0),
        "static" if recipe.static_input else "dynamic",
        _WEIGHT_SCALES,
        _INPUT_SCALES if recipe.static_input else (),
        (F32, BF16, F16, E8M0) if recipe.weight.scale_format == "e8m0" else (F32, BF16, F16),
        has_kv_scales=bool(model.kv_scales),
    )


class WeightStaging:
    """Takes the tensors of a checkpoint one by one and makes of them what the model's forward reads.

    A parameter's tensors (q, k and v; an expert layer's; codes and their scales) are merged and quantized as soon as
    the last of them has come, on the model's device, by the rules of load_model, and are then let go. So staging needs
    the memory of the live weights once, on `device`, and the tensors of the parameters under way.

    Args:
        model: whose weights are to be replaced; it is only read. Its codes are pinned (nn.pin_codes). Where it is cut
            among ranks, whole tensors come all the same, and this rank's slices are kept.
        layout: how the tensors hold codes; None for codes and scales as the model's recipe holds them.
        partial: names or patterns of the tensors that will come, where not all will; a parameter of which one is named
            needs all of its tensors.
        device: where the staged weights wait; None for the CPU.

    Attributes:
        seen: names of the tensors that have come.
        is_partial: not all of the model's are to come.

    Raises:
        CheckpointError: partial names nothing.
    """

    def __init__(
        self,
        model: Decoder,
        *,
        layout: Layout | None = None,
        partial: Sequence[str] = (),
        device: torch.device | str | None = None,
    ) -> None:
        pin_codes(model)
        self.model, self.layout, self.device = model, layout or held_layout(model), torch.device(device or "cpu")
        self.is_partial = bool(partial)
        self.parameters = _choose(parameter_names(model.config), partial)
        self._linears = {p.name: _linear(model, p) for p in self.parameters}
        self._owners = {name: p for p in self.parameters for name in self._possible_names(p)}
        self._arrived = _ArrivedTensors()
        self._tensors: dict[str, torch.Tensor] = {}
        self.seen: set[str] = set()
        self._converted: set[str] = set()
        self._positions = {p.name: i for i, p in enumerate(self.parameters)}
        self._num_expected = {p.name: len(p.parts) + len(self._state_names(p)) for p in self.parameters}

    def wants(self, name: str) -> bool:
        """Whether a tensor belongs to a parameter of this update's."""
        return name in self._owners

    def position(self, name: str) -> int:
        """Sorts names so that few parameters are under way at a time."""
        owner = self._owners.get(name)
        return len(self.parameters) if owner is None else self._positions[owner.name]

    def declare(self, entries: Iterable[TensorEntry]) -> None:
        """Check names, shapes and dtypes of all tensors before the first one comes.

        Raises:
            CheckpointError: a tensor is missing, unknown, of another shape or of a dtype that does not fit.
        """
        planned = {entry.name: entry for entry in entries}
        for entry in planned.values():
            self._check(entry)
        self._refuse_missing(planned)

    def add(self, name: str, tensor: torch.Tensor) -> None:
        """Take one tensor; it may be changed or freed afterwards.

        Raises:
            CheckpointError: an unknown name, one that came before, another shape or dtype, inf or NaN, a scale that is
                zero or negative.
        """
        self._check(TensorEntry(name, tensor.dtype, tuple(tensor.shape), _PATH))
        owner = self._owners.get(name)
        if name in self.seen or (owner is not None and owner.name in self._converted):
            raise CheckpointError(f"{_PATH}: {name} came twice, or is a scale of what came without codes")
        self.seen.add(name)
        check_finite(name, tensor, _PATH)
        if is_ignored(name):
            return
        self._arrived.put(name, tensor.detach())
        if owner is not None and self._is_complete(owner, name):
            self._convert(owner)
        else:  # a sender may use its buffer again
            self._arrived.put(name, tensor.detach().to("cpu" if owner is None else tensor.device, copy=True))

    def finish(self) -> Staged:
        """All weights, ready to be written.

        Raises:
            CheckpointError: a tensor has not come, a tied lm_head differs from the embedding, or the model holds its
                weights otherwise than at the start.
        """
        self._refuse_missing(self._arrived.entries)
        self._check_tied_head()
        live = live_tensors(self.model)
        for name, tensor in self._tensors.items():
            held = live.get(name)
            if held is None or (held.shape, held.dtype) != (tensor.shape, tensor.dtype):
                raise CheckpointError(
                    f"{_PATH}: the model holds {name} otherwise than the update made it; its numerics "
                    "changed meanwhile: begin again"
                )
        scales = self.model.kv_scales if self.is_partial else kv_scales.read(self._arrived, self.model.config)
        return Staged(self._tensors, scales)

    # What may come

    def _possible_names(self, parameter: ParameterNames) -> list[str]:
        """Every name that a tensor of this parameter may have: its parts, scales of their codes, delayed scaling's."""
        names = [name for name, _ in parameter.parts]
        if self._takes_codes(parameter):
            suffixes = (*self.layout.weight_scale, *self.layout.input_scale)
            names += [scale for name, _ in parameter.parts for scale in scaled_weight.scale_names(name, suffixes)]
        return names + self._state_names(parameter)

    def _state_names(self, parameter: ParameterNames) -> list[str]:
        linear = self._linears[parameter.name]
        has_state = linear is not None and linear.recipe is not None and linear.recipe.has_state
        prefix = parameter.name.removesuffix("weight")
        return [f"{prefix}{buffer}" for buffer in DELAYED_BUFFERS] if has_state else []

    def _takes_codes(self, parameter: ParameterNames) -> bool:
        """Linears that hold codes alone; and the head, whose codes are decoded as load_model does."""
        linear = self._linears[parameter.name]
        if self.layout.weight is None:
            return False
        return parameter.name == _HEAD or (linear is not None and linear.weight is None)

    def _is_code(self, parameter: ParameterNames, dtype: torch.dtype) -> bool:
        return self._takes_codes(parameter) and self.layout.weight is not None and dtype == self.layout.weight.dtype

    def _scale_suffixes(self, parameter: ParameterNames) -> list[tuple[str, ...]]:
        """What a part's codes come with: spellings of a scale of the weight, and of a known one of the input."""
        is_static = self.layout.input == "static" and parameter.name != _HEAD
        return [self.layout.weight_scale, self.layout.input_scale] if is_static else [self.layout.weight_scale]

    def _check(self, entry: TensorEntry) -> None:
        """Refuse a name that nothing needs, and a shape or dtype that its parameter cannot have."""
        owner, config = self._owners.get(entry.name), self.model.config
        if owner is None:
            is_head = entry.name == _HEAD and config.tie_word_embeddings
            of_whole = is_head or entry.name in kv_scales.find_names([entry.name], config.num_layers).all
            if not (is_ignored(entry.name) or (of_whole and not self.is_partial)):
                raise CheckpointError(f"{_PATH}: {entry.name} is no tensor of this model's, or of this update's part")
            return
        if entry.name in self._state_names(owner):
            self._check_state(entry)
        shape = owner.part_shapes.get(entry.name)
        if shape is None:
            return
        if entry.shape != shape:
            raise CheckpointError(f"{_PATH}: {entry.name} has shape {entry.shape}, but the model's is {shape}")
        if entry.dtype not in bf16.DTYPES and not self._is_code(owner, entry.dtype):
            takes = self._takes_codes(owner)
            held, more = ("FP8 codes", " or such codes with their scales") if takes else ("high precision", "")
            raise CheckpointError(
                f"{_PATH}: {entry.name} is {entry.dtype}; the model holds it in {held}, so send bfloat16, float16 or "
                f"float32{more}"
            )

    def _check_state(self, entry: TensorEntry) -> None:
        held = self.model.get_buffer(entry.name)
        if (entry.shape, entry.dtype) != (tuple(held.shape), held.dtype):
            raise CheckpointError(
                f"{_PATH}: {entry.name} is {entry.dtype} {entry.shape}, but the model's is {held.dtype} "
                f"{tuple(held.shape)}: delayed scaling with another amax history"
            )

    # What is still to come

    def _lacking(self, parameter: ParameterNames, entries: dict[str, TensorEntry]) -> list[str]:
        """Names that a parameter needs and that are not among entries; codes ask for their scales."""
        lacking = [name for name in (*dict(parameter.parts), *self._state_names(parameter)) if name not in entries]
        for name, _ in parameter.parts:
            if name in entries and self._is_code(parameter, entries[name].dtype):
                every = [(scaled_weight.scale_names(name, known), known) for known in self._scale_suffixes(parameter)]
                lacking += [n[0] for n, known in every if scaled_weight.find_scale(entries, name, known) is None]
        return lacking

    def _is_complete(self, parameter: ParameterNames, name: str) -> bool:
        """Whether all of a parameter is there with this tensor; names are compared only once the count fits."""
        is_code = self._is_code(parameter, self._arrived.entries[name].dtype)
        self._num_expected[parameter.name] += len(self._scale_suffixes(parameter)) * is_code - 1
        return self._num_expected[parameter.name] <= 0 and not self._lacking(parameter, self._arrived.entries)

    def _refuse_missing(self, entries: dict[str, TensorEntry]) -> None:
        lost = [n for p in self.parameters if p.name not in self._converted for n in self._lacking(p, entries)]
        if not self.is_partial:
            found = kv_scales.find_names(entries, self.model.config.num_layers)
            lost += kv_scales.missing_names(found, self.layout, kv_scales.attention_modules(self.parameters))
        if lost:
            raise CheckpointError(
                f"{_PATH}: missing tensors: {_listed(lost)}; an update brings every "
                "tensor unless partial names those that it brings"
            )

    # Conversion

    @torch.no_grad()
    def _convert(self, parameter: ParameterNames) -> None:
        """Make of a parameter's tensors what the forward reads, and let them go."""
        linear = self._linears[parameter.name]
        parts: list[torch.Tensor | QuantizedTensor]
        if self._takes_codes(parameter):
            parts = [scaled_weight.read(self._arrived, *part, self.layout) for part in parameter.part_shapes.items()]
        else:
            parts = [bf16.read(self._arrived, *part) for part in parameter.part_shapes.items()]
        if linear is None or not keeps_codes(linear.recipe):
            made = {parameter.name: own_slices(self.model, parameter.name, self._merge(parameter, parts))}
        else:
            made = self._make_linear(parameter, linear, parts)
        for name, tensor in made.items():
            self._tensors[name] = tensor.to(self.device, copy=True)
        self._converted.add(parameter.name)
        self._arrived.drop(self._possible_names(parameter))

    def _merge(self, parameter: ParameterNames, parts: list[torch.Tensor | QuantizedTensor]) -> torch.Tensor:
        """The parameter in the model's dtype."""
        dtype, decoded = self.model.dtype, {}
        for (name, _), part in zip(parameter.parts, parts, strict=True):
            decoded[name] = part.dequantize(dtype) if isinstance(part, QuantizedTensor) else part.to(dtype)
            check_finite(name, decoded[name], _PATH)  # fp32 may be too large for bf16
        return parameter.merge(decoded)

    def _make_linear(
        self, parameter: ParameterNames, linear: Linear, parts: list[torch.Tensor | QuantizedTensor]
    ) -> dict[str, torch.Tensor]:
        """Weight or codes of a linear under an FP8 recipe, and its known scales."""
        prefix, recipe = parameter.name.removesuffix("weight"), linear.recipe
        assert recipe is not None and recipe.weight is not None, "its recipe keeps codes"
        state = {name: self._arrived.load(name) for name in self._state_names(parameter)}
        if any(name.endswith(SCALE_BUFFER) and not (scale > 0).all() for name, scale in state.items()):
            raise CheckpointError(f"{_PATH}: {prefix}{SCALE_BUFFER} is zero or negative")
        theirs = [name for name, _ in parameter.parts]  # the sender knows these names, not the fused parameter's
        codes = {name: part for name, part in zip(theirs, parts, strict=True) if isinstance(part, QuantizedTensor)}
        if codes and len(codes) < len(parts):
            odd = [name for name in theirs if name not in codes]
            raise CheckpointError(
                f"{_PATH}: {_listed(codes)} came as codes, {_listed(odd)} in high precision, and the "
                "model holds them as one; send all of them alike"
            )
        if not codes and recipe.static_input:
            raise CheckpointError(
                f"{_PATH}: {_listed(theirs)}: the model has a known scale of the input, which comes "
                "beside codes alone; send codes and scales"
            )
        values: torch.Tensor | list[QuantizedTensor]
        if codes:
            values = [self._fit(name, part, linear) for name, part in codes.items()]
        else:
            values = self._merge(parameter, parts).to(self.model.device)
        quant_scale = state.get(f"{prefix}{SCALE_BUFFER}")
        made = make_tensors(linear, values, None if quant_scale is None else quant_scale.to(self.model.device))
        made = {f"{prefix}{name}": tensor for name, tensor in made.items()} | state
        if recipe.static_input:
            scale = scaled_weight.shared_input_scale(self._arrived, theirs, self.layout)
            assert scale is not None, "every part has come with its own"
            made |= {f"{prefix}input_scale": scale, f"{prefix}input_quant_scale": reciprocal(scale)}
        return made

    def _fit(self, name: str, part: QuantizedTensor, linear: Linear) -> QuantizedTensor:
        assert linear.recipe is not None and linear.recipe.weight is not None, "its recipe keeps codes"
        fitted = scaled_weight.fit(part, linear.recipe.weight)
        if fitted is None:
            raise CheckpointError(
                f"{_PATH}: {name} came with {part.scaling.kind} scales, and the model holds "
                f"{linear.recipe.weight.kind} ones; send high precision, or codes of that kind"
            )
        return fitted

    def _check_tied_head(self) -> None:
        if _HEAD not in self._arrived.entries or not self.model.config.tie_word_embeddings:
            return
        head = own_slices(self.model, _EMBEDDING, self._arrived.load(_HEAD)).to(self.model.dtype).to(self.device)
        if not torch.equal(head, self._tensors[_EMBEDDING]):
            raise CheckpointError(f"{_PATH}: {_HEAD} differs from the embedding, but the model ties them")


def _listed(names: Iterable[str]) -> str:
    """Some names for an error's text."""
    known = list(names)
    more = f" and {len(known) - _NUM_NAMED} more" if len(known) > _NUM_NAMED else ""
    return ", ".join(known[:_NUM_NAMED]) + more


def _choose(parameters: list[ParameterNames], patterns: Sequence[str]) -> list[ParameterNames]:
    """The parameters of which a tensor is named; all without patterns."""
    if not patterns:
        return parameters
    named = [{p.name for p in parameters if fnmatch.filter(dict(p.parts), pattern)} for pattern in patterns]
    if not all(named):
        raise CheckpointError(f"partial: {patterns[named.index(set())]!r} names no tensor of this model")
    return [p for p in parameters if p.name in set().union(*named)]


def _linear(model: Decoder, parameter: ParameterNames) -> Linear | None:
    module = model.get_submodule(parameter.name.rpartition(".")[0])
    return module if parameter.is_linear_weight and isinstance(module, Linear) else None
