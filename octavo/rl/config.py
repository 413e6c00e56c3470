"""The one configuration tree of a reinforcement-learning run: what a recipe file may say, section by section."""

from pathlib import Path
from typing import Literal, Self

from pydantic import Field, NonNegativeFloat, NonNegativeInt, PositiveFloat, PositiveInt, model_validator

from octavo.config import Config
from octavo.numerics import Numerics, get_recipe
from octavo.rl.tasks import Arithmetic, Task
from octavo.train.config import ModelSection, OptimizerSection


class TaskSection(Config):
    """Which problems there are; see octavo.rl.tasks.Arithmetic. A task of one's own goes to `run(task=...)`."""

    name: Literal["arithmetic"] = "arithmetic"
    operation: Literal["add", "multiply"] = "add"
    num_digits: int = Field(default=2, ge=1, le=9)
    num_operands: int = Field(default=2, ge=2, le=9)
    reverse_answer: bool = True
    heldout_share: float = Field(default=0.1, gt=0.0, lt=1.0)

    def build(self) -> Task:
        """The task that this section describes."""
        return Arithmetic(**self.model_dump(exclude={"name"}))


class WarmupSection(Config):
    """The supervised warm start that gives a new model something to be rewarded for.

    Args:
        init_std: standard deviation of a new model's matrices, larger than the 0.02 that suits wide models, with
            which a narrow one takes twice as long to begin.
        steps: the most optimizer steps; 0 for none (a checkpoint needs none).
        target_accuracy: stop as soon as sampling at rollout.temperature is right this often on training prompts.
        check_every: steps between those checks.
        check_prompts: prompts in a check.
        batch_size: examples in a step.
        lr: constant learning rate after 20 steps of warm-up.
    """

    init_std: PositiveFloat = 0.08
    steps: NonNegativeInt = 1000
    target_accuracy: float = Field(default=0.2, gt=0.0, le=1.0)
    check_every: PositiveInt = 5
    check_prompts: PositiveInt = 128
    batch_size: PositiveInt = 128
    lr: PositiveFloat = 5e-3


class RolloutSection(Config):
    """How completions are sampled.

    Args:
        prompts_per_step: groups in a step.
        samples_per_prompt: completions in a group.
        max_tokens: length limit of a completion.
        temperature: of sampling and of the trainer's logprobs alike.
        recipe: the sampler's linears; empty for the trainer's recipe, which exact mode needs.
        kv_cache_dtype: "bf16" or "fp8".
        max_num_seqs: sequences that the engine decodes at a time.
    """

    prompts_per_step: PositiveInt = 32
    samples_per_prompt: int = Field(default=8, ge=2)
    max_tokens: PositiveInt = 8
    temperature: PositiveFloat = 1.0
    recipe: str = ""
    kv_cache_dtype: Literal["bf16", "fp8"] = "fp8"
    max_num_seqs: PositiveInt = 256


class AlgorithmSection(Config):
    """GRPO and its loss.

    Args:
        name: "grpo".
        norm_adv_by_std: divide a group's advantages by their standard deviation; false is Dr. GRPO.
        clip_low, clip_high: bounds of the ratio, 1 - clip_low to 1 + clip_high.
        clip_c: dual clip: bound of the loss where the advantage is negative; 0 for none.
        kl_coef: weight of the k3 KL to the policy at the start; 0 keeps no copy of that policy.
        entropy_coef: weight of the entropy bonus.
        loss_aggregation: "token-mean" or "seq-mean-token-mean", over the whole optimizer step.
    """

    name: Literal["grpo"] = "grpo"
    norm_adv_by_std: bool = True
    clip_low: float = Field(default=0.2, gt=0.0, lt=1.0)
    clip_high: PositiveFloat = 0.28
    clip_c: NonNegativeFloat = 3.0
    kl_coef: NonNegativeFloat = 0.0
    entropy_coef: NonNegativeFloat = 0.0
    loss_aggregation: Literal["token-mean", "seq-mean-token-mean"] = "token-mean"


