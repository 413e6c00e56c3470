"""What to do about a key of verl's that octavo does not honour, by the beginning of its name."""

from octavo.integrations.config.verl_keys import ACTOR, MODEL, OPTIM, ROLLOUT, TRANSFORMER

_MEGATRON = f"{ACTOR}.megatron"
_ONE_GPU = "octavo rl runs on one GPU; give 1, or leave it out"
_RAY = "octavo rl runs in one process, without Ray; leave it out"
_MEMORY = "octavo keeps weights, gradients and optimizer on the GPU; leave it out"
_EXACT = "exact logprobs need the whole distribution; leave it out, or give the value that turns it off"
_DATA = "octavo reads questions and answers from one file as they are; prepare the file, and leave the key out"
_REWARD = "octavo has no reward models; give a verifier as custom_reward_function.path and .name"
_KV = "octavo's FP8 cache has a scale a token and head, which needs no calibration; leave it out"
# beginning of a key -> what to do where its value is none of those above
REMEDIES: dict[str, str] = {
    f"{ACTOR}.fsdp_config.": _MEMORY,
    "actor_rollout_ref.ref.": "the reference policy runs as the trainer does; leave it out",
    f"{_MEGATRON}.": "octavo's own trainer runs on one GPU; leave it out",
    f"{_MEGATRON}.qat.": "octavo trains in FP8, not in NVFP4; leave it out",
    f"{TRANSFORMER}.": "octavo's own layers compute this; leave it out",
    f"{OPTIM}.muon": "octavo has AdamW; leave it out",
    f"{TRANSFORMER}.moe_router_dtype": "routers run in bf16 with fp32 output on both sides; leave it out",
    f"{ACTOR}.ppo_epochs": "a rollout is learned from once; give 1, and raise trainer.minibatches for more updates",
    f"{ACTOR}.ppo_micro_batch_size": "give actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu",
    f"{ACTOR}.use_dynamic_bsz": "micro-batches are counted in sequences: give ppo_micro_batch_size_per_gpu",
    f"{ACTOR}.ppo_max_token_len_per_gpu": "micro-batches are counted in sequences: give ppo_micro_batch_size_per_gpu",
    f"{ACTOR}.ulysses_sequence_parallel_size": _ONE_GPU,
    f"{ACTOR}.shuffle": "sequences are always shuffled between minibatches, by run.seed; leave it out",
    f"{ACTOR}.policy_loss.": "this belongs to a loss that octavo does not have; leave it out",
    f"{ACTOR}.router_replay.": "routes stay in memory, and go to no file; leave it out",
    f"{_MEGATRON}.router_replay.": "routes stay in memory, and go to no file; leave it out",
    f"{ACTOR}.": "octavo's trainer has nothing like it; leave it out",
    f"{OPTIM}.": "octavo has AdamW with linear warm-up and a constant rate; leave it out",
    f"{OPTIM}.lr_warmup_steps_ratio": "give actor_rollout_ref.actor.optim.lr_warmup_steps",
    f"{ROLLOUT}.": "octavo's engine has nothing like it; leave it out",
    f"{ROLLOUT}.name": "octavo's own engine samples in this process; give vllm or sglang, or leave it out. For a "
    "server of theirs set octavo's [engine]",
    f"{ROLLOUT}.top_k": _EXACT,
    f"{ROLLOUT}.top_p": _EXACT,
    f"{ROLLOUT}.do_sample": "rollouts are sampled; leave it out",
    f"{ROLLOUT}.tensor_model_parallel_size": _ONE_GPU,
    f"{ROLLOUT}.data_parallel_size": _ONE_GPU,
    f"{ROLLOUT}.expert_parallel_size": _ONE_GPU,
    f"{ROLLOUT}.pipeline_model_parallel_size": _ONE_GPU,
    f"{ROLLOUT}.gpu_memory_utilization": "the engine sizes its own cache; leave it out",
    f"{ROLLOUT}.log_prob_": "scoring uses the trainer's micro-batches; give ppo_micro_batch_size_per_gpu",
    f"{ROLLOUT}.val_kwargs.": "evaluation is greedy, one answer a question; leave it out",
    f"{ROLLOUT}.quantization_config_file": "octavo's own recipes quantize; leave it out, and give quantization=fp8",
    f"{ROLLOUT}.engine_kwargs.": "this is another engine's argument; leave it out",
    f"{ROLLOUT}.engine_kwargs.vllm.calculate_kv_scales": _KV,
    f"{ROLLOUT}.calculate_kv_scales": _KV,
    f"{ROLLOUT}.seed": "one seed makes everything; give data.seed",
    f"{ROLLOUT}.full_determinism": "exact mode is octavo's way to it; leave it out",
    f"{ROLLOUT}.multi_turn.": "tasks of several turns are octavo's: set task.name = 'callable' in a recipe",
    f"{ROLLOUT}.checkpoint_engine.": "the engine shares the trainer's tensors; leave it out",
    f"{ROLLOUT}.prompt_length": "give data.max_prompt_length",
    f"{MODEL}.": "octavo reads the checkpoint as it is and trains all of it; leave it out",
    f"{MODEL}.lora_": "octavo trains all weights; leave it out",
    f"{MODEL}.use_remove_padding": "batches are always packed; leave it out",
    "algorithm.": "octavo's algorithms have nothing like it; leave it out",
    "algorithm.gamma": "an answer has one reward, which is not discounted; leave it out",
    "algorithm.lam": "there is no critic to smooth; leave it out",
    "algorithm.rollout_correction.bypass_mode": "octavo always scores with the trainer; leave it out",
    "algorithm.rollout_correction.loss_type": "choose actor_rollout_ref.actor.policy_loss.loss_mode",
    "data.": _DATA,
    "data.gen_batch_size": "each further batch has data.train_batch_size prompts; leave it out",
    f"{ACTOR}.loss_scale_factor": "seq-mean-token-sum-norm divides by data.max_response_length; leave it out",
    "reward_model.reward_kwargs.max_resp_len": "it must be data.max_response_length",
    "reward.reward_kwargs.max_resp_len": "it must be data.max_response_length",
    "data.truncation": "prompts are never cut; give truncation=error, and take long ones out of the file",
    "data.filter_overlong_prompts": "take long prompts out of the file; one that is too long stops the run",
    "data.tool_config_path": "tasks with tools are octavo's: set task.name = 'callable' in a recipe",
    "reward_model.": _REWARD,
    "reward.": _REWARD,
    "reward_manager.": _REWARD,
    "trainer.": "octavo rl runs without it; leave it out, or look for the key in octavo's own recipe",
    "trainer.total_epochs": "octavo counts steps: give trainer.total_training_steps, and leave this out",
    "trainer.nnodes": _ONE_GPU,
    "trainer.n_gpus_per_node": _ONE_GPU,
    "trainer.resume_mode": "a run goes on from its last checkpoint; give octavo's --no-resume to start anew",
    "trainer.critic_warmup": "there is no critic; leave it out",
    "async_training.": "octavo's asynchronous mode has max_policy_lag and partial_rollouts alone; leave it out",
    "ray_kwargs.": _RAY,
    "global_profiler.": "octavo has no such profiler; leave it out",
    "defaults": "only ppo_trainer, ppo_megatron_trainer and _self_ are known; print the job's whole configuration "
    "(--cfg job) and give that",
}
