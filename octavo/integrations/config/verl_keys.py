"""verl's keys that mean one of octavo's, each on its own; what several mean together is in verl.py.

Names and defaults are those of verl's own trainer configuration (0.7 and its main branch of late 2026).
"""

import dataclasses
from typing import Any

ACTOR = "actor_rollout_ref.actor"
ROLLOUT = "actor_rollout_ref.rollout"
MODEL = "actor_rollout_ref.model"
OPTIM = f"{ACTOR}.optim"
CORRECTION = "algorithm.rollout_correction"
TRANSFORMER = f"{ACTOR}.megatron.override_transformer_config"
ROUTES = f"{ROLLOUT}.enable_rollout_routing_replay"
REPLAYS = (f"{ACTOR}.router_replay.mode", f"{ACTOR}.megatron.router_replay.mode")
STALENESS = "async_training.staleness_threshold"
PARTIAL = "async_training.partial_rollout"
SYNC = "async_training.trigger_parameter_sync_step"


@dataclasses.dataclass(frozen=True)
class Key:
    """A key that sets one of octavo's.

    Attributes:
        name: verl's.
        default: verl's; UNSET where verl has none that means anything here.
        kind: the type of its values.
        to: octavo's key.
        values: verl's value -> octavo's; empty where they are the same.
    """

    name: str
    default: Any
    kind: type
    to: str
    values: dict[Any, Any] = dataclasses.field(default_factory=dict)


UNSET = object()

KEYS = (
    Key("data.train_batch_size", 1024, int, "rollout.prompts_per_step"),
    Key("data.max_response_length", 512, int, "rollout.max_tokens"),
    Key(f"{ROLLOUT}.response_length", UNSET, int, "rollout.max_tokens"),
    Key("data.seed", UNSET, int, "run.seed"),
    Key(f"{ROLLOUT}.temperature", 1.0, float, "rollout.temperature"),
    Key(f"{ROLLOUT}.max_num_seqs", 256, int, "rollout.max_num_seqs"),
    Key(f"{ACTOR}.entropy_coeff", 0.0, float, "algorithm.entropy_coef"),
    Key(
        f"{ACTOR}.loss_agg_mode",
        "token-mean",
        str,
        "algorithm.loss_aggregation",
        {name: name for name in ("token-mean", "seq-mean-token-mean", "seq-mean-token-sum", "seq-mean-token-sum-norm")},
    ),
    Key(f"{OPTIM}.lr", 1e-6, float, "trainer.optimizer.lr"),
    Key(f"{OPTIM}.weight_decay", 0.01, float, "trainer.optimizer.weight_decay"),
    Key(f"{ACTOR}.grad_clip", 1.0, float, "trainer.optimizer.max_grad_norm"),
    Key(f"{OPTIM}.clip_grad", UNSET, float, "trainer.optimizer.max_grad_norm"),
    Key(f"{ACTOR}.ppo_micro_batch_size_per_gpu", UNSET, int, "trainer.micro_batch_sequences"),
    Key("algorithm.norm_adv_by_std_in_grpo", True, bool, "algorithm.norm_adv_by_std"),
    Key("algorithm.filter_groups.enable", False, bool, "algorithm.filter_groups"),
    Key("trainer.total_training_steps", UNSET, int, "trainer.steps"),
    Key("trainer.device", UNSET, str, "run.device", {"cuda": "cuda", "cpu": "cpu"}),
)

# keys that verl.py reads together with others
GROUPED = (
    f"{MODEL}.path",
    f"{ROLLOUT}.n",
    f"{ROLLOUT}.quantization",
    f"{ROLLOUT}.engine_kwargs.vllm.kv_cache_dtype",
    f"{ROLLOUT}.engine_kwargs.sglang.kv_cache_dtype",
    f"{TRANSFORMER}.fp8",
    f"{TRANSFORMER}.fp8_recipe",
    f"{OPTIM}.override_optimizer_config.fp8_recipe",
    ROUTES,
    *REPLAYS,
    STALENESS,
    PARTIAL,
    SYNC,
    f"{OPTIM}.betas",
    f"{OPTIM}.lr_warmup_steps",
    f"{ACTOR}.ppo_mini_batch_size",
    f"{ACTOR}.clip_ratio",
    f"{ACTOR}.clip_ratio_low",
    f"{ACTOR}.clip_ratio_high",
    f"{ACTOR}.clip_ratio_c",
    f"{ACTOR}.policy_loss.loss_mode",
    f"{ACTOR}.use_kl_loss",
    f"{ACTOR}.kl_loss_coef",
    f"{ACTOR}.kl_loss_type",
    f"{ACTOR}.tis_imp_ratio_cap",
    "algorithm.adv_estimator",
    "algorithm.use_kl_in_reward",
    "algorithm.kl_penalty",
    "algorithm.kl_ctrl.kl_coef",
    "algorithm.filter_groups.metric",
    "algorithm.filter_groups.max_num_gen_batches",
    f"{CORRECTION}.rollout_is",
    f"{CORRECTION}.rollout_is_threshold",
    f"{CORRECTION}.rollout_is_batch_normalize",
    f"{CORRECTION}.rollout_rs",
    f"{CORRECTION}.rollout_rs_threshold",
    f"{CORRECTION}.rollout_rs_threshold_lower",
    f"{CORRECTION}.rollout_token_veto_threshold",
    "reward_model.reward_kwargs.overlong_buffer_cfg.enable",
    "reward_model.reward_kwargs.overlong_buffer_cfg.len",
    "reward_model.reward_kwargs.overlong_buffer_cfg.penalty_factor",
    "reward.reward_kwargs.overlong_buffer_cfg.enable",
    "reward.reward_kwargs.overlong_buffer_cfg.len",
    "reward.reward_kwargs.overlong_buffer_cfg.penalty_factor",
    "reward_model.overlong_buffer.enable",
    "reward_model.overlong_buffer.len",
    "reward_model.overlong_buffer.penalty_factor",
    "data.train_files",
    "data.val_files",
    "data.prompt_key",
    "data.max_prompt_length",
    "data.val_max_samples",
    "custom_reward_function.path",
    "custom_reward_function.name",
    "reward.custom_reward_function.path",
    "reward.custom_reward_function.name",
    "trainer.project_name",
    "trainer.experiment_name",
    "trainer.default_local_dir",
    "trainer.logger",
    "trainer.test_freq",
    "trainer.save_freq",
    "trainer.max_actor_ckpt_to_keep",
)
