"""Keys of verl's that octavo takes at the values at which it does the same and refuses at others; and what it says of
keys that it does not know.
"""

from typing import Any

from octavo.integrations.config.verl_keys import ACTOR, CORRECTION, MODEL, OPTIM, REF, ROLLOUT, TRANSFORMER, VERIFIERS

_OFF: tuple[Any, ...] = (False, None)
_UNSET: tuple[Any, ...] = (None, {})
_ENGINES = " ".join(
    f"{of}.{name}" for of in (ACTOR, REF) for name in ("fsdp_config", "megatron", "veomni", "torchtitan")
)
_OF_REF = TRANSFORMER.replace(ACTOR, REF)
_ADAMW = "octavo has AdamW with linear warm-up and a constant rate; leave it out"
_DATA = "octavo reads questions and answers from one file as they are; prepare the file, and leave the key out"
_DTYPE = "octavo computes in bf16 and FP8; leave it out"
_EXACT = "exact logprobs need the whole distribution; leave it out, or give the value that turns it off"
_FP32 = "gradients, masters and moments are fp32; leave it out"
_FRESH = "every response is sampled, and every one is waited for; leave it out"
_GREEDY = "evaluation is greedy, one answer a question; leave it out"
_KV = "octavo's FP8 cache has a scale a token and head, which needs no calibration; leave it out"
_KEYWORDS = "these are a function's keyword arguments, one level deep; give custom_reward_function.path too"
_LAYERS = "octavo's own layers compute this; leave it out"
_LORA = "octavo trains all weights; leave it out"
_RESUME = "a run goes on from its last checkpoint; leave it out, or give octavo's --no-resume to start from nothing"
_REWARD = "octavo has no reward models; give a verifier as custom_reward_function.path and .name"
_ROUTES = "routes are the sampler's, and go to no file; leave it out"
_TASK = "tasks with tools and of several turns are octavo's: set task.name = 'callable' in a config"
_WHOLE = "octavo reads the checkpoint as it is and trains all of it; leave it out"
_PACE = "octavo rl runs without it; leave it out, or look for the key in octavo's own config"
# sections, keys in them, the values taken, why another one or any key below is refused and what to do
_ROWS: tuple[tuple[str, str, tuple[Any, ...], str], ...] = (
    # numerics
    (f"{ROLLOUT} {_ENGINES}", "dtype", ("bfloat16",), _DTYPE),
    (f"{ACTOR}.fsdp_config", "model_dtype", ("fp32",), _FP32),
    (f"{ACTOR}.fsdp_config", "mixed_precision", _UNSET, _DTYPE),
    (f"{ACTOR}.megatron.override_ddp_config", "grad_reduce_in_fp32", (True,), _FP32),
    (OPTIM, "main_grads_dtype main_params_dtype exp_avg_dtype exp_avg_sq_dtype", ("fp32",), _FP32),
    (f"{ACTOR} {ROLLOUT} {_ENGINES}", "qat.enable", _OFF, "octavo trains in FP8, not in NVFP4; leave it out"),
    (f"{TRANSFORMER} {_OF_REF}", "moe_router_dtype", _UNSET, "routers run in bf16 with fp32 output; leave it out"),
    (ROLLOUT, "quantization_config_file", _UNSET, "octavo's own recipes quantize; give quantization=fp8 instead"),
    (f"{ROLLOUT} {ROLLOUT}.engine_kwargs.vllm", "calculate_kv_scales", _OFF, _KV),
    # the model
    (f"{ACTOR}.megatron {REF}.megatron", "override_mcore_model_config override_transformer_config", _UNSET, _LAYERS),
    (MODEL, "hf_config_path tokenizer_path custom_chat_template external_lib", _UNSET, _WHOLE),
    (MODEL, "override_config override_config.model_config", _UNSET, _WHOLE),
    (MODEL, "override_config.moe_config.freeze_moe_router", _OFF, _WHOLE),
    (MODEL, "lora_rank lora.rank", (0, None), _LORA),
    (MODEL, "lora_adapter_path lora.adapter_path", _UNSET, _LORA),
    (f"{MODEL} {ROLLOUT}", "mtp.enable", _OFF, "octavo predicts one token at a time; leave it out"),
    (REF, "model", _UNSET, "the reference policy is the one at the start; leave it out"),
    # learning
    (ACTOR, "ppo_epochs", (1,), "a rollout is learned from once; give 1, and raise trainer.minibatches"),
    (ACTOR, "rollout_n", (1,), f"it must be {ROLLOUT}.n"),
    (ACTOR, "loss_scale_factor", _UNSET, "seq-mean-token-sum-norm divides by data.max_response_length; leave it out"),
    (OPTIM, "optimizer", ("AdamW", "adamw", "adam"), _ADAMW),
    (OPTIM, "optimizer_impl", ("torch.optim",), _ADAMW),
    (OPTIM, "override_optimizer_config", _UNSET, _ADAMW),
    (OPTIM, "lr_decay_style lr_scheduler_type warmup_style weight_decay_incr_style", ("constant", None), _ADAMW),
    (OPTIM, "lr_warmup_init", (0,), _ADAMW),
    (OPTIM, "lr_warmup_steps_ratio", (0,), f"give {OPTIM}.lr_warmup_steps"),
    ("algorithm", "use_pf_ppo", _OFF, "octavo's algorithms have nothing like it; leave it out"),
    (CORRECTION, "bypass_mode", _OFF, "octavo always scores with the trainer; leave it out"),
    (CORRECTION, "loss_type", ("ppo_clip",), f"choose {ACTOR}.policy_loss.loss_mode"),
    ("distillation", "enabled", _OFF, "octavo rl has no distillation; leave it out"),
    # sampling
    (f"{ACTOR} {_ENGINES}", "router_replay.record_file router_replay.replay_file", _UNSET, _ROUTES),
    (f"{REF} {REF}.megatron {ACTOR}.veomni {REF}.veomni", "router_replay.mode", ("disabled",), _ROUTES),
    (ACTOR, "data_loader_seed", (42,), "one seed makes everything; give data.seed"),
    (ROLLOUT, "seed", (42,), "one seed makes everything; give data.seed"),
    (ROLLOUT, "top_k", (-1,), _EXACT),
    (ROLLOUT, "top_p", (1,), _EXACT),
    (ROLLOUT, "logprobs_mode", ("processed_logprobs",), _EXACT),
    (ROLLOUT, "do_sample", (True,), "rollouts are sampled; leave it out"),
    (ROLLOUT, "ignore_eos", _OFF, "a response ends at the end token; leave it out"),
    (ROLLOUT, "over_sample_rate", (0,), _FRESH),
    (ROLLOUT, "skip_rollout", _OFF, _FRESH),
    ("skip", "rollout.enable rollout_tq.enable async_rollout.enable", _OFF, _FRESH),
    (ROLLOUT, "engine_kwargs", _UNSET, "this is another engine's argument; leave it out"),
    (f"{ROLLOUT}.engine_kwargs", "vllm sglang trtllm", _UNSET, "this is another engine's argument; leave it out"),
    (ROLLOUT, "prompt_length", (512,), "give data.max_prompt_length"),
    (ROLLOUT, "val_kwargs.do_sample", _OFF, _GREEDY),
    (ROLLOUT, "val_kwargs.temperature", (0,), _GREEDY),
    (ROLLOUT, "val_kwargs.n", (1,), _GREEDY),
    (ROLLOUT, "multi_turn.enable", _OFF, _TASK),
    (ROLLOUT, "agent.default_agent_loop", ("single_turn_agent",), _TASK),
    (ROLLOUT, "agent.agent_loop_config_path agent.custom_async_server.path", _UNSET, _TASK),
    ("async_training", "require_batches", (1,), "octavo waits for one batch; give 1, or leave it out"),
    ("trainer", "v1.trainer_mode", ("sync",), "give async_training.staleness_threshold for an asynchronous run"),
    # data and rewards
    ("data", "gen_batch_size", _UNSET, "each further batch has data.train_batch_size prompts; leave it out"),
    ("data", "tokenizer", _UNSET, _WHOLE),
    ("data", "train_max_samples", (-1,), _DATA),
    ("data", "reward_fn_key", ("data_source",), _DATA),
    ("data", "shuffle", (True,), _DATA),
    ("data", "apply_chat_template_kwargs custom_cls.path sampler.class_path datagen.path", _UNSET, _DATA),
    ("data", "tool_config_path function_tool_path", _UNSET, _TASK),
    ("data", "truncation", ("error",), "prompts are never cut; give error, and data.filter_overlong_prompts=true"),
    ("trainer", "v1.sampler.custom_sampler.path", _UNSET, _DATA),
    ("reward_manager reward.reward_manager", "source", ("register",), _REWARD),
    ("reward_manager reward.reward_manager", "name", ("naive", "dapo"), _REWARD),
    ("reward_manager reward.reward_manager", "module.path", _UNSET, _REWARD),
    ("reward_model", "reward_manager", ("naive", "dapo", None), _REWARD),
    ("reward_model", "reward_loop_class_name reward_loop_module_path", _UNSET, _REWARD),
    ("reward_model reward.reward_model", "enable", _OFF, _REWARD),
    ("sandbox_fusion reward.sandbox_fusion", "url", _UNSET, _REWARD),
    ("reward_model reward", "reward_kwargs", _UNSET, _REWARD),
    (" ".join(VERIFIERS), "reward_kwargs", _UNSET, _KEYWORDS),
    ("reward_model reward", "reward_kwargs.max_resp_len", _UNSET, "it must be data.max_response_length"),
    # the run
    ("trainer", "nnodes n_gpus_per_node", (1,), "torchrun starts the ranks of octavo rl; give 1, or leave it out"),
    ("trainer", "resume_mode", ("auto",), _RESUME),
    ("trainer", "resume_from_path", _UNSET, _RESUME),
    ("trainer", "val_only", _OFF, _PACE),
    ("trainer", "critic_warmup", (0,), "the policy learns from the first step; give 0, or leave it out"),
)  # fmt: skip
# name -> (the values taken, why another is refused)
REFUSED = {
    f"{section}.{name}": (values, why)
    for sections, names, values, why in _ROWS
    for section in sections.split()
    for name in names.split()
}
# name -> another one, whose value it may have too
SAME_AS = {
    f"{ACTOR}.rollout_n": f"{ROLLOUT}.n",
    f"{ACTOR}.loss_scale_factor": "data.max_response_length",
    f"{ACTOR}.data_loader_seed": "data.seed",
    f"{ROLLOUT}.seed": "data.seed",
    f"{ROLLOUT}.prompt_length": "data.max_prompt_length",
    f"{MODEL}.hf_config_path": f"{MODEL}.path",
    f"{MODEL}.tokenizer_path": f"{MODEL}.path",
    f"{_OF_REF}.fp8": f"{TRANSFORMER}.fp8",
    f"{_OF_REF}.fp8_recipe": f"{TRANSFORMER}.fp8_recipe",
    "data.gen_batch_size": "data.train_batch_size",
    "reward_model.reward_kwargs.max_resp_len": "data.max_response_length",
    "reward.reward_kwargs.max_resp_len": "data.max_response_length",
}
# beginning of an unknown key -> what to do
REMEDIES = {
    "algorithm.": "octavo's algorithms have nothing like it; leave it out",
    f"{ACTOR}.": "octavo's trainer has nothing like it; leave it out",
    f"{ACTOR}.policy_loss.": "this belongs to a loss that octavo does not have; leave it out",
    f"{OPTIM}.": _ADAMW,
    f"{ROLLOUT}.": "octavo's engine has nothing like it; leave it out",
    f"{ROLLOUT}.val_kwargs.": _GREEDY,
    f"{MODEL}.": _WHOLE,
    "async_training.": "octavo's asynchronous mode has max_policy_lag and partial_rollouts alone; leave it out",
    "data.": _DATA,
    "reward": _REWARD,
    "trainer.": _PACE,
    "defaults": "only ppo_trainer, ppo_megatron_trainer and _self_ are known; give what --cfg job prints instead",
    **{name: why for name, (_, why) in REFUSED.items()},
}
