"""The handle of a run: what happens around every optimizer step, and which level follows.

The optimizer's own step hooks do the work, so a loop written for Apex needs no more than scale_loss.
"""

import base64
import contextlib
import dataclasses
import logging
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Literal

import safetensors.torch
import torch
from torch import nn

from octavo.amp.fallback import Fallback, Watch
from octavo.amp.grad_scaler import GradScaler
from octavo.amp.levels import Level, Levels, check_level
from octavo.distributed.shards import local
from octavo.errors import ConfigError, NonFiniteError
from octavo.models import Decoder
from octavo.nn import ConversionReport, fp8_state_dict, load_fp8_state_dict, mark_weights_updated
from octavo.numerics.infinity import take_infinity

logger = logging.getLogger("octavo.amp")

Schedule = Callable[[int], str] | Sequence[tuple[int, str]]
_MAX_NAMED = 3


@dataclasses.dataclass(frozen=True)
class Event:
    """Something a run's log should hold.

    Attributes:
        step: optimizer steps attempted until then.
        kind: "switch" (level is in force from here on) or "skip" (the update was left out).
        level: in force afterwards.
        reason: why, in words.
    """

    step: int
    kind: Literal["switch", "skip"]
    level: Level
    reason: str

    def __str__(self) -> str:
        what = f"switched to {self.level}" if self.kind == "switch" else "update skipped"
        return f"step {self.step}: {what}: {self.reason}"


