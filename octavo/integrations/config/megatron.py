"""Megatron-LM's flags on `octavo train`: one table, flag -> configuration key, and what a few of them mean together.

A flag that means something here sets the same thing as there; others of Megatron's are refused by name with the reason,
and none is taken and ignored. Megatron's own defaults apply where a group of flags is turned on, and only there:
--fp8-format alone is delayed scaling with a history of one step ("most_recent"), which is neither TransformerEngine's
default (1024, "max") nor octavo's. A size, a rate or an interval that no flag names stays as the recipe file has it.
"""

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

from octavo.errors import ConfigError
from octavo.train.config import RecipeSection, TrainConfig

Given = Mapping[str, Any]  # flag -> value; a switch that is on has True
Changes = dict[str, Any]  # configuration key -> value; UNSET takes the file's away
UNSET = object()


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


FLAGS = (
    Flag("--fp8-format", str, "Train in FP8; all operands in E4M3, or gradients in E5M2.", choices=("e4m3", "hybrid")),
    Flag("--fp8-hybrid", bool, "Old name of --fp8-format hybrid."),
    Flag("--fp8-e4m3", bool, "Old name of --fp8-format e4m3."),
    Flag(
        "--fp8-recipe",
        str,
        "With --fp8-format; Megatron's default is delayed.",
        choices=("tensorwise", "delayed", "mxfp8", "blockwise", "rowwise"),
    ),
    Flag("--fp8-margin", int, "Delayed scaling: powers of two kept free; Megatron's default is 0."),
    Flag("--fp8-amax-history-len", int, "Delayed scaling: steps remembered; Megatron's default is 1."),
    Flag(
        "--fp8-amax-compute-algo",
        str,
        "Delayed scaling; Megatron's default is most_recent.",
        choices=("most_recent", "max"),
    ),
    Flag("--no-fp8-wgrad", bool, "The weights' gradient GEMM stays in bf16."),
    Flag(
        "--transformer-impl",
        str,
        "local: no FP8 at all, as there; transformer_engine: octavo's own FP8 layers.",
        choices=("local", "transformer_engine"),
    ),
    Flag(
        "--first-last-layers-bf16", bool, "Leave the first and the last layer unquantized (not with delayed scaling)."
    ),
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
    Flag(
        "--lr-decay-style",
        str,
        "What follows the warm-up, up to the last step.",
        "schedule.kind",
        choices=("constant", "linear", "cosine"),
    ),
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
    Flag(
        "--recompute-granularity",
        str,
        "full: keep a layer's input alone; selective: nothing, attention's matrices are never kept here.",
        choices=("full", "selective"),
    ),
    Flag("--recompute-activations", bool, "Old name of --recompute-granularity selective."),
    Flag("--recompute-method", str, "With full: every layer, or the first ones.", choices=("uniform", "block")),
    Flag("--recompute-num-layers", int, "With block: how many layers; with uniform: 1."),
)

