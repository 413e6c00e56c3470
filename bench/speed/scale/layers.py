"""`layers18`: sharded training against one GPU alone; `layers36`: what does not fit one, beside what --plan says."""

import math
import time
from abc import ABC, abstractmethod

import torch

from bench.speed.scale.models import build, gathered_share, make_tokens, materialize, seq_len, shape
from bench.speed.scale.session import GIB, Session, Steps
from bench.timing import synchronize
from octavo.distributed.shards import cut, local
from octavo.models import Decoder, ModelConfig
from octavo.numerics import Recipe
from octavo.parallel import shard
from octavo.run.optimizer import MasterAdamW
from octavo.testing.assertions import assert_bitwise, assert_sqnr
from octavo.testing.tolerances import QDQ_BF16_BLOCK_DB
from octavo.train.build import DTYPES
from octavo.train.config import TrainConfig
from octavo.train.data import Batch
from octavo.train.memory_plan import STATE, describe_model, plan_memory
from octavo.train.step import summed_loss, train_step

RECIPES = ("blockwise", "tensorwise")
NUM_LAYERS = 18
MAX_PLAN_ERROR = 0.05
_SEQUENCES = (2, 1)  # a GPU: as many as the model alone has room for
_MIN_FREE = 0.04  # of a GPU: with less, the allocator begins to wait for memory
# Of the last layer: its gradient has come through the head, the loss, and one attention, whose atomics round anew each
# time; codes near a boundary take their neighbour.
_CHECKED = "layers.{}.self_attn.qkv_proj.weight"


class UpdatedStep(ABC):
    """A Decoder's step: the backward of a loss, the optimizer's update, and new weights noted."""

    def __init__(self, model: Decoder, optimizer: torch.optim.Optimizer) -> None:
        self.model, self.optimizer = model, optimizer

    @abstractmethod
    def backward(self) -> torch.Tensor:
        """The loss, with gradients made."""

    def __call__(self) -> torch.Tensor:
        """One step."""
        loss = self.backward()
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        self.model.mark_weights_updated()
        return loss


class Stepper(UpdatedStep):
    """A Decoder with torch's fused AdamW on bf16 parameters and gradients, and one batch."""

    def __init__(self, model: Decoder, batch: Batch) -> None:
        on_gpu = model.device.type == "cuda"
        super().__init__(model, torch.optim.AdamW(model.parameters(), lr=1e-5, fused=on_gpu))
        self.batch = batch.to(model.device)

    def backward(self) -> torch.Tensor:
        """The loss, with gradients made."""
        loss = summed_loss(self.model, self.batch) / self.batch.num_targets
        loss.backward()
        return loss.detach()

    def first_gradient(self) -> tuple[torch.Tensor, torch.Tensor]:
        """The first loss, and one matrix's gradient on this rank in fp32; nothing is updated."""
        loss = self.backward()
        parameter = self.model.get_parameter(_CHECKED.format(self.model.config.num_layers - 1))
        assert parameter.grad is not None, "it trains"
        gradient = local(parameter.grad).float()
        self.optimizer.zero_grad(set_to_none=True)
        return loss, gradient


def layers18(session: Session) -> None:
    """tokens/s of one GPU alone and of all ranks, with and without FP8 all-gather."""
    for recipe in RECIPES:
        session.attempt(f"layers18 {recipe}", lambda recipe=recipe: _compare(session, recipe))  # type: ignore[misc]


