"""GatheredWeight: a sharded weight whose codes travel. A rank quantizes its rows; FSDP2 gathers what it sends."""

from collections.abc import Callable, Sequence
from typing import Any

import torch

from octavo.errors import RecipeError, StaleCodesError
from octavo.nn.weights.delayed import DelayedState
from octavo.nn.weights.operands import Operands, values_of
from octavo.nn.weights.plan import LinearPlan
from octavo.nn.weights.shared_scales import SharedScales
from octavo.nn.weights.source import WeightSource
from octavo.nn.weights.version import count_optimizer_steps, num_optimizer_steps
from octavo.nn.weights.write_watch import WriteWatch
from octavo.numerics.quantized import QuantizedTensor
from octavo.numerics.recipe import Recipe
from octavo.ops.quantize import quantize
from octavo.ops.quantize.transpose import transpose_codes


class GatheredWeight(WeightSource):
    """Codes of a weight of which this rank has some rows, all in one row range.

    A rank's own codes are made where they are sent, for the forward and again for the backward: kept in between they
    would take more memory than codes save in flight, and making them takes less time than reading one. Their scale is
    fixed once a version of the rows. The parameter [N, K] that a forward sees is there for its gradient; it has no
    values. docs/adr/0025.

    Args:
        parts: as in WeightSource.
        recipe: the linear's; no other can compute from the codes.
        attach: gives the sharded parameter, when it is set, the hooks that call send and receive.
        scales: of a weight with one scale that no history gives.

    Attributes:
        stages: the forward that has begun trains, so that delayed scaling stages the weight's amax.
    """

    has_values = False

    def __init__(
        self,
        parts: tuple[int, ...],
        recipe: Recipe,
        attach: Callable[[Any], None],
        scales: SharedScales | None = None,
        version: int = 0,
    ) -> None:
        super().__init__(parts, version)
        assert recipe.weight is not None, f"recipe {recipe.name!r} quantizes no weight"
        self.recipe, self.scaling, self.begins_early = recipe, recipe.weight, recipe.has_state
        self.stages = self.has_begun = False
        self._attach, self._scales = attach, scales
        self._sharded: Any = None  # the parameter (a DTensor), which a gathered one stands in for at times
        self._known: dict[str, torch.Tensor] = {}  # the quant_scale of this version, where one is known
        self._scale: torch.Tensor | None = None  # of this version's codes
        self._key: tuple[int, ...] | None = None
        self._watch = WriteWatch()
        self._codes: Operands | None = None
        self._hollow_at = 0  # address of the parameter's storage until it is freed
        if scales is not None:
            scales.add(self)
        count_optimizer_steps()

    def __deepcopy__(self, memo: dict[int, Any]) -> "GatheredWeight":
        copied = type(self)(self.parts, self.recipe, self._attach, self._scales, self.version)
        copied.full_name, copied.group, copied.has_begun = self.full_name, self.group, self.has_begun
        return copied

    # A rank's rows

    @property
    def shard(self) -> torch.Tensor:
        """This rank's rows [N / ranks, K] of the weight."""
        return self._sharded._local_tensor.detach()  # type: ignore[no-any-return]

    def shard_state(self) -> tuple[int, ...]:
        """Changes when the rank's rows may have, as weight_state does: alike on all ranks that run one program."""
        weight = self._sharded
        local, steps = weight._local_tensor, num_optimizer_steps() if weight.requires_grad else 0
        return self.version, weight._version, local._version, local.data_ptr(), steps, int(self.stages)

    def send(self, state: DelayedState | None) -> list[torch.Tensor]:
        """What an all-gather takes of this rank: its codes as uint8 and, of blocks, their scales.

        Args:
            state: delayed scaling's, whose scale is the same on all ranks.
        """
        if self.scaling.is_per_tensor:
            made = self._encode(self._known_scale(state))
            if self._scale is None:
                self._scale = made.scale
            return [made.qdata.view(torch.uint8)]
        made = self._encode({})
        return [made.qdata.view(torch.uint8), made.scale]

    def _known_scale(self, state: DelayedState | None) -> dict[str, Any]:
        """A quantizer's arguments for the one scale of this version, which a history or all ranks' amaxes gave."""
        key = self.shard_state()
        if self._key is not None and key[:-1] == self._key[:-1] and key[-1] <= self._key[-1]:
            # a backward sends what its forward sent
            if self._scales is not None and torch._C._current_graph_task_id() == -1:
                self._watch.look(self.shard, self.full_name)
            return self._known
        if state is not None:
            known = state.known(DelayedState.WEIGHT, observe=self.stages)
        else:
            assert self._scales is not None, "one scale has a history or is shared"
            self._watch.begin(self.shard, (key[0], key[1] + key[2]))
            known = {"quant_scale": self._scales.of(self)}
        # A version has one scale: the history's may change before this forward's backward, and the forward's GEMMs may
        # still wait to read theirs when the backward's codes are made.
        self._scale = None
        self._key, self._known = key, {"quant_scale": known["quant_scale"].clone()}
        return known

    def fold_amax(self, amax: torch.Tensor) -> None:
        """Fold the amax of this rank's rows into one fp32 number, by the quantizer that drops NaN on every device."""
        self._encode({"quant_scale": torch.ones_like(amax), "amax_out": amax})

    def _encode(self, known: dict[str, Any]) -> QuantizedTensor:
        with torch.inference_mode(False), torch.no_grad():  # training steps read what an evaluation made
            return quantize(values_of(self.shard), self.scaling, **known)

    # The whole

    def receive(self, pieces: Sequence[torch.Tensor]) -> None:
        """Take the gathered codes [N, K] and, of blocks, their scales: views of memory that FSDP2 owns."""
        codes = pieces[0].view(self.scaling.dtype)
        scale = pieces[1] if len(pieces) > 1 else self._scale
        assert scale is not None, "a rank that gathers has sent"
        self._codes = [(slice(0, len(codes)), QuantizedTensor(codes, scale, self.scaling))]

    def hollow(self, dtype: torch.dtype) -> torch.Tensor:
        """A new parameter's data, [N, K]; its memory is freed as soon as the module has the parameter."""
        assert self._codes is not None, "asked for after receive"
        q = self._codes[0][1]
        with torch.inference_mode(False):
            made = torch.empty(q.shape, dtype=dtype, device=q.device)
        self._hollow_at = made.data_ptr()
        return made

    def replace_weight(self, weight: Any) -> None:
        """See WeightSource: the sharded parameter gets its hooks, and the gathered one loses its memory."""
        if hasattr(weight, "device_mesh"):
            self.release()
            self.is_sharded, self._sharded = True, weight
            self._attach(weight)
        elif weight is None or weight.untyped_storage().size() == 0:
            return
        elif weight.data_ptr() == self._hollow_at:
            weight.untyped_storage().resize_(0)
            self._hollow_at = 0
        else:
            self.release()

    def release(self) -> None:
        """See WeightSource."""
        self._codes = None

    # Operands

    def forward(self, weight: torch.Tensor | None, plan: LinearPlan, *, observe: bool = False) -> Operands:
        """See WeightSource.

        Raises:
            RecipeError: another recipe's codes are asked for.
            StaleCodesError: the weight is not gathered.
        """
        if plan.recipe.weight != self.scaling or plan.recipe.has_state != self.recipe.has_state:
            raise RecipeError(
                f"{self.full_name or 'this weight'} is gathered as codes of recipe {self.recipe.name!r}, and "
                f"{plan.recipe.name!r} is asked for; shard the model without all_gather_dtype='fp8' to change recipes"
            )
        if self._codes is None:
            raise StaleCodesError(
                f"FP8 codes of {self.full_name or 'a sharded weight'} are there from its all-gather until it is freed, "
                "and are not now; call the sharded module, or stay within octavo.parallel.gathered(model)"
            )
        return self._codes

    def backward(self, weight: torch.Tensor | None, plan: LinearPlan, *, after: torch.Tensor | None = None) -> Operands:
        """See WeightSource: blocks and scales are square, so that the codes are transposed, at every call."""
        after = after if torch.compiler.is_compiling() else None
        return [
            (rows, QuantizedTensor.trusted(transpose_codes(q.qdata, after), q.scale.t().contiguous(), q.scaling))
            for rows, q in self.forward(weight, plan)
        ]

    def held_bytes(self) -> int:
        """See WeightSource; of the whole weight."""
        return 0 if self._codes is None else sum(q.num_bytes for _, q in self._codes)
