"""Megatron-LM's flags on `octavo train`: which are taken, which are refused and why."""

import dataclasses
from typing import Any

from octavo.numerics.recipe import FORMAT_RECIPES


@dataclasses.dataclass(frozen=True)
class Flag:
    """A flag that is taken.

    Args:
        name: as it is written.
        kind: bool for a switch, else the type of its value.
        help: its meaning here.
        key: the configuration key that it sets; empty where only the groups below know.
        value: what a switch sets the key to.
        choices: the values allowed.
    """

    name: str
    kind: type
    help: str
    key: str = ""
    value: Any = True
    choices: tuple[str, ...] = ()


_IMPLS = ("local", "transformer_engine")
_KEPT = ("full", "selective")
_DECAYS = ("constant", "linear", "cosine")
FLAGS = (
    Flag("--fp8-format", str, "Train in FP8; all operands in E4M3, or gradients in E5M2.", choices=("e4m3", "hybrid")),
    Flag("--fp8-hybrid", bool, "Old name of --fp8-format hybrid."),
    Flag("--fp8-e4m3", bool, "Old name of --fp8-format e4m3."),
    Flag("--fp8-recipe", str, "With --fp8-format; Megatron's default is delayed.", choices=FORMAT_RECIPES),
    Flag("--fp8-margin", int, "Delayed scaling: powers of two kept free; Megatron's default is 0."),
    Flag("--fp8-amax-history-len", int, "Delayed scaling: steps remembered; Megatron's default is 1."),
    Flag("--fp8-amax-compute-algo", str, "Delayed scaling; most_recent by default.", choices=("most_recent", "max")),
    Flag("--no-fp8-wgrad", bool, "The weights' gradient GEMM stays in bf16."),
    Flag("--transformer-impl", str, "local: no FP8 at all, as there; else octavo's own FP8 layers.", choices=_IMPLS),
    Flag("--first-last-layers-bf16", bool, "Leave the first and last layer in bf16 (not with delayed scaling)."),
    Flag("--num-layers-at-start-in-bf16", int, "With --first-last-layers-bf16: how many; Megatron's default is 1."),
    Flag("--num-layers-at-end-in-bf16", int, "With --first-last-layers-bf16: how many; Megatron's default is 1."),
    Flag("--bf16", bool, "Parameters and activations in bf16; FP8 is for --fp8-format.", "precision.dtype", "bf16"),
    Flag("--use-precision-aware-optimizer", bool, "Moments and masters in the formats that the next four name."),
    Flag("--main-grads-dtype", str, "fp32 alone: gradients are summed in fp32.", choices=("fp32", "bf16")),
    Flag("--main-params-dtype", str, "fp32 alone: master weights.", choices=("fp32", "fp16")),
    Flag("--exp-avg-dtype", str, "First moments; as --exp-avg-sq-dtype.", choices=("fp32", "fp16", "bf16", "fp8")),
    Flag("--exp-avg-sq-dtype", str, "Second moments; as --exp-avg-dtype.", choices=("fp32", "fp16", "bf16", "fp8")),
    Flag("--lr", float, "Peak learning rate.", "optimizer.lr"),
    Flag("--min-lr", float, "Last learning rate."),
    Flag("--lr-warmup-iters", int, "Steps of linear warm-up.", "schedule.warmup_steps"),
    Flag("--lr-decay-style", str, "After the warm-up, up to the last step.", "schedule.kind", choices=_DECAYS),
    Flag("--weight-decay", float, "AdamW's, on matrices.", "optimizer.weight_decay"),
    Flag("--adam-beta1", float, "First moment's decay.", "optimizer.beta1"),
    Flag("--adam-beta2", float, "Second moment's decay.", "optimizer.beta2"),
    Flag("--adam-eps", float, "AdamW's epsilon.", "optimizer.eps"),
    Flag("--clip-grad", float, "Largest gradient norm; 0 for none.", "optimizer.max_grad_norm"),
    Flag("--train-iters", int, "Optimizer steps.", "run.steps"),
    Flag("--micro-batch-size", int, "Sequences in a forward pass.", "data.micro_batch_size"),
    Flag("--global-batch-size", int, "Sequences in an optimizer step.", "data.batch_size"),
    Flag("--seq-length", int, "Tokens in a sequence.", "data.seq_len"),
    Flag("--data-path", str, "The text.", "data.path"),
    Flag("--tokenizer-model", str, "A tokenizer.json or its directory.", "data.tokenizer"),
    Flag("--vocab-size", int, "Of the tokenizer that is trained on the spot.", "data.vocab_size"),
    Flag("--num-layers", int, "Decoder layers.", "model.num_hidden_layers"),
    Flag("--hidden-size", int, "Width.", "model.hidden_size"),
    Flag("--ffn-hidden-size", int, "Width of the MLP's gate and of its up half.", "model.intermediate_size"),
    Flag("--num-attention-heads", int, "Query heads.", "model.num_attention_heads"),
    Flag("--group-query-attention", bool, "As many KV heads as --num-query-groups; Megatron's default is 1."),
    Flag("--num-query-groups", int, "KV heads.", "model.num_key_value_heads"),
    Flag("--kv-channels", int, "Width of a head.", "model.head_dim"),
    Flag("--num-experts", int, "Experts of every layer, of family qwen3_moe.", "model.num_experts"),
    Flag("--moe-router-topk", int, "Experts that a token meets; Megatron's default is 2.", "model.num_experts_per_tok"),
    Flag("--moe-ffn-hidden-size", int, "Width of an expert; --ffn-hidden-size's if left out, as in Megatron."),
    Flag("--moe-aux-loss-coeff", float, "Of the load-balancing loss.", "model.router_aux_loss_coef"),
    Flag("--moe-z-loss-coeff", float, "Of the router's z-loss.", "model.router_z_loss_coef"),
    Flag("--moe-grouped-gemm", bool, "With --num-experts: experts always run as grouped GEMMs here."),
    Flag("--rotary-base", float, "RoPE's base.", "model.rope_theta"),
    Flag("--max-position-embeddings", int, "Longest text.", "model.max_position_embeddings"),
    Flag("--untie-embeddings-and-output-weights", bool, "An lm_head of its own.", "model.tie_word_embeddings", False),
    Flag("--pretrained-checkpoint", str, "Weights, architecture and tokenizer to start from.", "model.path"),
    Flag("--seed", int, "Of weights and data order.", "run.seed"),
    Flag("--save", str, "The run's directory; a run that is there goes on.", "run.dir"),
    Flag("--load", str, "The run's directory, as --save.", "run.dir"),
    Flag("--save-interval", int, "Steps between checkpoints.", "checkpoint.every"),
    Flag("--log-interval", int, "Steps between rows of metrics.", "metrics.log_every"),
    Flag("--eval-interval", int, "Steps between validations.", "metrics.eval_every"),
    Flag("--eval-iters", int, "Batches in a validation."),
    Flag("--tensor-model-parallel-size", int, "Ranks that cut each linear.", "parallel.tensor_parallel_degree"),
    Flag("--sequence-parallel", bool, "They cut the tokens between linears too.", "parallel.sequence_parallel"),
    Flag("--recompute-granularity", str, "full: keep a layer's input; selective: recompute nothing.", choices=_KEPT),
    Flag("--recompute-activations", bool, "Old name of --recompute-granularity selective."),
    Flag("--recompute-method", str, "With full: every layer, or the first ones.", choices=("uniform", "block")),
    Flag("--recompute-num-layers", int, "With block: how many layers; with uniform: 1."),
)

