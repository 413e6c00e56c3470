"""`whole`, `whole_2k`: all of Qwen3-8B under FSDP2, HSDP and DDP, against one GPU.

In bf16 all 36 layers and their optimizer leave one GPU no room. So it runs half of them, with the head, and a quarter:
what a layer takes is their difference, and as many more as are missing make one GPU's time for the whole.
"""

import dataclasses
import functools
from typing import Any

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from bench.speed.scale.layers import Stepper, time_alone
from bench.speed.scale.models import build, make_tokens, shape
from bench.speed.scale.session import Session, Steps
from octavo.distributed.mesh import Mesh
from octavo.models import ModelConfig
from octavo.numerics import get_recipe
from octavo.testing.assertions import assert_bitwise
from octavo.train.data import Batch
from octavo.train.step import summed_loss

BF16, BEST = "bf16", "delayed"  # the fastest recipe of bench/records/fsdp.json
RECIPES = {BF16: get_recipe(BF16), BEST: get_recipe(BEST, update_every="step")}
FSDP2, HSDP, DDP, ONE = "FSDP2", "HSDP", "DDP", "one GPU alone"
LAYERS, TOY_LAYERS = (36, 18, 9), (4, 2, 1)
TOKENS = {"whole": 16_384, "whole_2k": 2_048}  # a GPU, in sequences of at most 8192
MAX_SEQ_LEN, TOY_TOKENS = 8_192, 64
RATE, EFFICIENCY, SPEEDUP = "throughput a GPU", "efficiency against one GPU", "speed over FSDP2 in bf16"


class _Loss(nn.Module):
    """What DDP wraps: the sum of the losses of a Decoder."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, batch: Batch) -> torch.Tensor:
        return summed_loss(self.model, batch)  # type: ignore[arg-type]


class _ReplicatedStepper(Stepper):
    """Under DDP."""

    def backward(self) -> torch.Tensor:
        if not hasattr(self, "replicated"):
            self.replicated = DistributedDataParallel(
                _Loss(self.model), gradient_as_bucket_view=True, broadcast_buffers=False
            )
        loss: torch.Tensor = self.replicated(self.batch) / self.batch.num_targets
        loss.backward()
        return loss.detach()


@dataclasses.dataclass
class _Run:
    """One number of tokens: what was found so far, by recipe.

    Attributes:
        num_tokens: of a GPU.
        one_ms: a step of the whole on one GPU, by its two parts.
        base_ms: FSDP2 in bf16.
    """

    session: Session
    num_tokens: int
    one_ms: dict[str, float] = dataclasses.field(default_factory=dict)
    base_ms: float | None = None

    def __post_init__(self) -> None:
        self.num_tokens = TOY_TOKENS if self.session.is_toy else self.num_tokens
        self.layers = TOY_LAYERS if self.session.is_toy else LAYERS

    @functools.cached_property
    def replicas(self) -> Mesh:
        """Two copies, sharded over half of the ranks each."""
        return Mesh.of_process_group(2, self.session.mesh.world_size // 2, self.session.device)

    def config(self, num_layers: int) -> ModelConfig:
        return dataclasses.replace(shape(self.session, num_layers), num_layers=num_layers)

    def batch(self) -> Batch:
        length = min(self.num_tokens, MAX_SEQ_LEN)
        return make_tokens(self.config(1), self.num_tokens // length, length, seed=self.session.mesh.rank)

    def label(self, num_layers: int, recipe: str, layout: str) -> str:
        return case_label(num_layers, self.num_tokens, recipe, layout, self.session.mesh.world_size)


def case_label(num_layers: int, num_tokens: int, recipe: str, layout: str, num_gpus: int) -> str:
    """A case's name in the record."""
    where = layout if layout == ONE else f"{num_gpus} GPUs, {layout}"
    return f"Qwen3-8B ({num_layers} layers), {num_tokens} tokens a GPU, {recipe}: {where}"


def layouts(num_gpus: int) -> list[str]:
    """Those that so many GPUs have; two replicas of one GPU each are DDP."""
    return [FSDP2, *([f"{HSDP} 2 x {num_gpus // 2}"] if num_gpus >= 4 else []), DDP]