class CorrectionSection(Config):
    """What is done about a sampler whose numerics are not the trainer's.

    Args:
        kind: "none", or "token_tis": truncated importance weights, token by token.
        cap: the largest weight.
        effect_every: steps between measurements of loss and gradient with and without the weights, on the same
            rollouts (two more backward passes of the first minibatch); 0 for none.
    """

    kind: Literal["none", "token_tis"] = "none"
    cap: float = Field(default=2.0, ge=1.0)
    effect_every: NonNegativeInt = 0


class TrainerSection(Config):
    """The learning side.

    Args:
        recipe, fp8_format, backward: the linears' recipe, as octavo.get_recipe takes them.
        steps: rollout steps of the run.
        minibatches: optimizer steps a rollout step; each takes its share of the sequences, once.
        micro_batch_sequences: sequences in one forward pass; 0 for all of a minibatch.
        lr_warmup_steps: optimizer steps of linear warm-up; constant afterwards.
        optimizer: AdamW over fp32 masters.
    """

    recipe: str = "blockwise"
    fp8_format: Literal["hybrid", "e4m3"] | None = None
    backward: Literal["fp8", "bf16"] | None = None
    steps: PositiveInt = 120
    minibatches: PositiveInt = 4
    micro_batch_sequences: NonNegativeInt = 0
    lr_warmup_steps: NonNegativeInt = 0
    optimizer: OptimizerSection = OptimizerSection(lr=3e-4, weight_decay=0.0)


class EvalSection(Config):
    """Held-out accuracy by a bf16 greedy engine, whatever the run's own numerics are.

    Args:
        every: rollout steps between evaluations; 0 evaluates before the first and after the last step alone.
        num_prompts: held-out prompts, the same ones each time.
    """

    every: NonNegativeInt = 0
    num_prompts: PositiveInt = 256


class RunSection(Config):
    """The run itself.

    Args:
        dir: where metrics go (and the final checkpoint, where `save` is set).
        seed: of weights, prompts and sampling.
        device: "cpu", "cuda", "cuda:1"; empty takes a GPU where there is one.
        max_seconds: no step starts after this much time since the first; 0 for no limit.
        tensorboard: write TensorBoard events beside metrics.jsonl.
        save: write the final model under dir.
    """

    dir: Path = Path("runs/rl")
    seed: NonNegativeInt = 0
    device: str = ""
    max_seconds: NonNegativeFloat = 0.0
    tensorboard: bool = True
    save: bool = True


class RLConfig(Config):
    """Everything that `octavo rl` reads from a TOML file.

    Args:
        exact: trainer and sampler share one numerics, and every step checks that their logprobs are equal in bits.
    """

    exact: bool = True
    model: ModelSection = ModelSection(hidden_size=64, intermediate_size=192, num_hidden_layers=3)
    task: TaskSection = TaskSection()
    warmup: WarmupSection = WarmupSection()
    rollout: RolloutSection = RolloutSection()
    algorithm: AlgorithmSection = AlgorithmSection()
    correction: CorrectionSection = CorrectionSection()
    trainer: TrainerSection = TrainerSection()
    eval: EvalSection = EvalSection()
    run: RunSection = RunSection()

    @property
    def trainer_numerics(self) -> Numerics:
        """The numerics of the policy that trains; in exact mode of the one that samples too."""
        fields = {"fp8_format": self.trainer.fp8_format, "backward": self.trainer.backward}
        recipe = get_recipe(self.trainer.recipe, **{k: v for k, v in fields.items() if v is not None})
        kv_cache_dtype = self.rollout.kv_cache_dtype if self.exact else "bf16"
        return Numerics(recipe, kv_cache_dtype, self.exact)

    @property
    def rollout_numerics(self) -> Numerics:
        """The numerics of the policy that samples."""
        if self.exact:
            return self.trainer_numerics
        recipe = self.rollout.recipe or self.trainer.recipe
        return Numerics(get_recipe(recipe), self.rollout.kv_cache_dtype, exact=False)

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
        if self.correction.effect_every and self.correction.kind == "none":
            raise ValueError(
                "correction.effect_every measures what importance weights change, and correction.kind is 'none'; set "
                "kind = 'token_tis', or effect_every = 0"
            )
        num_sequences = self.rollout.prompts_per_step * self.rollout.samples_per_prompt
        if num_sequences % self.trainer.minibatches:
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
