"""Checkpoints of a whole run: written between two steps, whole or not there, and gone on from bit for bit.

They are octavo.run's (a servable model, the optimizer's tensors, manifest and checksums) with what a loop has beside
them: the reference policy, the KV scales, the sampler's count of requests, and what was known of the run.
"""

import copy
import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from octavo.distributed.mesh import ONE_PROCESS, Mesh
from octavo.errors import CheckpointError, ConfigError
from octavo.models import Decoder
from octavo.models.export import ModelExport
from octavo.models.tokenizer import Tokenizer
from octavo.ops.attention import KVScaleTable
from octavo.rl.config import RLConfig
from octavo.run.checkpoint_store import Checkpoint, CheckpointStore, changes, describe_model, flatten
from octavo.run.optimizer import MasterAdamW
from octavo.run.trainer_state import restore, trainer_state

CHECKPOINTS = "checkpoints"  # under run.dir
_REFERENCE, _KV = "reference.", "kv."
# Keys that may change between two parts of a run without changing a bit of it.
_FREE = (
    *("run.", "eval.", "trainer.steps", "trainer.mini_batch_size", "health."),
    *("parallel.data_parallel", "parallel.timeout_s", "rollout.keep_weights", "trainer.gather_once"),
)

# what older checkpoints call the same
_FORMER = {
    "accuracy_before": "heldout_reward_before",
    "accuracy": "heldout_reward",
    "warmup.target_accuracy": "warmup.target_reward",
}


@dataclasses.dataclass(frozen=True)
class Progress:
    """What a run knows between two steps beside its tensors.

    Attributes:
        step: rollout steps done.
        num_updates: optimizer steps done.
        num_requests: that the embedded engine has had, which seeds the next one's noise; None for a remote engine.
        weight_version: of the policy.
        heldout_reward_before: mean reward over held-out prompts, before the first step.
        heldout_reward: mean reward over held-out prompts, last.
        seconds: of the run so far.
    """

    step: int
    num_updates: int
    num_requests: int | None
    weight_version: int
    heldout_reward_before: float
    heldout_reward: float
    seconds: float


@dataclasses.dataclass(frozen=True)
class Parts:
    """The tensors' owners.

    Attributes:
        model: the policy.
        optimizer: its masters.
        reference: the policy that KL is to, or None.
        kv_table: the sampler's scales, or None.
        mesh: of the ranks that model and reference are sharded over.
        dtype: that the policy computes in; None for its parameters' own.
    """

    model: Decoder
    optimizer: MasterAdamW
    tokenizer: Tokenizer
    reference: Decoder | None = None
    kv_table: KVScaleTable | None = None
    mesh: Mesh = ONE_PROCESS
    dtype: torch.dtype | None = None

    def export(self) -> ModelExport:
        """The policy as it is saved."""
        return ModelExport(self.model, self.tokenizer, dtype=self.dtype)

    def tensors(self) -> dict[str, torch.Tensor]:
        """All that a checkpoint holds beside the policy, by name; the owners' own tensors."""
        state = trainer_state(self.model, self.optimizer)
        if self.reference is not None:
            state |= {_REFERENCE + name: param for name, param in self.reference.named_parameters()}
        if self.kv_table is not None:
            state |= {_KV + name: tensor for name, tensor in self.kv_table.state_dict().items()}
        return state


class FinishedRunError(CheckpointError):
    """A run has all of its steps.

    Attributes:
        model_path: the policy after the last step.
        changes: a line for each key that is another than the run's, and so has no effect.
    """

    def __init__(self, found: Checkpoint, config: RLConfig, keys: str) -> None:
        super().__init__(
            f"already at step {found.step} of {found.step}, nothing was trained; raise {keys}, or --no-resume / "
            "another run.dir"
        )
        self.model_path = found.path / "model"
        self.changes = [f"{change}: without effect, for no step is left" for change in _changes(found, config)]


def check_steps_left(found: Checkpoint, config: RLConfig, limits: Mapping[str, int]) -> None:
    """Refuse to go on from a checkpoint that has all steps.

    Args:
        limits: the most steps, by each key that says so.
    Raises:
        FinishedRunError: it has all of them.
        ConfigError: it has more than all.
    """
    keys = " and ".join(key for key, most in limits.items() if most <= found.step)
    if found.step > config.trainer.steps:
        raise ConfigError(
            f"{found.path} is at step {found.step}, and the run ends at step {config.trainer.steps}; raise {keys}, or "
            "start over with --no-resume"
        )
    if found.step == config.trainer.steps:
        raise FinishedRunError(found, config, keys)


def open_store(config: RLConfig, mesh: Mesh = ONE_PROCESS) -> CheckpointStore:
    """The run's checkpoints."""
    return CheckpointStore(config.run.dir / CHECKPOINTS, config.run.keep, mesh)


def path_of(config: RLConfig, step: int) -> Path:
    """Where a step's checkpoint is, or would be."""
    return open_store(config).path_of(step)


def save(config: RLConfig, parts: Parts, progress: Progress) -> Path:
    """Write a checkpoint; a kill at any moment leaves the older ones.

    Returns:
        Its directory; model/ in it can be served.
    """
    store, description = open_store(config, parts.mesh), {**_describe(config, parts), **dataclasses.asdict(progress)}
    export = parts.export()  # first: it lets go of what FSDP2 has gathered
    return store.save(description, parts.tensors(), export)


