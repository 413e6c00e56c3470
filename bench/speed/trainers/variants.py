"""What all frameworks share: the model, its tokens, and variants that are checked, timed and told alike."""

import contextlib
import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import torch

from bench.record import Timing
from bench.report import STEP_TIME
from bench.speed.scale.session import GIB, Session
from bench.speed.variants import attention_backend
from octavo.numerics.recipe import Recipe, get_recipe

SIZES = {
    "vocab_size": 32_000,
    "hidden_size": 4096,
    "intermediate_size": 14_336,
    "num_hidden_layers": 8,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "max_position_embeddings": 8192,
}
TOY = SIZES | {"vocab_size": 512, "hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 2}
TOY |= {"num_attention_heads": 4, "num_key_value_heads": 2}
MODEL = "8 layers at Llama-3-8B's width, vocabulary 32,000, random weights in bf16"
WARM_UP_STEPS, TIMED_STEPS = 4, 10
_MAX_LOSS_DIFFERENCE = 0.01  # of the first loss, against the first variant's
Step = Callable[[], torch.Tensor]  # one training step, which returns its loss


@dataclasses.dataclass
class TrainersSession(Session):
    """A Session, the recipes beside bf16, and whether what can be compiled is."""

    recipes: Sequence[str] = ("delayed", "blockwise")
    compiled: bool = True

    def describe(self, sentence: str) -> None:
        """Add a part's settings to the record's sentence, once."""
        if not self.compiled:
            sentence = f"{sentence} Cases in eager mode: nothing of the model is compiled."
        if sentence not in self.record.what:
            self.record.what += f" {sentence}"

    @property
    def kind(self) -> str:
        """Of the device: "cuda" or "cpu"."""
        return self.device.type

    def tokens(self, batch: int, seq_len: int, vocab_size: int, seed: int = 1) -> torch.Tensor:
        """Random ids [batch, seq_len] int64 on the device; toys have 64 a sequence."""
        shape = (batch, 64 if self.is_toy else seq_len)
        return torch.randint(vocab_size, shape, generator=torch.Generator().manual_seed(seed)).to(self.device)


class Variants:
    """A part's variants, one after the other; the first one's first loss is what the others' are compared with.

    Args:
        session: the run's.
        part: with which the cases' names begin.
    """

    def __init__(self, session: TrainersSession, part: str) -> None:
        self.session, self._part = session, part
        self._timings: dict[str, tuple[Timing, float]] = {}  # of those that ran: milliseconds, GiB
        self._first_loss: float | None = None

    def run(
        self,
        name: str,
        build: Callable[[contextlib.ExitStack], Step],
        peer: str = "bf16",
        metric: str = "speed over bf16",
    ) -> None:
        """Build a variant, check its first loss, time its steps, add its rows; a failure leaves the others.

        Args:
            build: of the variant's step; what gives its memory back goes on the stack.
            peer: the variant it stands beside, if that ran.
            metric: how many times as fast it is.
        """

        def attempt() -> None:
            torch.compiler.reset()
            with contextlib.ExitStack() as stack:
                step = build(stack)
                loss = self.session.mean(float(step()))
                self.check(loss)
                found = self.session.time_step(step, WARM_UP_STEPS - 1, TIMED_STEPS)
                self.add(name, found.timing, found.peak_bytes, loss, peer, metric)

        self.session.attempt(self.case(name), attempt)

    def case(self, name: str) -> str:
        """A variant's, in the record."""
        return f"{self._part}, {name}{'' if self.session.compiled else ', eager'}"

    def check(self, loss: float) -> None:
        """Compare a first loss, in nats, with the first variant's.

        Raises:
            ArithmeticError: it is another one.
        """
        base = self._first_loss = self._first_loss or loss
        if not abs(loss - base) <= _MAX_LOSS_DIFFERENCE * base:
            raise ArithmeticError(f"first loss {loss}, of the first variant {base}: not within 1 %")

    def add(self, name: str, timing: Timing, peak_bytes: float, loss: float, peer: str, metric: str) -> None:
        """Rows and a line of a variant: its step in milliseconds, its peak memory, its first loss; a collective."""
        session, record, case = self.session, self.session.record, self.case(name)
        peak = session.largest(peak_bytes) / GIB
        base, base_peak = self._timings.get(peer, (None, 0.0))
        beside, base_ms = (None, None) if base is None else (self.case(peer), base.median_us)
        self._timings[name] = timing, peak
        record.rows = [row for row in record.rows if row["case"] != case]  # a former run's
        record.add_times(case, STEP_TIME, "ms", timing, peer=beside, peer_value=base_ms)
        record.add(case, "first loss", "nats", loss)
        record.add(case, "peak memory", "GiB", peak)
        said = f"{case}: {timing.median_us:.1f} ms ({timing.p20_us:.1f} to {timing.p80_us:.1f}), {peak:.2f} GiB"
        if base is not None:
            record.add_ratio(case, metric, base.median_us / timing.median_us, beside)
            said += f", {metric} {base.median_us / timing.median_us:.3f}"
        if base_peak:
            record.add_ratio(case, "peak memory over the peer's", peak / base_peak, beside)
            said += f", {peak / base_peak:.3f} of its memory"
        session.say(f"{said}; first loss {loss:.4f}")


def make_llama(session: TrainersSession, **changes: int) -> Any:
    """A LlamaForCausalLM in bf16 on the device, the same in every variant, with sizes of its own changed."""
    from transformers import AutoModelForCausalLM, LlamaConfig

    sizes = TOY if session.is_toy else SIZES | changes
    config = LlamaConfig(**sizes, attn_implementation="sdpa", use_cache=False)
    torch.manual_seed(0)
    with torch.device(session.device):
        return AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)


def compile_layers(session: TrainersSession, model: Any) -> None:
    """Compile each decoder layer in place, where the session compiles; a CPU's toys never are."""
    from transformers.models.llama.modeling_llama import LlamaDecoderLayer

    if session.compiled and session.kind == "cuda":
        for module in model.modules():
            if isinstance(module, LlamaDecoderLayer):
                module.compile()


def make_optimizer(model: Any) -> torch.optim.Optimizer:
    """torch's fused AdamW over what is trained."""
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    return torch.optim.AdamW(trained, lr=1e-5, fused=True)


def training_step(
    session: TrainersSession, model: Any, ids: torch.Tensor, backward: Callable[[Any], object], update: Step | Any
) -> Step:
    """A step of a causal language model of transformers, with the session's attention.

    Args:
        ids: [B, S], inputs and labels.
        backward: of the loss.
        update: steps the optimizer and clears the gradients.
    """

    def step() -> torch.Tensor:
        with attention_backend(session.kind):
            loss: torch.Tensor = model(input_ids=ids, labels=ids).loss
            backward(loss)
        update()
        return loss.detach()

    return step


def optimizer_update(optimizer: Any) -> Callable[[], None]:
    """step and zero_grad."""

    def update() -> None:
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    return update


def recipe_of_loops(name: str) -> Recipe:
    """As octavo's own loops have it: delayed scales are made once a step."""
    return get_recipe(name, update_every="step") if name == "delayed" else get_recipe(name)