_ONE_MACHINE = "octavo train runs one process"
_ALWAYS = "octavo's decoder is always so; leave it out"
_NO_EXPERT_PADDING = "experts' rows are padded as their recipe's GEMMs need it; leave it out"
_NO_CAPACITY = "every token reaches its experts: there is no capacity"
_ROUTER = "the router is a softmax over all experts, whose chosen probabilities are divided by their sum"
# flag -> (whether it takes a value, why it is refused)
REFUSED: dict[str, tuple[bool, str]] = {
    "--fp16": (False, "octavo trains in bf16, which needs no loss scale; use --bf16, or octavo.amp for fp16 models"),
    "--loss-scale": (True, "bf16 and FP8 recipes need no loss scale"),
    "--fp8-param-gather": (False, f"{_ONE_MACHINE}: no parameters are gathered"),
    "--tp-only-amax-red": (False, f"{_ONE_MACHINE}: no amax is reduced"),
    "--fp8-dot-product-attention": (False, "attention is trained in bf16: no library has its FP8 backward on Hopper"),
    "--fp8-multi-head-attention": (False, "attention is trained in bf16: no library has its FP8 backward on Hopper"),
    "--fp8-output-proj": (False, "lm_head stays in high precision, so that sampled logprobs keep their bits"),
    "--te-precision-config-file": (True, "give precision.modules in the recipe file instead"),
    "--fp8-quantizer-factory": (True, "quantizers are octavo.Scaling's; choose --fp8-recipe"),
    "--keep-fp8-transpose-cache": (False, "both layouts of a weight are kept for a weight version anyway"),
    "--reuse-grad-buf-for-mxfp8-param-ag": (False, f"{_ONE_MACHINE}: no parameters are gathered"),
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
    "--moe-token-dispatcher-type": (True, f"{_ONE_MACHINE}: no tokens are sent"),
    "--moe-permute-fusion": (False, "tokens are always sorted by one kernel; leave it out"),
    "--fp4-format": (True, "set precision.recipe = 'nvfp4' in the recipe file: it is emulated"),
    "--fp4-recipe": (True, "set precision.recipe = 'nvfp4' in the recipe file: it is emulated"),
    "--sequence-parallel": (False, _ONE_MACHINE),
    "--use-distributed-optimizer": (False, _ONE_MACHINE),
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
    "--split": (True, "give data.validation_fraction in the recipe file"),
}
# flags that may say 1 and nothing else -> why
ONLY_ONE = {
    "--tensor-model-parallel-size": _ONE_MACHINE,
    "--pipeline-model-parallel-size": _ONE_MACHINE,
    "--context-parallel-size": _ONE_MACHINE,
    "--expert-model-parallel-size": _ONE_MACHINE,
    "--expert-tensor-parallel-size": _ONE_MACHINE,
    "--fp8-interval": "scales are updated at every step (Megatron ignores the flag)",
}

_FORMAT_FLAGS = {"--fp8-format": "", "--fp8-hybrid": "hybrid", "--fp8-e4m3": "e4m3"}
_DELAYED_FLAGS = {"--fp8-margin": 0, "--fp8-amax-history-len": 1, "--fp8-amax-compute-algo": "most_recent"}
_DELAYED_KEYS = {flag: "precision." + flag.removeprefix("--fp8-").replace("-", "_") for flag in _DELAYED_FLAGS}
_LAYER_FLAGS = ("--num-layers-at-start-in-bf16", "--num-layers-at-end-in-bf16")
_EXPERT_FLAGS = ("--moe-router-topk", "--moe-ffn-hidden-size", "--moe-grouped-gemm")
_ROUTER_FLAGS = ("--moe-aux-loss-coeff", "--moe-z-loss-coeff")
_STATE_FLAGS = ("--main-grads-dtype", "--main-params-dtype", "--exp-avg-dtype", "--exp-avg-sq-dtype")


def apply_flags(config: TrainConfig, given: Given) -> tuple[TrainConfig, list[str]]:
    """A configuration with Megatron's flags over it.

    Args:
        config: the recipe file's, with --set.
        given: the flags of FLAGS, REFUSED and ONLY_ONE that were written, and their values.
    Returns:
        (the configuration, "key = value" of everything that the flags set).
    Raises:
        ConfigError: a flag that is refused, or that would have no effect, named with the reason; a value that does
            not fit.
    """
    _refuse(given)
    changes: Changes = {}
    for flag in FLAGS:
        if flag.name in given and flag.key:
            changes[flag.key] = flag.value if flag.kind is bool else given[flag.name]
    for group in _GROUPS:
        group(config, given, changes)
    notes = [f"{key} = {value!r}" for key, value in changes.items() if value is not UNSET]
    return _changed(config, changes), notes


def _refuse(given: Given) -> None:
    for name in given:
        if name in REFUSED:
            raise ConfigError(f"{name} is refused: {REFUSED[name][1]}")
        if name in ONLY_ONE and given[name] != 1:
            raise ConfigError(f"{name} {given[name]} is refused: {ONLY_ONE[name]}; give 1 or leave it out")


def _changed(config: TrainConfig, changes: Changes) -> TrainConfig:
    data = config.model_dump(exclude_unset=True)
    for key, value in changes.items():
        section, name = key.split(".")
        if value is UNSET:
            data.get(section, {}).pop(name, None)
        else:
            data.setdefault(section, {})[name] = value
    return TrainConfig(**data)


def _needs(given: Given, flags: tuple[str, ...], needed: str, because: str) -> None:
    """Refuse the first of some flags that is written without another one."""
    if lonely := next((flag for flag in flags if flag in given), None):
        raise ConfigError(f"{lonely} has no effect without {needed}: {because}")


