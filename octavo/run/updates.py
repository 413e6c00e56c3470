"""The two ways in which MasterAdamW keeps state: torch's AdamW on fp32 masters, and octavo's with compact state."""

from collections.abc import Callable, Mapping
from typing import Any

import torch

from octavo.distributed.norm import global_norm
from octavo.distributed.shards import check_fits, fill, local
from octavo.distributed.tensor_group import TensorGroup
from octavo.errors import CheckpointError
from octavo.ops.accumulate import add_gradients
from octavo.optim import AdamW
from octavo.optim.state import by_rows
from octavo.run.sections import OptimizerSection

_MOMENTS = ("exp_avg", "exp_avg_sq")
_MOST_TOGETHER = 2**28  # elements: 1 GiB of sums
Params = dict[str, torch.nn.Parameter]
Slices = tuple[TensorGroup | None, frozenset[str]]  # tensor-parallel ranks, and parameters of which each has a slice
# this rank's fp32 sum, and what was added up so far: the same, one in 16 bits, or nothing
Sum = tuple[torch.Tensor, torch.Tensor | None]


class FullUpdate:
    """torch.optim.AdamW on fp32 masters: parameters that are fp32 are their own. Gradients add up in fp32."""

    def __init__(self, params: Params, config: OptimizerSection, slices: Slices = (None, frozenset())) -> None:
        self._params, self._slices = params, slices
        self._masters = {name: _master_of(param) for name, param in params.items()}
        self._adamw = torch.optim.AdamW(
            decay_groups(list(self._masters.values()), config.weight_decay),
            lr=config.lr,
            betas=(config.beta1, config.beta2),
            eps=config.eps,
            # on a GPU one kernel reads and writes everything once
            fused=all(master.is_cuda for master in self._masters.values()),
        )

    def init_state(self) -> None:
        """Zero moments for every master."""
        for master in self._masters.values():
            moments = {key: torch.zeros_like(master, requires_grad=False) for key in _MOMENTS}
            self._adamw.state[master] = {"step": torch.zeros((), device=master.device), **moments}

    def accumulate_gradients(self) -> None:
        """Add the parameters' gradients to the masters'."""
        # an fp32 parameter accumulates in place
        _accumulate({name: p for name, p in self._params.items() if self._masters[name] is not p}, self._sum_of)

    def clip_gradients(self, max_norm: float) -> torch.Tensor:
        """The norm before clipping."""
        grads = {name: master.grad for name, master in self._masters.items() if master.grad is not None}
        group, sliced = self._slices
        norm = global_norm(list(grads.values()), slices=[name in sliced for name in grads], group=group)
        if max_norm > 0.0:
            torch._foreach_mul_([local(grad) for grad in grads.values()], _factor(norm, max_norm))
        return norm

    @torch.no_grad()
    def step(self, groups: list[dict[str, Any]]) -> None:
        """Update the masters and round the parameters from them."""
        _follow(self._adamw, groups)
        self._adamw.step()
        self._adamw.zero_grad(set_to_none=True)
        self._round_params()

    def zero_grad(self) -> None:
        """Drop every gradient."""
        for param in (*self._params.values(), *self._masters.values()):
            param.grad = None

    def state_dict(self) -> dict[str, torch.Tensor]:
        """`master.<name>`, `step` and, after the first step, `exp_avg.<name>` and `exp_avg_sq.<name>`."""
        state = {f"master.{name}": master.detach() for name, master in self._masters.items()}
        for name, master in self._masters.items():
            for key in _MOMENTS:
                if key in self._adamw.state[master]:
                    state[f"{key}.{name}"] = self._adamw.state[master][key]
            state["step"] = self._adamw.state[master].get("step", torch.tensor(0.0))
        return state

    @torch.no_grad()
    def load_state_dict(self, state: Mapping[str, torch.Tensor]) -> None:
        """Take masters and moments, and round the parameters from the masters."""
        self._check_state(state)
        for name, master in self._masters.items():
            fill(master, state[f"master.{name}"])
            if state["step"] > 0:
                moments = {key: torch.empty_like(master, requires_grad=False) for key in _MOMENTS}
                for key, moment in moments.items():
                    fill(moment, state[f"{key}.{name}"])
                # where torch's fused update wants it
                self._adamw.state[master] = {"step": state["step"].to(master.device, copy=True), **moments}
        self._round_params()

    def _sum_of(self, name: str, grad: torch.Tensor) -> Sum:
        master = self._masters[name]
        if master.grad is None:
            master.grad = torch.empty_like(grad, dtype=torch.float32)
            return local(master.grad), None
        own = local(master.grad)
        return own, own

    def _check_state(self, state: Mapping[str, torch.Tensor]) -> None:
        if "step" not in state:
            raise CheckpointError(f"the optimizer state has no step{_hint(state)}")
        kinds = ("master", *_MOMENTS) if state["step"] > 0 else ("master",)
        for name, master in self._masters.items():
            for key in (f"{kind}.{name}" for kind in kinds):
                _check_tensor(state, key, master)

    def _round_params(self) -> None:
        for name, param in self._params.items():
            if self._masters[name] is not param:
                local(param).copy_(local(self._masters[name]))


