"""What octavo ignores of verl's configuration, whatever its value, and counts in a note: sections that it does not run.

No result here depends on them. Keys among them on which one would are in verl_refused.py: of both tables the longest
name that fits a key counts.
"""

from octavo.integrations.config.verl_keys import ACTOR, MODEL, OPTIM, OVERLONG, REF, ROLLOUT, TRANSFORMER

_MEGATRON = """recompute_ attention_backend gradient_accumulation_fusion apply_rope_fusion masked_softmax_fusion
bias_activation_fusion bias_dropout_fusion persist_layer_norm moe_permute_fusion moe_grouped_gemm moe_enable_deepep
moe_token_dispatcher_type moe_shared_expert_overlap deallocate_pipeline_outputs account_for_ num_layers_in_"""
# section -> why, and which keys of it, each with all below it (a trailing _ stands for any ending); none named: all
_SECTIONS: dict[str, tuple[str, str]] = {
    "critic": ("octavo has no critic", ""),
    **dict.fromkeys(("transfer_queue", "ray_kwargs"), ("octavo rl runs in one process", "")),
    "global_profiler": ("verl's profilers", ""),
    "hydra": ("Hydra's own", ""),
    **dict.fromkeys(("distillation", "skip", "sandbox_fusion", "reward_model"), ("it is off", "")),
    **dict.fromkeys(OVERLONG, ("verl's log", "log")),
    "reward_manager": ("custom ones are off", "module.name"),
    "reward": ("reward models are off", "num_workers reward_model sandbox_fusion reward_manager.module.name"),
    "actor_rollout_ref": ("how verl places its workers", "hybrid_engine nccl_timeout"),
    REF: ("the reference policy runs as the trainer does", ""),
    ACTOR: (
        "how verl shards, packs and computes, and what is off",
        """strategy fsdp_config megatron veomni torchtitan automodel ulysses_sequence_parallel_size load_weight
        checkpoint profiler use_dynamic_bsz ppo_max_token_len_per_gpu ppo_micro_batch_size use_remove_padding
        use_prefix_grouper use_fused_kernels use_torch_compile pad_to_length entropy_from_logits_
        entropy_checkpointing shuffle calculate_entropy calculate_sum_pi_squared sum_pi_squared_checkpointing
        freeze_vision_tower qat tau_pos tau_neg policy_loss.clip_cov_ policy_loss.kl_cov_ratio
        policy_loss.ppo_kl_coef policy_loss.dro_beta""",
    ),
    **dict.fromkeys((TRANSFORMER, TRANSFORMER.replace(ACTOR, REF)), ("how Megatron computes", _MEGATRON)),
    OPTIM: (
        "schedules and optimizers that are off",
        """lr_decay_steps min_lr min_lr_ratio num_cycles zero_indexed_step lr_wsd_ total_training_steps muon_
        use_checkpoint_opt_param_scheduler use_precision_aware_optimizer use_layer_wise_distributed_optimizer""",
    ),
    f"{OPTIM}.override_optimizer_config": (
        "how Megatron stores",
        """optimizer_cpu_offload optimizer_offload_fraction overlap_cpu_optimizer_d2h_h2d
        use_precision_aware_optimizer""",
    ),
    f"{ROLLOUT}.tensor_model_parallel_size": (
        "octavo cuts the sampler among ranks of torchrun where rollout.tensor_parallel_size says so",
        "",
    ),
    ROLLOUT: (
        "octavo's own engine samples, and what is off",
        """name mode load_format layer_name_map layered_summon skip_tokenizer_init cast_to_rollout_dtype
        gpu_memory_utilization enforce_eager cudagraph_capture_sizes free_cache_engine enable_sleep_mode
        multi_stage_wake_up full_determinism max_num_batched_tokens max_model_len enable_chunked_prefill
        enable_prefix_caching scheduling_policy disable_log_stats moe_load_balance_metrics_interval
        data_parallel_size expert_parallel_size pipeline_model_parallel_size nnodes n_gpus_per_node
        disaggregation checkpoint_engine agent.num_workers agent.custom_async_server.name calculate_log_probs
        log_prob_ trace prometheus profiler multi_turn mtp qat skip_dump_dir
        val_kwargs.top_k val_kwargs.top_p""",
    ),
    MODEL: (
        "how verl loads and computes, and what is off",
        """use_shm trust_remote_code use_remove_padding use_liger use_fused_kernels fused_kernel_options tiled_mlp
        enable_gradient_checkpointing enable_activation_offload override_config.attn_implementation
        lora lora_alpha target_modules exclude_modules mtp""",
    ),
    "algorithm": (
        "advantages that are off, verl's pace and metrics",
        "gamma lam kl_ctrl pf_ppo filter_groups.max_inflight_gen_batches rollout_correction.debug_rollout_actor_probs",
    ),
    "data": (
        "how verl loads, and images and sound",
        """use_shm val_batch_size dataloader_num_workers filter_overlong_prompts_workers validation_shuffle
        return_raw_input_ids return_raw_chat return_full_prompt trust_remote_code custom_cls.name sampler.class_name
        datagen.name image_patch_size image_key audio_key video_key mm_processor_kwargs return_multi_modal_inputs""",
    ),
    "trainer": (
        "how verl runs, and what it writes",
        """balance_batch esi_redundant_time default_hdfs_dir del_local_ckpt_after_load max_critic_ckpt_to_keep
        ray_wait_register_center_timeout use_v1 use_legacy_worker_impl v1 log_val_generations rollout_data_dir
        validation_data_dir val_before_train""",
    ),
}
# name -> (its section, why)
IGNORED = {
    ".".join(filter(None, (section, name))): (section, why)
    for section, (why, names) in _SECTIONS.items()
    for name in names.split() or [""]
}
