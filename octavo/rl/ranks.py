"""A run on several ranks: what it cannot do is refused before any work, and the policy is sharded over all of them."""

import dataclasses
from typing import Any

from octavo.distributed.agreement import check_agreement, describe_process
from octavo.distributed.local_job import future_group
from octavo.distributed.mesh import Mesh
from octavo.distributed.tensor_group import TensorGroup
from octavo.errors import ConfigError, DataError, OctavoError
from octavo.models import Decoder
from octavo.models.tokenizer import Tokenizer
from octavo.numerics import Numerics
from octavo.parallel import ShardReport, make_shell, parallelize, shard
from octavo.rl.config import RLConfig
from octavo.rl.engines.dealt import DealtEngine
from octavo.rl.rollout_batch import Rollouts
from octavo.run.checkpoint_store import flatten
from octavo.weights.refit import share_weights


@dataclasses.dataclass(frozen=True)
class Ranks:
    """A policy that is sharded over the ranks of a job.

    Attributes:
        policy: the model that trains.
        shell: of it, from before it was sharded.
        report: how it is sharded.
        tensor_group: the ranks that sample as one, each with slices of the sampler's linears; None where each samples.
    """

    mesh: Mesh
    policy: Decoder
    shell: Decoder
    report: ShardReport
    tensor_group: TensorGroup | None = None

    @classmethod
    def shard(cls, config: RLConfig, mesh: Mesh, model: Decoder, reference: Decoder | None) -> "Ranks":
        """Shard a policy in place, and the reference beside it.

        Args:
            model: in the trainer's numerics; the same on all ranks.
            reference: a copy of it; what it is gathered in is its own dtype.
        """
        if reference is not None:
            shard(reference, mesh)
        shell, dtype = make_shell(model), model.dtype
        report = shard(
            model.float(),
            mesh,
            reduction=config.parallel.reduction,
            param_dtype=dtype,
            all_gather_dtype="fp8" if config.parallel.all_gather_dtype == "fp8" else None,
        )
        size = config.rollout.tensor_parallel_size
        group = mesh.neighbours(size, config.parallel.timeout_s) if size > 1 else None
        return cls(mesh, model, shell, report, group)

    def view(self, numerics: Numerics) -> Decoder:
        """A decoder in other numerics, to which an engine lends the policy's weights."""
        return share_weights(self.shell, numerics)

    def engine(
        self, sampler: Decoder, tokenizer: Tokenizer, *, keeps_weights: bool = False, **limits: Any
    ) -> DealtEngine:
        """An engine over the policy, or over a view of it.

        Args:
            keeps_weights: a view has memory of its own for them, and is cut where ranks sample as one; else they are
                whole for the time of each batch.
        """
        group = self.tensor_group if keeps_weights else None
        return DealtEngine(
            self.policy, sampler, tokenizer, self.mesh, keeps_weights=keeps_weights, tensor_group=group, **limits
        )


def share_policy(mesh: Mesh, model: Decoder) -> None:
    """Give all ranks the first one's policy: on GPUs warm starts differ, in their bits and in when they end."""
    if mesh.world_size == 1:
        return
    mesh.broadcast(model.parameters())
    (version, *_) = mesh.gather_objects(model.weight_version)
    model.mark_weights_updated()
    model.weight_version = version


def check_ranks(config: RLConfig, mesh: Mesh, heldout: list[str]) -> None:
    """Before any work: all ranks run the same, and what is asked for can be done on so many.

    Raises:
        ConfigError: naming the key.
    """
    size = config.rollout.tensor_parallel_size
    if mesh.world_size % size:
        raise ConfigError(
            f"rollout.tensor_parallel_size must divide the number of ranks, got {size} for {mesh.world_size}; start "
            f"torchrun with --nproc-per-node {size} or a multiple of it"
        )
    if mesh.world_size == 1:
        return
    facts = {**dict(flatten(config.model_dump(mode="json"), "config.")), **describe_process()}
    check_agreement({**facts, "the held-out prompts": heldout})
    for key, is_asked, remedy in _unsupported(config):
        if is_asked:
            raise ConfigError(f"{key} is not supported on several ranks yet, got {mesh.world_size}; {remedy}")
    check_pieces(config, mesh, config.rollout.prompts_per_step * config.rollout.samples_per_prompt)