def whole(session: Session) -> None:
    """16k tokens a GPU."""
    _measure(_Run(session, TOKENS["whole"]))


def whole_2k(session: Session) -> None:
    """2k tokens a GPU."""
    _measure(_Run(session, TOKENS["whole_2k"]))


def _measure(run: _Run) -> None:
    for recipe in RECIPES:
        run.session.attempt(f"{recipe}, {ONE}", functools.partial(_measure_one, run, recipe))
        for layout in layouts(run.session.mesh.world_size):
            run.session.attempt(f"{recipe}, {layout}", functools.partial(_measure_layout, run, recipe, layout))


def _measure_one(run: _Run, recipe: str) -> None:
    whole_layers, *parts = run.layers
    ms = []
    for num_layers in parts:
        case = run.label(num_layers, recipe, ONE)
        found = time_alone(run.session, RECIPES[recipe], run.config(num_layers), run.batch())
        assert found is not None, f"{run.num_tokens} tokens fit a GPU beside {num_layers} layers"
        run.session.add_step(case, found[0])
        ms.append(run.session.largest(found[0].ms))
        run.session.record.add(case, RATE, "tokens/s", run.num_tokens / ms[-1] * 1e3)
        del found
        run.session.free()
    a_layer = (ms[0] - ms[1]) / (parts[0] - parts[1])
    run.one_ms[recipe] = ms[0] + (whole_layers - parts[0]) * a_layer
    run.session.record.add(run.label(whole_layers, recipe, ONE), "step time by its parts", "ms", run.one_ms[recipe])


def _measure_layout(run: _Run, recipe: str, layout: str) -> None:
    session, config = run.session, run.config(run.layers[0])
    case = run.label(run.layers[0], recipe, layout)
    has_room = True
    if layout == DDP:  # first without the others, who would wait for a rank that has no room
        found = time_alone(session, RECIPES[recipe], config, run.batch())
        has_room = found is not None
        if found is not None:
            session.add_step(run.label(run.layers[0], recipe, ONE), found[0])
        del found
        session.free()
    steps = _time_layout(run, recipe, layout, config) if has_room else None
    if session.mesh.any(steps is None):
        session.record.add(case, "out of memory", "", 1.0)
        session.say(f"{case}: out of memory")
        return
    assert steps is not None, "no rank is without"
    ms = session.largest(steps.ms)
    if recipe == BF16 and layout == FSDP2:
        run.base_ms = ms
    session.add_step(case, steps)
    session.record.add(case, RATE, "tokens/s", run.num_tokens / ms * 1e3)
    one = run.one_ms.get(recipe)
    for metric, peer, peer_ms in (
        (EFFICIENCY, run.label(run.layers[0], recipe, ONE), one),
        (SPEEDUP, run.label(run.layers[0], BF16, FSDP2), run.base_ms),
    ):
        if peer_ms is not None:
            session.record.add_ratio(case, metric, peer_ms / ms, peer)
            session.say(f"{'':<110} {peer_ms / ms:9.3f} {metric}")


def _time_layout(run: _Run, recipe: str, layout: str, config: ModelConfig) -> Steps | None:
    """Steps, once the first loss on each rank is that of one GPU; None where memory does not suffice."""
    session, batch = run.session, run.batch()
    sharding: dict[str, Any] = {"reduction": "mean", "reduce_dtype": None}
    stepper_of = Stepper
    if layout == DDP:
        sharding, stepper_of = {}, _ReplicatedStepper
    elif layout.startswith(HSDP):
        session = dataclasses.replace(session, mesh=run.replicas)
    try:
        model, _ = build(session, config, RECIPES[recipe])
        wanted = (summed_loss(model, batch.to(model.device)) / batch.num_targets).detach()
        del model
        session.free()
        model, _ = build(session, config, RECIPES[recipe], **sharding)
        stepper = stepper_of(model, batch)
        first, _ = stepper.first_gradient()
        session.check(lambda: assert_bitwise(first, wanted, f"{layout}: this rank's first loss"))
        return session.time_step(stepper)
    except torch.OutOfMemoryError:
        return None
