"""The one configuration tree of a reinforcement-learning run: what a TOML file may say, section by section."""

from pathlib import Path
from typing import Any, Literal, Self

from pydantic import Field, NonNegativeFloat, NonNegativeInt, PositiveFloat, PositiveInt, model_validator

from octavo.config import Config
from octavo.deprecation import rename_keys
from octavo.distributed.mesh import ParallelSection
from octavo.models.config import MOE_FAMILIES
from octavo.numerics import Numerics
from octavo.rl.correction import CorrectionSection
from octavo.rl.engines.config import EngineSection
from octavo.rl.health import HealthSection
from octavo.rl.precision import KVScalesKey, Precision, both_numerics, contradictions
from octavo.rl.tasks import TaskSection
from octavo.run.sections import ModelSection, OptimizerSection


class WarmupSection(Config):
    """The supervised warm start that gives a new model something to be rewarded for.

    Args:
        init_std: standard deviation of a new model's matrices, larger than the 0.02 that suits wide models, with
            which a narrow one takes twice as long to begin.
        steps: the most optimizer steps; 0 for none (a checkpoint needs none).
        target_reward: stop as soon as samples at rollout.temperature for training prompts have this mean reward. Its
            former name, target_accuracy, leaves octavo with the next release.
        check_every: steps between those checks.
        check_prompts: prompts in a check.
        batch_size: examples in a step.
        lr: constant learning rate after 20 steps of warm-up.
    """

    init_std: PositiveFloat = 0.08
    steps: NonNegativeInt = 1000
    target_reward: float = Field(default=0.2, gt=0.0, le=1.0)
    check_every: PositiveInt = 5
    check_prompts: PositiveInt = 128
    batch_size: PositiveInt = 128
    lr: PositiveFloat = 5e-3

    @model_validator(mode="before")
    @classmethod
    def _take_former_name(cls, data: Any) -> Any:
        return rename_keys("warmup", data, {"target_accuracy": "target_reward"})


class RolloutSection(Config):
    """How completions are sampled.

    Args:
        prompts_per_step: groups in a step.
        samples_per_prompt: completions in a group.
        max_tokens: length limit of a completion. With the longest prompt it must fit into the model's context.
        temperature: of sampling and of the trainer's logprobs alike.
        recipe: the sampler's linears; empty for the trainer's recipe, which exact mode needs.
        kv_cache_dtype: "bf16" or "fp8".
        attention_dtype: "bf16", or "fp8" for attention that multiplies an FP8 cache's codes.
        kv_scales: of an FP8 cache: "per_token_head" (needs no calibration and cannot go stale), or one of K and one of
            V a layer: "engine" (made by the first batch after each update), "trainer" (from the training batch under
            the new weights, handed over with the refit).
        kv_scale_margin: by how much the latter raise an amax.
        kv_fallback_clip_share: a layer of which more of a step's K or V was clipped keeps its cache in bf16 from then
            on; 0 for never. Of the latter kinds only.
        kv_fallback_flush_share: the same, of what was flushed to zero.
        max_num_seqs: sequences that the engine decodes at a time.
        keep_weights: on several ranks: each keeps the sampler's weights whole beside its shards of the trainer's, where
            they lie still for CUDA graphs and cached prompts; false gathers them for the time of each batch.
        tensor_parallel_size: neighbouring ranks among which the sampler's linears are cut, which sample as one; each
            keeps its slices in place of the whole weights. It divides the number of ranks.
        mask_padded_ids: ids of the model's vocabulary beyond the tokenizer's have no probability, in sampling and in
            training alike; false lets them be drawn (they have no text). Of the embedded engine alone.
    """

    prompts_per_step: PositiveInt = 32
    samples_per_prompt: int = Field(default=8, ge=2)
    max_tokens: PositiveInt = 8
    temperature: PositiveFloat = 1.0
    recipe: str = ""
    kv_cache_dtype: Literal["bf16", "fp8"] = "fp8"
    attention_dtype: Literal["bf16", "fp8"] = "bf16"
    kv_scales: KVScalesKey = "per_token_head"
    kv_scale_margin: float = Field(default=1.05, ge=1.0)
    kv_fallback_clip_share: float = Field(default=1e-3, ge=0.0, lt=1.0)
    kv_fallback_flush_share: float = Field(default=0.05, ge=0.0, lt=1.0)
    max_num_seqs: PositiveInt = 256
    keep_weights: bool = True
    tensor_parallel_size: PositiveInt = 1
    mask_padded_ids: bool = True


