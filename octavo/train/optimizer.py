"""MasterAdamW: torch's AdamW on fp32 masters, with parameters that are bf16 (or the masters themselves, in fp32).

Gradients are summed over micro-batches in fp32. After every update a bf16 parameter equals bf16(master), which is
what its FP8 codes are made from.
"""

from collections.abc import Mapping

import torch

from octavo.errors import CheckpointError
from octavo.models.decoder import Decoder
from octavo.nn import mark_weights_updated
from octavo.train.config import OptimizerSection

_MOMENTS = ("exp_avg", "exp_avg_sq")


class MasterAdamW:
    """AdamW with fp32 master weights, fp32 gradient accumulation and global-norm clipping.

    Args:
        model: its trainable parameters, fp32 or bf16. Matrices decay; vectors (norms, biases) do not.
        config: betas, eps, weight decay; the learning rate comes with each step.

    Exactness: with fp32 parameters, bit for bit torch.optim.AdamW over the same groups.
    """

    def __init__(self, model: torch.nn.Module, config: OptimizerSection) -> None:
        self._model = model
        self._params = {name: p for name, p in model.named_parameters() if p.requires_grad}
        self._masters = {name: _master_of(param) for name, param in self._params.items()}
        decay = [master for master in self._masters.values() if master.dim() >= 2]
        no_decay = [master for master in self._masters.values() if master.dim() < 2]
        groups = [
            {"params": decay, "weight_decay": config.weight_decay},
            {"params": no_decay, "weight_decay": 0.0},
        ]
        self._adamw = torch.optim.AdamW(
            [group for group in groups if group["params"]],
            lr=config.lr,
            betas=(config.beta1, config.beta2),
            eps=config.eps,
        )

    def accumulate_gradients(self) -> None:
        """Add the parameters' gradients to the masters' in fp32, and clear them: call after each backward."""
        for name, param in self._params.items():
            if param.grad is None:
                continue
            master = self._masters[name]
            if master is param:
                continue  # an fp32 parameter accumulates in place
            if master.grad is None:
                master.grad = param.grad.float()
            else:
                master.grad += param.grad
            param.grad = None

    def clip_gradients(self, max_norm: float) -> torch.Tensor:
        """Scale all gradients so that their global norm is at most max_norm.

        Args:
            max_norm: 0 measures without clipping.
        Returns:
            The norm before clipping, fp32 scalar on the parameters' device; not finite if any gradient is not,
            and then nothing may be updated.
        """
        grads = [master.grad for master in self._masters.values() if master.grad is not None]
        norm = torch.linalg.vector_norm(torch.stack([torch.linalg.vector_norm(grad) for grad in grads]))
        if max_norm > 0.0:
            torch._foreach_mul_(grads, (max_norm / (norm + 1e-6)).clamp(max=1.0))
        return norm

    def step(self, lr: float) -> None:
        """Update masters and parameters from the accumulated gradients, clear those, and commit the new weights."""
        for group in self._adamw.param_groups:
            group["lr"] = lr
        self._adamw.step()
        self._adamw.zero_grad(set_to_none=True)
        self._commit()

    def zero_grad(self) -> None:
        """Drop every gradient, the accumulated ones too."""
        for param in (*self._params.values(), *self._masters.values()):
            param.grad = None

    def state_dict(self) -> dict[str, torch.Tensor]:
        """Masters, moments and the step count as plain tensors: `master.<name>`, `exp_avg.<name>`, ..., `step`.

        Returns:
            fp32 tensors; they are the optimizer's own, not copies. Before the first step there are no moments.
        """
        state = {f"master.{name}": master.detach() for name, master in self._masters.items()}
        for name, master in self._masters.items():
            for key in _MOMENTS:
                if key in self._adamw.state[master]:
                    state[f"{key}.{name}"] = self._adamw.state[master][key]
            state["step"] = self._adamw.state[master].get("step", torch.tensor(0.0))
        return state

    def load_state_dict(self, state: Mapping[str, torch.Tensor]) -> None:
        """Take masters and moments from a state_dict, and round the parameters from the masters.

        Raises:
            CheckpointError: a tensor is missing or has another shape; nothing is changed then.
        """
        self._check_state(state)
        with torch.no_grad():
            for name, master in self._masters.items():
                master.copy_(state[f"master.{name}"])
                if state["step"] > 0:
                    self._adamw.state[master] = {
                        "step": state["step"].clone(),
                        **{key: state[f"{key}.{name}"].to(master.device, copy=True) for key in _MOMENTS},
                    }
        self._commit()

    def _check_state(self, state: Mapping[str, torch.Tensor]) -> None:
        kinds = ("master", *_MOMENTS) if "step" in state and state["step"] > 0 else ("master",)
        for name, master in self._masters.items():
            for key in (f"{kind}.{name}" for kind in kinds):
                if "step" not in state or key not in state:
                    raise CheckpointError(f"the optimizer state has no {key if 'step' in state else 'step'}")
                if state[key].shape != master.shape:
                    raise CheckpointError(
                        f"the optimizer state's {key} has shape {tuple(state[key].shape)}, the model's "
                        f"{tuple(master.shape)}; it belongs to another architecture"
                    )

    @torch.no_grad()
    def _commit(self) -> None:
        """Round the masters into the parameters and move the model to the next weight version."""
        for name, param in self._params.items():
            if self._masters[name] is not param:
                param.copy_(self._masters[name])
        if isinstance(self._model, Decoder):
            self._model.mark_weights_updated()
        else:
            mark_weights_updated(self._model)


def _master_of(param: torch.nn.Parameter) -> torch.nn.Parameter:
    if param.dtype == torch.float32:
        return param
    return torch.nn.Parameter(param.detach().float())
