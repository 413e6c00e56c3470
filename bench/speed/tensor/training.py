"""`training`: a training step of the layers of bench.speed.fsdp, on one GPU and cut among all of them."""

import dataclasses
import functools
import math

import torch

from bench.speed.scale.layers import UpdatedStep
from bench.speed.scale.models import materialize
from bench.speed.scale.session import Session
from bench.speed.stack import StackShape, llama_config
from bench.speed.step import LLAMA_3_8B, MAX_LOSS_DIFFERENCE
from bench.speed.tensor.models import GATHER, ONE_GPU, REDUCE, Layout, wanted
from bench.speed.variants import StackVariant, build_optimizer
from octavo.models import Decoder
from octavo.nn import PackedContext
from octavo.numerics import Numerics, get_recipe
from octavo.numerics.analysis import sqnr


def _by_tokens(layout: Layout) -> Layout:
    return dataclasses.replace(layout, sequence_parallel=True)


# (recipe, its layouts); "delayed" is the fastest of bench.speed.fsdp, and gather refuses it
CASES: tuple[tuple[str, tuple[Layout, ...]], ...] = (
    ("blockwise", (ONE_GPU, REDUCE, _by_tokens(REDUCE), GATHER, _by_tokens(GATHER))),
    ("delayed", (ONE_GPU, REDUCE, _by_tokens(REDUCE))),
)
_TOY = StackShape("a toy", 256, 512, 4, 2, 128, layers=2, batch=1, seq_len=64)
_VOCAB_SIZE = 512  # rows of the embedding, which every rank has whole: they shall cost nothing beside the layers
_STEPS_BEFORE = 2  # the check of gradients, without an update: delayed scaling knows its scales then
# Re-quantization spreads a difference over a whole model; a gradient that lacks a rank's part has 6 dB at most.
_MIN_GRADIENT_DB = 10.0


@dataclasses.dataclass(frozen=True)
class _Found:
    """Of one GPU: its median step, its first loss, and a gradient before any update."""

    case: str
    ms: float
    loss: float
    gradient: torch.Tensor


class _Step(UpdatedStep):
    """Decoder layers and torch's fused AdamW on bf16 parameters; the loss is the distance to random hidden states."""

    def __init__(self, model: Decoder, shape: StackShape) -> None:
        device = model.device
        super().__init__(model, build_optimizer(StackVariant("", "octavo"), list(model.parameters()), device.type))
        generator = torch.Generator(device).manual_seed(1)
        self.context = PackedContext.from_lengths([shape.seq_len] * shape.batch, model.numerics, device)
        self.tokens = torch.randint(_VOCAB_SIZE, (shape.num_tokens,), generator=generator, device=device)
        sizes = (shape.num_tokens, shape.hidden_size)
        self.target = torch.randn(sizes, generator=generator, device=device).to(torch.bfloat16)

    def backward(self) -> torch.Tensor:
        """The loss, with gradients made."""
        loss = (self.model(self.tokens, self.context) - self.target).float().square().mean()
        loss.backward()
        return loss.detach()

    def first(self) -> tuple[float, torch.Tensor]:
        """The first loss, and the gradient of the last layer's first norm, which all ranks have whole; no update.

        Returns:
            (mean square, [hidden_size] fp32).
        """
        groups = self.optimizer.param_groups
        rates = [group["lr"] for group in groups]
        for group in groups:
            group["lr"] = 0.0
        loss, *_ = [float(self()) for _ in range(_STEPS_BEFORE)]
        for group, rate in zip(groups, rates, strict=True):
            group["lr"] = rate
        self.backward()
        grad = self.model.layers[-1].input_layernorm.weight.grad  # type: ignore[union-attr]
        assert isinstance(grad, torch.Tensor), "it trains"
        found = grad.float().cpu()
        self.optimizer.zero_grad(set_to_none=True)
        return loss, found


def training(session: Session) -> None:
    """Each recipe under each of its layouts; all ranks see all tokens."""
    for recipe, layouts in CASES:
        found: list[_Found] = []
        for layout in wanted(session, layouts):
            run = functools.partial(_measure, session, recipe, layout, found)
            session.attempt(f"training {recipe}, {layout.label}", run)


def _measure(session: Session, recipe: str, layout: Layout, found: list[_Found]) -> None:
    shape = _TOY if session.is_toy else LLAMA_3_8B
    step = _Step(_build(session, shape, recipe, layout), shape)
    case = f"training step of {shape} in all, {recipe}: {layout.case(session)}"
    loss, gradient = step.first()
    base = found[0] if found else None
    _check(session, case, loss, gradient, base)
    steps = session.time_step(step)
    ms = session.largest(steps.ms)
    session.add_step(case, steps, *((base.case, base.ms) if base else (None, None)))
    rate = shape.num_tokens / ms * 1e3
    beside = (base.case, shape.num_tokens / base.ms * 1e3) if base else (None, None)
    session.record.add(case, "throughput", "tokens/s", rate, peer=beside[0], peer_value=beside[1])
    if layout.mode is None:
        found.append(_Found(case, ms, loss, gradient))
    if base is None:
        return
    session.record.add_ratio(case, "tokens/s over one GPU", base.ms / ms, base.case)
    session.say(f"{'':<110} {rate:,.0f} tokens/s, {base.ms / ms:.3f} of one GPU")


def _build(session: Session, shape: StackShape, recipe: str, layout: Layout) -> Decoder:
    config = llama_config(shape, vocab_size=_VOCAB_SIZE, tie_word_embeddings=True)  # no head: fsdp has none
    model = Decoder(config, device="meta")
    fields = {"update_every": "step"} if recipe == "delayed" else {}  # as bench.speed.fsdp has it
    model.set_numerics(Numerics(get_recipe(recipe, **fields)))
    materialize(model, session.device)
    layout.cut(session, model)
    return model


def _check(session: Session, case: str, loss: float, gradient: torch.Tensor, base: _Found | None) -> None:
    """The first loss is finite and near one GPU's, and so is a gradient that went through the last layer."""

    def near() -> None:
        assert math.isfinite(loss) and bool(gradient.isfinite().all()), f"loss {loss}, or a gradient, is not finite"
        if base is not None:
            off, db = abs(loss / base.loss - 1), sqnr(base.gradient, gradient)
            assert off <= MAX_LOSS_DIFFERENCE, f"first loss {loss:.6g}, one GPU's is {base.loss:.6g}"
            assert db >= _MIN_GRADIENT_DB, f"gradient: SQNR {db:.1f} dB, at least {_MIN_GRADIENT_DB} expected"

    session.check(near)
    session.record.add(case, "first loss", "mean square", loss, None, None, *_beside(base))
    if base is None:
        session.say(f"{case}: first loss {loss:.6g}")
        return
    db = min(sqnr(base.gradient, gradient), 999.0)  # equal bits: inf is no JSON
    session.record.add(case, "a norm's gradient against one GPU's", "dB", db)
    session.say(f"{case}: first loss {loss:.6g}, one GPU's {base.loss:.6g}; a norm's gradient has {db:.1f} dB")


def _beside(base: _Found | None) -> tuple[str | None, float | None]:
    return (base.case, base.loss) if base else (None, None)