def load(checkpoint: Checkpoint, config: RLConfig, parts: Parts) -> tuple[Progress, list[str]]:
    """Put a run back where a checkpoint was written.

    Args:
        parts: as the run builds them; kv_table is left to `load_kv_table`, for a refit comes first.
    Returns:
        (what was known, what a person should know: keys that changed and change the bits from here on).
    Raises:
        CheckpointError: another architecture, tokenizer or numerics; tensors that are missing.
    """
    former = _check(checkpoint, _describe(config, parts))
    like = None
    if parts.mesh.world_size > 1:
        parts.optimizer.init_state()
        like = parts.tensors()
    state = checkpoint.load_state(like)
    known = {_FORMER.get(key, key): value for key, value in checkpoint.description.items()}
    progress = Progress(**{f.name: known[f.name] for f in dataclasses.fields(Progress)})
    own = {name: tensor for name, tensor in state.items() if not name.startswith((_REFERENCE, _KV))}
    notes = former + restore(parts.model, parts.optimizer, own, progress.weight_version)
    if parts.reference is not None:
        _load_reference(parts.reference, state)
    notes += [f"{change}: other bits from here on" for change in _changes(checkpoint, config)]
    return progress, notes


def load_kv_table(checkpoint: Checkpoint, table: KVScaleTable) -> None:
    """Put the sampler's KV scales back, and the layers that had left FP8.

    Raises:
        CheckpointError: the checkpoint has none.
    """
    state = checkpoint.load_state()
    found = {name.removeprefix(_KV): tensor for name, tensor in state.items() if name.startswith(_KV)}
    if not found:
        raise CheckpointError(f"{checkpoint.path} has no KV scales: it was made under kv_scales = 'per_token_head'")
    table.load_state_dict(found)


def _describe(config: RLConfig, parts: Parts) -> dict[str, Any]:
    """What must be the same when a run goes on, and what a person wants to know."""
    return {
        **describe_model(parts.model, parts.tokenizer),
        "numerics": {"trainer": config.trainer_numerics.as_dict(), "rollout": config.rollout_numerics.as_dict()},
        "config": _plain(config),
    }


def _plain(config: RLConfig) -> dict[str, Any]:
    """The keys, with the number of mini-batches however it was given, and of epochs alone whether they are counted."""
    data = config.model_dump(mode="json")
    data["trainer"]["epochs"] = bool(config.trainer.epochs) or None
    data["trainer"]["minibatches"] = config.num_minibatches
    return data


def _check(checkpoint: Checkpoint, current: Mapping[str, Any]) -> list[str]:
    """Refuse to go on with another model; what a person should know where older numerics are taken for today's."""
    found, notes = _with_update_every(checkpoint.description, current["numerics"])
    for what in ("architecture", "tokenizer_fingerprint", "numerics"):
        theirs, ours = found.get(what), current[what]
        if theirs != ours:
            raise CheckpointError(
                f"{checkpoint.path}: its {what.replace('_', ' ')} is another: {_differences(theirs, ours)}; "
                "give the config that it was made with, choose another run.dir, or start over with --no-resume"
            )
    return notes


def _with_update_every(
    description: Mapping[str, Any], numerics: Mapping[str, Any]
) -> tuple[Mapping[str, Any], list[str]]:
    """A description in which delayed scaling has this run's update_every: older runs knew "forward" alone."""
    description, notes = copy.deepcopy(description), list[str]()
    for side in numerics:
        ours = numerics[side]["recipe"].get("delayed") or {}
        theirs = description.get("numerics", {}).get(side, {}).get("recipe", {}).get("delayed")
        if theirs and "update_every" in ours and "update_every" not in theirs:
            theirs["update_every"] = ours["update_every"]
            notes.append(
                f"{side}: delayed scaling changed its scales at each forward, and does so once an optimizer step from "
                "here on: other bits"
            )
    return description, notes


def _changes(checkpoint: Checkpoint, config: RLConfig) -> list[str]:
    """The keys with a say in the bits that are others than a checkpoint's."""
    defaults = RLConfig().model_dump(mode="json")  # of keys that are newer than the checkpoint
    theirs = {_FORMER.get(key, key): value for key, value in flatten(checkpoint.description["config"])}
    before = dict(flatten(defaults)) | theirs
    found = changes(before, _plain(config))
    return [change for key, change in found.items() if not key.startswith(_FREE)]


def _differences(theirs: Any, ours: Any) -> str:
    before, after = (dict(flatten(x if isinstance(x, Mapping) else {"it": x})) for x in (theirs, ours))
    keys = [key for key in {**before, **after} if before.get(key) != after.get(key)]
    shown = [f"{key} was {before.get(key)!r:.80}, is {after.get(key)!r:.80}" for key in keys[:4]]
    return ", ".join(shown) + (f" and {len(keys) - 4} others" if len(keys) > 4 else "")


@torch.no_grad()
def _load_reference(reference: Decoder, state: Mapping[str, torch.Tensor]) -> None:
    for name, param in reference.named_parameters():
        if _REFERENCE + name not in state:
            raise CheckpointError(f"the checkpoint has no {_REFERENCE}{name}: it was made with algorithm.kl_coef = 0")
        param.copy_(state[_REFERENCE + name])
    reference.mark_weights_updated()
