"""`ddp`: DDP of six Llama-3-8B layers with gradients in bf16 against octavo.distributed.fp8_hook."""

import dataclasses
from collections.abc import Callable

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import octavo
from bench.measure import training_step
from bench.speed.scale.session import Session
from bench.speed.stack import PlainLayer, StackShape, draw_input, draw_weights, torch_gated_unit, torch_norm
from bench.speed.step import LLAMA_3_8B, MAX_LOSS_DIFFERENCE, TOY
from bench.speed.variants import attention_backend
from octavo.distributed.fp8_hook import FP8HookState, fp8_hook
from octavo.numerics import Recipe, get_recipe
from octavo.testing.assertions import assert_bitwise

RECIPES = {"blockwise": get_recipe("blockwise"), "delayed": get_recipe("delayed", update_every="step")}
BF16, FP8 = "bf16 gradients", "FP8 hook"
_MAX_COMPILED = 64  # layers of two models, which one code object serves


def ddp(session: Session) -> None:
    """Both ways in turn, a recipe at a time."""
    shape = TOY if session.is_toy else LLAMA_3_8B
    for name, recipe in RECIPES.items():
        session.attempt(f"ddp {name}", lambda name=name, recipe=recipe: _compare(session, shape, name, recipe))  # type: ignore[misc]
        if session.device.type == "cuda":
            torch._dynamo.reset()


def _compare(session: Session, shape: StackShape, name: str, recipe: Recipe) -> None:
    torch._dynamo.config.recompile_limit = _MAX_COMPILED
    steps = {kind: _build(session, shape, recipe, kind) for kind in (BF16, FP8)}
    found = session.time_steps(steps)
    label = f"DDP on {session.mesh.world_size} GPUs, {shape} a GPU, {name}"
    base, hooked = found[BF16], found[FP8]
    first, wanted = (torch.tensor(steps.losses[0]) for steps in (hooked, base))
    session.check(lambda: assert_bitwise(first, wanted, f"{label}: first loss"))
    last = [session.mean(steps.losses[-1]) for steps in (hooked, base)]
    if not abs(last[0] - last[1]) <= MAX_LOSS_DIFFERENCE * last[1]:
        session.complain(f"{label}: last loss {last[0]:.6g} with the hook, {last[1]:.6g} without")
    # both models are in memory, so that peaks are no variant's own
    for kind, one in found.items():
        peer = (f"{label}: {BF16}", base.ms) if kind == FP8 else (None, None)
        session.add_step(f"{label}: {kind}", dataclasses.replace(one, peak_bytes=0), *peer)
    session.record.add_ratio(f"{label}: {FP8}", "speedup", base.ms / hooked.ms, f"{label}: {BF16}")


def _build(session: Session, shape: StackShape, recipe: Recipe, kind: str) -> Callable[[], torch.Tensor]:
    device = str(session.device)
    with torch.device(session.device):
        layers = [PlainLayer(shape, torch_norm, torch_gated_unit).to(torch.bfloat16) for _ in range(shape.layers)]
    for seed, layer in enumerate(layers):
        with torch.no_grad():
            for name, weight in draw_weights(shape, seed, device).items():
                layer.get_submodule(name).weight.copy_(weight)  # type: ignore[operator]
    model = nn.Sequential(*layers)
    octavo.convert(model, recipe)
    on_gpu = session.device.type == "cuda"
    for layer in layers if on_gpu else []:
        layer.compile()
    wrapped = DistributedDataParallel(model, gradient_as_bucket_view=True)
    if kind == FP8:
        state = FP8HookState(wrapped) if on_gpu else FP8HookState(wrapped, min_bytes=0)
        wrapped.register_comm_hook(state, fp8_hook)
    optimizer = torch.optim.AdamW(wrapped.parameters(), lr=1e-5, fused=on_gpu)
    x = draw_input(shape, device) * (1 + session.mesh.rank)  # other data on each rank

    def forward(hidden: torch.Tensor) -> torch.Tensor:
        with attention_backend(session.device.type):
            return wrapped(hidden)  # type: ignore[no-any-return]

    return training_step(forward, optimizer, x)
