"""GatheredWeight: a sharded weight whose codes travel. A rank quantizes its rows; FSDP2 gathers what it sends."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.multiprocessing.reductions import StorageWeakRef

from octavo.errors import RecipeError, StaleCodesError
from octavo.nn.weights.operands import Operands
from octavo.nn.weights.plan import LinearPlan
from octavo.nn.weights.source import WeightSource
from octavo.nn.weights.version import ModelState, count_optimizer_steps, num_optimizer_steps
from octavo.numerics.quantized import QuantizedTensor
from octavo.numerics.recipe import Recipe
from octavo.ops.quantize.transpose import transpose_codes


class GatheredWeight(WeightSource):
    """Codes of a weight of which this rank has some rows, all in one row range.

    A rank's own codes are made where they are sent, by its GatheredUnit. The parameter [N, K] that a forward sees is
    there for its gradient; it has no values. docs/adr/0025.

    Args:
        parts: as in WeightSource.
        recipe: the linear's; no other can compute from the codes.
        attach: gives the sharded parameter, when it is set, the hooks that call the unit's send, and receive.

    Attributes:
        stages: the forward that has begun trains, so that delayed scaling stages the weight's amax.
        is_lent: the whole model's codes are at hand for a while, and no forward gathers others.
        unit: the GatheredUnit that makes the rank's codes.
        model: counts the optimizer steps that may change the weight; None, as in a copy, for those of all optimizers.
            A rank that alone steps another one must not ask the others for new scales.
        scale: [1, 1] fp32, of this version's codes, where the weight has one.
    """

    has_values = False

    def __init__(self, parts: tuple[int, ...], recipe: Recipe, attach: Callable[[Any], None], version: int = 0) -> None:
        super().__init__(parts, version)
        assert recipe.weight is not None, f"recipe {recipe.name!r} quantizes no weight"
        self.recipe, self.scaling, self.begins_early = recipe, recipe.weight, recipe.has_state
        self.stages = self.has_begun = self._was_staged = False
        self.is_lent = False
        self.unit: Any = None
        self.model: ModelState | None = None
        self._attach = attach
        self._sharded: Any = None  # the parameter (a DTensor), which a gathered one stands in for at times
        self.scale: torch.Tensor | None = None
        self._codes: Operands | None = None
        self._whole: Operands = []  # the same, in memory that comes and goes
        self._storage = 0  # of its codes
        self._shard_storage: Any = None  # of the rank's rows when they were last looked at, and how many they had
        self._num_storages = 0
        self._num_cols = 0
        self._hollow_at = 0  # address of the parameter's storage until it is freed
        count_optimizer_steps()

    def __deepcopy__(self, memo: dict[int, Any]) -> "GatheredWeight":
        copied = type(self)(self.parts, self.recipe, self._attach, self.version)
        copied.full_name, copied.group, copied.has_begun = self.full_name, self.group, self.has_begun
        copied.unit = self.unit
        return copied

    # A rank's rows

    @property
    def local(self) -> torch.Tensor:
        """This rank's rows, as the parameter (a DTensor) has them."""
        return self._sharded._local_tensor  # type: ignore[no-any-return]

    @property
    def shard(self) -> torch.Tensor:
        """This rank's rows [N / ranks, K] of the weight."""
        return self.local.detach()

    def shard_state(self) -> tuple[int, ...]:
        """Changes when the rank's rows may have, as weight_state does: alike on all ranks that run one program.

        Storages are counted: an address may be given to other rows on one rank alone, which would ask the others for
        nothing. What a weak reference refers to keeps its number, though not its memory.
        """
        weight = self._sharded
        local, steps = weight._local_tensor, 0
        if weight.requires_grad:
            steps = num_optimizer_steps() if self.model is None else self.model.num_steps
        storage = StorageWeakRef(local.untyped_storage())
        if self._shard_storage is None or storage != self._shard_storage:
            self._shard_storage, self._num_storages = storage, self._num_storages + 1
        return self.version, weight._version, local._version, self._num_storages, steps, int(self.stages)

    # The whole

    def receive(self, pieces: Sequence[torch.Tensor]) -> None:
        """Take the gathered codes [N * K] and, of blocks, their scales, in memory that FSDP2 owns."""
        storage = pieces[0].untyped_storage()._cdata
        if storage != self._storage:
            # FSDP2 fills the same storages at every gather, so that views are made once
            codes = pieces[0].view(self.scaling.dtype).view(-1, self._num_cols)
            is_blocks = len(pieces) > 1
            scale = pieces[1].view(-1, -(-self._num_cols // self.scaling.block_size[1])) if is_blocks else self.scale
            self._keep(codes, scale)
            self._storage = storage
        elif len(pieces) == 1 and self._whole[0][1].scale is not self.scale:
            self._keep(self._whole[0][1].qdata, self.scale)
        self._codes, self._was_staged = self._whole, self.stages

    def _keep(self, codes: torch.Tensor, scale: torch.Tensor | None) -> None:
        assert scale is not None, "a rank that gathers has sent"
        self._whole = [(slice(0, len(codes)), QuantizedTensor.trusted(codes, scale, self.scaling))]

    def hollow(self, dtype: torch.dtype) -> torch.Tensor:
        """A new parameter's data, [N, K]; its memory is freed as soon as the module has the parameter."""
        assert self._codes is not None, "asked for after receive"
        q = self._codes[0][1]
        with torch.inference_mode(False):
            made = torch.empty(q.shape, dtype=dtype, device=q.device)
        self._hollow_at = made.data_ptr()
        return made

    def stop_watching(self) -> None:
        if self.unit is not None:
            self.unit.stop_watching()

    def replace_weight(self, weight: Any) -> None:
        """See WeightSource: the sharded parameter gets its hooks, and the gathered one loses its memory."""
        if weight is not None and weight is self._sharded:
            self.release()
            self._attach(weight)
        elif hasattr(weight, "device_mesh"):
            self.release()
            if self.unit is not None:
                self.unit.forget()
            self.is_sharded, self._sharded, self._num_cols = True, weight, weight.shape[1]
            self._attach(weight)
        elif weight is None or weight.untyped_storage().size() == 0:
            return
        elif weight.data_ptr() == self._hollow_at:
            weight.untyped_storage().resize_(0)
            self._hollow_at = 0
        else:
            self.release()

    @property
    def lacks_amax(self) -> bool:
        """The forward that has begun trains, and would compute from what an evaluation gathered and staged nothing."""
        return self.stages and self._codes is not None and not self._was_staged

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
        rows, q = self.forward(weight, plan)[0]
        scale = q.scale if q.scaling.is_per_tensor else q.scale.t().contiguous()
        return [(rows, QuantizedTensor.trusted(transpose_codes(q.qdata, after), scale, q.scaling))]

    def held_bytes(self) -> int:
        """See WeightSource; of the whole weight."""
        return 0 if self._codes is None else sum(q.num_bytes for _, q in self._codes)