def check_pieces(config: RLConfig, mesh: Mesh, num_sequences: int) -> None:
    """All ranks have as many micro-batches of a step's sequences as the others, or they would wait for each other.

    Raises:
        ConfigError: naming the key.
    """
    size, given = num_sequences // config.num_minibatches, config.trainer.micro_batch_sequences
    if mesh.world_size > 1 and _num_pieces(size, given) % mesh.world_size:
        fits = [n for n in range(size, 0, -1) if size % n == 0 and size // n % mesh.world_size == 0][:4]
        raise ConfigError(
            f"the micro-batches of a mini-batch must be a multiple of the ranks, got {_num_pieces(size, given)} of "
            f"{given or size} sequences each for {mesh.world_size}: a mini-batch has {size} sequences; "
            + (f"set trainer.micro_batch_sequences to {_listed(fits)}" if fits else _as_many(mesh.world_size))
        )


def check_cut(config: RLConfig, mesh: Mesh, model: Decoder) -> str:
    """Before the warm start: cut the sampler, without its values, as the engine will. All ranks come here.

    Args:
        model: the policy, whole on each rank.
    Returns:
        A line for the log; empty where the sampler is not cut.
    Raises:
        ConfigError: the ranks cannot cut it; the cause is parallelize's error.
    """
    size = config.rollout.tensor_parallel_size
    if size == 1:
        return ""
    shell = share_weights(make_shell(model), config.rollout_numerics)
    try:
        report = parallelize(shell, future_group(0, size))  # the first one's slices, so that all say the same
    except OctavoError as error:
        recipe = config.rollout_numerics.recipe.name
        raise ConfigError(
            f"rollout.tensor_parallel_size = {size} cannot cut the sampler, whose recipe is {recipe!r} "
            f"(rollout.recipe, trainer.recipe where that is empty): {error}"
        ) from error
    return f"the sampler is cut among {size} neighbouring ranks (groups: {mesh.world_size // size}): {report}"


def _num_pieces(size: int, micro_batch: int) -> int:
    return -(-size // (micro_batch or size))


def _as_many(num_ranks: int) -> str:
    return f"let trainer.minibatches, or mini_batch_size, give a multiple of {num_ranks} sequences"


def _listed(numbers: list[int]) -> str:
    return ", ".join(map(str, numbers[:-1])) + (" or " if len(numbers) > 1 else "") + str(numbers[-1])


def _unsupported(config: RLConfig) -> list[tuple[str, bool, str]]:
    """(what, whether the config asks for it, what to do)."""
    optimizer = config.trainer.optimizer
    return [
        (f"engine.name = {config.engine.name!r}", config.engine.is_remote, "set engine.name = 'embedded'"),
        ("asynchronous.max_policy_lag > 0", config.asynchronous.max_policy_lag > 0, "set it to 0"),
        (
            "rollout.keep_weights = false with rollout.tensor_parallel_size > 1",
            config.rollout.tensor_parallel_size > 1 and not config.rollout.keep_weights,
            "leave it at true: each rank keeps its slices",
        ),
        ("router_replay = true", config.router_replay, "leave it out"),
        (
            f"rollout.kv_scales = {config.rollout.kv_scales!r}",
            config.rollout_numerics.has_known_kv_scales,
            "leave it at 'per_token_head'",
        ),
        ("correction.effect_every > 0", config.correction.effect_every > 0, "set it to 0"),
        (
            f"trainer.recipe = {config.trainer.recipe!r}, whose scales have a history,",
            config.trainer_numerics.recipe.has_state,
            "set trainer.recipe = 'blockwise'",
        ),
        (
            f"trainer.optimizer.master_weights = {optimizer.master_weights!r}",
            optimizer.master_weights != "fp32",
            "set it to 'fp32': the shards are the masters",
        ),
    ]


def check_rewards_agree(rollouts: Rollouts, mesh: Mesh, step: int) -> None:
    """Every rank has scored all rollouts: refuse a verifier that does not say the same everywhere.

    Raises:
        DataError: on all ranks, naming the first sequence that differs.
    """
    everyone = mesh.gather_objects(rollouts.rewards)
    for rank, rewards in enumerate(everyone):
        differs = (rewards != everyone[0]).nonzero().flatten()
        if len(differs):
            i = int(differs[0])
            raise DataError(
                f"step {step}, sequence {i} (prompt {rollouts.prompts[i]!r}): its reward is {float(everyone[0][i])} "
                f"on rank 0 and {float(rewards[i])} on rank {rank}; it must depend on prompt and completion alone"
            )