class AlgorithmSection(Config):
    """How rewards become advantages, and advantages a loss.

    Args:
        name: advantages within the group of one prompt: "grpo" (less the mean, by the standard deviation), "reinforce"
            (less the mean), "rloo" (less the mean of the others).
        norm_adv_by_std: of grpo: divide a group's advantages by their standard deviation; false is Dr. GRPO.
        policy_loss: "ppo" (clipped ratio of a token), "gspo" (of a sequence: the geometric mean of its ratios), "cispo"
            (the clipped ratio is a constant weight of the token's logprob).
        clip_low: lower bound of the ratio, 1 - clip_low; gspo's ratios want some 1e-4.
        clip_high: upper bound of the ratio, 1 + clip_high; likewise.
        clip_c: dual clip: bound of the loss where the advantage is negative; 0 for none.
        kl_coef: weight of the k3 KL to the policy at the start; 0 keeps no copy of that policy.
        entropy_coef: weight of the entropy bonus.
        loss_aggregation: over the whole optimizer step: "token-mean", "seq-mean-token-mean", "seq-mean-token-sum", or
            "seq-mean-token-sum-norm" (the last over rollout.max_tokens, as Dr. GRPO has it).
        overlong_buffer: DAPO's shaping: a response that is longer than max_tokens - overlong_buffer loses a share of
            overlong_penalty for each token; 0 for none.
        overlong_penalty: what a response of max_tokens loses.
        filter_groups: DAPO's dynamic sampling: groups whose rewards are all equal are sampled again, with other
            prompts, up to max_gen_batches times a step.
    """

    name: Literal["grpo", "rloo", "reinforce"] = "grpo"
    norm_adv_by_std: bool = True
    policy_loss: Literal["ppo", "gspo", "cispo"] = "ppo"
    clip_low: float = Field(default=0.2, gt=0.0, lt=1.0)
    clip_high: PositiveFloat = 0.28
    clip_c: NonNegativeFloat = 3.0
    kl_coef: NonNegativeFloat = 0.0
    entropy_coef: NonNegativeFloat = 0.0
    loss_aggregation: Literal["token-mean", "seq-mean-token-mean", "seq-mean-token-sum", "seq-mean-token-sum-norm"] = (
        "token-mean"
    )
    overlong_buffer: NonNegativeInt = 0
    overlong_penalty: NonNegativeFloat = 1.0
    filter_groups: bool = False
    max_gen_batches: PositiveInt = 10


class TrainerSection(Config):
    """The learning side.

    Args:
        recipe: the linears' recipe, as octavo.get_recipe takes it.
        fp8_format: of the recipe, as octavo.get_recipe takes it.
        backward: of the recipe, as octavo.get_recipe takes it.
        steps: rollout steps of the run.
        epochs: in place of steps: passes over the task's training prompts, each in an order of its own, in whole steps;
            of tasks from files. With steps too, whichever ends first. Without it each step draws from all prompts.
        minibatches: optimizer steps a rollout step; each takes its share of the sequences, once. 4 where
            mini_batch_size is not given either.
        mini_batch_size: in place of minibatches: the size of a mini-batch in prompts, as verl's ppo_mini_batch_size
            counts it. An optimizer step takes mini_batch_size * rollout.samples_per_prompt sequences, mixed from all
            prompts of the rollout step. It must divide rollout.prompts_per_step.
        micro_batch_sequences: sequences in one forward pass; 0 for all of a minibatch.
        lr_warmup_steps: optimizer steps of linear warm-up; constant afterwards.
        check_exact_every: in exact mode with several minibatches: each step compares the first one's logprobs with the
            sampler's, and step 1 and every so many steps on the whole step's, for which the trainer scores all of it
            once more. 1 for every step, 0 for never.
        gather_once: on several ranks: gathered weights stay whole from one optimizer step to the next, and are not
            gathered for each micro-batch's forward and backward; in FP8 4 bytes a parameter while the learner works.
        optimizer: AdamW over fp32 masters.
    """

    recipe: str = "blockwise"
    fp8_format: Literal["hybrid", "e4m3"] | None = None
    backward: Literal["fp8", "bf16"] | None = None
    steps: PositiveInt = 120
    epochs: PositiveInt | None = None
    minibatches: PositiveInt = 4
    mini_batch_size: PositiveInt | None = None
    micro_batch_sequences: NonNegativeInt = 0
    lr_warmup_steps: NonNegativeInt = 0
    check_exact_every: NonNegativeInt = 20
    gather_once: bool = False
    optimizer: OptimizerSection = OptimizerSection(lr=3e-4, weight_decay=0.0)

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.mini_batch_size is not None and "minibatches" in self.model_fields_set:
            raise ValueError(
                f"trainer.minibatches={self.minibatches} (a count) and trainer.mini_batch_size={self.mini_batch_size} "
                "(prompts in each) exclude each other; give one of the two"
            )
        return self


