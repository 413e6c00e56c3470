"""AdamW with moments in fp32, bf16 or FP8 and masters in fp32 or in the 16 bits that a bf16 parameter lacks."""

from collections.abc import Callable, Iterable, Mapping
from itertools import chain
from typing import Any

import torch

from octavo.distributed.shards import cut, global_offset, local, whole
from octavo.errors import ConfigError, DtypeError
from octavo.ops.adamw import HYPER, STATE_DTYPES, adamw_step_
from octavo.optim.state import MasterWeights, State, StateDtype, fit_state, is_kept_whole, make_state

_MASTER_WEIGHTS = ("fp32", "remainder", None)


class AdamW(torch.optim.Optimizer):
    """AdamW (decoupled weight decay) with compact state; one pass over memory a step, one launch a parameter on a GPU.

    Args:
        params: parameters (fp32, bf16 or fp16) or groups of them; a group may set every argument below. They may be
            DTensors that are sharded along dim 0, as torch's fully_shard leaves them; so is their state then.
        lr: a number, or a scalar tensor (on the parameters' device a captured CUDA graph reads it at each replay).
        betas: as in torch.
        eps: as in torch.
        weight_decay: as in torch.
        state_dtype: how the two moments are kept: "fp32" (8 bytes a parameter), "bf16" (4, rounded stochastically)
            or "fp8" (2.06: E4M3 and unsigned E5M3 with a scale for each 128, rounded stochastically).
        master_weights: what a bf16 parameter's updates are summed in. "fp32": a copy, 4 bytes; "remainder": the 16 low
            bits of that copy, 2 bytes, which with the parameter are the copy, bit for bit; None: the parameter itself,
            rounded stochastically. An fp32 parameter is its own master and needs none.
    Raises:
        ConfigError: a value outside these.
        DtypeError: "remainder" for an fp16 parameter.
        ShapeError: at the first step, a parameter that is sharded along another dim.
    Exactness: a run that goes on from its state_dict repeats one that was not interrupted bit for bit (the bits of
        stochastic rounding come from an element's place and the step). Given the same gradients, moments are equal in
        bits on CPU and GPU, weights within 2**-20 of their updates, and both are equal in bits on any number of ranks.
        With state_dtype="fp32" it is torch's AdamW but for fp32 rounding. inf and NaN gradients are not looked for:
        check the gradients' norm before the step.
    """

    def __init__(
        self,
        params: Iterable[Any],
        lr: float | torch.Tensor = 1e-3,
        betas: tuple[float, float] = (0.9, 0.95),
        eps: float = 1e-8,
        weight_decay: float = 0.1,
        *,
        state_dtype: StateDtype = "fp32",
        master_weights: MasterWeights = "fp32",
    ) -> None:
        defaults = {
            "lr": lr,
            "betas": betas,
            "eps": eps,
            "weight_decay": weight_decay,
            "state_dtype": state_dtype,
            "master_weights": master_weights,
        }
        super().__init__(params, defaults)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add parameters with settings of their own; what is not given is the optimizer's.

        Raises:
            ConfigError: as the constructor.
            DtypeError: as the constructor.
        """
        super().add_param_group(param_group)
        try:
            _check_group(self.param_groups[-1])
        except (ConfigError, DtypeError):
            self.param_groups.pop()
            raise

    def init_state(self) -> None:
        """Make every parameter's state now (else a parameter's first step does): zero moments, masters from the
        parameters.
        """
        for group in self.param_groups:
            for param in group["params"]:
                self._state_of(param, group)

    @torch.no_grad()
    def step(  # type: ignore[override]
        self,
        closure: Callable[[], float] | None = None,
        *,
        grads: Mapping[torch.Tensor, torch.Tensor] | None = None,
        grad_scale: torch.Tensor | None = None,
    ) -> float | None:
        """Update every parameter that has a gradient. Nothing is read back from the device.

        Args:
            closure: recomputes the loss.
            grads: gradients by parameter, in place of `.grad`; of any float dtype (say fp32 sums for bf16 parameters).
            grad_scale: fp32 scalar tensor that gradients are multiplied by in fp32 (clipping), without a pass of its
                own.
        Returns:
            The closure's loss.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            found = [(p, p.grad if grads is None else grads.get(p)) for p in group["params"]]
            for device in dict.fromkeys(p.device for p, grad in found if grad is not None):
                here = [(p, grad) for p, grad in found if grad is not None and p.device == device]
                self._step_group(group, here, grad_scale)
        return loss

    def _step_group(
        self, group: dict[str, Any], found: list[tuple[torch.Tensor, torch.Tensor]], grad_scale: torch.Tensor | None
    ) -> None:
        if any(grad.is_sparse for _, grad in found):
            raise DtypeError("AdamW takes dense gradients only, got a sparse one; set sparse=False in the embedding")
        states = [self._state_of(param, group) for param, _ in found]
        steps = [state["step"] for state in states]
        torch._foreach_add_(steps, 1.0)
        hyper = _hyper(group, torch.stack(steps), grad_scale)  # [params, 5]
        beta1, beta2 = group["betas"]
        whole_ones = _gathered(group, found)
        for (param, grad), state, row in zip(found, states, hyper.unbind(), strict=True):
            weight, gradient = whole_ones.get(param, (local(param), local(grad)))
            own = {name: local(tensor) for name, tensor in state.items()}
            adamw_step_(
                weight,
                gradient,
                own["exp_avg"],
                own["exp_avg_sq"],
                row,
                beta1=beta1,
                beta2=beta2,
                eps=group["eps"],
                exp_avg_scale=_flat(own.get("exp_avg_scale")),
                exp_avg_sq_scale=_flat(own.get("exp_avg_sq_scale")),
                master=own.get("master", own.get("remainder")),
                offset=0 if param in whole_ones else global_offset(param),
            )
            if param in whole_ones:
                local(param).copy_(cut(weight, param))

    def _state_of(self, param: torch.Tensor, group: dict[str, Any]) -> State:
        state: State = self.state[param]
        if not state:
            state.update(make_state(param.detach(), group))
        return state

    @torch.no_grad()
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take groups and state from a state_dict, kept in the dtypes that they have.

        Of sharded parameters it may hold DTensors that lie as this run's state, or whole plain tensors, of which each
        rank takes its rows.

        Raises:
            CheckpointError: a tensor does not belong to its parameter; nothing is changed then.
            ValueError: torch's, for other groups.
        """
        ids = chain.from_iterable(group["params"] for group in state_dict["param_groups"])
        saved_groups = [group for group in state_dict["param_groups"] for _ in group["params"]]
        params = list(chain.from_iterable(group["params"] for group in self.param_groups))
        loaded: dict[torch.Tensor, State] = {}
        for key, param, group in zip(ids, params, saved_groups, strict=False):
            if key in state_dict["state"]:
                loaded[param] = fit_state(param.detach(), group, state_dict["state"][key])
        # torch's own would cast every tensor to its parameter's dtype, and 8-bit codes with them.
        super().load_state_dict({**state_dict, "state": {}})
        self.state.update(loaded)

    @property
    def num_state_bytes(self) -> int:
        """Bytes of all state there is, on this rank."""
        tensors = (local(tensor) for state in self.state.values() for tensor in state.values())
        return sum(tensor.numel() * tensor.element_size() for tensor in tensors)


def _check_group(group: dict[str, Any]) -> None:
    beta1, beta2 = group["betas"]
    rules = {
        "lr must be >= 0": isinstance(group["lr"], torch.Tensor) or group["lr"] >= 0.0,
        "betas must be in [0, 1)": 0.0 <= beta1 < 1.0 and 0.0 <= beta2 < 1.0,
        "eps must be > 0": group["eps"] > 0.0,
        "weight_decay must be >= 0": group["weight_decay"] >= 0.0,
        f"state_dtype must be one of {tuple(STATE_DTYPES)}": group["state_dtype"] in STATE_DTYPES,
        f"master_weights must be one of {_MASTER_WEIGHTS}": group["master_weights"] in _MASTER_WEIGHTS,
    }
    for rule, holds in rules.items():
        if not holds:
            raise ConfigError(f"AdamW: {rule}, got {group[rule.split()[0]]!r}")
    for param in group["params"]:
        if param.dtype not in (torch.float32, torch.bfloat16, torch.float16):
            raise DtypeError(f"AdamW takes float32, bfloat16 and float16 parameters, got {param.dtype}")
        if param.dtype == torch.float16 and group["master_weights"] == "remainder":
            raise DtypeError(
                "master_weights='remainder' needs bfloat16 parameters (float16 is no upper half of a float32), got "
                "float16; use master_weights='fp32'"
            )


def _gathered(
    group: dict[str, Any], found: list[tuple[torch.Tensor, torch.Tensor]]
) -> dict[torch.Tensor, tuple[torch.Tensor, torch.Tensor]]:
    """Whole weights and gradients of the sharded parameters whose state every rank holds whole."""
    here = [(param, grad) for param, grad in found if is_kept_whole(param, group)]
    params = [param for param, _ in here]
    parts = whole([local(tensor) for pair in here for tensor in pair], [param for param in params for _ in range(2)])
    return dict(zip(params, zip(parts[::2], parts[1::2], strict=True), strict=True))


def _flat(scale: torch.Tensor | None) -> torch.Tensor | None:
    return None if scale is None else scale.view(-1)


def _hyper(group: dict[str, Any], steps: torch.Tensor, grad_scale: torch.Tensor | None) -> torch.Tensor:
    """The columns HYPER for parameters at these steps: [params, 5] fp32, made on their device from fp64."""
    count = steps.double()
    lr = group["lr"]
    # Quotients of two tensors: a number over a tensor rounds twice. A number never becomes a copy to the device.
    lr = lr.to(count) if isinstance(lr, torch.Tensor) else torch.full_like(count, lr)
    one = torch.ones_like(count)
    beta1, beta2 = group["betas"]
    columns = {
        "decay": (one - lr * group["weight_decay"]).expand_as(count),
        "step_size": lr / (one - beta1**count),
        "inv_sqrt_correction": one / (one - beta2**count).sqrt(),
        "grad_scale": one if grad_scale is None else grad_scale.to(count).expand_as(count),
        "step": count,
    }
    return torch.stack([columns[name].to(torch.float32) for name in HYPER], dim=1)