class Handle:
    """Chooses a model's level step by step, scales gradients, and leaves out updates that are not finite.

    Args:
        levels: the model's two levels.
        model: for names of parameters, and to commit new weights.
        opt_level: the level where the schedule says nothing.
        scaler: gradient scaling, or None.
        fallback: rules by which O1 is left for a while, or None.
        schedule: step -> level, or (first step, level) pairs; steps count from 0.
        max_skips: this many skipped updates in a row are an error.
        on_event: called with every event, besides the logger "octavo.amp".

    Attributes:
        num_steps: steps attempted.
        num_skipped: of these, left out.
        events: what happened, oldest first.
    """

    def __init__(
        self,
        levels: Levels,
        model: nn.Module,
        *,
        opt_level: str = "O1",
        scaler: GradScaler | None = None,
        fallback: Fallback | None = None,
        schedule: Schedule | None = None,
        max_skips: int = 50,
        on_event: Callable[[Event], None] | None = None,
    ) -> None:
        self._levels, self._model = levels, model
        self._base = check_level(opt_level)
        if fallback is not None or schedule is not None:
            levels.check_o2()  # now, not in the step that first leaves O1
        self.scaler = scaler
        self._watch = Watch(fallback) if fallback is not None else None
        self._schedule = _as_function(schedule)
        self._max_skips, self._on_event = max_skips, on_event
        self.num_steps = self.num_skipped = self._skips_in_a_row = 0
        self.events: list[Event] = []
        self._optimizer: torch.optim.Optimizer | None = None
        self._losses: list[torch.Tensor] = []
        self._is_unscaled = False
        self._seen = [math.nan, 0.0]  # loss and overflow share of the step under way
        self._skipped = ""  # why its update is left out
        self._saw_infinity = False
        levels.set(self._scheduled())

    @property
    def level(self) -> Level:
        """The level in force."""
        return self._levels.level

    @property
    def report(self) -> ConversionReport | None:
        """What became of each linear at the start."""
        return self._levels.report

    def switch(self, level: str) -> None:
        """Put a level in force now, and for as long as neither the schedule nor a fallback says otherwise."""
        asked = check_level(level)
        self._switch(asked, "asked for")
        self._base = asked

    # Around an optimizer's step

    def attach(self, optimizer: torch.optim.Optimizer) -> None:
        """Do all of this in an optimizer's own step()."""
        self._optimizer = optimizer
        for device in {param.device for param in master_params(optimizer)}:
            take_infinity(device)  # what was quantized before is no matter of this run's checks
        optimizer.register_step_pre_hook(self._before_step)
        optimizer.register_step_post_hook(self._after_step)

    @contextlib.contextmanager
    def scale_loss(self, loss: torch.Tensor, *, delay_unscale: bool = False) -> Iterator[torch.Tensor]:
        """The loss to call backward() on; gradients are unscaled when the block ends, by an error too.

        A micro-batch whose block ends by an error has no say in fallback's rules: a loop may catch it and go on.

        Args:
            loss: of this micro-batch.
            delay_unscale: leave them scaled until the next block or step: saves work for all but the last micro-batch.
        """
        self._losses.append(seen := loss.detach())
        if self.scaler is not None and self._is_unscaled:
            self.scaler.rescale_(self._gradients())
            self._is_unscaled = False
        try:
            yield loss if self.scaler is None else self.scaler.scale_loss(loss)
        except BaseException:
            self._losses = [other for other in self._losses if other is not seen]
            raise
        finally:
            if not delay_unscale:
                self.unscale_gradients()

    def unscale_gradients(self) -> None:
        """Make the optimizer's gradients the loss's own; done once a step, before clipping at the latest."""
        if self.scaler is not None and not self._is_unscaled:
            self.scaler.unscale_(self._gradients())
        self._is_unscaled = True

    def step(self, loss: torch.Tensor | float | None = None) -> bool:
        """Step the optimizer and choose the next level.

        Args:
            loss: the step's loss, for the fallback rules; None takes the mean of what scale_loss saw.
        Returns:
            Whether the weights were updated.
        Raises:
            NonFiniteError: too many updates in a row had to be skipped.
        """
        if self._optimizer is None:
            raise ConfigError("this handle has no optimizer; call update(loss) after your own, or attach(optimizer)")
        if loss is not None:
            self._losses = [torch.as_tensor(loss).detach()]
        before = self.num_skipped
        self._optimizer.step()
        return self.num_skipped == before

    def update(
        self, loss: torch.Tensor | float, *, gradients_are_finite: bool = True, overflow_share: float | None = None
    ) -> None:
        """Choose the next level after a step that the caller made; step() and optimizer.step() do this themselves.

        Args:
            overflow_share: see Fallback; None measures it, but after an optimizer's step has taken over what was staged
                (delayed scaling with update_every="step") nothing is left to measure: the share is 0.
        """
        if overflow_share is None:
            share = self._levels.overflow_share()
            overflow_share = 0.0 if share is None else float(share)
        self._seen = [float(torch.as_tensor(loss).detach()), overflow_share]
        self._skipped = "" if gradients_are_finite else "the loop reported gradients that are not finite"
        self._end_step()

    def _before_step(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        """Unscale, and drop gradients that are not finite."""
        if any(callable(value) for value in (*args[1:], *kwargs.values())):
            raise ConfigError("octavo.amp takes optimizers whose step() needs no closure; compute the loss before it")
        self.unscale_gradients()
        norms = self._norms()
        device = norms.device
        losses = [loss.to(device, torch.float32) for loss in self._losses]
        share = self._levels.overflow_share() if self._watch is not None else None
        infinite, norm, *self._seen = _read(
            take_infinity(device),
            torch.linalg.vector_norm(norms),
            torch.stack(losses).mean() if losses else torch.full((), math.nan),
            torch.zeros(()) if share is None else share,
            device=device,
        )
        self._saw_infinity = infinite > 0.0  # a mean over processes
        self._skipped = "" if math.isfinite(norm) and not self._saw_infinity else self._name_bad(norms)
        if self._skipped:
            for param in master_params(optimizer):
                param.grad = None  # an optimizer leaves parameters without gradients alone

    def _after_step(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        # what an infinite operand was is only seen again where its codes are made again
        if not self._skipped or self._saw_infinity:
            commit = Decoder.mark_weights_updated if isinstance(self._model, Decoder) else mark_weights_updated
            commit(self._model)  # type: ignore[arg-type]
        self._end_step()

    def _gradients(self) -> list[torch.Tensor]:
        assert self._optimizer is not None, "only an attached handle looks at gradients"
        return [_elements(param.grad) for param in master_params(self._optimizer) if param.grad is not None]

    def _norms(self) -> torch.Tensor:
        """[params] fp32 norms of what this rank has of each gradient, 0 where there is none."""
        assert self._optimizer is not None, "only an attached handle looks at gradients"
        found = [local(grad) for grad in self._gradients()]
        norms = iter(torch._foreach_norm(found, 2, torch.float32) if found else ())
        device = found[0].device if found else torch.device("cpu")
        zero = torch.zeros((), device=device)
        every = [zero if p.grad is None else next(norms).to(device) for p in master_params(self._optimizer)]
        return torch.stack(every)

    def _name_bad(self, norms: torch.Tensor) -> str:
        """Which parameters' gradients are not finite, on whichever rank: more reads of a step that is lost anyway."""
        assert self._optimizer is not None, "only an attached handle looks at gradients"
        names = {param: name for name, param in self._model.named_parameters()}
        params = list(master_params(self._optimizer))
        is_bad = (~_mean_of_ranks(norms).isfinite()).tolist()
        bad = [names.get(p, f"a parameter of shape {tuple(p.shape)}") for p, b in zip(params, is_bad, strict=True) if b]
        if not bad and self._saw_infinity:
            return "a weight, input or gradient of a linear in FP8 was infinite, which the gradients do not show"
        if not bad:
            return "the gradients' norm is not finite"
        more = f" and {len(bad) - _MAX_NAMED} more" if len(bad) > _MAX_NAMED else ""
        return f"gradients that are not finite, of {', '.join(bad[:_MAX_NAMED])}{more}"

    # Between steps

    def _end_step(self) -> None:
        self.num_steps += 1
        self._losses, self._is_unscaled = [], False
        reason = self._skipped
        if self.scaler is not None:
            before = self.scaler.scale
            self.scaler.update(overflowed=bool(reason))
            reason += f"; loss scale {before:g} -> {self.scaler.scale:g}" if reason else ""
        if reason:
            self._skip(reason)
        else:
            self._skips_in_a_row = 0
        self._choose_level()

    def _skip(self, reason: str) -> None:
        self.num_skipped += 1
        self._skips_in_a_row += 1
        self._note("skip", reason)
        if self._skips_in_a_row >= self._max_skips:
            raise NonFiniteError(
                f"{self._skips_in_a_row} updates in a row were skipped, the last at step {self.num_steps}: {reason}; "
                "no loss scale helps here; lower the learning rate, or look for the bad layer with `octavo doctor`"
            )

    def _choose_level(self) -> None:
        """Fallback's rules first, then the schedule, then opt_level."""
        base, watch = self._scheduled(), self._watch
        reason = f"the schedule has {base} from step {self.num_steps}"
        if watch is None:
            self._switch(base, reason)
        elif watch.remaining:
            watch.remember(self._seen[0])
            watch.remaining -= 1
            self._switch("O2" if watch.remaining else base, f"back after {watch.rule.steps} steps in O2")
        elif self.level == "O2":
            watch.remember(self._seen[0])
            self._switch(base, reason)
        elif found := watch.observe(self._seen[0], not self._skipped, self._seen[1]):
            watch.start()
            self._switch("O2", found)
        else:
            self._switch(base, reason)

    def _switch(self, level: Level, reason: str) -> None:
        if level != self.level:
            self._levels.set(level)
            self._note("switch", reason)

    def _note(self, kind: Literal["switch", "skip"], reason: str) -> None:
        event = Event(self.num_steps, kind, self.level, reason)
        self.events.append(event)
        logger.warning("%s", event) if kind == "skip" else logger.info("%s", event)
        if self._on_event is not None:
            self._on_event(event)

    def _scheduled(self) -> Level:
        level = self._schedule(self.num_steps)
        return self._base if level is None else check_level(level)

    def state_dict(self) -> dict[str, Any]:
        """What a checkpoint needs to go on at the same level, as plain values.

        Delayed scaling's state is in it: the text under "fp8_state" is a safetensors file in base64.
        """
        fp8_state = fp8_state_dict(self._model)
        return {
            "level": self.level,
            "opt_level": self._base,
            "num_steps": self.num_steps,
            "num_skipped": self.num_skipped,
            "scaler": None if self.scaler is None else self.scaler.state_dict(),
            "fallback": None if self._watch is None else self._watch.state_dict(),
            "fp8_state": base64.b64encode(safetensors.torch.save(fp8_state)).decode() if fp8_state else None,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from state_dict's values; an older one's FP8 state comes with the model's own state dict.

        Raises:
            CheckpointError: the FP8 state is of another model.
            ConfigError: the run had a scaler or a fallback and this one has none, or the other way round.
        """
        for key, mine in (("scaler", self.scaler), ("fallback", self._watch)):
            if (state[key] is None) != (mine is None):
                has = "has none" if state[key] is None else "has one"
                raise ConfigError(f"the saved state {has} of amp's {key}, this run does not agree; set it as it was")
            if mine is not None:
                mine.load_state_dict(state[key])
        self.num_steps, self.num_skipped = int(state["num_steps"]), int(state["num_skipped"])
        if state.get("fp8_state"):
            load_fp8_state_dict(self._model, safetensors.torch.load(base64.b64decode(state["fp8_state"])))
        self._base = check_level(state["opt_level"])
        self._levels.set(check_level(state["level"]))


def master_params(optimizer: torch.optim.Optimizer) -> Iterator[torch.nn.Parameter]:
    """Every parameter of an optimizer, as Apex named them: for clipping."""
    return (param for group in optimizer.param_groups for param in group["params"])


def _elements(grad: torch.Tensor) -> torch.Tensor:
    """What an embedding's sparse gradient holds, sharing memory; another gradient itself."""
    return grad._values() if grad.is_sparse else grad


def _as_function(schedule: Schedule | None) -> Callable[[int], str | None]:
    if schedule is None:
        return lambda step: None
    if callable(schedule):
        return schedule
    pairs = [(first, check_level(level)) for first, level in schedule]
    if [first for first, _ in pairs] != sorted({first for first, _ in pairs}):
        raise ConfigError(f"a schedule's (first step, level) pairs must have growing steps, got {pairs}")
    return lambda step: next((level for first, level in reversed(pairs) if first <= step), None)


def _read(*numbers: torch.Tensor, device: torch.device) -> list[float]:
    """The step's one read of the device; every process of a distributed run gets the same numbers, their mean."""
    return _mean_of_ranks(torch.stack([number.to(device, torch.float32) for number in numbers])).tolist()


def _mean_of_ranks(packed: torch.Tensor) -> torch.Tensor:
    if torch.distributed.is_available() and torch.distributed.is_initialized():
        torch.distributed.all_reduce(packed)
        packed /= torch.distributed.get_world_size()
    return packed