class CompactUpdate:
    """octavo.optim.AdamW: moments in fp32, bf16 or FP8; masters in fp32, in 16 bits, or none.

    One micro-batch's gradient stays in its parameter's dtype, and no copy is made; from the second on they add up in
    fp32, so that no sum loses what its terms have. Clipping is a factor that the step applies in fp32.
    """

    def __init__(self, params: Params, config: OptimizerSection, slices: Slices = (None, frozenset())) -> None:
        self._params, self._slices = params, slices
        self._grads: dict[str, torch.Tensor] = {}
        self._grad_scale: torch.Tensor | None = None
        self._adamw = AdamW(
            decay_groups(list(params.values()), config.weight_decay),
            lr=config.lr,
            betas=(config.beta1, config.beta2),
            eps=config.eps,
            state_dtype=config.state_dtype,
            master_weights=None if config.master_weights == "none" else config.master_weights,
        )
        self._adamw.init_state()

    def init_state(self) -> None:
        """Nothing: it was made at once."""

    def accumulate_gradients(self) -> None:
        """Take the parameters' gradients over."""
        # an fp32 parameter accumulates in place
        params = {name: p for name, p in self._params.items() if p.grad is not None and p.dtype != torch.float32}
        _accumulate({name: p for name, p in params.items() if name in self._grads}, self._sum_of)
        for name, param in params.items():
            if param.grad is not None:  # the first
                self._grads[name], param.grad = local(param.grad), None

    def clip_gradients(self, max_norm: float) -> torch.Tensor:
        """The norm before clipping."""
        gradients = self._gradients()
        group, sliced = self._slices
        names = {id(param): name for name, param in self._params.items()}
        slices = [names[id(param)] in sliced for param in gradients]
        norm = global_norm(list(gradients.values()), list(gradients), slices=slices, group=group)
        if self._grad_scale is not None:
            norm = norm * self._grad_scale
        if max_norm > 0.0:
            factor = _factor(norm, max_norm)
            self._grad_scale = factor if self._grad_scale is None else self._grad_scale * factor
        return norm

    def step(self, groups: list[dict[str, Any]]) -> None:
        """Update parameters and masters, and drop the gradients."""
        _follow(self._adamw, groups)
        self._adamw.step(grads=self._gradients(), grad_scale=self._grad_scale)
        self.zero_grad()

    def zero_grad(self) -> None:
        """Drop every gradient."""
        self._grads, self._grad_scale = {}, None
        for param in self._params.values():
            param.grad = None

    def state_dict(self) -> dict[str, torch.Tensor]:
        """`<key>.<name>` for each key of octavo.optim.AdamW's state, and `param.<name>` where there is no master.

        An fp32 parameter is its own master: a sharded run, whose parameters are, reads what one in bf16 has saved.
        """
        state = {}
        for name, param in self._params.items():
            own = self._adamw.state[param]
            if "master" not in own:
                state[f"{'master' if param.dtype == torch.float32 else 'param'}.{name}"] = param.detach()
            state |= {f"{key}.{name}": tensor for key, tensor in own.items()}
        return state

    @torch.no_grad()
    def load_state_dict(self, state: Mapping[str, torch.Tensor]) -> None:
        """Take state and parameters."""
        expected = self.state_dict()
        # so fp32 parameters were called until 0.1
        former = {f"param.{key.removeprefix('master.')}": key for key in expected if key.startswith("master.")}
        state = {former.get(key, key): tensor for key, tensor in state.items()}
        state = {key: by_rows(tensor, expected[key].shape if key in expected else ()) for key, tensor in state.items()}
        for key, tensor in expected.items():
            _check_tensor(state, key, tensor, dtype=tensor.dtype)
        for key, tensor in expected.items():
            fill(tensor, state[key])
        for param in self._params.values():
            if "master" in self._adamw.state[param]:
                fill(param, self._adamw.state[param]["master"])

    def _sum_of(self, name: str, grad: torch.Tensor) -> Sum:
        old = self._grads[name]
        own = self._grads[name] = old if old.dtype == torch.float32 else torch.empty_like(old, dtype=torch.float32)
        return own, old

    def _gradients(self) -> dict[torch.Tensor, torch.Tensor]:
        found = {param: self._grads.get(name, param.grad) for name, param in self._params.items()}
        return {param: grad for param, grad in found.items() if grad is not None}