def _compare(session: Session, recipe: str) -> None:
    config, found = shape(session, NUM_LAYERS), None
    for num_seqs in _SEQUENCES:
        found = time_alone(session, recipe, config, _own_tokens(session, num_seqs))
        session.free()
        if found is not None:
            break
    assert found is not None, f"one sequence of {seq_len(session)} tokens fits a GPU"
    base, loss, own = found
    gradient = torch.stack(session.mesh.gather_objects(own.cpu())).mean(0).to(session.device)
    label = f"Qwen3-8B ({config.num_layers} layers), {num_seqs} x {seq_len(session)} tokens a GPU, {recipe}"
    alone = f"{label}: one GPU alone"
    tokens, num_ranks = num_seqs * seq_len(session), session.mesh.world_size
    of_ranks = sum(session.mesh.gather_objects(tokens / base.ms * 1e3))  # GPUs of a host may differ in speed
    session.add_step(alone, base)
    session.record.add(alone, "throughput a GPU", "tokens/s", of_ranks / num_ranks)
    for gather in (None, "fp8"):
        case = f"{label}: {num_ranks} GPUs, {'FP8' if gather else 'bf16'} all-gather"
        model, report = build(session, config, recipe, all_gather_dtype=gather, reduction="mean", reduce_dtype=None)
        stepper = Stepper(model, _own_tokens(session, num_seqs))
        first, own = stepper.first_gradient()
        wanted = cut(gradient, model.get_parameter(_CHECKED.format(config.num_layers - 1)))
        session.check(lambda a=first: assert_bitwise(a, loss, "this rank's first loss"))  # type: ignore[misc]
        session.check(lambda a=own, b=wanted: assert_sqnr(a, b, QDQ_BF16_BLOCK_DB, "gradient"))  # type: ignore[misc]
        steps = session.time_step(stepper)
        rate = num_ranks * tokens / session.largest(steps.ms) * 1e3
        session.add_step(case, steps, alone, base.ms)
        session.record.add(
            case, "throughput a GPU", "tokens/s", rate / num_ranks, peer=alone, peer_value=of_ranks / num_ranks
        )
        session.record.add_ratio(case, f"tokens/s over {num_ranks} x one GPU", rate / of_ranks, alone)
        session.say(f"{'':<110} {rate / of_ranks:9.3f} of {num_ranks} x one GPU")
        if gather is not None and report is not None:
            share = gathered_share(model, report)
            session.record.add_ratio(case, "all-gather bytes of linears over bf16's", share, "bf16")
            session.say(f"{'':<110} {share:9.4f} of bf16's all-gather bytes")
        del model, stepper
        session.free()


def time_alone(
    session: Session, recipe: str | Recipe, config: ModelConfig, batch: Batch
) -> tuple[Steps, torch.Tensor, torch.Tensor] | None:
    """One GPU's steps, its first loss and gradient; None on all ranks where one has no room."""
    found = None
    if session.device.type == "cuda":
        torch.cuda.reset_peak_memory_stats()
    try:
        model, _ = build(session, config, recipe)
        stepper = Stepper(model, batch)
        loss, gradient = stepper.first_gradient()
        stepper()  # has all that a step needs
        is_full = session.device.type == "cuda" and torch.cuda.max_memory_reserved() > _most_bytes()
        found = None if is_full else (loss, gradient)
    except torch.OutOfMemoryError:
        pass
    if session.mesh.any(found is None):
        session.say(f"{len(batch.input_ids)} tokens do not fit one GPU beside {config.num_layers} layers")
        return None
    assert found is not None, "no rank is without"
    return session.time_step(stepper), *found


def _most_bytes() -> float:
    return torch.cuda.get_device_properties(torch.cuda.current_device()).total_memory * (1 - _MIN_FREE)


def _own_tokens(session: Session, num_seqs: int) -> Batch:
    return make_tokens(shape(session, NUM_LAYERS), num_seqs, seq_len(session), seed=session.mesh.rank)


def train_config(session: Session, num_layers: int) -> TrainConfig:
    """As a config for `octavo train`: one sequence a rank, blockwise, FP8 moments and 16-bit remainders."""
    config = shape(session, num_layers)
    sections = {
        "model": model_section(config),
        "data": {
            "vocab_size": config.vocab_size,
            "seq_len": seq_len(session),
            "batch_size": session.mesh.world_size,
            "micro_batch_size": 1,
        },
        "optimizer": {"lr": 1e-5, "state_dtype": "fp8", "master_weights": "remainder"},
        "parallel": {"data_parallel_shard_degree": session.mesh.world_size},
        "run": {"device": session.device.type},
    }
    return TrainConfig.model_validate(sections)


