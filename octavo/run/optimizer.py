"""MasterAdamW: AdamW over a model's parameters, with fp32 masters or compact state, and the commit of new weights.

After every update a bf16 parameter equals bf16(master), which is what its FP8 codes are made from.
"""

from collections.abc import Callable, Mapping
from typing import Any

import torch

from octavo.distributed.cut import Cut
from octavo.errors import ConfigError
from octavo.nn import mark_weights_updated
from octavo.nn.cut_linear import parameter_cuts, sliced_parameters
from octavo.numerics.infinity import take_infinity
from octavo.ops.adamw import BLOCK
from octavo.optim.state import cut_of
from octavo.run.sections import OptimizerSection
from octavo.run.updates import CompactUpdate, FullUpdate, decay_groups


class MasterAdamW(torch.optim.Optimizer):
    """AdamW with master weights, gradient accumulation and global-norm clipping.

    A torch.optim.Optimizer: its param_groups hold the model's parameters, what they say of lr, betas, eps and
    weight_decay is what the next step does, and torch's LR schedulers drive it. The state dict alone is its own.

    Args:
        model: its trainable parameters, fp32 or bf16. Matrices decay; vectors (norms, biases) do not. They may be
            sharded by torch's fully_shard; state is then sharded alike.
            parallelize may have cut them: the norm is then the whole model's.
        config: learning rate, betas, eps, weight decay, state_dtype, master_weights.

    Exactness: with fp32 state and masters and fp32 parameters, bit for bit torch.optim.AdamW over the same groups;
        other state is octavo.optim.AdamW's. All of it continues bit for bit from its state_dict. Given the same whole
        gradients, norm, state and parameters have the same bits on any number of ranks.
    """

    def __init__(self, model: torch.nn.Module, config: OptimizerSection) -> None:
        self._model = model
        params = {name: p for name, p in model.named_parameters() if p.requires_grad}
        for device in {p.device for p in params.values()}:
            take_infinity(device)  # what others quantized before is no matter of this run's checks
        is_full = config.state_dtype == "fp32" and config.master_weights == "fp32"
        defaults = {"lr": config.lr, "betas": (config.beta1, config.beta2), "eps": config.eps}
        super().__init__(decay_groups(list(params.values()), config.weight_decay), defaults)
        slices = sliced_parameters(model)
        self._update = FullUpdate(params, config, slices) if is_full else CompactUpdate(params, config, slices)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """torch's, while the groups are made.

        Raises:
            ConfigError: later; the parameters are the model's.
        """
        if hasattr(self, "_update"):
            raise ConfigError("MasterAdamW has its model's parameters and takes no further group; build a new one")
        super().add_param_group(param_group)

    def init_state(self) -> None:
        """Make every moment now (zeros): then a fresh state_dict has all tensors that a checkpoint may fill."""
        self._update.init_state()

    def accumulate_gradients(self) -> None:
        """Take the parameters' gradients into the step's, and clear them: call after each backward.

        Sums of micro-batches are fp32. With compact state a single micro-batch's gradient is kept as it is.
        """
        self._update.accumulate_gradients()

    def clip_gradients(self, max_norm: float) -> torch.Tensor:
        """Scale all gradients so that their global norm is at most max_norm.

        Args:
            max_norm: 0 measures without clipping.
        Returns:
            The norm before clipping, fp32 scalar on the parameters' device; not finite if any gradient is not,
            and then nothing may be updated. A collective for sharded parameters; every rank gets the same.
        """
        return self._update.clip_gradients(max_norm)

    def step(  # type: ignore[override]
        self, closure: Callable[[], float] | None = None, *, lr: float | None = None
    ) -> float | None:
        """Update masters and parameters from the gradients, clear those, and commit the new weights.

        Args:
            closure: computes the loss and its gradients again.
            lr: for this step and the next ones; None for what param_groups say.
        Returns:
            The closure's loss.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        if lr is not None:
            for group in self.param_groups:
                group["lr"] = lr
        self._update.accumulate_gradients()  # of a backward after which the caller did not
        self._update.step(self.param_groups)
        self._commit()
        return loss

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Drop every gradient, the accumulated ones too; set_to_none=False keeps no zeros either."""
        self._update.zero_grad()

    def state_dict(self) -> dict[str, torch.Tensor]:  # type: ignore[override]
        """Masters (or parameters), moments and step counts by name: `master.<name>`, `exp_avg.<name>`, ...

        Returns:
            The optimizer's own tensors, not copies; DTensors for sharded parameters. With fp32 state there are no
            moments before the first step or init_state.
        """
        return self._update.state_dict()

    def state_cuts(self) -> dict[str, Cut]:
        """Where the state_dict's tensors lie whose parameters parallelize has cut, by their names.

        Raises:
            ConfigError: 8-bit moments of which ranks would share a scale.
        """
        of_parameters, cuts = parameter_cuts(self._model), dict[str, Cut]()
        for name, tensor in self.state_dict().items():
            key, _, parameter = name.partition(".")
            if parameter not in of_parameters or not tensor.dim():
                continue
            cut = cut_of(key, of_parameters[parameter])
            if cut is None:
                raise ConfigError(
                    f"8-bit moments have a scale for each {BLOCK} neighbouring elements, and tensor-parallel ranks cut "
                    f"{parameter} in between; set optimizer.state_dtype = 'bf16', or use fewer tensor-parallel ranks"
                )
            cuts[name] = cut
        return cuts

    def load_state_dict(self, state: Mapping[str, torch.Tensor]) -> None:  # type: ignore[override]
        """Take masters and moments from a state_dict, and round the parameters from the masters.

        Args:
            state: plain tensors, which are whole (each rank takes its rows), or DTensors cut as this run's state.
        Raises:
            CheckpointError: a tensor is missing, or has another shape, dtype or cut; nothing is changed then.
        """
        self._update.load_state_dict(state)
        self._commit()

    def _commit(self) -> None:
        """Move the model to the next weight version; frozen weights, and their codes, stay."""
        mark_weights_updated(self._model, trained_only=True)