_NO_RANKS = "octavo train does not spread that over ranks"
_ALWAYS = "octavo's decoder is always so; leave it out"
_NO_EXPERT_PADDING = "experts' rows are padded as their recipe's GEMMs need it; leave it out"
_NO_CAPACITY = "every token reaches its experts: there is no capacity"
_ROUTER = "the router is a softmax over all experts, whose chosen probabilities are divided by their sum"
# flag -> (whether it takes a value, why it is refused)
REFUSED: dict[str, tuple[bool, str]] = {
    "--fp16": (False, "octavo trains in bf16, which needs no loss scale; use --bf16, or octavo.amp for fp16 models"),
    "--loss-scale": (True, "bf16 and FP8 recipes need no loss scale"),
    "--fp8-param-gather": (False, "set parallel.all_gather_dtype = 'fp8' in the config file"),
    "--tp-only-amax-red": (False, "amaxes of delayed scaling are those of all ranks; leave it out"),
    "--fp8-dot-product-attention": (False, "attention is trained in bf16: no library has its FP8 backward on Hopper"),
    "--fp8-multi-head-attention": (False, "attention is trained in bf16: no library has its FP8 backward on Hopper"),
    "--fp8-output-proj": (False, "lm_head stays in high precision, so that sampled logprobs keep their bits"),
    "--te-precision-config-file": (True, "give precision.modules in the config file instead"),
    "--fp8-quantizer-factory": (True, "quantizers are octavo.Scaling's; choose --fp8-recipe"),
    "--keep-fp8-transpose-cache": (False, "both layouts of a weight are kept for a weight version anyway"),
    "--reuse-grad-buf-for-mxfp8-param-ag": (False, "no MXFP8 codes are gathered; leave it out"),
    "--moe-router-padding-for-fp8": (False, _NO_EXPERT_PADDING),
    "--moe-router-padding-for-quantization": (False, _NO_EXPERT_PADDING),
    "--moe-shared-expert-intermediate-size": (True, "octavo's decoder has no shared experts"),
    "--moe-layer-freq": (True, "every layer of a new model has experts; leave it out"),
    "--moe-expert-capacity-factor": (True, _NO_CAPACITY),
    "--moe-token-drop-policy": (True, _NO_CAPACITY),
    "--moe-pad-expert-input-to-capacity": (False, _NO_CAPACITY),
    "--moe-router-pre-softmax": (False, _ROUTER),
    "--moe-router-score-function": (True, _ROUTER),
    "--moe-router-topk-scaling-factor": (True, _ROUTER),
    "--moe-router-num-groups": (True, _ROUTER),
    "--moe-router-group-topk": (True, _ROUTER),
    "--moe-router-enable-expert-bias": (False, _ROUTER),
    "--moe-router-dtype": (True, "the router's logits are fp32; leave it out"),
    "--moe-router-load-balancing-type": (True, "the loss is Megatron's aux_loss; leave it out"),
    "--moe-input-jitter-eps": (True, "the router's input has no noise; leave it out"),
    "--moe-token-dispatcher-type": (True, "experts are whole on every rank: no tokens are sent"),
    "--moe-permute-fusion": (False, "tokens are always sorted by one kernel; leave it out"),
    "--fp4-format": (True, "set precision.recipe = 'nvfp4' in the config file: it is emulated"),
    "--fp4-recipe": (True, "set precision.recipe = 'nvfp4' in the config file: it is emulated"),
    "--use-distributed-optimizer": (False, "FSDP2 shards: set parallel.data_parallel_shard_degree in the config file"),
    "--optimizer": (True, "the optimizer is AdamW"),
    "--lr-decay-iters": (True, "the decay always ends at the last step, --train-iters"),
    "--lr-warmup-fraction": (True, "give --lr-warmup-iters"),
    "--train-samples": (True, "give --train-iters"),
    "--finetune": (False, "give --pretrained-checkpoint: it starts a new run from a checkpoint's weights"),
    "--no-load-optim": (False, "give --pretrained-checkpoint: it starts a new run from a checkpoint's weights"),
    "--attention-dropout": (True, "octavo's decoder has no dropout; leave it out"),
    "--hidden-dropout": (True, "octavo's decoder has no dropout; leave it out"),
    "--swiglu": (False, _ALWAYS),
    "--normalization": (True, "every norm is RMSNorm; leave it out"),
    "--position-embedding-type": (True, "positions are rotary; leave it out"),
    "--use-rotary-position-embeddings": (False, _ALWAYS),
    "--disable-bias-linear": (False, _ALWAYS),
    "--use-mcore-models": (False, "there is one model definition; leave it out"),
    "--use-flash-attn": (False, "torch chooses the attention kernel; leave it out"),
    "--init-method-std": (True, "initial weights have a standard deviation of 0.02; leave it out"),
    "--split": (True, "give data.validation_fraction in the config file"),
}
# flags that may say 1 and nothing else -> why
ONLY_ONE = {
    "--pipeline-model-parallel-size": _NO_RANKS,
    "--context-parallel-size": _NO_RANKS,
    "--expert-model-parallel-size": _NO_RANKS,
    "--expert-tensor-parallel-size": _NO_RANKS,
    "--fp8-interval": "scales are updated at every step (Megatron ignores the flag)",
}