def _fp8(config: TrainConfig, given: Given, changes: Changes) -> None:
    formats = {
        flag: given[flag] if flag == "--fp8-format" else name for flag, name in _FORMAT_FLAGS.items() if flag in given
    }
    if not formats:
        because = (
            "Megatron trains without FP8 then; add --fp8-format hybrid, or set precision.recipe in the recipe file"
        )
        _needs(given, ("--fp8-recipe", *_DELAYED_FLAGS, "--no-fp8-wgrad"), "--fp8-format", because)
        return
    if len(set(formats.values())) > 1:
        raise ConfigError(f"{' and '.join(formats)} name two formats; give --fp8-format alone")
    recipe = given.get("--fp8-recipe", "delayed")
    changes |= {"precision.recipe": recipe, "precision.fp8_format": next(iter(formats.values()))}
    for flag, default in _DELAYED_FLAGS.items():
        if recipe != "delayed" and flag in given:
            raise ConfigError(f"{flag} has no effect with --fp8-recipe {recipe}: it is delayed scaling's")
        changes[_DELAYED_KEYS[flag]] = given.get(flag, default) if recipe == "delayed" else UNSET
    if "--no-fp8-wgrad" in given:
        kept = config.precision.high_precision_gemms or ()
        changes["precision.high_precision_gemms"] = tuple(dict.fromkeys((*kept, "grad_weight")))


def _implementation(config: TrainConfig, given: Given, changes: Changes) -> None:
    if given.get("--transformer-impl") != "local":
        return
    if "precision.recipe" in changes:
        raise ConfigError(
            "--transformer-impl local has no FP8 (as in Megatron); use transformer_engine, or leave FP8 out"
        )
    changes |= {f"precision.{name}": UNSET for name in (*RecipeSection.model_fields, "modules")}
    changes["precision.recipe"] = "bf16"


def _layers_in_bf16(config: TrainConfig, given: Given, changes: Changes) -> None:
    if "--first-last-layers-bf16" not in given:
        _needs(given, _LAYER_FLAGS, "--first-last-layers-bf16", "Megatron counts layers only then")
        return
    recipe = changes.get("precision.recipe", config.precision.recipe)
    if recipe == "delayed":
        raise ConfigError(
            "--first-last-layers-bf16 does not go with delayed scaling (as in Megatron); name --fp8-recipe"
        )
    if recipe == "bf16":
        raise ConfigError("--first-last-layers-bf16 has no effect without FP8: add --fp8-format and --fp8-recipe")
    for flag in _LAYER_FLAGS:
        changes["precision." + flag.removeprefix("--").replace("-", "_")] = given.get(flag, 1)


def _optimizer(config: TrainConfig, given: Given, changes: Changes) -> None:
    if "--use-precision-aware-optimizer" not in given:
        _needs(given, _STATE_FLAGS, "--use-precision-aware-optimizer", "Megatron's states are fp32 then")
        return
    states = {given.get(flag, "fp32") for flag in ("--exp-avg-dtype", "--exp-avg-sq-dtype")}
    if len(states) > 1:
        raise ConfigError(
            f"--exp-avg-dtype and --exp-avg-sq-dtype must be the same here, got {', '.join(sorted(states))}"
        )
    for flag, remedy in (("--main-grads-dtype", "gradients are summed"), ("--main-params-dtype", "masters are kept")):
        if given.get(flag, "fp32") != "fp32":
            raise ConfigError(f"{flag} {given[flag]} is refused: {remedy} in fp32")
    state = states.pop()
    if state == "fp16":
        raise ConfigError("--exp-avg-dtype fp16 is refused: moments are kept in fp32, bf16 or fp8")
    changes |= {"optimizer.state_dtype": state, "optimizer.master_weights": "fp32"}


def _rates(config: TrainConfig, given: Given, changes: Changes) -> None:
    if "--min-lr" in given:
        lr, min_lr = changes.get("optimizer.lr", config.optimizer.lr), given["--min-lr"]
        if not 0.0 <= min_lr <= lr:
            raise ConfigError(f"--min-lr {min_lr} must be from 0 to the peak learning rate {lr}")
        changes["schedule.min_ratio"] = min_lr / lr