def model_section(config: ModelConfig) -> dict[str, object]:
    """[model] of a config for `octavo train`."""
    return {
        "family": config.family,
        "hidden_size": config.hidden_size,
        "intermediate_size": config.intermediate_size,
        "num_hidden_layers": config.num_layers,
        "num_attention_heads": config.num_heads,
        "num_key_value_heads": config.num_kv_heads,
        "head_dim": config.head_dim,
        "rope_theta": config.rope_theta,
        "tie_word_embeddings": False,
    }


def build_training(session: Session, config: TrainConfig) -> tuple[Decoder, MasterAdamW]:
    """What `octavo train` would build on these ranks, with other random weights."""
    model = describe_model(config)
    shard(model, session.mesh, reduction=config.parallel.reduction, param_dtype=DTYPES[config.precision.dtype])
    materialize(model, session.device)
    return model, MasterAdamW(model, config.optimizer)


class TrainStep:
    """octavo's own train_step on one global batch of random tokens."""

    def __init__(self, session: Session, model: Decoder, optimizer: MasterAdamW) -> None:
        self.mesh, self.model, self.optimizer, self.number = session.mesh, model, optimizer, 0
        length = seq_len(session)
        self.batches = [make_tokens(model.config, 1, length, seed=i) for i in range(session.mesh.world_size)]

    def __call__(self) -> torch.Tensor:
        """One step."""
        self.number += 1
        done = train_step(
            self.model, self.optimizer, self.batches, lr=1e-5, max_grad_norm=1.0, step=self.number, mesh=self.mesh
        )
        return torch.tensor(done.loss)


def layers36(session: Session) -> None:
    """The whole of Qwen3-8B."""
    session.attempt("layers36", lambda: _whole_model(session))


def _whole_model(session: Session) -> None:
    config = train_config(session, 36)
    plan, began = plan_memory(config), time.perf_counter()  # as `octavo train --plan` makes it
    model, optimizer = build_training(session, config)
    synchronize(session.device)
    session.say(f"model and optimizer made in {time.perf_counter() - began:.1f} s")
    steps = session.time_step(TrainStep(session, model, optimizer), warmup=2, timed=5)
    state_bytes = torch.cuda.memory_allocated() if session.device.type == "cuda" else 0
    case = (
        f"Qwen3-8B ({model.config.num_layers} layers), {seq_len(session)} tokens a GPU, blockwise, FP8 moments and "
        f"16-bit remainders: {session.mesh.world_size} GPUs"
    )
    # random weights say nothing of random tokens: logits of variance 0.02**2 x hidden_size add half of it to ln(V)
    expected = math.log(model.config.vocab_size) + 0.02**2 * model.config.hidden_size / 2
    if not abs(steps.losses[0] - expected) < 0.1 * expected:
        session.complain(f"{case}: first loss {steps.losses[0]:.3f}, about {expected:.3f} was to be expected")
    session.add_step(case, steps)
    peak = session.largest(steps.peak_bytes)
    if not peak:
        return
    session.record.add(
        case, "memory by octavo train --plan", "GiB", plan.peak_bytes / GIB, peer="peak memory", peer_value=peak / GIB
    )
    session.record.add_ratio(case, "memory by octavo train --plan over the peak", plan.peak_bytes / peak, "peak memory")
    session.say(f"{'':<110} {plan.peak_bytes / GIB:.2f} GiB planned, {plan.peak_bytes / peak - 1:+.1%}")
    session.say(f"{'':<110} {state_bytes / GIB:.2f} GiB between steps, {plan.total(STATE) / GIB:.2f} GiB planned")
    if abs(plan.peak_bytes / peak - 1) > MAX_PLAN_ERROR:
        session.complain(f"{case}: --plan said {plan.peak_bytes / GIB:.2f} GiB, {peak / GIB:.2f} were held at the peak")