class AsynchronousSection(Config):
    """Sampling the next steps' rollouts while the trainer learns; see octavo.rl.asynchronous.

    Args:
        max_policy_lag: updates that may come between a token's weights and its training; 0 samples and learns in turn.
        partial_rollouts: what becomes of rollouts that an update meets half done: "continue" (under the new weights,
            each token stamped with its version), or "drop" (sampled again).
    """

    max_policy_lag: NonNegativeInt = 0
    partial_rollouts: Literal["continue", "drop"] = "continue"


class EvalSection(Config):
    """Mean reward over held-out prompts by a bf16 greedy engine, whatever the run's own numerics are.

    Args:
        every: rollout steps between evaluations; 0 evaluates before the first and after the last step alone.
        num_prompts: held-out prompts, the same ones each time. Where it is not set, a held-out set with fewer is taken
            whole; where it is, that is an error.
    """

    every: NonNegativeInt = 0
    num_prompts: PositiveInt = 256


class RLRunSection(Config):
    """The run itself.

    Args:
        dir: where metrics go (and the final checkpoint, where `save` is set).
        seed: of weights, prompts and sampling.
        device: "cpu", "cuda", "cuda:1"; empty takes a GPU where there is one.
        max_seconds: no step starts after this much time since the first; 0 for no limit.
        tensorboard: write TensorBoard events beside metrics.jsonl.
        wandb: log to W&B too, under a project of this name (needs the wandb package); empty for not.
        mlflow: log to MLflow too, under an experiment of this name (needs the mlflow package); empty for not.
        transcripts_every: steps between sample transcripts for the report; 0 for none.
        report: write report.html under dir at the end.
        save: write the final model under dir.
        checkpoint_every: rollout steps between checkpoints of the whole run, from which the same command goes on bit
            for bit; 0 for none.
        keep: the newest ones that stay.
    """

    dir: Path = Path("runs/rl")
    seed: int = Field(default=0, ge=0, lt=2**64)
    device: str = ""
    max_seconds: NonNegativeFloat = 0.0
    tensorboard: bool = True
    wandb: str = ""
    mlflow: str = ""
    transcripts_every: NonNegativeInt = 10
    report: bool = True
    save: bool = True
    checkpoint_every: NonNegativeInt = 0
    keep: PositiveInt = 2


