"""`refit`: new weights of Qwen3-8B from FSDP2's shards into a sampler that is cut among the ranks, as `octavo rl` does.

The policy has fp32 shards; the sampler keeps slices in bf16 and their codes. Weights are checked for inf and NaN.
"""

import functools
from collections.abc import Callable

import torch

from bench.serve.made_tokenizer import make_tokenizer
from bench.serve.shapes import draw
from bench.speed.scale.models import materialize
from bench.speed.scale.session import Session
from bench.speed.tensor.models import GATHER_EXACT, REDUCE, Layout, config_of, wanted
from octavo.distributed.outcome import together
from octavo.distributed.shards import local
from octavo.distributed.tensor_group import TensorGroup
from octavo.models import Decoder
from octavo.models.checkpoint.names import parameter_names
from octavo.nn import Linear
from octavo.nn.finite_weights import check_finite_weights
from octavo.nn.live_weights import live_tensors, make_tensors, own_slices, pin_codes, renew_codes
from octavo.numerics import Numerics, get_recipe
from octavo.parallel import make_shell, shard, weight_copies
from octavo.rl.engines.dealt import DealtEngine
from octavo.rl.ranks import Ranks
from octavo.serve import SamplingParams

# nothing is sampled that is timed; old weights wait in the cache, as in a job
_LIMITS = {"max_num_seqs": 8, "max_model_len": 256, "num_kv_pages": 8192}


def refit(session: Session) -> None:
    """A sampler that is exact, and so cut by gather, and one that is not."""
    for layout in wanted(session, (REDUCE, GATHER_EXACT)):
        session.attempt(f"refit {layout.label}", functools.partial(_measure, session, layout))


def _measure(session: Session, layout: Layout) -> None:
    policy, sampler, engine = _build(session, layout)
    engine.llm.generate([[1, 2, 3]], SamplingParams(max_tokens=2, ignore_eos=True))
    pin_codes(sampler)  # as CUDA graphs have them

    def publish() -> torch.Tensor:
        policy.mark_weights_updated()
        return torch.tensor(float(engine.publish(policy, sampler).weight_version))

    _negate(policy)
    publish()
    num_equal = _check(session, sampler)
    steps = session.time_step(publish)
    name = f"{session.mesh.world_size} GPUs, {'exact, gather' if layout.exact else 'reduce'}"
    case = f"refit, Qwen3-8B ({policy.config.num_layers} layers), fp32 shards to blockwise slices: {name}"
    session.record.add(case, "tensors that equal slices of one GPU's", "tensors", num_equal)
    session.record.add_times(case, "refit", "ms", steps.timing)
    session.record.add(case, "refit, slowest rank", "ms", session.largest(steps.ms))
    session.say(
        f"{case}: {steps.ms:.1f} ms ({steps.timing.p20_us:.1f} to {steps.timing.p80_us:.1f}), {num_equal} equal"
    )
    session.attempt(f"refit's parts, {layout.label}", lambda: _time_parts(session, policy, sampler, case))


def _build(session: Session, layout: Layout) -> tuple[Decoder, Decoder, DealtEngine]:
    """What octavo.rl.ranks makes of a policy and rollout.tensor_parallel_size, on the device layer by layer."""
    policy = Decoder(config_of(session), device="meta")
    shell = make_shell(policy)
    report = shard(policy.float(), session.mesh, reduction="ordered", param_dtype=torch.bfloat16)
    materialize(policy, session.device)
    ranks = Ranks(session.mesh, policy, shell, report, TensorGroup.of())
    sampler = ranks.view(Numerics(get_recipe("blockwise"), "fp8", layout.exact))
    tokenizer = make_tokenizer(policy.config.vocab_size)
    return policy, sampler, ranks.engine(sampler, tokenizer, keeps_weights=True, **_LIMITS)


@torch.no_grad()
def _negate(policy: Decoder) -> None:
    """New weights, of which none is what the sampler has."""
    for parameter in policy.parameters():
        local(parameter).neg_()


@torch.no_grad()
def _check(session: Session, sampler: Decoder) -> int:
    """Tensors that are, in bits, what slicing one GPU's weights and their codes gives: all that the sampler reads.

    Raises:
        AssertionError: on all ranks, naming the first that is not on a rank.
    """
    held, found = live_tensors(sampler), {name for name, _ in sampler.named_buffers()}
    num_buffers = len(found)

    def compare() -> None:
        for index, parameter in enumerate(parameter_names(sampler.config)):  # as materialize draws them
            generator = torch.Generator(session.device).manual_seed(index)
            whole = draw(parameter, sampler.config.num_layers, generator, str(session.device)).neg_()
            owner, _, leaf = parameter.name.rpartition(".")
            linear = sampler.get_submodule(owner)
            is_weight = isinstance(linear, Linear) and leaf == "weight"
            made = make_tensors(linear, whole) if is_weight else {leaf: own_slices(sampler, parameter.name, whole)}  # type: ignore[arg-type]
            for key, value in made.items():
                name = f"{owner}.{key}"
                assert torch.equal(_bytes(held[name]), _bytes(value)), f"{name} is not a slice of one GPU's"
                found.add(name)
        assert found == set(held), f"not compared: {sorted(set(held) - found)[:3]}"

    session.check(compare)
    return len(found) - num_buffers


def _bytes(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.contiguous().reshape(-1).view(torch.uint8)


def _time_parts(session: Session, policy: Decoder, sampler: Decoder, case: str) -> None:
    """What DealtEngine.publish does, a part at a time, each waited for: together they take longer."""
    nothing, copy_weights = torch.zeros(()), weight_copies(policy, sampler)

    def gather() -> torch.Tensor:
        copy_weights()
        return nothing

    def check() -> torch.Tensor:
        together(session.mesh.host_group, lambda: check_finite_weights(sampler))
        return nothing

    def quantize() -> torch.Tensor:
        sampler.mark_weights_updated()
        renew_codes(sampler)
        return nothing

    parts: dict[str, Callable[[], torch.Tensor]] = {"gather and cut": gather, "check": check, "quantize": quantize}
    for name, steps in session.time_steps(parts).items():
        session.record.add_times(case, f"{name}, of that", "ms", steps.timing)
        session.say(f"{name:>40} {steps.ms:9.1f} ms")