def _warmup(config: TrainConfig, given: Given, changes: Changes) -> None:
    if not given.keys() & {"--lr-warmup-iters", "--train-iters"}:
        return
    warmup = changes.get("schedule.warmup_steps", config.schedule.warmup_steps)
    steps = changes.get("run.steps", config.run.steps)
    if warmup >= steps > 0:
        raise ConfigError(
            f"a warm-up of {warmup} steps does not fit a run of {steps}: give --lr-warmup-iters below --train-iters, "
            "or raise --train-iters"
        )


def _sizes(config: TrainConfig, given: Given, changes: Changes) -> None:
    if "--group-query-attention" in given:
        changes.setdefault("model.num_key_value_heads", 1)
    path = changes.get("model.path", config.model.path)
    shapes = [
        flag.name
        for flag in FLAGS
        if flag.name in given and flag.key.startswith("model.") and flag.key != "model.path"
        if flag.name not in _ROUTER_FLAGS  # which have a say with a checkpoint too
    ]
    if path and shapes:
        raise ConfigError(
            f"{shapes[0]} has no effect on the checkpoint {path}, which brings its architecture; leave it out"
        )
    if "--eval-iters" in given:
        batch = changes.get("data.batch_size", config.data.batch_size)
        changes["metrics.eval_tokens"] = (
            given["--eval-iters"] * batch * changes.get("data.seq_len", config.data.seq_len)
        )


def _experts(config: TrainConfig, given: Given, changes: Changes) -> None:
    if "--num-experts" not in given:
        _needs(given, _EXPERT_FLAGS, "--num-experts", "Megatron's layers are dense then")
        if not (config.model.num_experts or changes.get("model.path", config.model.path)):
            _needs(given, _ROUTER_FLAGS, "--num-experts", "Megatron's layers are dense then")
        return
    if config.model.family not in ("qwen3", "qwen3_moe"):
        raise ConfigError(
            f"--num-experts needs model.family qwen3_moe, the recipe file says {config.model.family}; leave that out"
        )
    changes["model.family"] = "qwen3_moe"
    changes.setdefault("model.num_experts_per_tok", 2)
    width = changes.get("model.intermediate_size", config.model.intermediate_size)
    changes["model.moe_intermediate_size"] = given.get("--moe-ffn-hidden-size", width)
    if changes["model.num_experts_per_tok"] > given["--num-experts"]:
        raise ConfigError(
            f"--moe-router-topk {changes['model.num_experts_per_tok']} must be at most --num-experts "
            f"{given['--num-experts']}; Megatron's default is 2"
        )


def _places(config: TrainConfig, given: Given, changes: Changes) -> None:
    if given.get("--save", given.get("--load")) != given.get("--load", given.get("--save")):
        raise ConfigError(
            f"--load {given['--load']} and --save {given['--save']} must be one directory: a run goes on where it is; "
            "--pretrained-checkpoint starts a new run from a checkpoint's weights"
        )


def _recompute(config: TrainConfig, given: Given, changes: Changes) -> None:
    granularity = given.get("--recompute-granularity")
    if "--recompute-activations" in given:
        if granularity == "full":
            raise ConfigError(
                "--recompute-activations is selective, --recompute-granularity says full; give one of them"
            )
        granularity = "selective"
    if granularity != "full":
        _needs(
            given, ("--recompute-method", "--recompute-num-layers"), "--recompute-granularity full", "they describe it"
        )
        if granularity:
            changes["run.recompute"] = "none"
        return
    method, num_layers = given.get("--recompute-method"), given.get("--recompute-num-layers", 1)
    if method is None:
        raise ConfigError("--recompute-granularity full needs --recompute-method uniform or block (as in Megatron)")
    if method == "uniform" and num_layers != 1:
        raise ConfigError(
            f"--recompute-num-layers {num_layers} is refused with uniform: layers are recomputed one by one"
        )
    changes |= {"run.recompute": "full", "run.recompute_num_layers": num_layers if method == "block" else 0}


_GROUPS: tuple[Callable[[TrainConfig, Given, Changes], None], ...] = (
    _fp8,
    _implementation,
    _layers_in_bf16,
    _optimizer,
    _rates,
    _warmup,
    _sizes,
    _experts,
    _places,
    _recompute,
)