def _accumulate(params: Params, sum_of: Callable[[str, torch.Tensor], Sum]) -> None:
    """Add gradients up and drop them, some at a time: what is dropped is memory for the next ones' new sums.

    Args:
        sum_of: from a parameter's name and gradient, where its sum belongs.
    """
    waiting = [(name, param, grad) for name, param in params.items() if (grad := param.grad) is not None]
    while waiting:
        sums, olds, grads, size = list[torch.Tensor](), list[torch.Tensor | None](), list[torch.Tensor](), 0
        while waiting and size < _MOST_TOGETHER:
            name, param, grad = waiting.pop(0)
            own, old = sum_of(name, grad)
            sums.append(own)
            olds.append(old)
            grads.append(local(grad))
            size += own.numel()
            param.grad = None
        add_gradients(sums, olds, grads)


def decay_groups(params: list[torch.nn.Parameter], weight_decay: float) -> list[dict[str, object]]:
    """Matrices decay; vectors (norms, biases) do not."""
    groups: list[dict[str, object]] = [
        {"params": [p for p in params if p.dim() >= 2], "weight_decay": weight_decay},
        {"params": [p for p in params if p.dim() < 2], "weight_decay": 0.0},
    ]
    return [group for group in groups if group["params"]]


def _follow(optimizer: torch.optim.Optimizer, groups: list[dict[str, Any]]) -> None:
    """Give an optimizer's groups the settings of MasterAdamW's, which lie in the same order."""
    for own, group in zip(optimizer.param_groups, groups, strict=True):
        own.update({key: group[key] for key in ("lr", "betas", "eps", "weight_decay")})


def _factor(norm: torch.Tensor, max_norm: float) -> torch.Tensor:
    return (max_norm / (norm + 1e-6)).clamp(max=1.0)


def _check_tensor(
    state: Mapping[str, torch.Tensor], key: str, expected: torch.Tensor, dtype: torch.dtype | None = None
) -> None:
    if key not in state:
        raise CheckpointError(f"the optimizer state has no {key}{_hint(state)}")
    if state[key].shape != expected.shape:
        raise CheckpointError(
            f"the optimizer state's {key} has shape {tuple(state[key].shape)}, the model's {tuple(expected.shape)}; it "
            "belongs to another architecture"
        )
    check_fits(state[key], expected, f"the optimizer state's {key}")
    if dtype is not None and state[key].dtype != dtype:
        raise CheckpointError(f"the optimizer state's {key} is {state[key].dtype}, not {dtype}{_hint(state)}")


def _hint(state: Mapping[str, torch.Tensor]) -> str:
    """What to do about a checkpoint whose state is of the other kind."""
    kinds = sorted({key.split(".", 1)[0] for key in state if key.startswith(("master.", "remainder.", *_MOMENTS))})
    return f" (it has {', '.join(kinds) or 'none of it'}); go on with the state_dtype and master_weights that saved it"


def _master_of(param: torch.nn.Parameter) -> torch.nn.Parameter:
    if param.dtype == torch.float32:
        return param
    return torch.nn.Parameter(param.detach().float())