class RLConfig(Config):
    """Everything that `octavo rl` reads from a TOML file.

    Attributes:
        exact: trainer and sampler share one numerics, and every step checks that their logprobs are equal in bits: its
            first minibatch's, and all of them as often as trainer.check_exact_every says.
        precision: one setting for both sides: "bf16"; FP8 "linears" in rollouts; "linears+kv", an FP8 KV cache too;
            "linears+kv+attention", attention's products too; "end_to_end", linears and KV cache, and training in FP8.
            trainer.recipe says which FP8 recipe, and trainer.fp8_format and trainer.backward how it trains. Empty: what
            the sections say.
        router_replay: the trainer sends each token to the experts that the sampler chose for it (R3); of a policy with
            experts that is not exact; octavo's own engines return them, here or behind a server.
    """

    exact: bool = True
    router_replay: bool = False
    precision: Precision = ""
    model: ModelSection = ModelSection(hidden_size=64, intermediate_size=192, num_hidden_layers=3)
    task: TaskSection = TaskSection()
    warmup: WarmupSection = WarmupSection()
    rollout: RolloutSection = RolloutSection()
    engine: EngineSection = EngineSection()
    algorithm: AlgorithmSection = AlgorithmSection()
    correction: CorrectionSection = CorrectionSection()
    health: HealthSection = HealthSection()
    trainer: TrainerSection = TrainerSection()
    asynchronous: AsynchronousSection = AsynchronousSection()
    eval: EvalSection = EvalSection()
    parallel: ParallelSection = ParallelSection()
    run: RLRunSection = RLRunSection()

    @property
    def trainer_numerics(self) -> Numerics:
        """The numerics of the policy that trains; in exact mode of the one that samples too."""
        return both_numerics(self)[0]

    @property
    def rollout_numerics(self) -> Numerics:
        """The numerics of the policy that samples."""
        return both_numerics(self)[1]

    @property
    def num_minibatches(self) -> int:
        """Optimizer steps a rollout step."""
        size = self.trainer.mini_batch_size
        return self.trainer.minibatches if size is None else self.rollout.prompts_per_step // size

    @model_validator(mode="after")
    def _check_precision(self) -> Self:
        if found := contradictions(self):
            raise ValueError("; ".join(found))
        return self

    @model_validator(mode="after")
    def _check_experts(self) -> Self:
        model = self.model
        if model.path or model.family not in MOE_FAMILIES:
            return self
        for key in ("num_experts", "num_experts_per_tok", "moe_intermediate_size"):
            if not getattr(model, key):
                raise ValueError(
                    f"model.family = {model.family!r} needs model.{key}, a whole number >= 1, got {getattr(model, key)}"
                )
        if model.num_experts_per_tok > model.num_experts:
            raise ValueError(
                f"model.num_experts_per_tok = {model.num_experts_per_tok} must be at most model.num_experts = "
                f"{model.num_experts}"
            )
        return self

    @model_validator(mode="after")
    def _check_router_replay(self) -> Self:
        if self.router_replay and self.exact:
            raise ValueError(
                "router_replay = true has nothing to do under exact = true, where both sides choose the same experts; "
                "leave one of the two out"
            )
        if self.router_replay:
            self.engine.check_returns_experts()
        return self

    @model_validator(mode="after")
    def _check_asynchronous(self) -> Self:
        lag = self.asynchronous.max_policy_lag
        if not lag:
            return self
        said = f"asynchronous.max_policy_lag = {lag}"
        if self.exact:
            raise ValueError(
                f"{said} trains on tokens of older weights, and exact = true promises the sampler's bits at every "
                "step; set exact = false and correction.kind = 'token_tis', or max_policy_lag = 0"
            )
        if self.correction.kind == "none":
            raise ValueError(
                f"{said} trains on tokens of older weights, whose logprobs the sampler told: weigh them by "
                "correction.kind = 'token_tis'"
            )
        if self.engine.is_remote:
            raise ValueError(f"{said} wants engine.name = 'embedded', got {self.engine.name!r}; set max_policy_lag = 0")
        return self

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.exact and self.rollout.recipe not in ("", self.trainer.recipe):
            raise ValueError(
                f"exact = true needs one recipe on both sides, got rollout.recipe={self.rollout.recipe!r} and "
                f"trainer.recipe={self.trainer.recipe!r}; leave rollout.recipe empty, or set exact = false and "
                "correction.kind = 'token_tis'"
            )
        if 0.0 < self.algorithm.clip_c <= 1.0 + self.algorithm.clip_high:
            raise ValueError(
                f"algorithm.clip_c={self.algorithm.clip_c} would bound ratios that clipping lets through; give 0 for "
                f"none, or more than 1 + clip_high = {1.0 + self.algorithm.clip_high}"
            )
        if self.algorithm.overlong_buffer > self.rollout.max_tokens:
            raise ValueError(
                f"algorithm.overlong_buffer={self.algorithm.overlong_buffer} is longer than a response may be "
                f"(rollout.max_tokens={self.rollout.max_tokens}); every one would be punished"
            )
        if self.correction.effect_every and self.correction.kind == "none":
            raise ValueError(
                "correction.effect_every measures what importance weights change, and correction.kind is 'none'; set "
                "kind = 'token_tis', or effect_every = 0"
            )
        num_prompts, size = self.rollout.prompts_per_step, self.trainer.mini_batch_size
        if size is not None and num_prompts % size:
            raise ValueError(
                f"trainer.mini_batch_size={size} must divide the {num_prompts} prompts of a step "
                "(rollout.prompts_per_step)"
            )
        num_sequences = num_prompts * self.rollout.samples_per_prompt
        if num_sequences % self.num_minibatches:
            raise ValueError(
                f"trainer.minibatches={self.trainer.minibatches} must divide the {num_sequences} sequences of a step "
                "(rollout.prompts_per_step x rollout.samples_per_prompt)"
            )
        self.trainer_numerics  # noqa: B018 - RecipeError where there is no such recipe
        rollout = self.rollout_numerics.recipe
        if rollout.has_state:
            raise ValueError(
                f"rollout.recipe must make its scales from what it quantizes, got {rollout.name!r} (the trainer's "
                "where it is empty), whose amax history only training steps fill; use 'tensorwise'"
            )
        return self
