"""verl's keys that mean one of octavo's, each on its own; what several mean together is in verl_run.py, verl_loss.py,
verl_routes.py and verl_async.py.

Names and defaults are those of verl's own trainer configuration (0.7 and its main branch of late 2026).
"""

import dataclasses
from typing import Any

ACTOR = "actor_rollout_ref.actor"
ROLLOUT = "actor_rollout_ref.rollout"
MODEL = "actor_rollout_ref.model"
REF = "actor_rollout_ref.ref"
OPTIM = f"{ACTOR}.optim"
CORRECTION = "algorithm.rollout_correction"
TRANSFORMER = f"{ACTOR}.megatron.override_transformer_config"
ROUTES = f"{ROLLOUT}.enable_rollout_routing_replay"
REPLAYS = (f"{ACTOR}.router_replay.mode", f"{ACTOR}.megatron.router_replay.mode")
STALENESS = "async_training.staleness_threshold"
PARTIAL = "async_training.partial_rollout"
SYNC = "async_training.trigger_parameter_sync_step"
# by its names of now, of before, and of the first configs
OVERLONG = (
    "reward.reward_kwargs.overlong_buffer_cfg",
    "reward_model.reward_kwargs.overlong_buffer_cfg",
    "reward_model.overlong_buffer",
)
VERIFIERS = ("reward.custom_reward_function", "custom_reward_function")  # now, and before


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
_AGGREGATIONS = ("token-mean", "seq-mean-token-mean", "seq-mean-token-sum", "seq-mean-token-sum-norm")

KEYS = (
    Key("data.train_batch_size", 1024, int, "rollout.prompts_per_step"),
    Key("data.max_response_length", 512, int, "rollout.max_tokens"),
    Key(f"{ROLLOUT}.response_length", UNSET, int, "rollout.max_tokens"),
    Key("data.seed", UNSET, int, "run.seed"),
    Key(f"{ROLLOUT}.temperature", 1.0, float, "rollout.temperature"),
    Key(f"{ROLLOUT}.max_num_seqs", 256, int, "rollout.max_num_seqs"),
    Key(f"{ACTOR}.entropy_coeff", 0.0, float, "algorithm.entropy_coef"),
    Key(f"{ACTOR}.loss_agg_mode", "token-mean", str, "algorithm.loss_aggregation", {it: it for it in _AGGREGATIONS}),
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

# section -> keys in it that are read together with others
_GROUPED = {
    MODEL: "path",
    ROLLOUT: """n quantization engine_kwargs.vllm.kv_cache_dtype engine_kwargs.sglang.kv_cache_dtype
    enable_rollout_routing_replay""",
    TRANSFORMER: "fp8 fp8_recipe",
    OPTIM: "betas lr_warmup_steps override_optimizer_config.fp8_recipe",
    ACTOR: """router_replay.mode megatron.router_replay.mode ppo_mini_batch_size clip_ratio clip_ratio_low
    clip_ratio_high clip_ratio_c policy_loss.loss_mode use_kl_loss kl_loss_coef kl_loss_type tis_imp_ratio_cap""",
    "async_training": "staleness_threshold partial_rollout trigger_parameter_sync_step",
    "algorithm": """adv_estimator use_kl_in_reward kl_penalty kl_ctrl.kl_coef filter_groups.metric
    filter_groups.max_num_gen_batches""",
    CORRECTION: """rollout_is rollout_is_threshold rollout_is_batch_normalize rollout_rs rollout_rs_threshold
    rollout_rs_threshold_lower rollout_token_veto_threshold""",
    **dict.fromkeys(OVERLONG, "enable len penalty_factor"),
    **dict.fromkeys(VERIFIERS, "path name"),
    "data": "train_files val_files prompt_key max_prompt_length filter_overlong_prompts val_max_samples",
    "trainer": """total_epochs project_name experiment_name default_local_dir logger test_freq save_freq
    max_actor_ckpt_to_keep""",
}
GROUPED = tuple(f"{section}.{name}" for section, names in _GROUPED.items() for name in names.split())
